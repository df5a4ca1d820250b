"""Objectives that go wrong on the one rank that holds a marked sample; importable by the processes of all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext, Objective
from posttrain.config.grpo import GRPOConfig

NOT_FINITE, BROKEN = 1e6, 2e6
"""Advantages that mark a sample."""


def build(rl: GRPOConfig, context: ModelContext) -> Objective:
    """The run's own objective, but for batches with a marked sample."""
    plain = build_objective(rl, context)

    def fn(model: Any, batch: Any) -> Any:
        loss, metrics = plain.fn(model, batch)
        if bool((batch.advantages == BROKEN).any()):
            raise ValueError("this objective breaks on a marked sample")
        return (loss * math.nan if bool((batch.advantages == NOT_FINITE).any()) else loss), metrics

    return replace(plain, fn=fn)
