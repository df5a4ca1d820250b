"""The trainer's invariants, on the real trainer and a real tiny model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, MetricAdapter, Objective, Reduction
from posttrain.config import OptimizerConfig
from posttrain.errors import ConfigError, TrainingError
from posttrain.model.policy import CausalPolicy
from posttrain.records import Mean, Sum
from posttrain.trainer.core import Batching, Trainer
from tests.builders import exact_policy, objective, ragged_groups, tiny_policy

LOSS_TYPES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-fixed")


def gradient(policy: CausalPolicy, *, micro_batch: int, groups: Any, objective: Objective) -> torch.Tensor:
    """The gradient that reaches the optimizer, flat."""
    trainer = Trainer(OptimizerConfig(lr=0.0), policy=policy, objective=objective, batching=Batching(16, micro_batch))
    seen: list[torch.Tensor] = []

    def snapshot(optimizer: Any, *_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for group in optimizer.param_groups for p in group["params"]]))

    trainer.optimizer.register_step_pre_hook(snapshot)
    assert trainer.train_step(groups).rejection is None
    return seen[0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_splitting_a_batch_never_changes_its_gradient(loss_type: str) -> None:
    policy = exact_policy()
    groups = ragged_groups(policy)
    loss = objective(loss_type=loss_type, logprob_dtype="float64", batch_per_replica=16)
    whole = gradient(policy, micro_batch=16, groups=groups, objective=loss)
    assert float(whole.norm()) > 1e-3
    for parts in (2, 4, 8, 16):
        split = gradient(policy, micro_batch=16 // parts, groups=groups, objective=loss)
        assert float((split - whole).norm() / whole.norm()) <= 1e-12, parts


def test_splitting_a_legacy_batch_never_changes_its_gradient() -> None:
    policy = exact_policy()
    groups = ragged_groups(policy)
    loss = objective(grpo_surrogate="legacy_pg", batch_per_replica=16)
    whole = gradient(policy, micro_batch=16, groups=groups, objective=loss)
    for parts in (2, 4, 8):
        split = gradient(policy, micro_batch=16 // parts, groups=groups, objective=loss)
        # log-probabilities are float32 here: the legacy loss has no logprob_dtype
        assert float((split - whole).norm() / whole.norm()) <= 1e-6, parts


def test_ten_steps_at_lr_zero_move_nothing_and_keep_the_ratio_at_one() -> None:
    policy = tiny_policy()
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    groups = ragged_groups(policy)
    loss = objective(batch_per_replica=16, mini_batch_per_replica=8, certified_deterministic_forward=True)
    trainer = Trainer(OptimizerConfig(lr=0.0), policy=policy, objective=loss, batching=Batching(8, 4))
    for _ in range(10):
        result = trainer.train_step(groups)
        assert result.rejection is None and result.applied_steps == 2
        assert result.metrics["train/ratio_absdev"].value <= 1e-6
        assert abs(result.metrics["train/ratio_max"].value - 1) <= 1e-6
        assert result.metrics["train/logprob_gap_max"].value <= 1e-4
    assert trainer.model_step == 20
    for name, tensor in policy.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_old_policy_stays_frozen_over_the_windows_of_a_batch() -> None:
    policy = tiny_policy(dtype=torch.float64)
    groups = ragged_groups(policy)
    loss = objective(batch_per_replica=16, mini_batch_per_replica=8, certified_deterministic_forward=True, logprob_dtype="float64")
    trainer = Trainer(OptimizerConfig(lr=1e-3), policy=policy, objective=loss, batching=Batching(8, 8))
    result = trainer.train_step(groups)
    assert result.applied_steps == 2
    # the second window trains moved weights against the log-probabilities of the unmoved ones
    assert result.metrics["train/ratio_absdev"].value > 1e-4


def test_noisy_forwards_are_caught_before_a_cached_old_policy_is_used() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    dropout = torch.nn.Dropout(0.5)
    policy.module.model.layers[0].mlp.register_forward_hook(lambda module, args, out: dropout(out) if module.training else out)
    loss = objective(batch_per_replica=16, mini_batch_per_replica=8, certified_deterministic_forward=True)
    trainer = Trainer(OptimizerConfig(lr=1e-3), policy=policy, objective=loss, batching=Batching(8, 8))
    with pytest.raises(TrainingError, match="forwards of the same weights differ"):
        trainer.train_step(groups)


def poisoned(policy: CausalPolicy, *, at: int, gradient_only: bool = False) -> Objective:
    """Counts its calls and turns the loss (or only its gradient) into NaN from call `at` on."""
    calls = 0

    def fn(model: Any, batch: Any) -> Any:
        nonlocal calls
        scores = model.score(batch, temperature=1.0, dtype=torch.float32)
        loss, calls = -scores.logprobs.mean(), calls + 1
        if calls > at:
            # sqrt(0) has value 0 and an infinite slope
            loss = loss + (scores.logprobs - scores.logprobs.detach()).sum().sqrt() if gradient_only else loss * math.nan
        return loss, {OBJECTIVE_WEIGHT_SUM: Sum(1.0), "loss": Mean(float(loss.detach()), 1)}

    return Objective(fn, Reduction.TOKEN_SUM, MetricAdapter({"loss": "train/loss"}, frozenset({OBJECTIVE_WEIGHT_SUM})))


def weights(policy: CausalPolicy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.module.parameters()])


@pytest.mark.parametrize("force_finite", [True, False])
def test_a_loss_that_is_not_finite_rejects_the_whole_window(force_finite: bool) -> None:
    policy = tiny_policy()
    groups, before = ragged_groups(policy), weights(policy)
    config = OptimizerConfig(lr=1e-2, force_finite_grads=force_finite)
    trainer = Trainer(config, policy=policy, objective=poisoned(policy, at=3), batching=Batching(16, 4))
    result = trainer.train_step(groups)
    assert (result.applied_steps, trainer.model_step) == (0, 0)
    assert result.rejection == "the loss of micro-batch 3 is nan"
    assert torch.equal(weights(policy), before)
    assert all(p.grad is None for p in policy.module.parameters())


def test_windows_before_the_rejected_one_stay_committed() -> None:
    policy = tiny_policy()
    groups, before = ragged_groups(policy), weights(policy)
    trainer = Trainer(OptimizerConfig(lr=1e-2), policy=policy, objective=poisoned(policy, at=2), batching=Batching(8, 4))
    result = trainer.train_step(groups)
    assert (result.applied_steps, trainer.model_step) == (1, 1)
    assert result.rejection is not None and not torch.equal(weights(policy), before)


def test_gradients_that_are_not_finite_are_rejected_unless_the_check_is_off() -> None:
    policy = tiny_policy()
    groups, before = ragged_groups(policy), weights(policy)
    checked = Trainer(
        OptimizerConfig(lr=1e-2), policy=policy, objective=poisoned(policy, at=0, gradient_only=True), batching=Batching(16, 16)
    )
    result = checked.train_step(groups)
    assert result.rejection is not None and result.rejection.startswith("the gradient norm is")
    assert torch.equal(weights(policy), before)
    unchecked = Trainer(
        OptimizerConfig(lr=1e-2, force_finite_grads=False),
        policy=policy,
        objective=poisoned(policy, at=0, gradient_only=True),
        batching=Batching(16, 16),
    )
    result = unchecked.train_step(groups)
    assert result.rejection is None and result.metrics["optim/finite_gradient_check_enabled"].value == 0
    assert bool(weights(policy).isnan().any())


def test_clipping_scales_the_gradient_to_the_given_norm() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    trainer = Trainer(
        OptimizerConfig(lr=0.0, grad_clip_norm=0.01),
        policy=policy,
        objective=objective(batch_per_replica=16),
        batching=Batching(16, 16),
    )
    norms: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]])))
    )
    result = trainer.train_step(groups)
    assert result.metrics["optim/grad_norm"].value > 0.1
    assert norms[0] == pytest.approx(0.01, rel=1e-3)


def test_train_keys_freeze_everything_else() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    config = OptimizerConfig(lr=1e-2, train_keys=["layers.1.mlp"])
    trainer = Trainer(config, policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 8))
    assert trainer.train_step(groups).rejection is None
    for name, p in policy.module.named_parameters():
        assert torch.equal(p, before[name]) == ("layers.1.mlp" not in name), name


def test_train_keys_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rl\.optimizer\.train_keys='lora': matches none"):
        Trainer(
            OptimizerConfig(train_keys=["mlp", "lora"]),
            policy=tiny_policy(),
            objective=objective(batch_per_replica=16),
            batching=Batching(16, 16),
        )


def test_an_objective_without_its_weight_is_refused() -> None:
    policy = tiny_policy()
    bare = Objective(
        lambda model, batch: (model.score(batch, temperature=1.0, dtype=torch.float32).logprobs.mean(), {}),
        Reduction.TOKEN_SUM,
        MetricAdapter({}),
    )
    trainer = Trainer(OptimizerConfig(), policy=policy, objective=bare, batching=Batching(16, 16))
    with pytest.raises(TrainingError, match="objective_weight_sum"):
        trainer.train_step(ragged_groups(policy))


def test_a_metric_the_adapter_does_not_know_is_refused() -> None:
    policy = tiny_policy()
    loud = Objective(
        lambda model, batch: (model.score(batch, temperature=1.0, dtype=torch.float32).logprobs.mean(), {"mystery": Mean(1, 1)}),
        Reduction.MEAN,
        MetricAdapter({"loss": "train/loss"}),
    )
    trainer = Trainer(OptimizerConfig(), policy=policy, objective=loud, batching=Batching(16, 16))
    with pytest.raises(TrainingError, match="mystery"):
        trainer.train_step(ragged_groups(policy))


def test_recorded_logprobs_belong_to_their_completions() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    trainer = Trainer(OptimizerConfig(lr=0.0), policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 4))
    recorded = trainer.train_step(groups).token_logprobs
    for group in groups:
        for index, completion in enumerate(group.scored.rollout.completions):
            values = recorded[(group.scored.rollout.prompt.id, index)]
            assert values == pytest.approx(completion.logprobs, abs=1e-4)


def test_micro_batches_without_signal_skip_the_backward_and_change_nothing() -> None:
    policy = exact_policy()
    groups = ragged_groups(policy)
    tied = groups[0]
    groups[0] = replace(tied, advantages=(0.0,) * len(tied.advantages))
    loss = objective(logprob_dtype="float64", batch_per_replica=16)
    every = gradient(policy, micro_batch=1, groups=groups, objective=loss)
    for micro_batch in (2, 8, 16):
        split = gradient(policy, micro_batch=micro_batch, groups=groups, objective=loss)
        assert float((split - every).norm() / every.norm()) <= 1e-12
    # the tied group is a micro-batch of its own even where both would fit into one
    trainer = Trainer(OptimizerConfig(lr=0.0), policy=policy, objective=loss, batching=Batching(16, 16))
    assert trainer.train_step(groups).metrics["train/skipped_backward_frac"].value == 0.5


def test_a_window_without_any_signal_still_decays_the_moments() -> None:
    policy = tiny_policy()
    groups = ragged_groups(policy)
    trainer = Trainer(OptimizerConfig(lr=1e-3), policy=policy, objective=objective(batch_per_replica=16), batching=Batching(16, 8))
    trainer.train_step(groups)
    parameter = next(policy.module.parameters())
    before = trainer.optimizer.state[parameter]["exp_avg"].clone()
    tied = [replace(group, advantages=(0.0,) * len(group.advantages)) for group in groups]
    result = trainer.train_step(tied)
    assert result.rejection is None and result.metrics["optim/grad_norm"].value == 0 and trainer.model_step == 2
    assert torch.allclose(trainer.optimizer.state[parameter]["exp_avg"], 0.9 * before)
