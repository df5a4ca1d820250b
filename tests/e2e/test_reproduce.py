"""`posttrain reproduce`: the recorded run again, and what it says when it is not the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.chaos import COMMAND, run


@pytest.mark.slow
def test_a_run_is_reproduced_and_a_changed_one_is_not(tmp_path: Path) -> None:
    run(tmp_path, "experiment=tiny", "rl.max_steps=1", "tracker.report=false")
    run_dir = tmp_path / "outputs/posttrain/tiny"
    printed = run(tmp_path, "reproduce", str(run_dir))
    assert "recorded command: " in printed and "experiment=tiny" in printed
    assert "metrics of the first step are equal, digit by digit" in printed and "differs:" not in printed
    metrics = run_dir / "metrics.jsonl"
    line = json.loads(metrics.read_text())
    line["train/entropy"] += 1e-12
    metrics.write_text(json.dumps(line) + "\n")
    record = json.loads((run_dir / "provenance.1.json").read_text())
    record["packages"]["torch"] = "1.0"
    (run_dir / "provenance.1.json").write_text(json.dumps(record))
    done = subprocess.run([*COMMAND, "reproduce", str(run_dir)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "step 1 train/entropy: recorded" in done.stdout and "not reproduced: 1 of" in done.stdout
    assert "differs: packages.torch was 1.0, is 2.13" in done.stdout


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "reproduce", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "holds no complete first step" in done.stderr
