"""`grid.*`: who hosts the roles and where they are placed."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.base import bounded, choice, pending


@dataclass
class ShapesConfig:
    """Execution shapes [replicas, ranks] per role; null derives them from `grid.ranks` and `grid.num_replicas`."""

    policy: list[int] | None = pending(None)
    rollout: list[int] | None = pending(None)


@dataclass
class GridConfig:
    """Orchestration: backend, placement and shapes of the role groups."""

    backend: str = choice("local", "ray", pending=True)
    """`local` hosts every role in this process; it starts the further ranks of the policy as processes of its own."""
    gpu_placement: str = choice("colocated", "disaggregated", pending=True)
    """Whether rollout and policy share devices."""
    grouping: str = choice("all_in_one", "per_role", pending=True)
    """How roles become actor groups."""
    ranks: int = bounded(1, ge=1)
    """Ranks that train the policy together; must equal `model.parallelism.dp_replicate` x `dp_shard`."""
    num_replicas: int = pending(1)
    """Independent execution replicas of the rollout side."""
    gpus_per_role: int | None = pending(None)
    """Reserved; never read."""
    shapes: ShapesConfig = field(default_factory=ShapesConfig)
