"""The console program as a user meets it, on the tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

POSTTRAIN = [sys.executable, "-m", "posttrain"]


def call(
    *arguments: str, cwd: Path, code: int = 0, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*POSTTRAIN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of experiment=tiny: its working directory and what it printed."""
    cwd = tmp_path_factory.mktemp("tiny")
    return cwd, call("experiment=tiny", cwd=cwd).stdout


def test_a_run_leaves_its_directory_complete(tiny: tuple[Path, str]) -> None:
    cwd, printed = tiny
    run_dir = cwd / "outputs/posttrain/tiny"
    assert re.search(r"held-out accuracy 0\.\d\d -> 0\.\d\d \(seed 0\)", printed)
    assert "grpo_surrogate=clipped" in printed and "loss_type=token-mean" in printed
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config_resolved.yaml", "events.jsonl", "metrics.jsonl", "provenance.1.json", "report.html", "samples"}
    lines = metrics(run_dir)
    assert [(line["step"], line["model_step"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert list(lines[0])[:3] == ["step", "model_step", "time_s"]
    assert all("/" in key for line in lines for key in list(line)[3:])
    assert all(line["train/ratio_absdev"] == 0 and line["train/logprob_gap_max"] < 1e-4 for line in lines)
    assert all(line["train/valid_token_count"] == line["rollout/tokens"] for line in lines)
    first = json.loads((run_dir / "samples/step_00001.jsonl").read_text().splitlines()[0])
    assert len(first["completions"]) == 8
    assert {"kind": "published", "version": 3}.items() <= [
        event for line in (run_dir / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["kind"] == "published"
    ][-1].items()


def test_the_resolved_config_reloads_to_the_same_tree(tiny: tuple[Path, str]) -> None:
    cwd, _ = tiny
    run_dir = cwd / "outputs/posttrain/tiny"
    stored = yaml.safe_load((run_dir / "config_resolved.yaml").read_text())
    assert stored["effective_objective"]["grpo_surrogate"] == "clipped"
    assert stored["provenance"]["tree_sha256"] == json.loads((run_dir / "provenance.1.json").read_text())["tree_sha256"]
    again = call("--config-dir", str(run_dir), "--config-name", "config_resolved", "--cfg", "job", cwd=cwd).stdout
    reloaded = yaml.safe_load(again)
    for node in ("algorithm", "model", "rl", "rollout", "grid", "tracker", "job"):
        assert reloaded[node] == stored[node], node
    refused = call("--config-dir", str(run_dir), "--config-name", "config_resolved", "rl.sed=1", cwd=cwd, code=2)
    assert "rl.sed" in refused.stderr and "seed" in refused.stderr


def test_reloading_repeats_the_run_and_moves_the_first_one_aside(tiny: tuple[Path, str], tmp_path: Path) -> None:
    cwd, _ = tiny
    first = cwd / "outputs/posttrain/tiny"
    call("--config-dir", str(first), "--config-name", "config_resolved", f"job.output_root={tmp_path}/o", "tracker.report=false", cwd=cwd)
    second = tmp_path / "o/posttrain/tiny"
    timings = ("time/", "time_s", "memory/", "rollout/tokens_per_s", "reward/time_s", "reward/slowest_s", "sync/seconds")
    for a, b in zip(metrics(first), metrics(second), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timings)} == {k: v for k, v in b.items() if not k.startswith(timings)}
    reload = ("--config-dir", str(first), "--config-name", "config_resolved")
    stdout = call(*reload, f"job.output_root={tmp_path}/o", "tracker.report=false", "rl.max_steps=1", cwd=cwd).stdout
    assert "moved to" in stdout
    assert len(metrics(tmp_path / "o/posttrain/tiny.1")) == 3 and len(metrics(second)) == 1


def test_lr_zero_keeps_the_policy(tmp_path: Path) -> None:
    call("experiment=tiny", "rl.max_steps=10", "rl.optimizer.lr=0", "tracker.report=false", "tracker.samples_every=0", cwd=tmp_path)
    lines = metrics(tmp_path / "outputs/posttrain/tiny")
    assert len(lines) == 10
    assert all(line["train/ratio_absdev"] <= 1e-6 and abs(line["train/ratio_max"] - 1) <= 1e-6 for line in lines)
    assert any(line["optim/grad_norm"] > 0 for line in lines)
    assert lines[-1]["val/accuracy"] == 0.0


def test_the_bare_command_is_the_toy_with_the_plain_policy_gradient(tmp_path: Path) -> None:
    config = yaml.safe_load(call("--cfg", "job", cwd=tmp_path).stdout)
    assert config["rl"]["grpo_surrogate"] == "legacy_pg" and config["algorithm"]["name"] == "legacy_pg"
    call("rl.max_steps=1", "rollout.max_tokens=4", cwd=tmp_path)
    assert len(metrics(tmp_path / "outputs/posttrain/legacy_pg")) == 1


def test_a_sweep_runs_every_member_in_a_place_of_its_own(tmp_path: Path) -> None:
    call("-m", "experiment=tiny", "rl.seed=0,1", "rl.max_steps=1", cwd=tmp_path)
    runs = sorted((tmp_path / "outputs/posttrain/tiny_sweep").glob("*/metrics.jsonl"))
    assert len(runs) == 2
    first, second = (json.loads(next((run.parent / "samples").glob("step_*")).read_text().splitlines()[0]) for run in runs)
    assert first["completions"] != second["completions"]


def test_one_broken_member_stops_a_sweep_before_it_starts(tmp_path: Path) -> None:
    done = call("-m", "experiment=tiny", "rl.batch_per_replica=32,31", cwd=tmp_path, code=2)
    assert "rl.batch_per_replica=31" in done.stderr and not (tmp_path / "outputs").exists()


def test_help_check_and_cfg_import_no_torch() -> None:
    for arguments in (["--help"], ["check", "experiment=tiny"], ["--validate-manifest", "experiment=quickstart"], ["--cfg", "job"]):
        code = (
            "import sys\nfrom posttrain.app import main\n"
            f"try: main({arguments!r})\nexcept SystemExit as e: assert not e.code, e.code\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (arguments, done.stderr)


def test_check_prints_the_plan(tmp_path: Path) -> None:
    plan = call("check", "experiment=tiny", cwd=tmp_path).stdout
    assert "4 prompts x 8 completions = 32 per step" in plan
    assert not (tmp_path / "outputs").exists()
    assert call("--validate-manifest", "experiment=tiny", cwd=tmp_path).stdout == plan


def test_help_lists_groups_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\n# My own preset.\ndefaults:\n  - tiny\n  - _self_\nrl:\n  max_steps: 1\njob:\n  name: mine\n"
    )
    assert "mine" in call("--help", "--config-dir", "conf", cwd=tmp_path).stdout
    call("--config-dir", "conf", "experiment=mine", cwd=tmp_path)
    assert len(metrics(tmp_path / "outputs/posttrain/mine")) == 1


def test_completion_knows_groups_and_keys() -> None:
    env = {**os.environ, "_TEST_COMP": "1", "COMP_LINE": "posttrain experi", "COMP_POINT": "16"}
    done = subprocess.run([*POSTTRAIN, "-sc", "query=bash"], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert "experiment=" in done.stdout, done.stderr


def test_doctor_reports_versions(tmp_path: Path) -> None:
    printed = call("doctor", cwd=tmp_path).stdout
    assert re.search(r"torch\s+2\.13\.0\S*\s+ok", printed) and "everything required agrees" in printed


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*POSTTRAIN, "experiment=tiny", "rl.max_steps=100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background of a shell hands down an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    path = tmp_path / "outputs/posttrain/tiny/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (path.exists() and path.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stderr and "interrupted" in stderr
    lines = metrics(path.parent)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    last = json.loads((path.parent / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] in ("run_finished", "announcement") and (path.parent / "report.html").exists()
    assert len(list((path.parent / "samples").glob("step_*"))) >= len(lines)


def test_a_rejected_update_stops_the_run_with_one_reason(tmp_path: Path) -> None:
    done = call("experiment=tiny", "rl.optimizer.lr=1e30", "rl.max_steps=50", cwd=tmp_path, code=1)
    assert "rejected" in done.stderr and "Traceback" not in done.stderr
    event = [json.loads(line) for line in (tmp_path / "outputs/posttrain/tiny/events.jsonl").read_text().splitlines()]
    assert any(line["kind"] == "run_finished" and line["status"] == "failed" for line in event)
