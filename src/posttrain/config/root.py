"""The one typed tree of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from posttrain.config.algorithm import AlgorithmConfig
from posttrain.config.grid import GridConfig
from posttrain.config.job import JobConfig
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.run import RunConfig
from posttrain.config.tracker import TrackerConfig


@dataclass
class RootConfig:
    """algorithm, model, rl, rollout, grid, tracker, job."""

    algorithm: AlgorithmConfig = MISSING
    model: ModelConfig = MISSING
    rl: RunConfig = MISSING
    rollout: RolloutConfig = MISSING
    grid: GridConfig = field(default_factory=GridConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    job: JobConfig = field(default_factory=JobConfig)
    provenance: dict[str, Any] | None = None
    """Written into `config_resolved.yaml` by a run; ignored when that file is loaded again."""
    effective_objective: dict[str, Any] | None = None
    """Likewise: the objective the run trained with."""
