"""The clipped GRPO loss in which better-than-average completions count less than worse ones."""

from dataclasses import dataclass, replace

import torch

from posttrain.algorithm import grpo
from posttrain.algorithm.primitives.objective import MetricAdapter, ModelContext, Objective, ObjectiveFn
from posttrain.config import GRPOConfig
from posttrain.data.packer import PolicyBatch
from posttrain.model.protocol import PolicyModel
from posttrain.records import Mean, Metric

POSITIVE_WEIGHT = 0.25


@dataclass(frozen=True)
class WeightedGains:
    """Multiplies positive advantages, then leaves everything to the shipped objective."""

    base: ObjectiveFn
    positive_weight: float

    def __call__(self, model: PolicyModel, batch: PolicyBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        per_token = batch.token_advantages
        weighed = replace(
            batch,
            advantages=self._weigh(batch.advantages),
            token_advantages=None if per_token is None else self._weigh(per_token),
        )
        loss, metrics = self.base(model, weighed)
        metrics["positive_frac"] = Mean(float((batch.advantages > 0).sum()), batch.num_sequences)
        return loss, metrics

    def _weigh(self, advantages: torch.Tensor) -> torch.Tensor:
        return torch.where(advantages > 0, self.positive_weight * advantages, advantages)


def build_objective(rl: GRPOConfig, model_context: ModelContext) -> Objective:
    base = grpo.build_objective(rl, model_context)
    return replace(
        base,  # keeps the reduction, the cache of the old policy and the reference
        fn=WeightedGains(base.fn, POSITIVE_WEIGHT),
        metric_adapter=MetricAdapter(
            names={**base.metric_adapter.names, "positive_frac": "train/positive_frac"},
            ignored=base.metric_adapter.ignored,
        ),
        identity={**base.identity, "objective": "weighted_gains", "positive_weight": POSITIVE_WEIGHT},
    )
