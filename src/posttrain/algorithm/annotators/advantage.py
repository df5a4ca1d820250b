"""Group-relative advantages, computed while the complete group is present."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posttrain.records import SPREAD_TOLERANCE

STD_EPSILON = 1e-4
"""Added to the group's standard deviation, in reward units."""


def group_advantages(rewards: Sequence[float], *, unbiased: bool) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + 1e-4) with the sample standard deviation (arXiv 2402.03300, sec. 4.1.2); with `unbiased`,
    A_i = r_i - mean (Dr-GRPO, arXiv 2503.20783). A group whose rewards tie gets exact zeros.

    Example: rewards (1, 0, 0, 1) have mean 0.5 and std sqrt(1/3): advantages +-0.8659.
    """
    if max(rewards) - min(rewards) <= SPREAD_TOLERANCE:
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if unbiased:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return tuple(value / (std + STD_EPSILON) for value in centred)
