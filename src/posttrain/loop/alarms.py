"""Watches the metrics of a run for the signs that it trains on something wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.config.tracker import AlarmConfig

MEMORY_WINDOW = 20
"""Steps over which the growth of memory is fitted."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One threshold that was passed."""

    name: str
    """The key of `tracker.alarms` that owns the threshold."""
    message: str


class Alarms:
    """Raises each alarm when its condition begins, and again only after it had ended."""

    def __init__(self, config: AlarmConfig, *, single_step: bool) -> None:
        """
        Args:
            single_step: the run takes one optimizer step per batch.
        """
        self._config = config
        self._single_step = single_step
        self.stop = config.stop
        self._raised: set[str] = set()
        self._tied_steps = 0
        self._memory: deque[float] = deque(maxlen=MEMORY_WINDOW)

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that begin with this step; call it once per step, in order."""
        standing = {alarm.name: alarm for alarm in self._standing(step, metrics)}
        new = [alarm for name, alarm in standing.items() if name not in self._raised]
        self._raised = set(standing)
        return new

    def state(self) -> dict[str, Any]:
        """What the alarms remember; the memory curve starts anew with every process."""
        return {"raised": sorted(self._raised), "tied_steps": self._tied_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`."""
        self._raised, self._tied_steps = set(state["raised"]), state["tied_steps"]

    def _standing(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        config = self._config
        # without a cached old policy every ratio of the batch belongs to its only step
        ratio = metrics.get("train/first_ratio_absdev", metrics.get("train/ratio_absdev", 0.0) if self._single_step else 0.0)
        if step == 1 and config.first_ratio and not ratio <= config.first_ratio:
            yield Alarm(
                "first_ratio",
                f"the probability ratio of the first optimizer step is off by {ratio:.3g} on average and should be 1: trainer and the "
                "policy it is compared with disagree about the same weights (dropout, precision, or another model)",
            )
        gap = metrics.get("train/logprob_gap_mean", 0.0)
        if config.logprob_gap and not gap <= config.logprob_gap:
            yield Alarm(
                "logprob_gap",
                f"step {step}: log-probabilities of trainer and sampler differ by {gap:.3g} nats on average: the engine serves other "
                "weights, or another numerical path",
            )
        self._tied_steps = 0 if metrics.get("train/informative_groups", 1.0) else self._tied_steps + 1
        if config.uninformative_steps and self._tied_steps >= config.uninformative_steps:
            yield Alarm(
                "uninformative_steps",
                f"step {step}: no group had rewards that differ for {self._tied_steps} steps: nothing is learned; make the task easier "
                "or harder, or raise rl.group_size",
            )
        if "memory/rss_gib" in metrics:
            self._memory.append(metrics["memory/rss_gib"] * 1024)
        if config.memory_slope_mib and len(self._memory) == MEMORY_WINDOW and self._slope() > config.memory_slope_mib:
            yield Alarm(
                "memory_slope_mib",
                f"step {step}: resident memory grew by {self._slope():.0f} MiB a step over the last {MEMORY_WINDOW} steps: something leaks",
            )

    def _slope(self) -> float:
        """MiB per step by least squares."""
        n = len(self._memory)
        centre, mean = (n - 1) / 2, sum(self._memory) / n
        return sum((i - centre) * (value - mean) for i, value in enumerate(self._memory)) / sum((i - centre) ** 2 for i in range(n))
