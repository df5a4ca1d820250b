"""Objectives of the GRPO family, built from `rl.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, MetricAdapter, ModelContext, Objective, Reduction
from posttrain.algorithm.primitives.policy_gradient import (
    clipped_policy_gradient_loss,
    per_sequence_sum,
    reduce_policy_gradient_loss,
)
from posttrain.config.grpo import GRPOConfig
from posttrain.config.run import resolved_dtype
from posttrain.records import Max, Mean, Metric, Sum

if TYPE_CHECKING:
    from posttrain.data.packer import PolicyBatch
    from posttrain.model.protocol import PolicyModel

METRIC_ADAPTER = MetricAdapter(
    names={
        "loss": "train/loss",
        "clip_frac": "train/clip_frac",
        "dual_clip_frac": "train/dual_clip_frac",
        "ratio_absdev": "train/ratio_absdev",
        "ratio_max": "train/ratio_max",
        "entropy": "train/entropy",
        "logprob_gap_mean": "train/logprob_gap_mean",
        "logprob_gap_max": "train/logprob_gap_max",
        "logprob_gap_kl": "train/logprob_gap_kl",
        "valid_token_count": "train/valid_token_count",
        "valid_sequence_count": "train/valid_sequence_count",
        "advantage_absmean": "train/advantage_absmean",
    },
    ignored=frozenset({OBJECTIVE_WEIGHT_SUM}),
)


def build_objective(rl: GRPOConfig, context: ModelContext) -> Objective:
    """The objective that `rl.grpo_surrogate` selects.

    Raises:
        ValueError: `context.max_response_length` is not a positive integer.
    """
    length = context.max_response_length
    if isinstance(length, bool) or length < 1:
        raise ValueError(f"max_response_length={length!r}: must be a positive integer; it comes from rollout.max_tokens")
    if rl.grpo_surrogate == "legacy_pg":
        return Objective(LegacyPolicyGradient(), Reduction.MEAN, METRIC_ADAPTER, identity={"grpo_surrogate": "legacy_pg"})
    fn = ClippedSurrogate(
        epsilon_low=rl.epsilon_low,
        epsilon_high=rl.epsilon_high,
        lower_bound_ratio=rl.lower_bound_ratio,
        loss_type=rl.loss_type,
        temperature=rl.temperature,
        logprob_dtype=rl.logprob_dtype,
        max_response_length=length,
    )
    return Objective(fn, Reduction.TOKEN_SUM, METRIC_ADAPTER, old_logp_cache=rl.n_mini > 1, identity=fn.identity())


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """Importance ratios against a frozen old policy, epsilon and dual clip, and one of four normalizations."""

    epsilon_low: float
    epsilon_high: float
    lower_bound_ratio: float
    loss_type: str
    temperature: float
    logprob_dtype: str
    max_response_length: int

    def identity(self) -> Mapping[str, object]:
        values: dict[str, object] = {
            "grpo_surrogate": "clipped",
            "epsilon_low": self.epsilon_low,
            "epsilon_high": self.epsilon_high,
            "lower_bound_ratio": self.lower_bound_ratio,
            "loss_type": self.loss_type,
            "temperature": self.temperature,
            "logprob_dtype": self.logprob_dtype,
        }
        if self.loss_type == "seq-mean-token-sum-fixed":
            values["max_response_length"] = self.max_response_length
        return values

    def __call__(self, model: PolicyModel, batch: PolicyBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        scores = model.score(batch, temperature=self.temperature, dtype=resolved_dtype(self.logprob_dtype))
        logprobs = scores.logprobs
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.to(logprobs.dtype)
        advantages = batch.advantages.to(logprobs.dtype)[batch.sequence]
        surrogate = clipped_policy_gradient_loss(
            logprobs,
            old_logprobs=old,
            advantages=advantages,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            lower_bound_ratio=self.lower_bound_ratio,
        )
        numerator, weight = reduce_policy_gradient_loss(
            surrogate.losses,
            loss_mask=batch.loss_mask,
            sequence=batch.sequence,
            num_sequences=batch.num_sequences,
            loss_type=self.loss_type,
            max_response_length=self.max_response_length,
        )
        metrics = _shared_metrics(batch, logprobs, scores.entropy)
        metrics["loss"] = Mean(float(numerator.detach()), weight)
        metrics[OBJECTIVE_WEIGHT_SUM] = Sum(weight)
        mask, tokens = batch.loss_mask, float(batch.loss_mask.sum())
        deviation = torch.where(mask, (surrogate.ratios - 1).abs(), 0.0)
        metrics["clip_frac"] = Mean(float((surrogate.clipped & mask).sum()), tokens)
        metrics["dual_clip_frac"] = Mean(float((surrogate.dual_clipped & mask).sum()), tokens)
        metrics["ratio_absdev"] = Mean(float(deviation.sum()), tokens)
        if tokens:
            metrics["ratio_max"] = Max(float(surrogate.ratios[mask].max()))
        return numerator / max(weight, 1.0), metrics


@dataclass(frozen=True, slots=True)
class LegacyPolicyGradient:
    """REINFORCE with the group advantage: loss = -1/S sum_i A_i sum_t log p(y_it); no ratio, no clip, temperature 1."""

    def __call__(self, model: PolicyModel, batch: PolicyBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        dtype = torch.float64 if batch.advantages.dtype == torch.float64 else torch.float32
        scores = model.score(batch, temperature=1.0, dtype=dtype)
        advantages = batch.advantages.to(scores.logprobs.dtype)
        masked = torch.where(batch.loss_mask, scores.logprobs, torch.zeros_like(scores.logprobs))
        per_sequence = per_sequence_sum(masked, batch.sequence, batch.num_sequences)
        loss = -(advantages * per_sequence).sum() / max(batch.num_sequences, 1)
        metrics = _shared_metrics(batch, scores.logprobs, scores.entropy)
        metrics["loss"] = Mean(float(loss.detach()) * batch.num_sequences, batch.num_sequences)
        return loss, metrics


@torch.no_grad()
def _shared_metrics(batch: PolicyBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> dict[str, Metric]:
    """Diagnostics every surrogate reports: entropy, sampler-to-trainer gap, denominators."""
    mask, tokens = batch.loss_mask, float(batch.loss_mask.sum())
    # Only what the loss uses is compared: masked tokens may have been sampled under other rules.
    gap = torch.where(mask, batch.sampled_logprobs.to(logprobs.dtype) - logprobs.detach(), 0.0)
    counts = per_sequence_sum(mask.to(logprobs.dtype), batch.sequence, batch.num_sequences)
    sequences = float((counts > 0).sum())
    return {
        "entropy": Mean(float(torch.where(mask, entropy, 0.0).sum()), tokens),
        "logprob_gap_mean": Mean(float(gap.abs().sum()), tokens),
        "logprob_gap_max": Max(float(gap.abs().max()) if gap.numel() else 0.0),
        "logprob_gap_kl": Mean(float(gap.sum()), tokens),
        "valid_token_count": Sum(tokens),
        "valid_sequence_count": Sum(sequences),
        "advantage_absmean": Mean(float(batch.advantages.abs().sum()), float(batch.num_sequences)),
    }
