"""What is said about one command-line override, and that each complaint meets the override it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.base import nearest
from posttrain.config.compose import compose_checked
from posttrain.config.resolve import attempt
from posttrain.errors import Violation


def refusals(*overrides: str) -> dict[str, Violation]:
    _, found = compose_checked(overrides)
    return {violation.key: violation for violation in found}


def test_the_later_of_two_overrides_of_one_key_is_blamed() -> None:
    found = refusals("rl.seed=3", "rl.seed=x")
    assert list(found) == ["rl.seed"]
    assert found["rl.seed"].value == "x"


def test_an_override_that_contains_another_is_not_confused_with_it() -> None:
    composed, found = compose_checked(["rl.max_steps=1", "rl.max_steps=10x", "rl.seed=1"])
    assert [(violation.key, violation.value) for violation in found] == [("rl.max_steps", "10x")]
    assert composed is not None
    assert (composed.rl.max_steps, composed.rl.seed) == (1, 1)


def test_the_later_of_two_options_of_one_group_is_blamed() -> None:
    assert refusals("algorithm=grpo", "algorithm=ppo")["algorithm"].value == "ppo"


def test_broken_options_do_not_hide_broken_values() -> None:
    assert set(refusals("algorithm=ppo", "model=huge", "rl.sed=1", "rl.group_size=7")) == {
        "algorithm",
        "model",
        "rl.sed",
        "rl.batch_per_replica",
    }


def test_a_missing_value_does_not_hide_other_rules() -> None:
    assert set(refusals("model=hf", "rl.group_size=7", "job.name=${nope}")) == {"model.name_or_path", "rl.batch_per_replica", "job.name"}


@pytest.mark.parametrize(
    ("override", "key", "rule", "remedy"),
    [
        ("rl.max_steps=1e3", "rl.max_steps", "must be an integer", "write rl.max_steps=1000"),
        ("rl.data.max_prompt_tokens=abc", "rl.data.max_prompt_tokens", "must be an integer or null", "give an integer or null"),
        ("rl.optimizer.betas=[a,b]", "rl.optimizer.betas", "must be a list of numbers", "'rl.optimizer.betas=[0.9, 0.95]'"),
        ("rl.optimizer={a: 3}", "rl.optimizer.a", "is not a key of OptimizerConfig", "see posttrain --cfg job"),
        ("model.name_or_path=x", "model.name_or_path", "is not a key of NativePolicyBuildSpec", "set model=hf"),
        ("rl/optimizer=x", "rl/optimizer", "is no group", "algorithm"),
        ("~rl.seed", "rl.seed", "cannot be deleted", "set a value"),
        ("~algorithm", "algorithm", "is needed", "algorithm=..."),
        ("+algorithm=grpo", "algorithm", "already", "write algorithm=grpo"),
        ("+rl.seed=3", "rl.seed", "exists already", "write rl.seed=3"),
        ("rl.x={a:", "rl.x", "unbalanced brace", "quote"),
        ("rl.data.path=/a(b", "rl.data.path", "unbalanced parenthesis", "quote"),
        ("rl.data.path=a=b", "rl.data.path", "cannot be parsed", "quote"),
        ("=3", "", "names no key", "KEY=VALUE"),
        ("job.name=${job.name}", "job.name", "Recursive", "interpolation"),
        ("rl.seed=range(3)", "rl.seed", "is a sweep", "-m"),
    ],
)
def test_message(override: str, key: str, rule: str, remedy: str) -> None:
    violation = refusals(override)[key]
    assert rule in violation.rule
    assert remedy in violation.remedy


def test_a_broken_file_of_ones_own_is_reported_whole(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /model: huge\n  - _self_\n")
    composed, found = compose_checked(["experiment=mine"], config_dir=str(tmp_path))
    assert composed is not None
    assert [(violation.key, violation.value) for violation in found] == [("model", "huge")]
    assert "tiny" in found[0].remedy


def test_a_config_dir_adds_experiments(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nrl:\n  max_steps: 7\n")
    composed, found = compose_checked(["experiment=mine"], config_dir=str(tmp_path))
    assert found == []
    assert composed is not None
    root = attempt(composed)
    assert root is not None
    assert root.rl.max_steps == 7


def test_a_missing_config_dir_is_refused(tmp_path: Path) -> None:
    composed, found = compose_checked([], config_dir=str(tmp_path / "none"))
    assert composed is None
    assert found[0].key == "--config-dir"


def test_attempt_gives_the_tree_of_a_configuration_that_breaks_rules() -> None:
    composed, found = compose_checked(["rl.group_size=7"])
    assert composed is not None
    assert found
    root = attempt(composed)
    assert root is not None
    assert root.model is not None


def test_attempt_gives_nothing_while_values_are_missing() -> None:
    composed, _ = compose_checked(["model=hf"])
    assert composed is not None
    assert attempt(composed) is None


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (["seed", "reward"], "did you mean 'seed'?"),
        (["alpha", "beta"], "known: alpha, beta"),
        ([f"name{i}" for i in range(13)], "see posttrain --cfg job for all keys"),
    ],
)
def test_nearest_never_lists_dozens_of_names(known: list[str], expected: str) -> None:
    assert nearest("sed", known) == expected
