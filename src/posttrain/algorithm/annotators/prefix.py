"""Shared prefixes of one group under different rewards: tokens to which the group gives contradicting credit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from posttrain.records import SPREAD_TOLERANCE


def conflicting_prefix_lengths(completions: Sequence[tuple[int, ...]], rewards: Sequence[float], *, min_tokens: int) -> list[int]:
    """For every completion the length of the longest prefix it shares with one of another reward; 0 below `min_tokens`.

    Sorted as token sequences, the longest prefix a completion shares with any later one is the smallest of the adjacent shared
    prefixes in between, so the nearest one of another reward on either side decides: O(group size x length) but for ties.

    Example: (5, 6, 7) and (5, 6, 8) with rewards 1 and 0 share the conflicting prefix (5, 6): [2, 2] for min_tokens up to 2.
    """
    order = sorted(range(len(completions)), key=lambda i: completions[i])
    shared = [_shared(completions[a], completions[b]) for a, b in pairwise(order)]
    lengths = [0] * len(completions)
    for place, i in enumerate(order):
        forward = _nearest_conflict(shared[place:], [rewards[j] for j in order[place + 1 :]], rewards[i])
        backward = _nearest_conflict(shared[:place][::-1], [rewards[j] for j in order[:place][::-1]], rewards[i])
        longest = max(forward, backward)
        lengths[i] = longest if longest >= min_tokens else 0
    return lengths


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def _nearest_conflict(steps: Sequence[int], others: Sequence[float], reward: float) -> int:
    """The shared prefix with the first neighbour whose reward differs: the minimum over the steps towards it."""
    span: int | None = None
    for step, other in zip(steps, others, strict=True):
        span = step if span is None else min(span, step)
        if abs(other - reward) > SPREAD_TOLERANCE:
            return span
    return 0
