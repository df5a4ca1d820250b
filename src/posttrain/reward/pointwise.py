"""Lifting a pointwise scorer into a group-native provider: `map_candidates`.

Owns the timing of each candidate and the rule that a scorer's exception makes that candidate failed, with the reason, and
nothing else. Deadlines are the reward service's, which watches `in_flight` from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from posttrain.errors import RewardError
from posttrain.records import RolloutGroup, Score
from posttrain.reward.provider import CandidateInput, PointwiseScorer
from posttrain.reward.worker import BoundedWorker

FAILURE_TOTAL = 0.0
"""The total of a candidate that could not be scored."""

_NO_PARTS: Mapping[str, float] = MappingProxyType({})


class CandidateFailure(Exception):
    """Raised by a scorer that cannot score this candidate and says why; any other exception counts just the same."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The candidate being scored right now."""

    sample: int
    started: float
    """`time.perf_counter()` when its scorer was called."""


class PointwiseProvider:
    """Scores the completions of a group one after the other, each on its own."""

    def __init__(
        self,
        scorer: PointwiseScorer,
        *,
        name: str,
        needs: Iterable[str],
        identity: Mapping[str, object],
        trusted: bool = False,
        worker: BoundedWorker | None = None,
    ) -> None:
        """`trusted`: the scorer cannot hang (it is simple, or kills its own work), so no thread needs to watch it."""
        self.name = name
        self.needs = frozenset(needs)
        self.identity: Mapping[str, object] = MappingProxyType(dict(identity))
        self.trusted = trusted
        self.in_flight: InFlight | None = None
        self._scorer = scorer
        self._worker = worker

    def score(self, group: RolloutGroup) -> Sequence[Score]:
        return [self._candidate(group, sample) for sample in range(len(group.completions))]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _candidate(self, group: RolloutGroup, sample: int) -> Score:
        candidate = CandidateInput(
            completion=group.completions[sample].text,
            prompt=group.prompt.text,
            reference=group.prompt.reference,
            representations=group.prompt.representations,
        )
        # Importing the worker's library takes seconds, which the first candidate must not be charged with.
        if self._worker is not None:
            self._worker.start()
        started = time.perf_counter()
        self.in_flight = InFlight(sample, started)
        try:
            total, parts, failure = *_total(self._scorer(candidate)), None
        except RewardError:
            raise
        except CandidateFailure as error:
            total, parts, failure = FAILURE_TOTAL, _NO_PARTS, str(error)
        except Exception as error:
            total, parts, failure = FAILURE_TOTAL, _NO_PARTS, f"{type(error).__name__}: {error}"
        finally:
            self.in_flight = None
        return Score(total=total, parts=parts, time_s=time.perf_counter() - started, failure=failure)


def map_candidates(scorer: PointwiseScorer, *, name: str, needs: Iterable[str], identity: Mapping[str, object]) -> PointwiseProvider:
    """A provider that calls `scorer` once per completion.

    A returned number is the total; returned named parts add up to it. An exception makes the candidate failed. `needs` names
    the columns the scorer reads and `identity` what its score depends on (a version, thresholds, ...). The scorer runs in a
    thread of this process, under `rl.reward_timeout_s`.
    """
    return PointwiseProvider(scorer, name=name, needs=needs, identity=identity)


def _total(result: float | Mapping[str, float]) -> tuple[float, Mapping[str, float]]:
    if isinstance(result, Mapping):
        parts = {name: float(value) for name, value in result.items()}
        return sum(parts.values()), MappingProxyType(parts)
    return float(result), _NO_PARTS
