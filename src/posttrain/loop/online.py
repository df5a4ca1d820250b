"""The online loop of the GRPO family: draw, generate, score, annotate, train, publish; evaluate on the way."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from posttrain.algorithm.annotators.group import GroupAnnotator
from posttrain.config.grpo import GRPOConfig
from posttrain.data.source import Cursor, PromptSource
from posttrain.errors import TrainingError
from posttrain.loop.alarms import Alarm, Alarms
from posttrain.loop.batching import Collection, DynamicSampling, collect
from posttrain.loop.held_out import HeldOut
from posttrain.loop.saver import RunSaver
from posttrain.records import Max, Mean, Metric, RolloutGroup, RolloutRequest, SamplingParams, ScoredGroup, Sum, merge_metrics
from posttrain.reward.service import RewardService
from posttrain.rollout.engine import RolloutEngine
from posttrain.runtime.seeding import derive_seed
from posttrain.track import Tracker
from posttrain.trainer.core import Trainer
from posttrain.weight_sync.protocol import WeightSync


@dataclass(frozen=True, slots=True)
class OnlineParts:
    """The components one online run is made of; each is swappable behind its protocol."""

    source: PromptSource
    engine: RolloutEngine
    rewards: RewardService
    trainer: Trainer
    weight_sync: WeightSync
    tracker: Tracker
    held_out: HeldOut | None
    alarms: Alarms
    annotate: GroupAnnotator
    saver: RunSaver
    token_texts: Callable[[tuple[int, ...]], list[str]]


class OnlineLoop:
    """Synchronous: every completion is drawn under the weights that are then trained."""

    def __init__(self, rl: GRPOConfig, *, parts: OnlineParts, sampling: SamplingParams, rollout_seed: int) -> None:
        self._rl = rl
        self._parts = parts
        self._sampling = sampling
        self._rollout_seed = rollout_seed
        self._dynamic = DynamicSampling.of(rl)
        self._score: float | None = None
        self._evaluated_at = 0
        self._done = 0
        """Finished steps."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a saved state; the parts have been restored by their owners but for source and alarms."""
        self._done, self._score, self._evaluated_at = state["step"], state["score"], state["evaluated_at"]
        self._parts.source.restore(Cursor(**state["cursor"]))
        self._parts.alarms.restore(state["alarms"])

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._done,
            "score": self._score,
            "evaluated_at": self._evaluated_at,
            "cursor": asdict(self._parts.source.cursor()),
            "alarms": self._parts.alarms.state(),
            "tracker": self._parts.tracker.state(),
        }

    def run(self) -> float | None:
        """Train for `rl.max_steps` collected batches; returns the last held-out score, if any was measured.

        Raises:
            TrainingError: a window was rejected, dynamic sampling fell short of its quota, or an alarm was raised under
                `tracker.alarms.stop`; the metrics up to then are written.
            EmergencyStop: the run was asked to end; it is saved.
        """
        parts, steps = self._parts, self._rl.max_steps
        self._publish(verify=True)
        if self._rl.validation.at_start and not self._done:
            self._evaluate(0)
        parts.tracker.ready()
        parts.saver.mark(self._state())
        for step in range(self._done + 1, steps + 1):
            parts.saver.stop_if_asked(step_ahead=True)
            evaluated_at = self._evaluated_at
            self._step(step)
            self._done = step
            parts.saver.mark(self._state())
            parts.saver.save_if_due(last=step == steps, evaluated=self._evaluated_at != evaluated_at)
        parts.saver.finish()
        return self._score

    def _step(self, step: int) -> None:
        parts, tracker = self._parts, self._parts.tracker
        metrics: dict[str, Metric] = {}
        collection = self._collect(step, metrics)
        groups = [parts.annotate(group) for group in collection.groups]
        with tracker.phase("train"):
            result = parts.trainer.train_step(groups)
        merge_metrics(metrics, result.metrics)
        if result.rejection is None:
            merge_metrics(metrics, self._publish(verify=step == 1))
            if self._evaluation_due(step):
                self._evaluate(step)
        merge_metrics(metrics, self._process_metrics())
        tracker.samples(step, groups=groups, token_texts=parts.token_texts, token_logprobs=result.token_logprobs)
        values = {name: metric.value for name, metric in sorted(metrics.items())}
        tracker.step(step, model_step=result.model_step, metrics=values)
        alarms = self._watch(step, values)
        if result.rejection is not None:
            raise TrainingError(
                f"step {step}: the optimizer window was rejected, nothing of it was applied: {result.rejection}; "
                f"{result.applied_steps} of {self._rl.n_mini} windows of this batch were committed. "
                "Lower rl.optimizer.lr or inspect samples/"
            )
        if alarms and parts.alarms.stop:
            raise TrainingError(f"tracker.alarms.stop=true and alarm {alarms[0].name} was raised: {alarms[0].message}")

    def _collect(self, step: int, metrics: dict[str, Metric]) -> Collection:
        """The step's scored groups. This backend hosts a single data cell, number 0."""

        def draw(prompts: Mapping[int, int]) -> Mapping[int, Sequence[ScoredGroup]]:
            return {cell: self._generate(step, count, metrics) for cell, count in prompts.items()}

        collection = collect(self._dynamic, draw, groups_per_step=self._rl.groups_per_step)
        merge_metrics(metrics, collection.metrics(dynamic=self._dynamic.quota > 0))
        if collection.shortfall:
            self._parts.tracker.event(
                "warning",
                step=step,
                message=f"step {step}: {collection.shortfall} of {self._dynamic.quota} informative groups are missing after "
                f"{collection.extra_rounds} extra round(s); tied groups fill the batch",
            )
        return collection

    def _generate(self, step: int, count: int, metrics: dict[str, Metric]) -> Sequence[ScoredGroup]:
        """Draw `count` prompts, sample and score them; adds to `metrics`."""
        parts, tracker = self._parts, self._parts.tracker
        with tracker.phase("data"):
            requests = self._requests(step, count)
        parts.saver.stop_if_asked()
        with tracker.phase("generate"):
            started = time.monotonic()
            rollouts = parts.engine.generate(requests)
            merge_metrics(metrics, rollout_metrics(rollouts, seconds=time.monotonic() - started))
        parts.saver.stop_if_asked()
        with tracker.phase("reward"):
            scored = parts.rewards.score(rollouts)
        parts.saver.stop_if_asked()
        merge_metrics(metrics, scored.metrics)
        for failure in scored.failures:
            tracker.event("reward_failed", step=step, prompt=failure.prompt_id, sample=failure.sample, reason=failure.reason)
        return scored.groups

    def _watch(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Report the alarms that begin with this step."""
        alarms = self._parts.alarms.observe(step, values)
        for alarm in alarms:
            self._parts.tracker.event("warning", step=step, alarm=alarm.name, message=f"alarm {alarm.name}: {alarm.message}")
        return alarms

    def _requests(self, step: int, count: int) -> list[RolloutRequest]:
        prompts = self._parts.source.draw(count)
        return [
            RolloutRequest(prompt, self._rl.group_size, self._sampling, derive_seed(self._rollout_seed, "rollout", step, prompt.id))
            for prompt in prompts
        ]

    def _publish(self, *, verify: bool) -> dict[str, Metric]:
        with self._parts.tracker.phase("sync"):
            publication = self._parts.weight_sync.publish(self._parts.trainer.model_step, verify=verify)
        metrics = {name: metric.value for name, metric in publication.metrics.items()}
        self._parts.tracker.event("published", version=publication.version, verified=verify, **metrics)
        return publication.metrics

    def _evaluation_due(self, step: int) -> bool:
        """Whether the model steps of this batch crossed a multiple of the cadence, or the run ends here."""
        validation = self._rl.validation
        crossed = validation.every > 0 and self._parts.trainer.model_step // validation.every > self._evaluated_at // validation.every
        return crossed or (validation.at_end and step == self._rl.max_steps)

    def _evaluate(self, step: int) -> None:
        if self._parts.held_out is None:
            return
        with self._parts.tracker.phase("validate"):
            self._score = self._parts.held_out.evaluate(self._parts.trainer.model_step, step=step)
        self._evaluated_at = self._parts.trainer.model_step

    def _process_metrics(self) -> dict[str, Metric]:
        unit = 1 if sys.platform == "darwin" else 1024
        return {
            "data/epoch": Max(float(self._parts.source.cursor().epoch)),
            "data/skipped_too_long": Max(float(self._parts.source.skipped_too_long)),
            "memory/peak_rss_gib": Max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30),
            "memory/rss_gib": Max(psutil.Process().memory_info().rss / 2**30),
        }


def rollout_metrics(rollouts: Sequence[RolloutGroup], *, seconds: float) -> dict[str, Metric]:
    """Lengths, truncation and speed of one collection."""
    completions = [completion for group in rollouts for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    count, tokens = float(len(completions)), float(sum(lengths))
    return {
        "rollout/tokens": Sum(tokens),
        "rollout/tokens_per_s": Mean(tokens, seconds),
        "train/response_len_mean": Mean(tokens, count),
        "train/response_len_max": Max(float(max(lengths, default=0))),
        "train/rollout_truncated_frac": Mean(float(truncated), count),
    }
