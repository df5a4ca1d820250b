"""A plausible finished run, written by the real Tracker with a fake clock: what the report tests and screenshots look at."""

from __future__ import annotations

import math
import random
from pathlib import Path

from posttrain.config.tracker import TrackerConfig
from posttrain.records import Completion, Prompt, RolloutGroup, Score, ScoredGroup, TrainGroup
from posttrain.track import RunHeader, Tracker

CONFIG_TEXT = """\
# resolved by posttrain; reload with: posttrain --config-dir outputs/arith/demo --config-name config_resolved
algorithm:
  name: grpo
model:
  name_or_path: tiny-qwen3
  dtype: float32
rl:
  objective_builder: posttrain.algorithm.grpo.build_objective
  max_steps: 40
  optimizer:
    name: adamw
    lr: 1.0e-05
  group_size: 8
  batch_per_replica: 32
rollout:
  temperature: 1.0
  max_tokens: 64
effective_objective:
  surrogate: clipped
  loss_type: token-mean
  clip: [0.8, 1.2]
  dual_clip: 3.0
  advantage: (r - mean) / std
  kl_beta: 0.0
provenance:
  git_commit: 3f2a9c1
"""
WORDS = ["First", "we", "add", "the", "tens", "and", "then", "carry", "one", "so", "that", "gives", "a", "total", "of", "check", "again"]


class FakeClock:
    """Monotonic seconds that only move when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Vocabulary:
    """Ids handed out on first sight, so that token texts survive the trip through ids."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: dict[str, int] = {}

    def ids(self, texts: list[str]) -> tuple[int, ...]:
        for text in texts:
            if text not in self._ids:
                self._ids[text] = len(self._texts)
                self._texts.append(text)
        return tuple(self._ids[text] for text in texts)

    def texts(self, ids: tuple[int, ...]) -> list[str]:
        return [self._texts[i] for i in ids]


def make_group(
    rng: random.Random, vocabulary: Vocabulary, *, prompt_id: str, skill: float, version: int, group_size: int = 8, evil: bool = False
) -> ScoredGroup:
    """One arithmetic prompt with completions that are right with probability `skill`."""
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    text = f"<|user|>\nWhat is {a} + {b}? Think briefly, then answer.\n<|assistant|>\n"
    completions: list[Completion] = []
    scores: list[Score] = []
    for sample in range(group_size):
        right = rng.random() < skill
        truncated = rng.random() < 0.22 * (1 - skill)
        failed = rng.random() < 0.006
        thought = [" " + rng.choice(WORDS) for _ in range(rng.randint(6, 34))]
        answer = a + b if right else a + b + rng.choice([-10, -1, 1, 10])
        tokens = [*thought, ".", "\n", " Answer", ":", f" {answer}", "<|end|>"]
        if truncated:
            tokens = [*thought, *(" " + rng.choice(WORDS) for _ in range(20))]
        if evil and sample == 0:
            tokens = ["</script>", "<script>alert(1)</script>", "<!--", " <img src=x onerror=alert(2)>", " @@data@@ ", "&amp; ü 漢字 🙂"]
        form = 0.0 if truncated else 0.1
        total = 0.0 if failed or truncated else form + (0.9 if right else 0.0)
        completions.append(
            Completion(
                token_ids=vocabulary.ids(tokens),
                logprobs=tuple(-abs(rng.gauss(0.0, 0.9)) * (1.2 - skill) - 0.001 for _ in tokens),
                finish_reason="length" if truncated else "stop",
                weight_version=version,
                text="".join(tokens).removesuffix("<|end|>").strip(),
            )
        )
        parts = {"correct": total - form, "format": form} if total else {"correct": 0.0, "format": 0.0}
        scores.append(Score(total=total, parts=parts, time_s=0.002, failure="timed out after 10 s" if failed else None))
    totals = [score.total for score in scores]
    prompt = Prompt(id=prompt_id, content=text, text=text, token_ids=(1, 2, 3), reference=str(a + b))
    return ScoredGroup(RolloutGroup(prompt, tuple(completions)), tuple(scores), spread=max(totals) - min(totals))


def train_group(group: ScoredGroup) -> TrainGroup:
    """Group-relative advantages; truncated completions and the final token of every fifth one are masked."""
    totals = [score.total for score in group.scores]
    mean = sum(totals) / len(totals)
    std = math.sqrt(sum((total - mean) ** 2 for total in totals) / len(totals))
    advantages = tuple((total - mean) / std if std else 0.0 for total in totals)
    masks = tuple(
        tuple(
            completion.finish_reason == "stop" and not (index % 5 == 4 and t == len(completion.token_ids) - 1)
            for t in range(len(completion.token_ids))
        )
        for index, completion in enumerate(group.rollout.completions)
    )
    return TrainGroup(group, advantages, masks)


def make_run(
    run_dir: Path,
    *,
    steps: int = 40,
    total_steps: int | None = None,
    groups_per_step: int = 4,
    evil: bool = False,
    finish: str | None = "completed",
) -> None:
    """Write a whole run under `run_dir`, with a report unless it is left unfinished (`finish=None`)."""
    rng, vocabulary, clock = random.Random(0), Vocabulary(), FakeClock()
    total_steps = total_steps or steps
    config = TrackerConfig(console="quiet", report=finish is not None)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config_resolved.yaml").write_text(CONFIG_TEXT, encoding="utf-8")
    tracker = Tracker(
        run_dir,
        config=config,
        group=run_dir.parent.name,
        name=run_dir.name,
        total_steps=total_steps,
        resolved_config={},
        sinks=(),
        now=clock,
    )
    tracker.start(
        RunHeader(algorithm="grpo", model="tiny-qwen3 (11M)", seed=0, device="cpu, 2 threads", details={"Prompts": "arithmetic 2-digit +"})
    )

    def skill_at(step: int) -> float:
        return 0.12 + 0.8 / (1 + math.exp(-(step - 0.45 * total_steps) / (0.12 * total_steps)))

    def validate(step: int) -> None:
        with tracker.phase("validate"):
            clock.advance(1.6)
        groups = [
            make_group(rng, vocabulary, prompt_id=f"held-{i}", skill=skill_at(step), version=step, group_size=1)
            for i in range(16 if steps < 200 else 4)
        ]
        accuracy = sum(group.scores[0].total for group in groups) / len(groups)
        lengths = [len(group.rollout.completions[0].token_ids) for group in groups]
        metrics = {"val/accuracy": accuracy, "val/response_len_mean": sum(lengths) / len(lengths), "val/truncated_frac": 0.0}
        tracker.validation(step, metrics=metrics, groups=groups, token_texts=vocabulary.texts)

    validate(0)
    for step in range(1, steps + 1):
        skill = skill_at(step - 1)
        with tracker.phase("generate"):
            clock.advance(5.1 + rng.gauss(0, 0.3) - 1.2 * skill)
        groups = [
            make_group(
                rng,
                vocabulary,
                prompt_id=f"e0-r{step * groups_per_step + i}",
                skill=skill,
                version=step - 1,
                evil=evil and step == 1 and i == 0,
            )
            for i in range(groups_per_step)
        ]
        with tracker.phase("reward"):
            clock.advance(0.25 + rng.random() * 0.1)
        with tracker.phase("train"):
            clock.advance(7.4 + rng.gauss(0, 0.25) - 1.5 * skill)
        with tracker.phase("sync"):
            clock.advance(0.32)
        clock.advance(0.12)
        trained = [train_group(group) for group in groups]
        token_logprobs = {
            (group.rollout.prompt.id, index): tuple(value + rng.gauss(0, 0.06) for value in completion.logprobs)
            for group in groups
            for index, completion in enumerate(group.rollout.completions)
        }
        tracker.samples(step, groups=trained, token_texts=vocabulary.texts, token_logprobs=token_logprobs)
        tracker.step(step, model_step=step, metrics=_metrics(rng, groups, step, total_steps, skill))
        if step % 10 == 0 and step != steps:
            validate(step)
    validate(steps)
    if finish is None:  # as if killed here: the files are flushed, but nothing recorded an end
        tracker.close()
        events = run_dir / "events.jsonl"
        kept = [line for line in events.read_text(encoding="utf-8").splitlines(keepends=True) if '"run_finished"' not in line]
        events.write_text("".join(kept), encoding="utf-8")
        return
    if steps < total_steps:
        tracker.event("warning", message=f"interrupted by SIGINT after step {steps}", step=steps)
    tracker.finish(finish, summary={"published_versions": steps})
    tracker.close()


def _metrics(rng: random.Random, groups: list[ScoredGroup], step: int, total_steps: int, skill: float) -> dict[str, float]:
    rewards = [score.total for group in groups for score in group.scores]
    completions = [completion for group in groups for completion in group.rollout.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "reward/failed": sum(score.failure is not None for group in groups for score in group.scores),
        "reward/zero_spread_frac": sum(group.spread == 0 for group in groups) / len(groups),
        "reward/time_s": 0.25 + rng.random() * 0.1,
        "reward/part/correct": mean * 0.9,
        "reward/part/format": 0.1 * min(1.0, 0.6 + skill * 0.4),
        "train/loss": rng.gauss(0, 0.004) - 0.01,
        "train/clip_frac": abs(rng.gauss(0.004, 0.003)),
        "train/ratio_absdev": abs(rng.gauss(2e-3, 6e-4)),
        "train/entropy": 1.9 - 1.4 * skill + rng.gauss(0, 0.04),
        "train/logprob_gap_mean": abs(rng.gauss(2e-5, 4e-6)),
        "train/logprob_gap_max": abs(rng.gauss(3e-4, 8e-5)),
        "train/response_len_mean": sum(lengths) / len(lengths),
        "train/response_len_max": max(lengths),
        "train/rollout_truncated_frac": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        "train/valid_token_count": sum(lengths) - rng.randint(0, 60),
        "train/advantage_absmean": 0.8 - 0.3 * skill + rng.gauss(0, 0.03),
        "optim/grad_norm": math.nan if step == 17 else 1.4 - 0.8 * skill + abs(rng.gauss(0, 0.15)),
        "optim/lr": 1e-5,
        "optim/applied_steps": 1.0,
        "rollout/tokens": sum(lengths),
        "rollout/tokens_per_s": sum(lengths) / (5.1 - 1.2 * skill) * 3,
        "sync/bytes": 44_040_192,
        "data/epoch": step / total_steps,
        "data/skipped_too_long": 0,
        "memory/rss_gib": 1.9 + 0.002 * step,
    }
