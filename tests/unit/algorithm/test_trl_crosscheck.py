"""The objective against `GRPOTrainer._compute_loss` of TRL 1.16.0 itself, on the same log-probabilities.

TRL's method runs unchanged on a stand-in for the trainer that carries the attributes it reads. Where the two libraries define
something differently, the test holds both numbers.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, Objective
from posttrain.data.packer import PolicyBatch
from posttrain.model.protocol import TokenScores
from tests.unit.algorithm.ragged import MAX_TOKENS, objective_of

LENGTHS = (7, 3, 12, 1, 9, 5)
ADVANTAGES = (1.3, -0.8, -1.7, 0.6, 0.0, 0.9)
EXACT, SINGLE = 1e-12, 2e-6
"""Relative error in float64, and of rounding in float32."""


@pytest.fixture(scope="module")
def trl():
    """The trainer class. vLLM is hidden from TRL: importing it costs a minute, its version draws a warning, and no loss needs it."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)
        trainer = import_module("trl.trainer.grpo_trainer").GRPOTrainer
    assert version("trl") == "1.16.0"
    return trainer


@dataclass
class Batch:
    """Padded [B, T] tensors, as TRL takes them."""

    logps: torch.Tensor
    old: torch.Tensor
    anchor: torch.Tensor
    entropies: torch.Tensor
    kept: torch.Tensor
    """bool: trained tokens, holes in the middle of a completion included."""
    real: torch.Tensor
    """bool: not padding."""
    advantages: torch.Tensor
    """[B], or [B, T]."""

    def rows(self, chosen: slice) -> Batch:
        return Batch(**{name: value[chosen] for name, value in vars(self).items()})

    @property
    def flat(self) -> PolicyBatch:
        """The same for posttrain, one prompt per completion."""
        lengths = self.real.sum(1)
        count = len(lengths)
        per_token = self.advantages.dim() == 2
        return PolicyBatch(
            prompts=torch.zeros(count, 1, dtype=torch.int64),
            prompt_lengths=torch.ones(count, dtype=torch.int64),
            prompt_of=torch.arange(count),
            completions=torch.zeros(self.real.shape, dtype=torch.int64),
            lengths=lengths,
            labels=torch.zeros(int(lengths.sum()), dtype=torch.int64),
            sequence=torch.repeat_interleave(torch.arange(count), lengths),
            loss_mask=self.kept[self.real],
            advantages=self.advantages.mean(1) if per_token else self.advantages,
            sampled_logprobs=self.old[self.real],
            keys=tuple((str(i), 0) for i in range(count)),
            old_logprobs=self.old[self.real],
            reference_logprobs=self.anchor[self.real],
            token_advantages=self.advantages[self.real] if per_token else None,
        )


def make(*, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.4, per_token: bool = False) -> Batch:
    """Ratios on both sides of every bound; every completion keeps a token, since the two libraries count others differently."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    noise = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4)]
    real = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    kept = real & (torch.rand(shape, generator=draw) < 0.8)
    kept[:, 0] = True
    logps = -2 + noise[0]
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    if per_token:
        advantages = advantages[:, None] + 0.5 * noise[3]
    anchor = logps + 1.5 * noise[2]
    values = (logps, logps + spread * noise[1], anchor, noise[3].abs())
    logps, old, anchor, entropies = (value.to(dtype) for value in values)
    return Batch(logps, old, anchor, entropies, kept, real, advantages.to(dtype))


@dataclass
class Result:
    """Loss, its gradient in the [B, T] log-probabilities, and the logged metrics."""

    loss: float
    gradient: torch.Tensor
    metrics: dict[str, float]


def theirs(trl, batch: Batch, *, loss_type: str, items: int | None = None, accumulation: int = 1, on_policy: bool = False, **how) -> Result:
    """`GRPOTrainer._compute_loss` on one micro-batch.

    Args:
        items: tokens of the whole accumulation window; None: of this batch.
        accumulation: micro-batches of the window.
    """
    leaf = batch.logps.clone().requires_grad_()
    metrics: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, batch.entropies, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=how.get("delta"), steps_per_generation=accumulation),
        aux_loss_enabled=False,
        beta=how.get("beta", 0.0),
        current_gradient_accumulation_steps=accumulation,
        epsilon_high=how.get("epsilon_high", 0.2),
        epsilon_low=how.get("epsilon_low", 0.2),
        importance_sampling_level=how.get("level", "token"),
        loss_type=loss_type,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    nothing = torch.zeros(batch.real.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing[:, :1],
        "prompt_mask": nothing[:, :1] + 1,
        "completion_ids": nothing,
        "completion_mask": batch.real.long(),
        "tool_mask": batch.kept.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": None if on_policy else batch.old,
        "ref_per_token_logps": batch.anchor,
        "num_items_in_batch": torch.tensor(int(batch.kept.sum()) if items is None else items),
    }
    loss = trl._compute_loss(trainer, None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return Result(loss.item(), leaf.grad, {name: values[-1] for name, values in metrics["train"].items()})


def ours(objective: Objective, batch: Batch, *, on_policy: bool = False, from_sampler: bool = False) -> Result:
    leaf = batch.logps.clone().requires_grad_()
    policy = SimpleNamespace(score=lambda *_, **__: TokenScores(leaf[batch.real], batch.entropies[batch.real].float()))
    flat = batch.flat
    if on_policy or from_sampler:
        flat = PolicyBatch(**{name: getattr(flat, name) for name in flat.__dataclass_fields__} | {"old_logprobs": None})
    loss, metrics = objective.fn(policy, flat)
    loss.backward()
    assert leaf.grad is not None
    values = {name: metric.value for name, metric in metrics.items() if hasattr(metric, "value")}
    return Result(loss.item(), leaf.grad, values | {"weight": metrics[OBJECTIVE_WEIGHT_SUM].total})


def assert_equal(a: Result, b: Result, tolerance: float) -> None:
    assert a.loss == pytest.approx(b.loss, rel=tolerance, abs=tolerance / 4)  # terms of about 1 cancel in the sum
    assert (a.gradient - b.gradient).norm() <= tolerance * b.gradient.norm()


REDUCTIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-fixed",
    "luspo": "seq-mean-token-sum",
}
"""TRL's name for a normalization -> ours."""
RECIPES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "ppo-clip": ({}, {"lower_bound_ratio": 0.0}),
    "dapo-asymmetric": ({"epsilon_low": 0.2, "epsilon_high": 0.28}, {"epsilon_low": 0.2, "epsilon_high": 0.28, "lower_bound_ratio": 0.0}),
    "dual-clip": ({"delta": 1.5}, {"lower_bound_ratio": 1.5}),
    "kl": ({"beta": 0.04}, {"kl_beta": 0.04, "lower_bound_ratio": 0.0}),
    "gspo": ({"level": "sequence"}, {"importance_sampling_level": "sequence", "lower_bound_ratio": 0.0}),
    "gspo-paper": (
        {"level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        {"importance_sampling_level": "sequence", "lower_bound_ratio": 0.0, "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo-kl": (
        {"level": "sequence", "beta": 0.04},
        {"importance_sampling_level": "sequence", "lower_bound_ratio": 0.0, "kl_beta": 0.04},
    ),
}
"""name -> (TRL's settings, ours)."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_loss_and_gradient_are_those_of_trl(trl, loss_type, recipe):
    """In float64 to the last digits, in float32 to its rounding."""
    their_settings, our_settings = RECIPES[recipe]
    for seed in range(3):
        for dtype, name, tolerance in ((torch.float64, "float64", EXACT), (torch.float32, "float32", SINGLE)):
            batch = make(seed=seed, dtype=dtype, spread=0.02 if recipe == "gspo-paper" and seed else 0.4)
            objective = objective_of(loss_type=REDUCTIONS[loss_type], logprob_dtype=name, **our_settings)
            expected = theirs(trl, batch, loss_type=loss_type, **their_settings)
            assert_equal(ours(objective, batch), expected, tolerance)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_on_policy_too(trl, loss_type, level):
    batch = make(seed=4)
    objective = objective_of(loss_type=REDUCTIONS[loss_type], importance_sampling_level=level, lower_bound_ratio=0.0)
    expected = theirs(trl, batch, loss_type=loss_type, level=level, on_policy=True)
    assert_equal(ours(objective, batch, on_policy=True), expected, EXACT)


def test_the_sampler_as_the_old_policy(trl):
    batch = make(seed=5)
    found = ours(objective_of(use_rollout_logprobs_for_loss=True, lower_bound_ratio=0.0), batch, from_sampler=True)
    assert_equal(found, theirs(trl, batch, loss_type="dapo"), EXACT)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_advantages_per_token(trl, loss_type):
    batch = make(seed=6, per_token=True)
    objective = objective_of(loss_type=REDUCTIONS[loss_type], lower_bound_ratio=0.0, kl_beta=0.1)
    assert_equal(ours(objective, batch), theirs(trl, batch, loss_type=loss_type, beta=0.1), EXACT)


def test_logged_quantities_agree(trl):
    """Entropy, KL and the share of clipped tokens; TRL's counters come in float32."""
    batch = make(seed=7)
    expected = theirs(trl, batch, loss_type="dapo", beta=0.04, epsilon_low=0.2, epsilon_high=0.28).metrics
    found = ours(objective_of(kl_beta=0.04, lower_bound_ratio=0.0, epsilon_high=0.28), batch).metrics
    assert expected["clip_ratio/region_mean"] > 0.1
    assert found["clip_frac"] == pytest.approx(expected["clip_ratio/region_mean"], rel=1e-6)
    assert found["kl_mean"] == pytest.approx(expected["kl"], rel=1e-6)
    assert found["entropy"] == pytest.approx(expected["entropy"], rel=1e-6)


def test_the_recipes_reach_every_clip(trl):
    """Low and high clip at both levels, and the dual clip: otherwise agreement above would be that of two plain ratios."""
    for level in ("token", "sequence"):
        metrics = [theirs(trl, make(seed=seed), loss_type="grpo", level=level).metrics for seed in range(3)]
        assert all(max(m[f"clip_ratio/{side}_mean"] for m in metrics) > 0 for side in ("low", "high"))
    assert ours(objective_of(lower_bound_ratio=1.5), make()).metrics["dual_clip_frac"] > 0


# ------------------------------------------------------------------------------------------------ documented differences


@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("grpo", "sequence"), ("dr_grpo", "token"), ("luspo", "token")])
def test_a_completion_without_a_trained_token_is_not_counted(trl, loss_type, level):
    """TRL divides by all B completions, also those that mask_truncated_completions emptied; here such a completion leaves the
    denominator too, as it does in a token mean. With two of six emptied: a divisor of 6 against one of 4."""
    batch = make(seed=8)
    batch.kept[[1, 4]] = False
    objective = objective_of(loss_type=REDUCTIONS[loss_type], importance_sampling_level=level, lower_bound_ratio=0.0)
    found, expected = ours(objective, batch), theirs(trl, batch, loss_type=loss_type, level=level)
    assert found.metrics["weight"] == 4
    assert found.loss == pytest.approx(expected.loss * 6 / 4, rel=EXACT)
    assert (found.gradient - expected.gradient * 6 / 4).norm() <= EXACT * found.gradient.norm()


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_token_mean_over_several_micro_batches(trl, loss_type):
    """Two micro-batches with different numbers of trained tokens. TRL's `dapo` divides by the tokens of the window, which is our
    token mean in any cut; its `bnpo` averages the means of the micro-batches and differs."""
    batch = make(seed=9)
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, 6))]
    items = int(batch.kept.sum())
    expected = torch.cat([theirs(trl, part, loss_type=loss_type, items=items, accumulation=2).gradient for part in parts])
    objective = objective_of(lower_bound_ratio=0.0)
    results = [ours(objective, part) for part in parts]
    assert results[0].metrics["weight"] != results[1].metrics["weight"]
    found = torch.cat([result.gradient * result.metrics["weight"] / items for result in results])
    if loss_type == "dapo":
        assert (found - expected).norm() <= EXACT * expected.norm()
    else:
        unequal = torch.cat([result.gradient / 2 for result in results])
        assert (unequal - expected).norm() <= EXACT * expected.norm()
        assert (found - expected).norm() > 0.05 * expected.norm()


def test_a_response_ratio_far_off_policy_is_capped(trl):
    """A mean log-ratio of 12 under a negative advantage: exp(12) in TRL, exp(10) without a gradient here. From below both
    are unbounded."""
    batch = make(seed=10)
    objective = objective_of(loss_type="seq-mean-token-mean", importance_sampling_level="sequence", lower_bound_ratio=0.0)
    one = batch.rows(slice(1, 2))
    one.old = one.logps - 12.0
    found, expected = ours(objective, one), theirs(trl, one, loss_type="grpo", level="sequence")
    assert expected.loss == pytest.approx(0.8 * math.exp(12), rel=EXACT)
    assert found.loss == pytest.approx(0.8 * math.exp(10), rel=EXACT)
    assert float(found.gradient.abs().max()) == 0.0 < float(expected.gradient.abs().max())
    other = batch.rows(slice(0, 1))
    other.old = other.logps + 25.0
    assert_equal(ours(objective, other), theirs(trl, other, loss_type="grpo", level="sequence"), EXACT)


def test_the_penalty_is_bounded_at_20_nats(trl):
    """A token 23 nats under the reference costs exp(23) - 24 in TRL and exp(20) - 21 here, without a gradient there."""
    batch = make(seed=11).rows(slice(3, 4))
    batch.old, batch.anchor = batch.logps, batch.logps + 23.0
    found = ours(objective_of(kl_beta=1.0), batch)
    expected = theirs(trl, batch, loss_type="dapo", beta=1.0)
    surrogate = -0.6
    assert expected.loss - surrogate == pytest.approx(math.exp(23) - 24, rel=1e-11)
    assert found.loss - surrogate == pytest.approx(math.exp(20) - 21, rel=1e-11)
    assert found.gradient[0, 0].item() == pytest.approx(-0.6, rel=EXACT)
    assert expected.gradient[0, 0].item() == pytest.approx(-0.6 + 1 - math.exp(23), rel=1e-11)
