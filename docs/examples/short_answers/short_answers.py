"""Rewards of this project: right, and a little more for being short."""

from posttrain.reward.pointwise import CandidateFailure, PointwiseProvider, map_candidates
from posttrain.reward.provider import CandidateInput

SHORT = 8
"""Characters."""


def short_and_right(candidate: CandidateInput) -> dict[str, float]:
    if candidate.reference is None:
        raise CandidateFailure("the prompt has no reference")
    answer = candidate.completion.strip()
    right = str(candidate.reference) in answer
    return {"right": float(right), "short": 0.1 if len(answer) <= SHORT else 0.0}


def catalog() -> dict[str, PointwiseProvider]:
    return {
        "short_and_right": map_candidates(
            short_and_right,
            name="short_and_right",
            needs=["reference"],
            identity={"reward": "short_and_right", "revision": 1, "short": SHORT},
        )
    }
