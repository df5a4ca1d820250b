"""`posttrain reproduce RUN`: start a recorded run again, for one step, and compare what it measured.

Owns the comparison only. The run itself is the ordinary program with the recorded configuration, in a process and a directory of
its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import ReportError

MACHINE = ("time/", "memory/", "sync/seconds", "reward/time_s", "reward/slowest_s", "rollout/tokens_per_s")
"""Metrics that measure the machine and not the training."""
COMPARED = ("tree_sha256", "git", "python", "packages", "environment", "hardware", "data")
DEADLINE_S = 3600.0
_POLL_S = 0.05


def reproduce(run_dir: Path) -> int:
    """Print what differs; 0 when every metric of the first step is equal, 1 when one is not.

    Raises:
        ReportError: no finished first step, or no recorded configuration; or the run does not start any more.
    """
    recorded = _first_step(run_dir / "metrics.jsonl")
    if recorded is None:
        raise ReportError(f"{run_dir}: metrics.jsonl holds no complete first step to compare with")
    if not (run_dir / "config_resolved.yaml").is_file():
        raise ReportError(f"{run_dir} has no config_resolved.yaml: it is not a run directory")
    before = _provenance(run_dir)
    print(f"recorded command: {' '.join(before.get('command', ['unknown']))}")
    with tempfile.TemporaryDirectory(prefix="posttrain-reproduce-") as scratch:
        again_dir, again = _run_one_step(run_dir, Path(scratch))
        for line in _changes(before, _provenance(again_dir)):
            print(f"differs: {line}")
    unequal = [key for key in sorted({*recorded, *again}) if recorded.get(key) != again.get(key)]
    for key in unequal:
        print(f"step 1 {key}: recorded {recorded.get(key)}, now {again.get(key)}")
    if unequal:
        print(f"not reproduced: {len(unequal)} of {len(recorded)} metrics of the first step differ")
        return 1
    print(f"reproduced: all {len(recorded)} metrics of the first step are equal, digit by digit")
    return 0


def _run_one_step(run_dir: Path, scratch: Path) -> tuple[Path, dict[str, Any]]:
    overrides = [f"job.output_root={scratch}", "rl.resume=off"]
    overrides += ["tracker.console=quiet", "tracker.report=false", "tracker.wandb.mode=disabled"]
    command = [sys.executable, "-m", "posttrain", "--config-dir", str(run_dir.resolve()), "--config-name", "config_resolved", *overrides]
    log = scratch / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                for metrics in scratch.glob("*/*/metrics.jsonl"):
                    found = _first_step(metrics)
                    if found is not None:
                        return metrics.parent, found
                if process.poll() is not None:
                    break
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # one step is enough, and its directory is thrown away
            process.wait()
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise ReportError(f"the recorded configuration did not reach the end of its first step:\n{tail}")


def _first_step(path: Path) -> dict[str, Any] | None:
    """The untimed metrics of step 1, once its line is complete."""
    if not path.is_file():
        return None
    first, newline, _ = path.read_text(encoding="utf-8").partition("\n")
    if not newline:
        return None
    line = json.loads(first)
    return {key: value for key, value in line.items() if key != "time_s" and not key.startswith(MACHINE)} if line.get("step") == 1 else None


def _provenance(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / "provenance.1.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in COMPARED:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts = [f"{name}.{key} was {old.get(key)}, is {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            yield from parts
        else:
            yield f"{name} was {old}, is {new}"
