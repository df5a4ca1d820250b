"""Typed configuration: schemas, one file a subtree, and `resolve`. Imports no torch."""

from posttrain.config.base import walk
from posttrain.config.data import PromptEnvConfig
from posttrain.config.grid import GridConfig
from posttrain.config.grpo import GRPOConfig, resolve_data_seed
from posttrain.config.job import JobConfig
from posttrain.config.model import HFModelConfig, ModelConfig, NativePolicyBuildSpec
from posttrain.config.resolve import resolve
from posttrain.config.rollout import HFRolloutConfig, RolloutConfig, VLLMRolloutConfig
from posttrain.config.root import RootConfig
from posttrain.config.run import OptimizerConfig, Precision, RunConfig, ValidationConfig, resolve_precision
from posttrain.config.tracker import TrackerConfig

__all__ = [
    "GRPOConfig",
    "GridConfig",
    "HFModelConfig",
    "HFRolloutConfig",
    "JobConfig",
    "ModelConfig",
    "NativePolicyBuildSpec",
    "OptimizerConfig",
    "Precision",
    "PromptEnvConfig",
    "RolloutConfig",
    "RootConfig",
    "RunConfig",
    "TrackerConfig",
    "VLLMRolloutConfig",
    "ValidationConfig",
    "resolve",
    "resolve_data_seed",
    "resolve_precision",
    "walk",
]
