"""Objectives of the GRPO family, built from `rl.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, MetricAdapter, ModelContext, Objective, Reduction
from posttrain.algorithm.primitives.policy_gradient import (
    ClippedLoss,
    KLPenalty,
    clipped_policy_gradient_loss,
    per_sequence_sum,
    reduce_policy_gradient_loss,
    sampled_k3_penalty,
    sequence_log_ratio,
)
from posttrain.algorithm.primitives.score_centering import ImportanceWeight, ScoreCentering, score_centering
from posttrain.config.grpo import GRPOConfig
from posttrain.config.run import resolved_dtype
from posttrain.errors import TrainingError
from posttrain.records import Max, Mean, Metric, Sum

if TYPE_CHECKING:
    from posttrain.data.packer import PolicyBatch
    from posttrain.model.protocol import PolicyModel, TokenScores

METRIC_ADAPTER = MetricAdapter(
    names={
        name: f"train/{name}"
        for name in (
            "loss",
            "clip_frac",
            "dual_clip_frac",
            "ratio_absdev",
            "ratio_max",
            "seq_clip_frac",
            "seq_log_ratio_abs",
            "kl_mean",
            "kl_max",
            "kl_beta",
            "sc_correction_abs",
            "sc_head_mass",
            "sc_tail_ratio_absdev",
            "sc_weight_mean",
            "sc_reweighted_frac",
            "entropy",
            "valid_token_count",
            "valid_sequence_count",
            "advantage_absmean",
        )
    },
    ignored=frozenset({OBJECTIVE_WEIGHT_SUM}),
)


def build_objective(rl: GRPOConfig, context: ModelContext) -> Objective:
    """The objective that `rl.grpo_surrogate` selects.

    Raises:
        TrainingError: `rl.kl_beta` without a reference scorer.
        ValueError: a fixed divisor that is not a positive integer.
    """
    length = context.max_response_length
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"max_response_length={length!r} must be an integer >= 1; it comes from rollout.max_tokens")
    if rl.grpo_surrogate == "legacy_pg":
        identity: dict[str, object] = {"grpo_surrogate": "legacy_pg"} | _annotation_identity(rl)
        return Objective(LegacyPolicyGradient(), Reduction.MEAN, METRIC_ADAPTER, identity=identity)
    if rl.kl_beta > 0 and context.reference_scorer is None:
        raise TrainingError(f"rl.kl_beta={rl.kl_beta} needs the scores of a frozen reference; set rl.ref.build_ref=true")
    centering = rl.score_centering
    fn = ClippedSurrogate(
        epsilon_low=rl.epsilon_low,
        epsilon_high=rl.epsilon_high,
        lower_bound_ratio=rl.lower_bound_ratio,
        loss_type=rl.loss_type,
        temperature=rl.temperature,
        logprob_dtype=rl.logprob_dtype,
        max_response_length=length,
        importance_sampling_level=rl.importance_sampling_level,
        old_from_rollout=rl.use_rollout_logprobs_for_loss,
        kl_beta=rl.kl_beta,
        kl_coeff_clamp=rl.kl_coeff_clamp,
        centering=ImportanceWeight(centering.compose, centering.tis_clip, centering.mis_low, centering.mis_high)
        if centering.enabled
        else None,
        centering_top_k=centering.top_k,
    )
    identity = dict(fn.identity()) | _annotation_identity(rl)
    if context.reference_artifact is not None:
        identity["reference_artifact"] = context.reference_artifact
    return Objective(
        fn,
        Reduction.TOKEN_SUM,
        METRIC_ADAPTER,
        old_logp_cache=rl.n_mini > 1 and not rl.use_rollout_logprobs_for_loss,
        reference_scorer=context.reference_scorer if rl.kl_beta > 0 else None,
        identity=identity,
    )


def _annotation_identity(rl: GRPOConfig) -> dict[str, object]:
    """What the annotators feed into the loss, recorded where it departs from the default so that older runs stay comparable."""
    found: dict[str, object] = {}
    for name in ("unbiased_advantage", "mask_truncated_completions", "min_filter_prefix_tokens", "advantage_estimator"):
        value = getattr(rl, name)
        if value:
            found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """Importance ratios against a frozen old policy per token or per response, epsilon and dual clip, an optional KL penalty
    and score centering, and one of four normalizations."""

    epsilon_low: float
    epsilon_high: float
    lower_bound_ratio: float
    loss_type: str
    temperature: float
    logprob_dtype: str
    max_response_length: int
    importance_sampling_level: str = "token"
    old_from_rollout: bool = False
    """Take the sampler's own log-probabilities for the old policy's."""
    kl_beta: float = 0.0
    kl_coeff_clamp: float | None = None
    centering: ImportanceWeight | None = None
    centering_top_k: int = 128

    def identity(self) -> Mapping[str, object]:
        """The values that define the loss. Those that arrived after the first release appear only where they depart from their
        default, so that older runs keep their identity."""
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
        if self.importance_sampling_level != "token":
            values["importance_sampling_level"] = self.importance_sampling_level
        if self.old_from_rollout:
            values["use_rollout_logprobs_for_loss"] = True
        if self.kl_beta > 0:
            values["kl_beta"] = self.kl_beta
        if self.kl_coeff_clamp is not None:
            values["kl_coeff_clamp"] = self.kl_coeff_clamp
        if self.centering is not None:
            values["score_centering.compose"] = self.centering.compose
            values["score_centering.top_k"] = self.centering_top_k
            if self.centering.compose == "tis":
                values["score_centering.tis_clip"] = self.centering.tis_clip
            if self.centering.compose == "mis":
                values["score_centering.mis_low"] = self.centering.mis_low
                values["score_centering.mis_high"] = self.centering.mis_high
        return values

    def __call__(self, model: PolicyModel, batch: PolicyBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss of one micro-batch, divided by its own weight, with the weight reported as OBJECTIVE_WEIGHT_SUM.

        Raises:
            TrainingError: a per-token advantage at the sequence level, or an annotation that the settings need is missing.
        """
        top_ids = self._top_ids(batch)
        scores = model.score(batch, temperature=self.temperature, dtype=resolved_dtype(self.logprob_dtype), top_ids=top_ids)
        logprobs = scores.logprobs
        advantages = self._advantages(batch).to(logprobs.dtype)
        surrogate = self._surrogate(batch, logprobs, advantages)
        metrics = _shared_metrics(batch, logprobs, scores.entropy)
        losses = surrogate.losses
        if self.centering is not None:
            centred = self._centred(batch, scores, self.centering)
            losses = losses * centred.weights + advantages * centred.correction
            metrics |= _centering_metrics(batch, centred)
        penalty = self._penalty(batch, logprobs)
        if penalty is not None:
            losses = losses + self.kl_beta * penalty.losses
            metrics |= _kl_metrics(batch, penalty, self.kl_beta)
        numerator, weight = reduce_policy_gradient_loss(
            losses,
            loss_mask=batch.loss_mask,
            sequence=batch.sequence,
            num_sequences=batch.num_sequences,
            loss_type=self.loss_type,
            max_response_length=self.max_response_length,
        )
        metrics["loss"] = Mean(float(numerator.detach()), weight)
        metrics[OBJECTIVE_WEIGHT_SUM] = Sum(weight)
        metrics |= _clip_metrics(batch, surrogate, logprobs.detach() - self._old(batch, logprobs))
        return numerator / max(weight, 1.0), metrics

    def _old(self, batch: PolicyBatch, logprobs: torch.Tensor) -> torch.Tensor:
        if self.old_from_rollout:
            return batch.sampled_logprobs.to(logprobs.dtype)
        return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.to(logprobs.dtype)

    def _advantages(self, batch: PolicyBatch) -> torch.Tensor:
        if self.importance_sampling_level == "sequence" and batch.token_advantages is not None:
            raise TrainingError(
                "rl.importance_sampling_level=sequence gives a response one ratio, so it takes one advantage per response; this batch "
                "has per-token advantages: use importance_sampling_level=token"
            )
        return batch.advantages_of_tokens()

    def _surrogate(self, batch: PolicyBatch, logprobs: torch.Tensor, advantages: torch.Tensor) -> ClippedLoss:
        old = self._old(batch, logprobs)
        if self.importance_sampling_level == "sequence":
            log_ratios = sequence_log_ratio(
                logprobs, old_logprobs=old, loss_mask=batch.loss_mask, sequence=batch.sequence, num_sequences=batch.num_sequences
            )
        else:
            log_ratios = logprobs - old
        return clipped_policy_gradient_loss(
            log_ratios,
            advantages=advantages,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            lower_bound_ratio=self.lower_bound_ratio,
        )

    def _penalty(self, batch: PolicyBatch, logprobs: torch.Tensor) -> KLPenalty | None:
        if self.kl_beta == 0:
            return None
        if batch.reference_logprobs is None:
            if torch.is_grad_enabled():
                raise TrainingError("rl.kl_beta > 0, but the batch carries no reference log-probabilities")
            return None  # a pass ahead of training, whose loss nobody reads
        return sampled_k3_penalty(logprobs, reference_logprobs=batch.reference_logprobs.to(logprobs.dtype), coeff_clamp=self.kl_coeff_clamp)

    def _top_ids(self, batch: PolicyBatch) -> torch.Tensor | None:
        if self.centering is None:
            return None
        if batch.top_ids is None or batch.top_logprobs is None:
            raise TrainingError("rl.score_centering.enabled=true, but the sampler recorded no head: the rollout engine must report top-k")
        return batch.top_ids

    def _centred(self, batch: PolicyBatch, scores: TokenScores, weight: ImportanceWeight) -> ScoreCentering:
        assert batch.top_logprobs is not None and scores.top_logprobs is not None
        return score_centering(
            scores.logprobs,
            scores.top_logprobs,
            sampled_logprobs=batch.sampled_logprobs.to(scores.logprobs.dtype),
            sampled_head_logprobs=batch.top_logprobs.to(scores.logprobs.dtype),
            weight=weight,
        )


@dataclass(frozen=True, slots=True)
class LegacyPolicyGradient:
    """REINFORCE with the group advantage: loss = -1/S sum_i A_i sum_t log p(y_it); no ratio, no clip, temperature 1."""

    def __call__(self, model: PolicyModel, batch: PolicyBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        dtype = torch.float64 if batch.advantages.dtype == torch.float64 else torch.float32
        scores = model.score(batch, temperature=1.0, dtype=dtype)
        weighted = batch.advantages_of_tokens().to(scores.logprobs.dtype) * scores.logprobs
        masked = torch.where(batch.loss_mask, weighted, torch.zeros_like(weighted))
        loss = -masked.sum() / max(batch.num_sequences, 1)
        metrics = _shared_metrics(batch, scores.logprobs, scores.entropy)
        metrics["loss"] = Mean(float(loss.detach()) * batch.num_sequences, batch.num_sequences)
        return loss, metrics


def _masked(batch: PolicyBatch, values: torch.Tensor) -> torch.Tensor:
    return torch.where(batch.loss_mask, values, torch.zeros_like(values))


def _token_mean(batch: PolicyBatch, values: torch.Tensor) -> Mean:
    """Mean over trained tokens of [N] values; what is compared is what the loss uses."""
    return Mean(float(_masked(batch, values).sum()), float(batch.loss_mask.sum()))


@torch.no_grad()
def _shared_metrics(batch: PolicyBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> dict[str, Metric]:
    """Diagnostics every surrogate reports: entropy and denominators."""
    counts = per_sequence_sum(batch.loss_mask.to(logprobs.dtype), batch.sequence, batch.num_sequences)
    return {
        "entropy": _token_mean(batch, entropy),
        "valid_token_count": Sum(float(batch.loss_mask.sum())),
        "valid_sequence_count": Sum(float((counts > 0).sum())),
        "advantage_absmean": Mean(float(batch.advantages.abs().sum()), float(batch.num_sequences)),
    }


@torch.no_grad()
def _clip_metrics(batch: PolicyBatch, surrogate: ClippedLoss, log_ratios: torch.Tensor) -> dict[str, Metric]:
    """What the ratio and its clip did, by token and by response.

    Args:
        log_ratios: [N] per-token log-ratios, whatever the level of the ratio is.
    """
    counts = per_sequence_sum(batch.loss_mask.to(log_ratios.dtype), batch.sequence, batch.num_sequences)
    sequences = float((counts > 0).sum())
    clipped = (surrogate.clipped & batch.loss_mask).to(log_ratios.dtype)
    touched = per_sequence_sum(clipped, batch.sequence, batch.num_sequences) > 0
    response = per_sequence_sum(_masked(batch, log_ratios), batch.sequence, batch.num_sequences) / counts.clamp(min=1)
    metrics: dict[str, Metric] = {
        "clip_frac": _token_mean(batch, surrogate.clipped.float()),
        "dual_clip_frac": _token_mean(batch, surrogate.dual_clipped.float()),
        "ratio_absdev": _token_mean(batch, (surrogate.ratios - 1).abs()),
        "seq_clip_frac": Mean(float(touched.sum()), sequences),
        "seq_log_ratio_abs": Mean(float(response.abs().sum()), sequences),
    }
    if bool(batch.loss_mask.any()):
        metrics["ratio_max"] = Max(float(surrogate.ratios[batch.loss_mask].max()))
    return metrics


@torch.no_grad()
def _kl_metrics(batch: PolicyBatch, penalty: KLPenalty, beta: float) -> dict[str, Metric]:
    values = _masked(batch, penalty.values)
    return {
        "kl_mean": _token_mean(batch, penalty.values),
        "kl_max": Max(float(values.max()) if values.numel() else 0.0),
        "kl_beta": Mean(beta, 1),
    }


@torch.no_grad()
def _centering_metrics(batch: PolicyBatch, centred: ScoreCentering) -> dict[str, Metric]:
    return {
        "sc_correction_abs": _token_mean(batch, centred.coefficients),
        "sc_head_mass": _token_mean(batch, centred.head_mass),
        "sc_tail_ratio_absdev": _token_mean(batch, (centred.tail_ratio - 1).abs()),
        "sc_weight_mean": _token_mean(batch, centred.weights),
        "sc_reweighted_frac": _token_mean(batch, (centred.weights != 1).to(centred.weights.dtype)),
    }
