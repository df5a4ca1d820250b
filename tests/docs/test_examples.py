"""The documented examples run from the command line as the pages say, and their code is what takes effect."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir())

FORGOTTEN = """
from dataclasses import replace

import weighted_gains
from posttrain.algorithm.grpo import METRIC_ADAPTER


def build_objective(rl, model_context):
    return replace(weighted_gains.build_objective(rl, model_context), metric_adapter=METRIC_ADAPTER)
"""
"""The objective of the page whose author forgot to map its metric."""

WRONG_COUNT = """
def estimate(group):
    return [0.0]
"""


def example(name: str, *overrides: str) -> list[str]:
    return ["--config-dir", f"docs/examples/{name}", f"experiment={name}", *overrides]


SPLIT = ("rl.micro_batch_per_replica=4", "job.name=split")
PLAIN = ("experiment=tiny", "rl.max_steps=2", "job.name=plain")
FAILS = ("rl.objective_builder=forgotten.build_objective", "job.name=forgotten")
SHORT_OF = ("rl.advantage_estimator=wrong_count.estimate", "job.name=wrong_count")
PROGRAMS: list[list[str]] = [
    *(example(name, "rl.max_steps=2") for name in NAMES),
    example("weighted_gains", "rl.max_steps=1", *SPLIT),
    example("weighted_gains", *FAILS),
    example("leave_one_out", *SHORT_OF),
    list(PLAIN),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Every program, executed in one folder by one process (see driver.py): the folder, and arguments -> code and output."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder / "docs/examples")
    (folder / "forgotten.py").write_text(FORGOTTEN, encoding="utf-8")
    (folder / "wrong_count.py").write_text(WRONG_COUNT, encoding="utf-8")
    paths = [folder, *(folder / "docs/examples" / name for name in NAMES)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("driver.py"))],
        input=json.dumps(PROGRAMS),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "GOMP_SPINCOUNT": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"outputs/posttrain/{run}/metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def groups(folder: Path, run: str, step: int = 1) -> list[list[dict[str, Any]]]:
    text = (folder / f"outputs/posttrain/{run}/samples/step_{step:05d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["completions"] for line in text.splitlines()]


def effective_objective(folder: Path, run: str) -> dict[str, object]:
    return yaml.safe_load((folder / f"outputs/posttrain/{run}/config_resolved.yaml").read_text(encoding="utf-8"))["effective_objective"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_python_file_and_one_experiment(name: str) -> None:
    files = {str(path.relative_to(EXAMPLES / name)) for path in (EXAMPLES / name).rglob("*") if path.suffix != ".pyc" and path.is_file()}
    assert files == {f"{name}.py", f"experiment/{name}.yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains(name: str, workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = workspace
    result = results[json.dumps(example(name, "rl.max_steps=2"))]
    assert result["code"] == 0 and "completed after 2/2 steps" in result["output"], result["output"][-2000:]
    assert len(metrics(folder, name)) == 2


@pytest.mark.slow
def test_the_objective_scales_gains_and_records_itself(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = workspace
    identity = effective_objective(folder, "weighted_gains")
    assert identity == effective_objective(folder, "plain") | {"objective": "weighted_gains", "positive_weight": 0.25}
    advantages = [completion["advantage"] for group in groups(folder, "weighted_gains") for completion in group]
    positive = [a for a in advantages if a > 0]
    assert 0 < len(positive) < len(advantages)
    line, plain = metrics(folder, "weighted_gains")[0], metrics(folder, "plain")[0]
    assert line["train/positive_frac"] == len(positive) / len(advantages)
    # the annotator's advantages in samples/ are untouched; the loss saw the weighed ones
    weighed = sum(0.25 * a if a > 0 else -a for a in advantages) / len(advantages)
    assert line["train/advantage_absmean"] == pytest.approx(weighed, rel=1e-6)
    assert plain["train/advantage_absmean"] == pytest.approx(sum(map(abs, advantages)) / len(advantages), rel=1e-6)
    # at ratio 1 the token-mean loss is minus the token-weighted mean advantage
    tokens = [len(completion["logprobs"]) for group in groups(folder, "weighted_gains") for completion in group]
    expected = -sum(n * (0.25 * a if a > 0 else a) for n, a in zip(tokens, advantages, strict=True)) / sum(tokens)
    assert line["train/loss"] == pytest.approx(expected, rel=1e-5) and expected > 0.05
    assert line["optim/grad_norm"] != pytest.approx(plain["optim/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_the_objective_keeps_the_reduction(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = workspace
    whole, split = metrics(folder, "weighted_gains")[0], metrics(folder, "split")[0]
    for key in ("optim/grad_norm", "train/loss", "train/positive_frac", "train/valid_token_count"):
        assert split[key] == pytest.approx(whole[key], rel=1e-4), key


@pytest.mark.slow
def test_an_unmapped_metric_stops_the_run_in_its_first_step(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, results = workspace
    result = results[json.dumps(example("weighted_gains", *FAILS))]
    message = "the objective reported metric 'positive_frac', which its metric adapter neither maps nor ignores; mapped: "
    assert result["code"] == 1 and message in result["output"], result["output"][-2000:]
    page = (EXAMPLES.parent / "objectives.md").read_text(encoding="utf-8")
    assert f"posttrain: {message}" in page
    assert not metrics(folder, "forgotten")


@pytest.mark.slow
def test_advantages_are_those_of_the_formula(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = workspace
    assert effective_objective(folder, "leave_one_out")["advantage_estimator"] == "leave_one_out.estimate"
    informative = 0
    for step in (1, 2):
        for group in groups(folder, "leave_one_out", step):
            rewards = [completion["reward"] for completion in group]
            mean = math.fsum(rewards) / len(rewards)
            scale = len(rewards) / (len(rewards) - 1)
            assert [completion["advantage"] for completion in group] == pytest.approx([scale * (r - mean) for r in rewards], abs=1e-12)
            informative += max(rewards) > min(rewards)
    assert informative > 0
    mean = [completion["advantage"] for group in groups(folder, "leave_one_out") for completion in group]
    assert metrics(folder, "leave_one_out")[0]["train/advantage_absmean"] == pytest.approx(sum(map(abs, mean)) / len(mean), rel=1e-6)


@pytest.mark.slow
def test_an_estimator_with_too_few_values_is_named(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    _, results = workspace
    result = results[json.dumps(example("leave_one_out", *SHORT_OF))]
    assert result["code"] == 1 and "the advantage estimator returned 1 advantages" in result["output"], result["output"][-2000:]


@pytest.mark.slow
def test_rewards_are_those_of_the_scorer(workspace: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = workspace
    text = (folder / "outputs/posttrain/short_answers/samples/step_00001.jsonl").read_text(encoding="utf-8")
    right = short = total = count = 0.0
    for line in text.splitlines():
        record = json.loads(line)
        for completion in record["completions"]:
            answer = completion["text"].strip()
            parts = {"right": float(str(record["reference"]) in answer), "short": 0.1 if len(answer) <= 8 else 0.0}
            assert completion["parts"] == parts and completion["reward"] == sum(parts.values()) and completion["failure"] is None
            right, short, total, count = right + parts["right"], short + parts["short"], total + completion["reward"], count + 1
    line = metrics(folder, "short_answers")[0]
    assert line["reward/part/right"] == pytest.approx(right / count) and line["reward/part/short"] == pytest.approx(short / count)
    assert line["reward/mean"] == pytest.approx(total / count) and right > 0
    held_out = json.loads((folder / "outputs/posttrain/short_answers/samples/validation_00000.jsonl").read_text().splitlines()[0])
    assert held_out["completions"][0]["parts"] == {}  # arithmetic has none
