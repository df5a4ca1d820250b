"""Held-out evaluation during training: the same prompts and draws every time, so that only the weights differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.config.run import ValidationConfig
from posttrain.records import Prompt, RolloutRequest, SamplingParams
from posttrain.reward.service import RewardService
from posttrain.rollout.engine import RolloutEngine
from posttrain.runtime.seeding import derive_seed
from posttrain.track import Tracker


class HeldOut:
    """Samples and scores a fixed list of prompts."""

    def __init__(
        self,
        config: ValidationConfig,
        *,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        engine: RolloutEngine,
        rewards: RewardService,
        tracker: Tracker,
        token_texts: Callable[[tuple[int, ...]], list[str]],
    ) -> None:
        self._config = config
        self._engine, self._rewards, self._tracker, self._token_texts = engine, rewards, tracker, token_texts
        self._requests = [
            RolloutRequest(prompt, config.samples_per_prompt, sampling, derive_seed(config.seed, "held-out", prompt.id))
            for prompt in prompts
        ]

    def evaluate(self, model_step: int, *, step: int) -> float:
        """Mean reward over all held-out completions under the engine's committed weights."""
        scored = self._rewards.score(self._engine.generate(self._requests))
        for failure in scored.failures:
            self._tracker.event(
                "reward_failed",
                held_out=True,
                model_step=model_step,
                prompt=failure.prompt_id,
                sample=failure.sample,
                reason=failure.reason,
            )
        completions = [completion for group in scored.groups for completion in group.rollout.completions]
        rewards = [score.total for group in scored.groups for score in group.scores]
        accuracy = sum(rewards) / len(rewards)
        metrics = {
            "val/accuracy": accuracy,
            "val/failed": float(len(scored.failures)),
            "val/response_len_mean": sum(len(completion.token_ids) for completion in completions) / len(completions),
            "val/truncated_frac": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        }
        self._tracker.validation(model_step, step=step, metrics=metrics, groups=scored.groups, token_texts=self._token_texts)
        return accuracy
