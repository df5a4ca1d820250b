"""Registers the schemas with Hydra, in groups of their own so that they do not show among the options."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from posttrain.config.algorithm import AlgorithmConfig
from posttrain.config.grid import GridConfig
from posttrain.config.grpo import GRPOConfig
from posttrain.config.model import HFModelConfig, NativePolicyBuildSpec
from posttrain.config.rollout import HFRolloutConfig, VLLMRolloutConfig
from posttrain.config.root import RootConfig
from posttrain.config.tracker import TrackerConfig


def _open(cls: type, *subtrees: str) -> DictConfig:
    """A schema whose named subtrees take any key without `+`."""
    node = OmegaConf.structured(cls)
    for key in subtrees:
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    return node


SCHEMAS: dict[str, object] = {
    "schema/root": RootConfig,
    "schema/algorithm/named": AlgorithmConfig,
    "schema/rl/grpo": _open(GRPOConfig, "data.reasoning_gym.config", "validation.data.reasoning_gym.config"),
    "schema/model/hf": HFModelConfig,
    "schema/model/native": _open(NativePolicyBuildSpec, "model_config"),
    "schema/rollout/hf": HFRolloutConfig,
    "schema/rollout/vllm": _open(VLLMRolloutConfig, "compilation_config"),
    "schema/grid/default": GridConfig,
    "schema/tracker/default": TrackerConfig,
}


def schema_of(node: object) -> str | None:
    """The absolute config path of the schema whose type `node` has, or None when it needs none of its own."""
    for path, schema in SCHEMAS.items():
        cls = schema if isinstance(schema, type) else OmegaConf.get_type(schema)  # type: ignore[arg-type]
        if type(node) is cls:
            return f"/{path}"
    return None


def register() -> None:
    """Put every schema into Hydra's config store; calling it again changes nothing."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for path, node in SCHEMAS.items():
        group, _, name = path.rpartition("/")
        store.store(group=group, name=name, node=node, provider="posttrain")
    # Hydra deep-copies the whole store for every group it lists; what load() hands out is copied anyway.
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
