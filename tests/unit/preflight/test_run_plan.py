"""The plan says in numbers what a configuration will do; rewards and places are judged against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import JobConfig, RootConfig, resolve
from posttrain.config.compose import compose
from posttrain.preflight import inspect, plan
from posttrain.preflight.output import output_violations


def root_of(*overrides: str) -> RootConfig:
    return resolve(compose(list(overrides)))


def planned(*overrides: str) -> dict[str, str]:
    return dict(line.split(None, 1) for line in plan(root_of(*overrides)))


def test_batch_arithmetic() -> None:
    batch = ("rl.batch_per_replica=64", "rl.group_size=8", "rl.micro_batch_per_replica=8", "rl.max_steps=20", "rollout.max_tokens=16")
    lines = planned(*batch)
    assert lines["batch"] == "8 prompts x 8 completions = 64 per step -> 1 optimizer step of 8 micro-batches x 8"
    assert lines["steps"] == "20 x 64 completions = 1280 completions, at most 20480 sampled tokens, 20 optimizer steps"


def test_several_optimizer_steps_a_batch() -> None:
    lines = planned("algorithm=grpo", "rl.certified_deterministic_forward=true", "rl.mini_batch_per_replica=16", "rl.max_steps=3")
    assert lines["batch"] == "4 prompts x 8 completions = 32 per step -> 2 optimizer steps of 1 micro-batch x 16"
    assert lines["steps"].endswith("6 optimizer steps")


def test_every_part_is_named() -> None:
    lines = planned("rollout=vllm", "rl.validation.num_prompts=8", "rl.validation.every=2", "job.output_root=/runs", "job.name=me")
    assert lines["run"] == "/runs/posttrain/me"
    assert lines["rollout"].startswith("vllm (in process), temperature 1")
    assert lines["validation"].endswith("greedy, at the start, every 2 optimizer steps, at the end")
    assert {"algorithm", "model", "data", "reward", "optimizer", "precision", "devices"} <= lines.keys()


def test_cautions_are_part_of_the_plan() -> None:
    assert plan(root_of("rl.optimizer.force_finite_grads=false"))[-1].startswith("note: rl.optimizer.force_finite_grads=false")


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "checked_rewards.py").write_text(
        "class Needy:\n"
        "    name = 'needy'\n    needs = frozenset({'difficulty'})\n    identity = {}\n"
        "    def score(self, group): ...\n    def close(self): ...\n"
        "def catalog():\n    return {'needy': Needy}\n"
        "def broken():\n    raise OSError('no service')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "checked_rewards"


def test_reward_that_reads_a_column_the_source_lacks_is_refused(catalog: str) -> None:
    found = inspect(root_of("rl.reward=needy", f"rl.reward_provider_catalog={catalog}.catalog"))
    assert [violation.key for violation in found] == ["rl.reward"]
    assert "reads column 'difficulty', which the source rl.data does not have" in found[0].rule


def test_catalog_that_fails_is_refused(catalog: str) -> None:
    found = inspect(root_of(f"rl.reward_provider_catalog={catalog}.broken"))
    assert [violation.key for violation in found] == ["rl.reward_provider_catalog"]
    assert "no service" in found[0].rule


def test_output_below_a_missing_directory_is_fine_and_leaves_nothing(tmp_path: Path) -> None:
    assert list(output_violations(JobConfig(name="n", output_root=str(tmp_path / "a" / "b")))) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("file", "key"), [("out", "job.output_root"), ("out/g", "job.group"), ("out/g/n", "job.name")])
def test_output_through_a_file_blames_the_part_that_is_one(tmp_path: Path, file: str, key: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("")
    found = list(output_violations(JobConfig(group="g", name="n", output_root=str(tmp_path / "out"))))
    assert [violation.key for violation in found] == [key]
