"""The GRPO objective against the slow reference, and against itself cut into micro-batches."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import OBJECTIVE_WEIGHT_SUM, ModelContext, Objective, Reduction
from posttrain.config.grpo import GRPOConfig
from posttrain.data.packer import PolicyBatch
from posttrain.model.protocol import TokenScores
from posttrain.records import Sum

VOCAB = 9
MAX_TOKENS = 11
LOSS_TYPES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-fixed")
EPSILONS = ((0.2, 0.2), (0.1, 0.28), (-1.0, 0.2), (0.2, -1.0), (-1.0, -1.0))
TOLERANCE = 1e-12


def _load_reference():
    """The sibling module, whatever import mode pytest runs in."""
    spec = importlib.util.spec_from_file_location("grpo_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _load_reference()


@dataclass(frozen=True)
class Ragged:
    """A batch as lists, one entry per sequence."""

    logits: list[torch.Tensor]
    labels: list[list[int]]
    masks: list[list[bool]]
    advantages: list[float]
    old: list[list[float]] | None

    def packed(self, chosen: Sequence[int] | None = None) -> PolicyBatch:
        """The chosen sequences (all by default) as the tensors of one micro-batch; two sequences share each prompt."""
        chosen = range(len(self.labels)) if chosen is None else chosen
        prompts = sorted({index // 2 for index in chosen})
        lengths = [len(self.labels[index]) for index in chosen]
        completions = torch.zeros(len(lengths), max([*lengths, 1]), dtype=torch.int64)
        for row, index in enumerate(chosen):
            completions[row, : lengths[row]] = torch.tensor(self.labels[index], dtype=torch.int64)

        def flat(per_sequence, dtype):
            return torch.tensor([value for index in chosen for value in per_sequence[index]], dtype=dtype)

        old = None if self.old is None else flat(self.old, torch.float64)
        return PolicyBatch(
            prompts=torch.tensor([[prompt, 1, 2] for prompt in prompts]),
            prompt_lengths=torch.full((len(prompts),), 3),
            prompt_of=torch.tensor([prompts.index(index // 2) for index in chosen]),
            completions=completions,
            lengths=torch.tensor(lengths),
            labels=flat(self.labels, torch.int64),
            sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            loss_mask=flat(self.masks, torch.bool),
            advantages=torch.tensor([self.advantages[index] for index in chosen], dtype=torch.float64),
            sampled_logprobs=torch.full((sum(lengths),), -2.0, dtype=torch.float64),
            truncated=torch.zeros(len(lengths), dtype=torch.bool),
            keys=tuple((f"p{index // 2}", index % 2) for index in chosen),
            old_logprobs=old,
        )


class TablePolicy:
    """A policy whose logits are free parameters, [T_i, V] for each (prompt, sample)."""

    def __init__(self, ragged: Ragged) -> None:
        self._logits = {(f"p{index // 2}", index % 2): rows for index, rows in enumerate(ragged.logits)}

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype) -> TokenScores:
        logits = torch.cat([self._logits[key] for key in batch.keys]) / temperature
        logp = torch.log_softmax(logits.to(dtype), dim=-1)
        return TokenScores(logp.gather(1, batch.labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach().float())


def ragged(*, seed: int = 0, old: str | None = None, temperature: float = 1.0) -> Ragged:
    """Eight sequences: one empty (1), one wholly masked (4), two without an advantage (3, 6), the rest mixed.

    Perturbed old log-probabilities put ratios on both sides of every bound, the dual clip's included.
    """
    draw = random.Random(seed)
    lengths = [4, 0, 6, 2, 3, 5, 1, MAX_TOKENS]
    torch_draw = torch.Generator().manual_seed(seed)
    logits = [torch.randn(n, VOCAB, generator=torch_draw, dtype=torch.float64).mul_(1.5).requires_grad_() for n in lengths]
    labels = [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]
    masks = [[index != 4 and draw.random() < 0.8 for _ in range(n)] for index, n in enumerate(lengths)]
    for index in (0, 2, 3, 5, 6, 7):
        masks[index][0] = True
    advantages = [1.3, 0.9, -0.8, 0.0, 1.1, -1.7, 0.0, 0.6]
    old_logprobs = None
    if old == "perturbed":
        old_logprobs = [
            [
                reference.token_logprob(rows[t].detach(), labels[index][t], temperature).item() + draw.choice((-1.6, -0.3, -0.05, 0.1, 0.5))
                for t in range(len(rows))
            ]
            for index, rows in enumerate(logits)
        ]
    return Ragged(logits, labels, masks, advantages, old_logprobs)


def objective_of(**rl: object) -> tuple[GRPOConfig, Objective]:
    config = GRPOConfig(**{"logprob_dtype": "float64", **rl})  # type: ignore[arg-type]
    return config, build_objective(config, ModelContext(model_id="table", max_response_length=MAX_TOKENS))


def grads(batch: Ragged) -> list[torch.Tensor]:
    found = [torch.zeros_like(rows) if rows.grad is None else rows.grad.clone() for rows in batch.logits]
    for rows in batch.logits:
        rows.grad = None
    return found


def distance(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative to the norm of the whole gradient."""
    a, b = (torch.cat([rows.flatten() for rows in side]) for side in (actual, expected))
    return ((a - b).norm() / b.norm()).item()


def windowed(objective: Objective, batch: Ragged, micro_batches: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient as a trainer combines them over equally large micro-batches."""
    policy, size = TablePolicy(batch), len(batch.labels) // micro_batches
    numerator, weight = 0.0, 0.0
    for start in range(0, len(batch.labels), size):
        loss, metrics = objective.fn(policy, batch.packed(range(start, start + size)))
        objective.metric_adapter(metrics)
        share = 1.0
        if objective.reduction is Reduction.TOKEN_SUM:
            reported = metrics[OBJECTIVE_WEIGHT_SUM]
            assert isinstance(reported, Sum)
            share = reported.total
        (loss * share).backward()
        numerator, weight = numerator + loss.item() * share, weight + share
    return numerator / weight, [grad / weight for grad in grads(batch)]


@pytest.mark.parametrize("old", [None, "perturbed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("epsilon_low", "epsilon_high"), EPSILONS)
@pytest.mark.parametrize("lower_bound_ratio", [3.0, 0.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_clipped_matches_the_reference(loss_type, lower_bound_ratio, epsilon_low, epsilon_high, temperature, old):
    how = {
        "loss_type": loss_type,
        "lower_bound_ratio": lower_bound_ratio,
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "temperature": temperature,
    }
    batch = ragged(old=old, temperature=temperature)
    _, objective = objective_of(grpo_surrogate="clipped", **how)
    expected, expected_grads = reference.reference_loss(
        batch.logits, batch.labels, batch.masks, batch.advantages, batch.old, surrogate="clipped", max_tokens=MAX_TOKENS, **how
    )
    loss, metrics = objective.fn(TablePolicy(batch), batch.packed())
    loss.backward()
    objective.metric_adapter(metrics)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert distance(grads(batch), expected_grads) <= TOLERANCE


def test_the_grid_reaches_every_branch():
    """Both clips and the dual clip decide at least one unmasked token; without this the grid above could pass by luck."""
    seen = set()
    for temperature in (1.0, 0.7):
        batch = ragged(old="perturbed", temperature=temperature)
        assert batch.old is not None
        for i, rows in enumerate(batch.logits):
            for t in range(len(rows)):
                if batch.masks[i][t] and batch.advantages[i] != 0:
                    logp = reference.token_logprob(rows[t].detach(), batch.labels[i][t], temperature).item()
                    ratio = torch.tensor(logp - batch.old[i][t]).exp().item()
                    side = "low" if ratio < 0.8 else "dual" if ratio > 3 else "high" if ratio > 1.28 else "inside"
                    seen.add((side, batch.advantages[i] > 0))
    assert {("low", False), ("high", True), ("dual", False), ("inside", True), ("inside", False), ("low", True), ("high", False)} <= seen


def test_legacy_pg_matches_the_reference():
    batch = ragged()
    _, objective = objective_of(grpo_surrogate="legacy_pg", logprob_dtype="float64")
    expected, expected_grads = reference.reference_loss(
        batch.logits,
        batch.labels,
        batch.masks,
        batch.advantages,
        None,
        surrogate="legacy_pg",
        loss_type="token-mean",
        epsilon_low=0.2,
        epsilon_high=0.2,
        lower_bound_ratio=3.0,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
    )
    loss, metrics = objective.fn(TablePolicy(batch), batch.packed())
    loss.backward()
    objective.metric_adapter(metrics)
    assert objective.reduction is Reduction.MEAN
    assert loss.item() == pytest.approx(expected, rel=TOLERANCE)
    assert distance(grads(batch), expected_grads) <= TOLERANCE


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("old", [None, "perturbed"])
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, None])
def test_micro_batches_do_not_change_the_gradient(loss_type, old, micro_batches):
    """At eight, one micro-batch holds only an empty sequence and one only masked tokens. No loss type: legacy_pg."""
    batch = ragged(old=old)
    how = {"grpo_surrogate": "legacy_pg"} if loss_type is None else {"grpo_surrogate": "clipped", "loss_type": loss_type}
    _, objective = objective_of(**how)
    whole_loss, whole = windowed(objective, batch, 1)
    loss, parts = windowed(objective, batch, micro_batches)
    assert loss == pytest.approx(whole_loss, rel=TOLERANCE)
    assert distance(parts, whole) <= TOLERANCE


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_order_of_the_sequences_does_not_matter(loss_type):
    batch = ragged(old="perturbed")
    _, objective = objective_of(grpo_surrogate="clipped", loss_type=loss_type)
    results = []
    for order in (range(8), [5, 2, 7, 0, 1, 6, 3, 4]):
        loss, _ = objective.fn(TablePolicy(batch), batch.packed(order))
        loss.backward()
        results.append((loss.item(), grads(batch)))
    assert results[1][0] == pytest.approx(results[0][0], rel=TOLERANCE)
    assert distance(results[1][1], results[0][1]) <= TOLERANCE


def test_masked_tokens_have_no_influence():
    """Neither their logits nor their labels nor their old log-probabilities reach the loss."""
    batch = ragged(old="perturbed")
    assert batch.old is not None
    changed = replace(
        batch,
        logits=[
            torch.where(
                torch.tensor(mask, dtype=torch.bool)[:, None], rows.detach(), rows.detach() + 100.0 * torch.arange(VOCAB)
            ).requires_grad_()
            for mask, rows in zip(batch.masks, batch.logits, strict=True)
        ],
        labels=[[label if m else 0 for label, m in zip(*pair, strict=True)] for pair in zip(batch.labels, batch.masks, strict=True)],
        old=[[value if m else -500.0 for value, m in zip(*pair, strict=True)] for pair in zip(batch.old, batch.masks, strict=True)],
    )
    _, objective = objective_of(grpo_surrogate="clipped")
    outcomes = []
    for one in (batch, changed):
        loss, _ = objective.fn(TablePolicy(one), one.packed())
        loss.backward()
        outcomes.append((loss.item(), grads(one)))
    assert outcomes[1][0] == pytest.approx(outcomes[0][0], rel=TOLERANCE)
    assert distance(outcomes[1][1], outcomes[0][1]) <= TOLERANCE
    assert all(grad.isfinite().all() for grad in outcomes[1][1])


@pytest.mark.parametrize("surrogate", ["clipped", "legacy_pg"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_learn_from_is_a_zero_and_not_a_nan(surrogate, loss_type):
    batch = ragged()
    _, objective = objective_of(grpo_surrogate=surrogate, loss_type=loss_type)
    loss, metrics = objective.fn(TablePolicy(batch), batch.packed([1, 4]))
    loss.backward()
    objective.metric_adapter(metrics)
    assert loss.item() == 0.0
    assert all((grad == 0).all() for grad in grads(batch))
