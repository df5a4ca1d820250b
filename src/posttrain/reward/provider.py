"""What a reward provider is, and how a pointwise scorer becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from posttrain.records import RolloutGroup, Score


class RewardProvider(Protocol):
    """Scores complete groups. Group-native: it may compare completions with each other."""

    name: str
    """Key under which it was selected; shown in errors and metrics."""
    needs: frozenset[str]
    """Columns it reads: any of `prompt`, `reference` and further column names; preflight checks them."""
    identity: Mapping[str, object]
    """What the score depends on, for provenance."""

    def score(self, group: RolloutGroup) -> Sequence[Score]:
        """One score per completion, in order. A completion it cannot score gets a `failure`, never a silent zero."""
        ...

    def close(self) -> None:
        """Release worker processes; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class CandidateInput:
    """What a pointwise scorer sees of one completion."""

    completion: str
    """Decoded answer without special tokens."""
    prompt: str
    """The exact text the model was given."""
    reference: object | None
    representations: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


PointwiseScorer = Callable[[CandidateInput], float | Mapping[str, float]]
"""Returns the total, or named parts that add up to it."""
