"""The trainer: accumulate, normalise once, check, clip, step. It knows no algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, Objective, Reduction
from posttrain.config.grpo import GRPOConfig
from posttrain.config.run import OptimizerConfig
from posttrain.data.packer import PolicyBatch, TrainSample, micro_batches, pack, samples_of
from posttrain.errors import TrainingError
from posttrain.model.policy import CausalPolicy
from posttrain.records import Mean, Metric, StepResult, Sum, TrainGroup, merge_metrics
from posttrain.trainer.optim import build_optimizer, select_trainable
from posttrain.trainer.recorder import ScoreRecorder

FORWARD_NOISE_NATS = 0.05
"""Largest difference, on any token, between two forwards of the same weights that a cached old policy tolerates."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How the completions of a collected batch are cut."""

    mini_batch: int
    """Completions per optimizer step."""
    micro_batch: int
    """Completions per forward and backward."""
    micro_batch_tokens: int = 0
    """Tokens per forward and backward, in place of the count where it is not 0."""

    @classmethod
    def of(cls, rl: GRPOConfig) -> Batching:
        return cls(rl.mini_batch, rl.micro_batch, rl.micro_batch_tokens)


class Trainer:
    """Runs `n_mini` optimizer windows over one collected batch."""

    def __init__(self, config: OptimizerConfig, *, policy: CausalPolicy, objective: Objective, batching: Batching) -> None:
        self._config = config
        self._policy = policy
        self._objective = objective
        self._batching = batching
        self._parameters = select_trainable(policy.module, config.train_keys)
        self.optimizer = build_optimizer(config, self._parameters)
        self._probed = self._checked_ratio = False
        self.model_step = 0
        """Committed optimizer steps."""

    def train_step(self, groups: Sequence[TrainGroup]) -> StepResult:
        """Train on one collected batch.

        Windows are committed one by one; a rejected window commits nothing and ends the batch.

        Raises:
            TrainingError: the objective broke its contract, or the forward is too noisy for a cached old policy.
        """
        samples = samples_of(groups)
        size = self._batching.mini_batch
        if len(samples) % size:
            raise TrainingError(f"a batch of {len(samples)} completions does not split into mini-batches of {size}")
        self._policy.module.train()
        windows = [self._micro_batches(samples[i : i + size]) for i in range(0, len(samples), size)]
        if self._objective.old_logp_cache:
            windows = self._with_old_policy(windows)
        metrics: dict[str, Metric] = {}
        logprobs: dict[tuple[str, int], tuple[float, ...]] = {}
        applied, rejection = 0, None
        for window in windows:
            rejection = self._window(window, metrics, logprobs)
            if rejection:
                break
            applied += 1
        metrics["optim/applied_steps"] = Sum(applied)
        metrics["optim/lr"] = Mean(self._config.lr, 1)
        metrics["optim/finite_gradient_check_enabled"] = Mean(float(self._config.force_finite_grads), 1)
        return StepResult(self.model_step, applied, rejection, metrics, logprobs)

    def _micro_batches(self, window: Sequence[TrainSample]) -> list[PolicyBatch]:
        """Samples without an advantage are kept apart, so that micro-batches made of nothing else skip their backward pass.

        The order inside a window is free, since its gradient is a sum; micro-batches of different sizes are free only where
        the objective reports its weights (a MEAN is one of equally large micro-batches).
        """
        parts = [[s for s in window if s.has_signal], [s for s in window if not s.has_signal]]
        if self._objective.reduction is Reduction.MEAN or self._objective.reference_scorer is not None:
            parts = [list(window)]  # with a reference every sample has a gradient
        return [
            pack(chunk, pad_id=self._policy.pad_id).to(self._policy.device)
            for part in parts
            for chunk in micro_batches(part, count=self._batching.micro_batch, tokens=self._batching.micro_batch_tokens)
        ]

    def _window(
        self,
        window: Sequence[PolicyBatch],
        metrics: dict[str, Metric],
        logprobs: dict[tuple[str, int], tuple[float, ...]],
    ) -> str | None:
        """One optimizer step; returns why it was rejected, or None when it was applied."""
        recorder = ScoreRecorder(self._policy)
        weight_sum = 0.0
        skipped = 0
        local: dict[str, Metric] = {}
        rejection: str | None = None
        for number, batch in enumerate(window):
            if self._objective.reference_scorer is not None:
                batch = batch.with_reference_logprobs(self._objective.reference_scorer(batch))
            loss, reported = self._objective.fn(recorder, batch)
            if not math.isfinite(float(loss.detach())):
                rejection = f"the loss of micro-batch {number} is {float(loss.detach())}"
                break
            weight = self._weight(reported)
            weight_sum += weight
            scale = weight if self._objective.reduction is Reduction.TOKEN_SUM else 1.0 / len(window)
            skipped += not recorder.backward(loss * scale)
            merge_metrics(local, self._objective.metric_adapter(reported))
            if not self._checked_ratio:
                merge_metrics(local, _first_ratio(batch, recorder.logprobs))
            logprobs.update(recorder.by_sequence(batch))
        self._checked_ratio = True
        for parameter in self._parameters:
            # a window without any signal is a zero gradient, not a missing one: moments decay as they would have
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._objective.reduction is Reduction.TOKEN_SUM:
            self._normalise(weight_sum)
        if rejection is None:
            rejection = self._apply(local)
        self.optimizer.zero_grad(set_to_none=True)
        local["train/skipped_backward_frac"] = Mean(skipped, len(window))
        merge_metrics(metrics, local)
        return rejection

    def _weight(self, reported: dict[str, Metric]) -> float:
        if self._objective.reduction is Reduction.MEAN:
            return 1.0
        weight = reported.get(OBJECTIVE_WEIGHT_SUM)
        if not isinstance(weight, Sum) or not math.isfinite(weight.total) or weight.total < 0:
            raise TrainingError(
                f"an objective with Reduction.TOKEN_SUM must report metric {OBJECTIVE_WEIGHT_SUM!r} as a finite, non-negative Sum; "
                f"got {weight!r}"
            )
        return weight.total

    def _normalise(self, weight_sum: float) -> None:
        """Turn accumulated numerator gradients into the gradient of numerator / weight: the only place the divisor enters.

        A window whose every token is masked has weight and gradient zero, and is applied as such.
        """
        for gradient in self._gradients():
            gradient.mul_(1.0 / weight_sum if weight_sum else 0.0)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _apply(self, local: dict[str, Metric]) -> str | None:
        norm = torch.nn.utils.get_total_norm(self._gradients())
        local["optim/grad_norm"] = Mean(float(norm), 1)
        if self._config.force_finite_grads and not math.isfinite(float(norm)):
            return f"the gradient norm is {float(norm)}"
        if self._config.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip_norm, norm)
        self.optimizer.step()
        self.model_step += 1
        return None

    @torch.no_grad()
    def _with_old_policy(self, windows: list[list[PolicyBatch]]) -> list[list[PolicyBatch]]:
        """Freeze the old policy's log-probabilities of the whole batch before the first step moves the weights."""
        recorder = ScoreRecorder(self._policy)

        def scored(batch: PolicyBatch) -> torch.Tensor:
            self._objective.fn(recorder, batch)
            if recorder.logprobs is None:
                raise TrainingError("an objective with old_logp_cache must score its batch through the model it is given")
            return recorder.logprobs

        frozen = [[batch.with_old_logprobs(scored(batch)) for batch in window] for window in windows]
        if not self._probed:
            self._probe_noise(frozen[0][0], scored)
            self._probed = True
        return frozen

    def _probe_noise(self, batch: PolicyBatch, scored: Callable[[PolicyBatch], torch.Tensor]) -> None:
        """Measure, once, whether evaluation and training forwards agree, as `certified_deterministic_forward` attests."""
        assert batch.old_logprobs is not None
        self._policy.module.eval()
        again = scored(batch)
        self._policy.module.train()
        gap = float((again - batch.old_logprobs).abs().max()) if again.numel() else 0.0
        if not gap <= FORWARD_NOISE_NATS:
            raise TrainingError(
                f"rl.certified_deterministic_forward=true, but evaluation and training forwards of the same weights differ by {gap:.3g} "
                f"nats (tolerance {FORWARD_NOISE_NATS}); disable dropout or set rl.mini_batch_per_replica=0"
            )


def _first_ratio(batch: PolicyBatch, logprobs: torch.Tensor | None) -> dict[str, Metric]:
    """Mean |ratio - 1| against the cached old policy before any step has moved the weights; nothing without such a cache."""
    if batch.old_logprobs is None or logprobs is None:
        return {}
    off = ((logprobs - batch.old_logprobs.to(logprobs.dtype)).exp() - 1).abs()
    kept = torch.where(batch.loss_mask, off, torch.zeros_like(off))
    return {"train/first_ratio_absdev": Mean(float(kept.sum()), float(batch.loss_mask.sum()))}
