"""The same training with the real engine, through the command line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: rollout=vllm cannot be tested"),
]


def test_the_tiny_experiment_trains_with_vllm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttrain", "experiment=tiny", "rollout=vllm", "rollout.load_format=dummy", "tracker.report=false"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    run_dir = tmp_path / "outputs/posttrain/tiny"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["model_step"] for line in lines] == [1, 2, 3]
    # fp32 sampling and fp32 training: what the engine sampled is what the trainer scores, after every publication
    assert all(line["train/logprob_gap_max"] < 1e-3 and line["train/ratio_absdev"] == 0 for line in lines)
    published = [
        event for line in (run_dir / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["kind"] == "published"
    ]
    assert [event["version"] for event in published] == [0, 1, 2, 3]
    assert published[0]["verified"] and published[0]["sync/verified_tensors"] > 0 and published[0]["sync/probe_gap"] < 1e-3
    versions = {
        completion["weight_version"]
        for line in (run_dir / "samples/step_00003.jsonl").read_text().splitlines()
        for completion in json.loads(line)["completions"]
    }
    assert versions == {2}
