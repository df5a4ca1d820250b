"""`algorithm.*`: which named recipe a run follows, for provenance; the knobs themselves live under `rl`."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class AlgorithmConfig:
    name: str = MISSING
    """Recipe name recorded with the run and its trackers: grpo, dr_grpo, gspo, dapo, ..."""
