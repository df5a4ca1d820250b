"""RLOO: the baseline of a completion is the mean reward of the others in its group (arXiv 2402.14740)."""

import math

from posttrain.records import ScoredGroup


def estimate(group: ScoredGroup) -> list[float]:
    rewards = [score.total for score in group.scores]
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
