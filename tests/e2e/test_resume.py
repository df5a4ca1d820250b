"""Killed, stopped and damaged runs: what continues is the run that would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos import COMMAND, differences, run, run_with_kills

TINY = ("experiment=tiny", "rl.max_steps=8", "rl.save_every=2", "rl.validation.every=4", "tracker.report=false")
KINDS = {
    "sync": (),
    "async": ("rl.save_async=true", "rl.keep_optim_last=2"),
    "family": (
        "rl.kl_beta=0.01",
        "rl.ref.build_ref=true",
        "rl.kl_coeff_clamp=5",
        "rl.mini_batch_per_replica=16",
        "rl.micro_batch_per_replica=8",
        "rl.certified_deterministic_forward=true",
        "rl.min_informative_groups=2",
        "rl.dynamic_sampling_on_budget_exhausted=proceed",
        "rl.data.shuffle=true",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    run(tmp_path, *TINY, *KINDS[kind], "job.name=straight")
    name = tmp_path / "outputs/posttrain/killed"
    points = run_with_kills(tmp_path, name, *TINY, *KINDS[kind], "job.name=killed", kills=3, seed=7)
    assert differences(tmp_path / "outputs/posttrain/straight", name) == [], points


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_kills(kind: str, seed: int, tmp_path: Path) -> None:
    run(tmp_path, *TINY, *KINDS[kind], "rl.max_steps=24", "job.name=straight")
    name = tmp_path / "outputs/posttrain/killed"
    points = run_with_kills(tmp_path, name, *TINY, *KINDS[kind], "rl.max_steps=24", "job.name=killed", kills=20, seed=seed)
    assert differences(tmp_path / "outputs/posttrain/straight", name) == [], points


@pytest.mark.slow
@pytest.mark.vllm
def test_a_killed_vllm_run_continues_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    extra = ("rollout=vllm", "rollout.kv_cache_memory_bytes=268435456", "rl.max_steps=4")
    run(tmp_path, *TINY, *extra, "job.name=straight")
    name = tmp_path / "outputs/posttrain/killed"
    points = run_with_kills(tmp_path, name, *TINY, *extra, "job.name=killed", kills=2, seed=1)
    assert differences(tmp_path / "outputs/posttrain/straight", name) == [], points


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_75(number: signal.Signals, tmp_path: Path) -> None:
    """No regular save is configured: the emergency save alone makes the run resumable."""
    tiny = ("experiment=tiny", "rl.max_steps=40", "tracker.report=false")
    process = subprocess.Popen([*COMMAND, *tiny, "job.name=cut"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = tmp_path / "outputs/posttrain/cut"
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 75, printed + errors
    assert f"signal {number.name}: saved after step" in errors and "the same command continues from there" in errors
    assert "Traceback" not in errors
    ended = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["status"] for event in ended if event["kind"] == "run_finished"] == ["stopped"]
    printed = run(tmp_path, *tiny, "job.name=cut")
    assert "resumed from iter_" in printed and "held-out accuracy" in printed
    run(tmp_path, *tiny, "job.name=straight")
    assert _metric_lines(run_dir) == _metric_lines(tmp_path / "outputs/posttrain/straight")


def _metric_lines(run_dir: Path) -> list[dict[str, object]]:
    from tests.chaos import _metrics

    return _metrics(run_dir)


@pytest.mark.slow
def test_a_wall_clock_limit_saves_in_time(tmp_path: Path) -> None:
    command = [*COMMAND, "experiment=tiny", "rl.max_steps=100000", "rl.save_before_s=4", "rl.validation.num_prompts=0", "job.name=limit"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr
    assert "rl.save_before_s=4 leaves no time for another step: saved after step" in done.stderr


@pytest.mark.slow
def test_what_would_not_be_exact_is_refused_with_both_values(tmp_path: Path) -> None:
    tiny = ("experiment=tiny", "rl.max_steps=2", "rl.save_every=1", "tracker.report=false", "job.name=r")
    run(tmp_path, *tiny)
    changed = [*COMMAND, *tiny, "rl.max_steps=4", "rl.seed=3", "rl.epsilon_high=0.3", "rl.optimizer.lr=0.002"]
    done = subprocess.run(changed, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    for text in (
        "rl.seed was 0 and is 3",
        "data_seed was 0 and is 3",
        "objective.epsilon_high was 0.2 and is 0.3",
        "rl.optimizer.lr was 0.001 and is 0.002",
        "rl.init_from",
    ):
        assert text in done.stderr, done.stderr
    printed = run(tmp_path, *tiny)
    assert "this run is finished" in printed and "raise rl.max_steps" in printed
    printed = run(tmp_path, *tiny, "rl.max_steps=3", "rl.micro_batch_per_replica=8")
    assert "differ in its last bits" in printed and "rl.micro_batch_per_replica was 16 and is 8" in printed
    run(tmp_path, *tiny, "rl.max_steps=2", "rl.resume=off")
    assert (tmp_path / "outputs/posttrain/r.1/checkpoints").is_dir()
    started = run(tmp_path, *tiny[:-1], "job.name=warm", "rl.init_from=outputs/posttrain/r", "rl.max_steps=1")
    assert "completed after 1/1 steps" in started
