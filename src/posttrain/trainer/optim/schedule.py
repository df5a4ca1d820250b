"""The learning rate as a pure function of the committed model step: a resumed run needs nothing else to continue it exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.config.run import OptimizerConfig
from posttrain.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Schedule:
    """With w warm-up updates, T updates in all and k updates applied so far, the next one uses lr times

    - (k + 1) / w                        for k < w
    - 1                                  `constant`
    - 1 - (k - w) / (T - w)              `linear`
    - (1 + cos(pi (k - w) / (T - w))) / 2  `cosine`

    so that no update of the run has rate 0.
    """

    lr: float
    kind: str
    warmup: int
    total: int | None

    @classmethod
    def of(cls, config: OptimizerConfig, *, total_steps: int | None) -> Schedule:
        """
        Args:
            total_steps: optimizer steps of the whole run; only a rate that falls needs them.

        Raises:
            TrainingError: they are needed and missing, or not more than the warm-up.
        """
        if config.lr_schedule != "constant" and (total_steps is None or total_steps <= config.warmup_steps):
            raise TrainingError(
                f"rl.optimizer.lr_schedule={config.lr_schedule} needs more optimizer steps in all than warmup_steps={config.warmup_steps}; "
                f"it was given {total_steps}"
            )
        return cls(config.lr, config.lr_schedule, config.warmup_steps, total_steps)

    def rate(self, applied: int) -> float:
        """The rate of the update that follows `applied` committed ones; past the end of the run it stays at the last one."""
        if applied < self.warmup:
            return self.lr * (applied + 1) / self.warmup
        if self.kind == "constant" or self.total is None:
            return self.lr
        fallen = (min(applied, self.total - 1) - self.warmup) / (self.total - self.warmup)
        return self.lr * (1 - fallen if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * fallen)))

    def set(self, groups: list[dict[str, object]], *, applied: int) -> float:
        """Give every parameter group of an optimizer the rate of its next step; returns it."""
        rate = self.rate(applied)
        for group in groups:
            group["lr"] = rate
        return rate
