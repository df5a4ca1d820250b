"""Determinism and adapters through the console program: the same bits twice, and over a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from posttrain.checkpoint.initial import resolve_save
from posttrain.checkpoint.tensors import _load
from tests.e2e.test_cli import POSTTRAIN, call, metrics

TIMINGS = ("time/", "time_s", "memory/", "rollout/tokens_per_s", "reward/time_s", "reward/slowest_s", "sync/seconds", "checkpoint/")
QUIET = ("tracker.report=false", "tracker.samples_every=0")


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock or a memory counter says."""
    return [{key: value for key, value in line.items() if not key.startswith(TIMINGS)} for line in metrics(run_dir)]


def tensors(run_dir: Path, component: str) -> dict[str, torch.Tensor]:
    """A component of the latest checkpoint."""
    folder = resolve_save(run_dir) / component
    named = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in named.items() if hasattr(meta, "size")}
    _load(state, folder)
    return state


def lora() -> tuple[str, ...]:
    """The tiny experiment with adapters on its model."""
    from posttrain.model.native import tiny

    directory = tiny.build({}, dtype="float32").directory
    return "experiment=tiny", "model=hf", f"model.name_or_path={directory}", "model.lora.rank=4", "rl.optimizer.lr=1e-2"


def assert_same(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    for component in ("model", "optimizer"):
        first, second = tensors(one, component), tensors(other, component)
        assert first and first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), component


@pytest.mark.slow
def test_two_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        call("experiment=tiny", "rl.deterministic=true", "rl.save_every=3", f"job.name={name}", *QUIET, cwd=tmp_path)
    assert_same(tmp_path / "outputs/posttrain/a", tmp_path / "outputs/posttrain/b")


@pytest.mark.slow
def test_adapters_train_alike_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    runs = {"one": (), "two": ("grid.ranks=2", "model.parallelism.dp_shard=2")}
    for name, more in runs.items():
        call(*lora(), "rl.max_steps=2", "rl.save_every=2", *QUIET, f"job.name={name}", *more, cwd=tmp_path, timeout=250)
    one, two = (tmp_path / f"outputs/posttrain/{name}" for name in runs)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["optim/grad_norm"] > 0 and b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=1e-4)
        assert b["train/logprob_gap_max"] < 1e-3
    assert tensors(one, "model").keys() == tensors(two, "model").keys()


@pytest.mark.vllm
@pytest.mark.slow
def test_merged_adapters_are_what_vllm_samples_with(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("vllm")
    call(*lora(), "rl.max_steps=3", "rollout=vllm", "rollout.max_model_len=256", *QUIET, cwd=tmp_path, timeout=280)
    run_dir = tmp_path / "outputs/posttrain/tiny"
    lines = metrics(run_dir)
    assert [line["model_step"] for line in lines] == [1, 2, 3]
    assert all(line["train/logprob_gap_max"] < 1e-3 for line in lines)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    published = [event for event in events if event["kind"] == "published"]
    assert published[0]["verified"] and published[0]["sync/probe_gap"] < 1e-3


@pytest.mark.slow
def test_adapters_stay_near_the_base_they_started_from(tmp_path: Path) -> None:
    """The reference is the base; a run that starts from adapters starts at distance 0 of its own reference."""
    pytest.importorskip("peft")
    kl = ("rl.kl_beta=0.1", "rl.ref.build_ref=true")
    call(*lora(), *kl, "rl.max_steps=2", "rl.save_every=2", "job.name=first", *QUIET, cwd=tmp_path)
    first = tmp_path / "outputs/posttrain/first"
    call(*lora(), *kl, f"rl.init_from={first}", "rl.max_steps=2", "job.name=second", *QUIET, cwd=tmp_path)
    for run_dir in (first, tmp_path / "outputs/posttrain/second"):
        distances = [line["train/kl_mean"] for line in metrics(run_dir)]
        assert abs(distances[0]) < 1e-6 < distances[1]


@pytest.mark.slow
def test_a_killed_run_with_adapters_and_a_schedule_resumes_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    arguments = (
        *lora(),
        *("rl.optimizer.lr_schedule=cosine", "rl.optimizer.warmup_steps=2", "rl.max_steps=6", "rl.save_every=1"),
        *QUIET,
    )
    call(*arguments, "job.name=straight", cwd=tmp_path)
    straight, killed = (tmp_path / f"outputs/posttrain/{name}" for name in ("straight", "killed"))
    process = subprocess.Popen([*POSTTRAIN, *arguments, "job.name=killed"], cwd=tmp_path, stdout=subprocess.DEVNULL, env=os.environ.copy())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(killed.glob("checkpoints/iter_*2/manifest.json")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len((killed / "metrics.jsonl").read_text().splitlines())
    assert 2 <= done < 6, "the run was to be killed on its way"
    assert "resumed from" in call(*arguments, "job.name=killed", cwd=tmp_path).stdout
    assert_same(straight, killed)
    assert all(".lora_" in name for name in tensors(straight, "model"))
    rates = [line["optim/lr"] for line in metrics(straight)]
    assert rates[:2] == pytest.approx([0.5e-2, 1e-2]) and rates[2:] == sorted(rates[2:], reverse=True) and rates[5] < 2e-3
    events = [json.loads(line) for line in (straight / "events.jsonl").read_text().splitlines()]
    assert {event["version"] for event in events if event["kind"] == "published"} == set(range(7))
