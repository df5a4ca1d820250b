"""The trainer: accumulate, normalise once, check, clip, step. It knows no algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, Objective, Reduction
from posttrain.config.grpo import GRPOConfig
from posttrain.config.run import OptimizerConfig
from posttrain.data.packer import PolicyBatch, TrainSample, micro_batches, pack, samples_of
from posttrain.errors import TrainingError
from posttrain.model.policy import CausalPolicy
from posttrain.records import Max, Mean, Metric, StepResult, Sum, TrainGroup, merge_metrics
from posttrain.trainer.optim import Schedule, build_optimizer, select_trainable
from posttrain.trainer.ranks import ALONE, Ranks
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """This rank's part of one forward and backward."""

    batch: PolicyBatch
    idle: bool = False
    """The part is empty: the batch is a stand-in that keeps the ranks' collectives in step, and nothing of it counts."""

    def with_old_logprobs(self, old_logprobs: torch.Tensor) -> MicroBatch:
        return replace(self, batch=self.batch.with_old_logprobs(old_logprobs))


class Trainer:
    """Runs `n_mini` optimizer windows over one collected batch. With several ranks every one of them is given the whole batch, plans
    the same micro-batches and trains on its part of each."""

    def __init__(
        self,
        config: OptimizerConfig,
        *,
        policy: CausalPolicy,
        objective: Objective,
        batching: Batching,
        total_steps: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """
        Args:
            policy: sharded already where there are several ranks.
            total_steps: optimizer steps of the whole run, the length of a learning-rate schedule that falls.
        """
        if objective.reduction is Reduction.MEAN and batching.micro_batch_tokens:
            raise TrainingError(
                f"rl.micro_batch_tokens={batching.micro_batch_tokens} makes micro-batches of unequal size, and an objective with "
                "Reduction.MEAN takes a mean over equal ones; use rl.micro_batch_per_replica, or Reduction.TOKEN_SUM"
            )
        if objective.reduction is Reduction.MEAN and batching.micro_batch % ranks.size:
            raise TrainingError(
                f"an objective with Reduction.MEAN takes a mean over equal parts: micro-batches of {batching.micro_batch} completions do "
                f"not split evenly over grid.ranks={ranks.size}; change rl.micro_batch_per_replica, or use Reduction.TOKEN_SUM"
            )
        self._ranks = ranks
        self._config = config
        self._policy = policy
        self._objective = objective
        self._batching = batching
        self._parameters = select_trainable(policy.module, config.train_keys)
        self.optimizer = build_optimizer(config, policy.module)
        self.schedule = Schedule.of(config, total_steps=total_steps)
        self._probed = False
        self.model_step = 0
        """Committed optimizer steps."""

    def state(self) -> dict[str, Any]:
        """What an exact resume needs beside the tensors."""
        return {"model_step": self.model_step, "probed": self._probed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`; the tensors have been loaded."""
        self.model_step, self._probed = state["model_step"], state["probed"]

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
        if not self._ranks.alone:
            metrics, logprobs = self._merged(metrics, logprobs)
        metrics["optim/applied_steps"] = Sum(applied)
        metrics["optim/finite_gradient_check_enabled"] = Mean(float(self._config.force_finite_grads), 1)
        return StepResult(self.model_step, applied, rejection, metrics, logprobs)

    def _merged(
        self, metrics: dict[str, Metric], logprobs: dict[tuple[str, int], tuple[float, ...]]
    ) -> tuple[dict[str, Metric], dict[tuple[str, int], tuple[float, ...]]]:
        """What all ranks observed."""
        merged: dict[str, Metric] = {}
        everyones: dict[tuple[str, int], tuple[float, ...]] = {}
        for theirs, scores in self._ranks.gather_objects((metrics, logprobs)):
            merge_metrics(merged, theirs)
            everyones |= scores
        return merged, everyones

    def _micro_batches(self, window: Sequence[TrainSample]) -> list[MicroBatch]:
        """Samples without an advantage are kept apart, so that micro-batches made of nothing else skip their backward pass.

        The order inside a window is free, since its gradient is a sum; micro-batches of different sizes are free only where
        the objective reports its weights (a MEAN is one of equally large micro-batches).
        """
        parts = [[s for s in window if s.has_signal], [s for s in window if not s.has_signal]]
        if self._objective.reduction is Reduction.MEAN or self._objective.reference_scorer is not None:
            parts = [list(window)]  # with a reference every sample has a gradient
        return [
            self._own_part(chunk)
            for part in parts
            for chunk in micro_batches(part, count=self._batching.micro_batch, tokens=self._batching.micro_batch_tokens)
        ]

    def _own_part(self, chunk: Sequence[TrainSample]) -> MicroBatch:
        """Consecutive samples, as evenly as their number allows."""
        rank, size = self._ranks.rank, self._ranks.size
        own = chunk[rank * len(chunk) // size : (rank + 1) * len(chunk) // size]
        idle = not own
        if idle:
            shortest = min(chunk, key=lambda sample: len(sample.prompt.token_ids) + len(sample.completion.token_ids))
            own = [replace(shortest, advantage=0.0, loss_mask=(False,) * len(shortest.loss_mask))]
        return MicroBatch(pack(own, pad_id=self._policy.pad_id).to(self._policy.device), idle)

    def _window(
        self,
        window: Sequence[MicroBatch],
        metrics: dict[str, Metric],
        logprobs: dict[tuple[str, int], tuple[float, ...]],
    ) -> str | None:
        """One optimizer step; returns why it was rejected, or None when it was applied."""
        recorder = ScoreRecorder(self._policy, self._ranks)
        weight_sum = 0.0
        skipped = 0
        local: dict[str, Metric] = {}
        rejection: str | None = None
        for number, part in enumerate(window):
            batch = part.batch
            if self._objective.reference_scorer is not None:
                batch = batch.with_reference_logprobs(self._objective.reference_scorer(batch))
            loss, reported = self._objective.fn(recorder, batch)
            bad = [value for value in self._ranks.gather(0.0 if part.idle else float(loss.detach())) if not math.isfinite(value)]
            if bad:
                rejection = f"the loss of micro-batch {number} is {bad[0]}"
                break
            if part.idle:
                skipped += not recorder.backward(None)
                continue
            weight = self._weight(reported)
            weight_sum += weight
            scale = weight if self._objective.reduction is Reduction.TOKEN_SUM else 1.0 / (len(window) * self._ranks.size)
            skipped += not recorder.backward(loss * scale)
            merge_metrics(local, self._objective.metric_adapter(reported))
            if recorder.logprobs is not None and not metrics:
                merge_metrics(local, _agreement(batch, recorder.logprobs, first_step=not self.model_step))
            logprobs.update(recorder.by_sequence(batch))
        for parameter in self._parameters:
            # a window without any signal is a zero gradient, not a missing one: moments decay as they would have
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._objective.reduction is Reduction.TOKEN_SUM:
            self._normalise(sum(self._ranks.gather(weight_sum)))
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
        norm: Any = torch.nn.utils.get_total_norm(self._gradients())
        value = float(norm if self._ranks.alone else norm.full_tensor())
        local["optim/grad_norm"] = Mean(value, 1)
        if self._config.force_finite_grads and not math.isfinite(value):
            return f"the gradient norm is {value}"
        if self._config.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip_norm, norm)
        local["optim/lr"] = Mean(self.schedule.set(self.optimizer.param_groups, applied=self.model_step), 1)
        self.optimizer.step()
        self.model_step += 1
        return None

    @torch.no_grad()
    def _with_old_policy(self, windows: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Freeze the old policy's log-probabilities of the whole batch before the first step moves the weights."""
        recorder = ScoreRecorder(self._policy)

        def scored(batch: PolicyBatch) -> torch.Tensor:
            self._objective.fn(recorder, batch)
            if recorder.logprobs is None:
                raise TrainingError("an objective with old_logp_cache must score its batch through the model it is given")
            return recorder.logprobs

        frozen = [[part.with_old_logprobs(scored(part.batch)) for part in window] for window in windows]
        if not self._probed:
            self._probe_noise(frozen[0][0].batch, scored)
            self._probed = True
        return frozen

    def _probe_noise(self, batch: PolicyBatch, scored: Callable[[PolicyBatch], torch.Tensor]) -> None:
        """Measure, once, whether evaluation and training forwards agree, as `certified_deterministic_forward` attests."""
        assert batch.old_logprobs is not None
        self._policy.module.eval()
        again = scored(batch)
        self._policy.module.train()
        gap = max(self._ranks.gather(float((again - batch.old_logprobs).abs().max()) if again.numel() else 0.0))
        if not gap <= FORWARD_NOISE_NATS:
            raise TrainingError(
                f"rl.certified_deterministic_forward=true, but evaluation and training forwards of the same weights differ by {gap:.3g} "
                f"nats (tolerance {FORWARD_NOISE_NATS}); disable dropout or set rl.mini_batch_per_replica=0"
            )


def _agreement(batch: PolicyBatch, logprobs: torch.Tensor, *, first_step: bool) -> dict[str, Metric]:
    """How well trainer and sampler agree, from a micro-batch of a batch's first optimizer step: later ones have moved the policy.

    Only what the loss uses is compared. On the run's first step the ratio to a cached old policy is reported too.
    """
    mask, tokens = batch.loss_mask, float(batch.loss_mask.sum())
    gap = torch.where(mask, batch.sampled_logprobs.to(logprobs.dtype) - logprobs, 0.0)
    metrics: dict[str, Metric] = {
        "train/logprob_gap_mean": Mean(float(gap.abs().sum()), tokens),
        "train/logprob_gap_max": Max(float(gap.abs().max()) if gap.numel() else 0.0),
        "train/logprob_gap_kl": Mean(float(gap.sum()), tokens),
    }
    if first_step and batch.old_logprobs is not None:
        off = ((logprobs - batch.old_logprobs.to(logprobs.dtype)).exp() - 1).abs()
        metrics["train/first_ratio_absdev"] = Mean(float(torch.where(mask, off, 0.0).sum()), tokens)
    return metrics
