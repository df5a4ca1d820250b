"""Learning-rate schedules: their closed forms, and the clock they follow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.algorithm.primitives.objective import Objective
from posttrain.config import OptimizerConfig
from posttrain.errors import TrainingError
from posttrain.trainer.core import Batching, Trainer
from posttrain.trainer.optim import Schedule
from tests.builders import objective, ragged_groups, tiny_policy


def rates(kind: str, *, warmup: int, total: int | None, updates: int) -> list[float]:
    schedule = Schedule.of(OptimizerConfig(lr=0.8, lr_schedule=kind, warmup_steps=warmup), total_steps=total)
    return [schedule.rate(applied) for applied in range(updates)]


def test_rates_by_hand() -> None:
    assert rates("constant", warmup=0, total=None, updates=3) == [0.8, 0.8, 0.8]
    assert rates("constant", warmup=4, total=None, updates=6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates("linear", warmup=0, total=4, updates=4) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates("linear", warmup=2, total=6, updates=6) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])
    side = 0.4 * math.sqrt(0.5)
    assert rates("cosine", warmup=0, total=4, updates=4) == pytest.approx([0.8, 0.4 + side, 0.4, 0.4 - side])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_no_update_has_rate_zero_and_none_exceeds_lr(kind: str, warmup: int) -> None:
    shown = rates(kind, warmup=warmup, total=20, updates=25)
    assert all(0 < rate <= 0.8 for rate in shown) and max(shown) == 0.8
    assert shown[:warmup] == sorted(shown[:warmup]) and shown[warmup:] == sorted(shown[warmup:], reverse=True)


@pytest.mark.parametrize("total", [None, 3])
def test_a_falling_rate_needs_its_length(total: int | None) -> None:
    with pytest.raises(TrainingError, match="needs more optimizer steps"):
        Schedule.of(OptimizerConfig(lr_schedule="linear", warmup_steps=3), total_steps=total)


def recorded(trainer: Trainer) -> list[float]:
    """The rate of every step the optimizer takes from now on."""
    seen: list[float] = []
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.extend({group["lr"] for group in optimizer.param_groups}))
    return seen


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_window_of_a_batch_has_a_rate_of_its_own(name: str) -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    loss = objective(batch_per_replica=16, mini_batch_per_replica=8, certified_deterministic_forward=True)
    config = OptimizerConfig(name=name, lr=1e-3, lr_schedule="linear", warmup_steps=1)
    trainer = Trainer(config, policy=policy, objective=loss, batching=Batching(8, 8), total_steps=5)
    seen = recorded(trainer)
    shown = [trainer.train_step(groups).metrics["optim/lr"].value for _ in range(2)]
    assert seen == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.5e-3])
    assert shown == pytest.approx([1e-3, 0.625e-3])


def test_a_rejected_window_does_not_advance_the_rate() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    good = objective(batch_per_replica=16)
    broken = False

    def fn(model: Any, batch: Any) -> Any:
        loss, metrics = good.fn(model, batch)
        return (loss * math.nan if broken else loss), metrics

    loss = Objective(fn, good.reduction, good.metric_adapter)
    config = OptimizerConfig(lr=1e-3, warmup_steps=4)
    trainer = Trainer(config, policy=policy, objective=loss, batching=Batching(16, 16))
    seen = recorded(trainer)
    assert trainer.train_step(groups).rejection is None
    broken = True
    rejected = trainer.train_step(groups)
    assert rejected.rejection is not None and trainer.model_step == 1 and "optim/lr" not in rejected.metrics
    broken = False
    assert trainer.train_step(groups).rejection is None
    assert seen == pytest.approx([0.25e-3, 0.5e-3])


def test_a_resumed_trainer_continues_the_rate() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    config = OptimizerConfig(lr=1e-3, lr_schedule="cosine", warmup_steps=2)

    def trainer() -> Trainer:
        return Trainer(config, policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 16), total_steps=8)

    first = trainer()
    for _ in range(4):
        first.train_step(groups)
    straight, resumed = recorded(first), None
    second = trainer()
    second.restore(first.state())
    resumed = recorded(second)
    torch.manual_seed(0)
    first.train_step(groups)
    second.train_step(groups)
    assert straight == resumed == [first.schedule.rate(4)]
