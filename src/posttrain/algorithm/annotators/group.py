"""The annotation of a complete group: its advantages, and which of its tokens the loss may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from posttrain.algorithm.annotators.advantage import group_advantages
from posttrain.algorithm.annotators.prefix import conflicting_prefix_lengths
from posttrain.config.grpo import GRPOConfig
from posttrain.errors import TrainingError
from posttrain.records import Advantage, ScoredGroup, TrainGroup
from posttrain.runtime.dotted import import_dotted

AdvantageEstimator = Callable[[ScoredGroup], Sequence[Advantage]]
"""Advantages of a complete group: one number per completion, or one per token."""


@dataclass(frozen=True, slots=True)
class GroupAnnotator:
    """Turns scored groups into train groups."""

    estimate: AdvantageEstimator
    min_filter_prefix_tokens: int | None = None
    mask_truncated: bool = False

    @classmethod
    def of(cls, rl: GRPOConfig) -> GroupAnnotator:
        """Raises ConfigError when `rl.advantage_estimator` names nothing that can be imported."""
        if rl.advantage_estimator:
            estimate = cast("AdvantageEstimator", import_dotted(rl.advantage_estimator))
        else:
            estimate = GroupRelative(rl.unbiased_advantage)
        return cls(estimate, rl.min_filter_prefix_tokens, rl.mask_truncated_completions)

    def __call__(self, group: ScoredGroup) -> TrainGroup:
        """A truncated completion, or a shared prefix under different rewards, leaves the loss and its denominators; the rewards
        stay in the group's statistics."""
        completions = group.rollout.completions
        hidden = [0] * len(completions)
        if self.min_filter_prefix_tokens is not None:
            hidden = conflicting_prefix_lengths(
                [completion.token_ids for completion in completions],
                [score.total for score in group.scores],
                min_tokens=self.min_filter_prefix_tokens,
            )
        masks: list[tuple[bool, ...]] = []
        for completion, prefix in zip(completions, hidden, strict=True):
            dropped = self.mask_truncated and completion.finish_reason == "length"
            masks.append(tuple(not dropped and position >= prefix for position in range(len(completion.token_ids))))
        estimated = list(self.estimate(group))
        try:
            return TrainGroup(group, tuple(map(_plain, estimated)), tuple(masks))
        except (TypeError, ValueError) as error:
            named = f"{len(estimated)} advantages for group {group.rollout.prompt.id!r}"
            raise TrainingError(f"the advantage estimator returned {named}: {error}") from error


def _plain(advantage: Any) -> Advantage:
    """A number, or one number per token, whatever library the estimator's sequences come from."""
    if isinstance(advantage, int | float) or getattr(advantage, "ndim", None) == 0:
        return float(advantage)
    return tuple(float(value) for value in advantage)


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """The estimate of GRPO, and of Dr-GRPO when `unbiased`."""

    unbiased: bool

    def __call__(self, group: ScoredGroup) -> tuple[float, ...]:
        return group_advantages([score.total for score in group.scores], unbiased=self.unbiased)
