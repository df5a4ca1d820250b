"""The reward stage: rollout groups in; scored groups, metrics and named failures out.

Owns the deadline of a candidate, the contract check on what providers return, and the group spread, which is recorded once,
here. A provider is never waited for in silence: what cannot be killed is watched, and the run stops with its name.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from posttrain.errors import RewardError
from posttrain.records import Max, Mean, Metric, RolloutGroup, Score, ScoredGroup, Sum, merge_metrics
from posttrain.reward.pointwise import FAILURE_TOTAL, PointwiseProvider
from posttrain.reward.provider import RewardProvider

HANG_FACTOR = 2.0
"""A candidate past its deadline has failed; one that still runs after this many deadlines is taken for hung."""

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """One completion that could not be scored."""

    prompt_id: str
    sample: int
    reason: str


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What the reward stage made of one collection of groups."""

    groups: tuple[ScoredGroup, ...]
    metrics: dict[str, Metric]
    """`reward/mean`, `reward/std` (mean over groups of the standard deviation inside the group), `reward/spread`,
    `reward/zero_spread_frac`, `reward/part/<name>`, `reward/failed`, `reward/time_s`, `reward/slowest_s`."""
    failures: tuple[RewardFailure, ...]


class RewardService:
    """Scores groups with one provider under a deadline per completion."""

    def __init__(self, provider: RewardProvider, *, timeout_s: float) -> None:
        self._provider = provider
        self._timeout_s = timeout_s

    def score(self, groups: Sequence[RolloutGroup]) -> RewardResult:
        metrics: dict[str, Metric] = {"reward/failed": Sum(0.0), "reward/time_s": Sum(0.0)}
        scored: list[ScoredGroup] = []
        failures: list[RewardFailure] = []
        for group in groups:
            started = time.perf_counter()
            scores = self._checked(group, self._scores(group))
            totals = [score.total for score in scores]
            result = ScoredGroup(rollout=group, scores=scores, spread=max(totals) - min(totals))
            scored.append(result)
            failures += [
                RewardFailure(group.prompt.id, sample, score.failure) for sample, score in enumerate(scores) if score.failure is not None
            ]
            merge_metrics(metrics, group_metrics(result, wall_s=time.perf_counter() - started))
        return RewardResult(tuple(scored), metrics, tuple(failures))

    def close(self) -> None:
        self._provider.close()

    def _scores(self, group: RolloutGroup) -> Sequence[Score]:
        provider = self._provider
        if isinstance(provider, PointwiseProvider) and provider.trusted:
            return provider.score(group)
        return _Watched(provider, group, timeout_s=self._timeout_s).result()

    def _checked(self, group: RolloutGroup, scores: Sequence[Score]) -> tuple[Score, ...]:
        """The scores with the contract enforced: one `Score` per completion; a late or non-finite one has failed."""
        where = f"reward {self._provider.name!r}, prompt {group.prompt.id!r}"
        if len(scores) != len(group.completions):
            raise RewardError(
                f"{where}: {len(scores)} scores for {len(group.completions)} completions, there must be one each; fix the provider"
            )
        checked = []
        for sample, score in enumerate(scores):
            if not isinstance(score, Score):
                raise RewardError(f"{where}, sample {sample}: got {type(score).__name__}, must be a Score; fix the provider")
            if not math.isfinite(score.total):
                reason = score.failure or f"non-finite total {score.total}"
                score = replace(score, total=FAILURE_TOTAL, parts=MappingProxyType({}), failure=reason)
            elif score.failure is None and score.time_s > self._timeout_s:
                score = replace(score, total=FAILURE_TOTAL, parts=MappingProxyType({}), failure=f"timed out after {score.time_s:.1f}s")
            checked.append(score)
        return tuple(checked)


def group_metrics(group: ScoredGroup, *, wall_s: float) -> dict[str, Metric]:
    """The metrics of one group. Failed completions count in the mean with the total they were given; their parts are unknown."""
    totals = [score.total for score in group.scores]
    mean = sum(totals) / len(totals)
    deviation = math.sqrt(sum((total - mean) ** 2 for total in totals) / len(totals))
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(sum(totals), len(totals)),
        "reward/std": Mean(deviation, 1),
        "reward/spread": Mean(group.spread, 1),
        "reward/zero_spread_frac": Mean(float(not group.informative), 1),
        "reward/failed": Sum(float(sum(score.failure is not None for score in group.scores))),
        "reward/time_s": Sum(wall_s),
        "reward/slowest_s": Max(max(score.time_s for score in group.scores)),
    }
    for score in group.scores:
        if score.failure is None:
            merge_metrics(metrics, {f"reward/part/{name}": Mean(value, 1) for name, value in score.parts.items()})
    return metrics


class _Watched:
    """One call of a provider in a daemon thread, so that a hung call can be abandoned and does not keep the process alive."""

    def __init__(self, provider: RewardProvider, group: RolloutGroup, *, timeout_s: float) -> None:
        self._provider = provider
        self._group = group
        self._timeout_s = timeout_s
        self._scores: Sequence[Score] = ()
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name=f"reward-{provider.name}", daemon=True)
        self._thread.start()

    def result(self) -> Sequence[Score]:
        """Waits for the thread, which ends by itself; raises RewardError when it is taken for hung."""
        poll_s = min(_POLL_S, self._timeout_s / 4)
        while self._thread.is_alive():
            self._thread.join(poll_s)
            self._raise_if_hung()
        if isinstance(self._error, RewardError):
            raise self._error
        if self._error is not None:
            raise RewardError(
                f"reward {self._provider.name!r}, prompt {self._group.prompt.id!r}: the provider raised "
                f"{type(self._error).__name__}: {self._error}; it must return a failed Score for what it cannot score"
            ) from self._error
        return self._scores

    def _run(self) -> None:
        try:
            self._scores = self._provider.score(self._group)
        except BaseException as error:
            self._error = error

    def _raise_if_hung(self) -> None:
        if not self._thread.is_alive():
            return
        now, count, provider = time.perf_counter(), len(self._group.completions), self._provider
        if isinstance(provider, PointwiseProvider):
            current = provider.in_flight
            if current is None:
                return
            what, elapsed, allowed = f"sample {current.sample}", now - current.started, self._timeout_s
        else:
            what, elapsed, allowed = f"one of samples 0..{count - 1}", now - self._started, self._timeout_s * count
        if elapsed > HANG_FACTOR * allowed:
            raise RewardError(
                f"reward {provider.name!r}, prompt {self._group.prompt.id!r}, {what}: still running after {elapsed:.1f}s, the deadline is "
                f"{allowed:g}s (rl.reward_timeout_s={self._timeout_s:g}) and code in this process cannot be killed; bound the scorer "
                "itself (a request timeout, a subprocess) or raise rl.reward_timeout_s"
            )
