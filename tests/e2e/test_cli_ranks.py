"""`grid.ranks=2` as a user meets it: the same numbers as one process, exact resume, and one clear end when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_cli import POSTTRAIN, call, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TINY = ("experiment=tiny", "tracker.report=false", "rl.validation.num_prompts=0")
TWO = ("grid.ranks=2", "model.parallelism.dp_shard=2")
TIMINGS = ("time", "memory/", "rollout/tokens_per_s", "reward/time_s", "reward/slowest_s", "sync/")


def numbers(run_dir: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in metrics(run_dir)]


def test_two_ranks_give_the_numbers_of_one_and_resume_exactly(tmp_path: Path) -> None:
    call(*TINY, "job.name=one", cwd=tmp_path)
    call(*TINY, *TWO, "job.name=two", cwd=tmp_path)
    one, two = (numbers(tmp_path / "outputs/posttrain" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 3
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5 if "gap" in name or name == "train/loss" else 1e-6), name
    saving = (*TINY, *TWO, "job.name=resumed", "rl.save_every=1", "rl.save_async=true")
    call(*saving, "rl.max_steps=2", cwd=tmp_path)
    assert "resumed from iter_000000002" in call(*saving, cwd=tmp_path).stdout
    assert numbers(tmp_path / "outputs/posttrain/resumed") == two
    # what two ranks saved, one process continues
    moved = call(*TINY, "job.name=resumed", "rl.save_every=1", "rl.save_async=true", "rl.max_steps=4", cwd=tmp_path).stdout
    assert "differ in its last bits" in moved and "completed after 4/4 steps" in moved


def test_a_mesh_that_is_not_the_ranks_is_refused(tmp_path: Path) -> None:
    refused = call(*TINY, "grid.ranks=2", cwd=tmp_path, code=2).stderr
    assert "grid.ranks=2: must equal model.parallelism.dp_replicate=1 x model.parallelism.dp_shard=1" in refused
    refused = call(*TINY, "rl.reduce_dtype=bfloat16", cwd=tmp_path, code=2).stderr
    assert "rl.reduce_dtype='bfloat16': is never read" in refused


@pytest.mark.parametrize("victim", ["follower", "lead"])
def test_a_killed_rank_ends_the_run_and_leaves_no_process(victim: str, tmp_path: Path) -> None:
    command = [*POSTTRAIN, *TINY, *TWO, "rl.max_steps=1000"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=err, env=dict(os.environ))
        log = tmp_path / "outputs/posttrain/tiny/metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.read_text().count("\n") >= 2):
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "err").read_text()[-2000:]
            time.sleep(0.2)
        followers = [child for child in psutil.Process(run.pid).children(recursive=True) if "posttrain.trainer.follower" in child.cmdline()]
        assert len(followers) == 1
        os.kill(followers[0].pid if victim == "follower" else run.pid, signal.SIGKILL)
        code = run.wait(60)
    psutil.wait_procs(followers, timeout=20)
    assert not any(follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE for follower in followers)
    if victim == "follower":
        assert code == 1
        text = (tmp_path / "err").read_text()
        assert f"rank 1 (process {followers[0].pid}) was killed by signal SIGKILL" in text, text[-3000:]
    else:
        assert code == -signal.SIGKILL
