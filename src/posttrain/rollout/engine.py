"""What a rollout engine is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.records import RolloutGroup, RolloutRequest


class RolloutEngine(Protocol):
    """Samples completions under committed weights only."""

    @property
    def weight_version(self) -> int | None:
        """The committed version, or None before the first publication and while one is under way."""
        ...

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """One complete group per request, in order.

        The tokens of a completion depend on its request's seed, its index in the group and the weights, not on what else is in
        the call. Raises RolloutError when no version is committed.
        """
        ...

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        ...
