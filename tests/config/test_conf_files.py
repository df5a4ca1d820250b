"""Every file under conf/ composes and resolves, and says only what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from posttrain.config import HFModelConfig, HFRolloutConfig, NativePolicyBuildSpec, VLLMRolloutConfig, resolve
from posttrain.config.base import default_of
from posttrain.config.compose import compose, compose_checked
from posttrain.config.grid import GridConfig
from posttrain.config.grpo import GRPOConfig
from posttrain.config.locate import conf_dir
from posttrain.config.tracker import TrackerConfig

NEEDS_A_VALUE = {
    "model=hf": {"model.name_or_path"},
    "data=jsonl": {"rl.data.path"},
}
"""Options that are incomplete on purpose, with the keys the user must give."""

NOT_AVAILABLE_YET = {
    "grid=colocated": {"grid.backend"},
    "grid=disaggregated": {"grid.backend", "grid.gpu_placement"},
}

REPEATS_ON_PURPOSE = {
    ("data/arithmetic", "rl.reward"),  # every data option names its reward
    ("data/gsm8k", "rl.data.split"),  # stands beside the held-out split
    ("grid/colocated", "grid.gpu_placement"),  # the two placements read as a pair
}


def options() -> list[str]:
    files = (path.relative_to(conf_dir()) for path in sorted(conf_dir().glob("*/**/*.yaml")))
    return [f"{path.parent.as_posix()}={path.stem}" for path in files]


@pytest.mark.parametrize("option", options())
def test_option_resolves_on_the_default_root(option: str) -> None:
    composed, found = compose_checked([option])
    if option in NOT_AVAILABLE_YET:
        assert {violation.key for violation in found} == NOT_AVAILABLE_YET[option]
        assert all(violation.rule == "is not available yet" for violation in found)
        return
    if option in NEEDS_A_VALUE:
        assert {violation.key for violation in found} == NEEDS_A_VALUE[option]
        return
    assert not found
    assert composed is not None
    resolve(composed)


def test_incomplete_options_resolve_once_their_keys_are_given() -> None:
    root = resolve(compose(["model=hf", "model.name_or_path=/models/x", "data=jsonl", "rl.data.path=/data/x.jsonl"]))
    assert isinstance(root.model, HFModelConfig)
    assert (root.model.name_or_path, root.rl.data.kind) == ("/models/x", "jsonl")


def test_default_root_resolves_to_the_toy_recipe() -> None:
    root = resolve(compose([]))
    assert isinstance(root.rl, GRPOConfig)
    assert isinstance(root.model, NativePolicyBuildSpec)
    assert isinstance(root.rollout, HFRolloutConfig)
    assert (root.algorithm.name, root.rl.grpo_surrogate, root.job.name) == ("legacy_pg", "legacy_pg", "legacy_pg")


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout=vllm", "rollout.limit_mm_per_prompt={image: 4}"],
        ["rollout=vllm", "rollout.enforce_eager=false", "rollout.compilation_config={mode: 3}"],
        ["data=reasoning_gym", "rl.data.reasoning_gym.config.max_terms=3"],
        ["model.model_config.hidden_size=32"],
    ],
)
def test_open_mappings_take_keys_without_plus(overrides: list[str]) -> None:
    resolve(compose(overrides))


def test_mapping_values_arrive_plain() -> None:
    rollout = resolve(compose(["rollout=vllm", "rollout.limit_mm_per_prompt={image: 4}"])).rollout
    assert isinstance(rollout, VLLMRolloutConfig)
    assert rollout.limit_mm_per_prompt == {"image": 4}
    assert type(rollout.limit_mm_per_prompt) is dict


def group_files() -> list[Path]:
    return [path for path in sorted(conf_dir().glob("*/**/*.yaml")) if path.parent.name != "experiment"]


@pytest.mark.parametrize("file", group_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_group_file_repeats_no_default(file: Path) -> None:
    name = f"{file.parent.name}/{file.stem}"
    repeated = {key for key, value, default in stated(file) if value == default}
    assert repeated == {key for where, key in REPEATS_ON_PURPOSE if where == name}


@pytest.mark.parametrize("file", group_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_group_file_opens_with_what_it_is(file: Path) -> None:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert lines[0].rstrip().endswith(".") or ":" in lines[0]


@pytest.mark.parametrize("file", sorted(conf_dir().glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_experiment_opens_with_its_command(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# posttrain experiment={file.stem}")


def stated(file: Path) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and schema default of every leaf a group file sets."""
    text = file.read_text(encoding="utf-8")
    content = {key: value for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"}
    package = next((line.split()[-1] for line in text.splitlines() if line.startswith("# @package")), file.parent.name)
    roots: dict[str, Any] = {"rl": GRPOConfig, "grid": GridConfig, "tracker": TrackerConfig, "algorithm": None}
    roots["model"] = NativePolicyBuildSpec if "/schema/model/native" in text else HFModelConfig
    roots["rollout"] = VLLMRolloutConfig if "/schema/rollout/vllm" in text else HFRolloutConfig
    for key, value in leaves(content):
        full = key if package == "_global_" else f"{package}.{key}"
        top, _, rest = full.partition(".")
        if roots[top] is not None:
            yield full, value, default_at(roots[top], rest)


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        full = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from leaves(value, full)
        else:
            yield full, value


def default_at(cls: Any, path: str) -> Any:
    node: Any = cls
    for part in path.split("."):
        spec = node.__dataclass_fields__[part]
        node = default_of(spec)
        node = type(node) if is_dataclass(node) else node
    return node


def test_recorded_configuration_loads_again(tmp_path: Path) -> None:
    """A run's own record, as an engineer would write one by hand, is a config like any other."""
    defaults = ["/schema/root@_here_", "/schema/algorithm/named@algorithm", "/schema/rl/grpo@rl", "/schema/model/native@model"]
    defaults += ["/schema/rollout/hf@rollout", "_self_", {"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    plain = OmegaConf.to_container(OmegaConf.structured(resolve(compose(["experiment=tiny"]))), resolve=True)
    assert isinstance(plain, dict)
    recorded = {**plain, "defaults": defaults, "provenance": {"git": "abc"}, "effective_objective": {"reduction": "TOKEN_SUM"}}
    (tmp_path / "config_resolved.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False), encoding="utf-8")
    again = resolve(compose([], config_dir=str(tmp_path), config_name="config_resolved"))
    assert again.provenance is None
    assert OmegaConf.to_container(OmegaConf.structured(again), resolve=True) == plain
