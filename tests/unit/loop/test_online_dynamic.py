"""Dynamic sampling and alarms in the real online loop on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from posttrain.algorithm.annotators.group import GroupAnnotator
from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext
from posttrain.config import GRPOConfig, HFRolloutConfig, OptimizerConfig, TrackerConfig
from posttrain.config.tracker import AlarmConfig
from posttrain.data.source import Cursor
from posttrain.errors import TrainingError
from posttrain.loop.alarms import Alarms
from posttrain.loop.online import OnlineLoop, OnlineParts
from posttrain.model.policy import CausalPolicy
from posttrain.records import Prompt, RolloutGroup, SamplingParams, Score
from posttrain.reward.service import RewardService
from posttrain.rollout.hf_engine import HFEngine
from posttrain.track import RunHeader, Tracker
from posttrain.trainer.core import Batching, Trainer
from posttrain.weight_sync.protocol import Publication, WeightSync
from posttrain.weight_sync.shared import SharedSync
from tests.builders import tiny_policy

GROUP, MAX_TOKENS = 2, 6
QUIET = AlarmConfig(logprob_gap=0.0, uninformative_steps=0, memory_slope_mib=0.0, first_ratio=0.0)


class Numbers:
    """Prompts p0, p1, p2, ... without end."""

    columns = frozenset({"prompt"})
    skipped_too_long = 0

    def __init__(self, policy: CausalPolicy) -> None:
        self._tokenizer = policy.tokenizer
        self.drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [Prompt(f"p{n}", f"{n}=", f"{n}=", tuple(self._tokenizer.encode(f"{n}=", add_special_tokens=False))) for n in numbers]

    def cursor(self) -> Cursor:
        return Cursor(0, self.drawn, 0)

    def restore(self, cursor: Cursor) -> None:
        self.drawn = cursor.index


class ByNumber:
    """The first completion of prompt n earns one more than the others where `informative(n)`, else all earn the same."""

    name = "by_number"
    needs: frozenset[str] = frozenset()
    identity: Mapping[str, object] = {}

    def __init__(self, informative: Callable[[int], bool]) -> None:
        self._informative = informative

    def score(self, group: RolloutGroup) -> Sequence[Score]:
        differ = self._informative(int(group.prompt.id[1:]))
        return [Score(1.0 if differ and i == 0 else 0.0) for i in range(len(group.completions))]

    def close(self) -> None:
        pass


class CommitOnly:
    """Publishes nothing but the version: the engine keeps the weights it has."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine

    def publish(self, version: int, *, verify: bool) -> Publication:
        self._engine.commit(version)
        return Publication(version, {})


class NoSaves:
    """A saver that never saves and is never asked to stop."""

    def mark(self, state: Mapping[str, object]) -> None:
        pass

    def save_if_due(self, *, last: bool, evaluated: bool) -> None:
        pass

    def stop_if_asked(self, *, step_ahead: bool = False) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass
class Run:
    """One loop and the files it leaves."""

    folder: Path
    informative: Callable[[int], bool]
    rl: GRPOConfig
    alarms: AlarmConfig = field(default_factory=lambda: QUIET)
    noise: float = 0.0
    """Standard deviation of what is added to the weights of the engine's own copy; 0 shares the policy's."""
    lr: float = 1e-3

    def __post_init__(self) -> None:
        self.policy = tiny_policy()
        self.source = Numbers(self.policy)
        objective = build_objective(self.rl, ModelContext("tiny", MAX_TOKENS))
        self.trainer = Trainer(OptimizerConfig(lr=self.lr), policy=self.policy, objective=objective, batching=Batching.of(self.rl))

    def __call__(self) -> None:
        engine, sync = self._engine()
        config = TrackerConfig(console="quiet", report=False)
        with Tracker(
            self.folder, config=config, group="g", name="n", total_steps=self.rl.max_steps, resolved_config={}, sinks=()
        ) as tracker:
            tracker.start(RunHeader(algorithm="grpo", model="tiny", seed=0, device="cpu", details={}))
            parts = OnlineParts(
                source=self.source,
                engine=engine,
                rewards=RewardService(ByNumber(self.informative), timeout_s=10.0),
                trainer=self.trainer,
                weight_sync=sync,
                tracker=tracker,
                held_out=None,
                alarms=Alarms(self.alarms, single_step=True),
                annotate=GroupAnnotator.of(self.rl),
                saver=NoSaves(),  # type: ignore[arg-type]
                token_texts=lambda ids: [str(token) for token in ids],
            )
            OnlineLoop(self.rl, parts=parts, sampling=SamplingParams(MAX_TOKENS), rollout_seed=0).run()

    def _engine(self) -> tuple[HFEngine, WeightSync]:
        if not self.noise:
            engine = HFEngine(HFRolloutConfig(), policy=self.policy)
            return engine, SharedSync(engine, policy=self.policy.module, sampler=self.policy.module)
        copy = tiny_policy()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in copy.module.parameters():
                parameter += self.noise * torch.randn(parameter.shape, generator=generator)
        engine = HFEngine(HFRolloutConfig(), policy=copy)
        return engine, CommitOnly(engine)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self._lines("metrics.jsonl")

    @property
    def warnings(self) -> list[dict[str, object]]:
        return [event for event in self._lines("events.jsonl") if event["kind"] == "warning"]

    def trained_prompts(self, step: int) -> list[str]:
        return [line["prompt_id"] for line in self._lines(f"samples/step_{step:05d}.jsonl")]

    def _lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def rl_of(*, steps: int = 1, groups: int = 2, **knobs: object) -> GRPOConfig:
    return GRPOConfig(
        objective_builder="unused",
        max_steps=steps,
        batch_per_replica=groups * GROUP,
        group_size=GROUP,
        **knobs,  # type: ignore[arg-type]
    )


# ------------------------------------------------------------------------------------------------------- dynamic sampling


def test_tied_groups_are_drawn_again_and_never_trained_on(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: n % 3 == 2, rl_of(steps=2, min_informative_groups_frac=1.0))
    run()
    # draws of two: (0 1) (2 3) (4 5) for the first step, (6 7) (8 9) (10 11) for the second
    assert [run.trained_prompts(step) for step in (1, 2)] == [["p2", "p5"], ["p8", "p11"]]
    assert run.source.drawn == 12 and not run.warnings
    for line in run.metrics:
        assert line["train/informative_groups"] == 2 and line["train/zero_spread_frac"] == 0
        assert line["train/grpo_dynamic_sampling_extra_rollouts"] == line["train/grpo_dynamic_sampling_refill_dispatches"] == 2
        assert line["train/grpo_dynamic_sampling_dropped_groups"] == 4 and line["train/grpo_dynamic_sampling_shortfall"] == 0
        assert line["train/skipped_backward_frac"] == 0
        # rollout and reward metrics cover everything that was generated, not only what is trained
        assert line["reward/mean"] == pytest.approx(2 / 6 / GROUP)
        assert line["rollout/tokens"] > line["train/valid_token_count"]


def test_the_whole_budget_is_one_call(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        lambda n: n % 3 == 2,
        rl_of(min_informative_groups_frac=1.0, dynamic_sampling_max_extra_rollouts=3, dynamic_sampling_refill_dispatch="whole_budget"),
    )
    run()
    (line,) = run.metrics
    assert run.source.drawn == 8 and run.trained_prompts(1) == ["p2", "p5"]
    assert line["train/grpo_dynamic_sampling_extra_rollouts"] == 3 and line["train/grpo_dynamic_sampling_refill_dispatches"] == 1


def test_without_a_quota_tied_groups_are_trained_on(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: n == 1, rl_of())
    run()
    (line,) = run.metrics
    assert run.source.drawn == 2 and run.trained_prompts(1) == ["p0", "p1"]
    assert line["train/informative_groups"] == 1 and line["train/zero_spread_frac"] == 0.5
    assert not any("dynamic_sampling" in name for name in line)


def test_an_exhausted_budget_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: n in (0, 1, 2), rl_of(steps=2, min_informative_groups_frac=1.0, dynamic_sampling_max_extra_rollouts=3))
    with pytest.raises(TrainingError, match=r"1 informative groups short of its quota of 2 after 3 extra round\(s\)") as caught:
        run()
    assert "rl.dynamic_sampling_on_budget_exhausted=proceed" in str(caught.value)
    assert run.source.drawn == 2 + 2 * (1 + 3)
    assert [line["step"] for line in run.metrics] == [1], "the step before is complete, this one trained on nothing"
    assert run.trainer.model_step == 1


def test_proceeding_trains_on_filler_and_says_so(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        lambda n: n == 5,
        rl_of(min_informative_groups=2, dynamic_sampling_max_extra_rollouts=3, dynamic_sampling_on_budget_exhausted="proceed"),
    )
    run()
    (line,), (warning,) = run.metrics, run.warnings
    assert run.trained_prompts(1) == ["p0", "p5"]
    assert line["train/grpo_dynamic_sampling_shortfall"] == 1 and line["train/informative_groups"] == 1
    assert warning["step"] == 1 and "1 of 2 informative groups are missing after 3 extra round(s)" in str(warning["message"])


def test_the_same_seed_draws_the_same_run(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name, lambda n: n % 3 == 2, rl_of(steps=2, min_informative_groups_frac=1.0)) for name in "ab"]
    for run in runs:
        run()
    first, second = (run.policy.module.state_dict() for run in runs)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# ----------------------------------------------------------------------------------------------------------------- masks


def test_truncated_completions_leave_the_loss_of_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: True, rl_of(mask_truncated_completions=True))
    before = {name: tensor.clone() for name, tensor in run.policy.module.state_dict().items()}
    run()
    (line,) = run.metrics
    # the tiny model never ends within six tokens: every completion is cut, so nothing is trained
    assert line["train/rollout_truncated_frac"] == 1 and line["train/valid_token_count"] == 0
    assert line["reward/mean"] == 0.5 and line["train/informative_groups"] == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.policy.module.state_dict().items())


# ---------------------------------------------------------------------------------------------------------------- alarms


def alarms_on(**knobs: object) -> AlarmConfig:
    return AlarmConfig(**{"logprob_gap": 0.0, "uninformative_steps": 0, "memory_slope_mib": 0.0, "first_ratio": 0.0, **knobs})  # type: ignore[arg-type]


def test_an_alarm_under_stop_ends_the_run_after_its_line_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: False, rl_of(steps=5), alarms=alarms_on(uninformative_steps=2, stop=True))
    with pytest.raises(TrainingError, match=r"tracker\.alarms\.stop=true and alarm uninformative_steps was raised: step 2"):
        run()
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert [(warning["alarm"], warning["step"]) for warning in run.warnings] == [("uninformative_steps", 2)]


def test_an_alarm_without_stop_is_one_warning(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: False, rl_of(steps=4), alarms=alarms_on(uninformative_steps=2))
    run()
    assert len(run.metrics) == 4
    assert [(warning["alarm"], warning["step"]) for warning in run.warnings] == [("uninformative_steps", 2)]
    assert str(run.warnings[0]["message"]).startswith("alarm uninformative_steps: ")


def test_an_engine_with_other_weights_raises_the_gap_alarm(tmp_path: Path) -> None:
    alarms = alarms_on(logprob_gap=0.1)
    honest = Run(tmp_path / "honest", lambda n: True, rl_of(steps=2), alarms=alarms)
    honest()
    assert not honest.warnings and all(line["train/logprob_gap_mean"] < 1e-4 for line in honest.metrics)
    wrong = Run(tmp_path / "wrong", lambda n: True, rl_of(steps=2), alarms=alarms, noise=0.05)
    wrong()
    assert all(line["train/logprob_gap_mean"] > 0.1 for line in wrong.metrics)
    assert [(warning["alarm"], warning["step"]) for warning in wrong.warnings] == [("logprob_gap", 1)]


def test_an_engine_that_is_never_updated_raises_the_gap_alarm_once_the_policy_moved(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: True, rl_of(steps=3), alarms=alarms_on(logprob_gap=0.1), noise=1e-9, lr=0.05)
    run()
    assert run.metrics[0]["train/logprob_gap_mean"] < 1e-4
    assert [(warning["alarm"], warning["step"]) for warning in run.warnings] == [("logprob_gap", 2)]


def test_a_rejected_window_is_named_although_an_alarm_stops_the_run_too(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda n: False, rl_of(), alarms=alarms_on(uninformative_steps=1, stop=True), noise=0.05)
    with torch.no_grad():
        run.policy.module.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"the optimizer window was rejected.*the loss of micro-batch 0 is nan"):
        run()
    assert len(run.metrics) == 1 and [warning["alarm"] for warning in run.warnings] == ["uninformative_steps"]
