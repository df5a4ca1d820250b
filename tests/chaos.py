"""Runs that are killed at random points and continued, compared bit by bit with one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.layout import CHECKPOINTS, LATEST
from posttrain.runtime.reproduce import MACHINE

COMMAND = [sys.executable, "-m", "posttrain"]


def run(cwd: Path, *overrides: str, timeout: float = 300) -> str:
    """One undisturbed run; its output."""
    done = subprocess.run([*COMMAND, *overrides], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def run_with_kills(cwd: Path, run_dir: Path, *overrides: str, kills: int, seed: int, uploads: Path | None = None) -> list[str]:
    """Start the run again and again; attempt i is killed with SIGKILL at a random point, the last one may finish.

    A point is a line of events.jsonl (every phase starts and ends with one, every save leaves one) plus a few random
    milliseconds, so that it does not depend on how fast the machine is. Returns the points, for the message of a failure.
    """
    chance, points = random.Random(seed), list[str]()
    for _ in range(kills):
        before = _lines(run_dir)
        # an attempt writes about 12 lines before its first step and 13 a step; a third of the kills hit the start
        target = before + chance.randint(2, 60)
        process = subprocess.Popen([*COMMAND, *overrides], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            while process.poll() is None and _lines(run_dir) < target:
                time.sleep(0.002)
            time.sleep(chance.random() * 0.05)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
        points.append(f"line {target - before} of {_lines(run_dir) - before}, exit {process.returncode}")
        assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
    run(cwd, *overrides)
    return points


def _lines(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def differences(straight: Path, resumed: Path) -> list[str]:
    """What two finished runs do not share bit by bit: metrics (timings aside), samples, weights, optimizer, training state."""
    found: list[str] = []
    a, b = _metrics(straight), _metrics(resumed)
    if len(a) != len(b):
        found.append(f"{len(a)} and {len(b)} metrics lines")
    for left, right in zip(a, b, strict=False):
        found += [
            f"step {left['step']}: {key} {left.get(key)} != {right.get(key)}" for key in {*left, *right} if left.get(key) != right.get(key)
        ]
    names = sorted(path.name for path in (straight / "samples").iterdir())
    if names != sorted(path.name for path in (resumed / "samples").iterdir()):
        found.append("other sample files")
    found += [f"samples/{name}" for name in names if _untimed(straight / "samples" / name) != _untimed(resumed / "samples" / name)]
    for component in ("model", "optimizer"):
        left, right = _tensors(straight, component), _tensors(resumed, component)
        if left.keys() != right.keys():
            found.append(f"{component}: other names")
        found += [f"{component}: {name}" for name in left if not _equal(left[name], right.get(name))]
    left_state, right_state = _state(straight), _state(resumed)
    keys = {*left_state, *right_state} - {"tracker", "exact"}
    return found + [f"training state: {key}" for key in keys if left_state.get(key) != right_state.get(key)]


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time_s" and not key.startswith(MACHINE)} for line in lines]


def _untimed(path: Path) -> list[Any]:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if "time" not in key}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return [strip(json.loads(line)) for line in path.read_text().splitlines()]


def _latest(run_dir: Path) -> Path:
    folder = run_dir / CHECKPOINTS
    return folder / (folder / LATEST).read_text().strip()


def _state(run_dir: Path) -> dict[str, Any]:
    return json.loads((_latest(run_dir) / "training_state" / "state.json").read_text())


def _tensors(run_dir: Path, component: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = run_dir / f"{component}.pt"
    dcp_to_torch_save(str(_latest(run_dir) / component), str(out))
    loaded = torch.load(out, weights_only=False)
    out.unlink()
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        else:
            flat[path] = value

    walk(loaded, "")
    return flat


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) else left == right
