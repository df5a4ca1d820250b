"""The GRPO objective against the slow reference, in any cut into micro-batches and on both layouts of a real policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from posttrain.algorithm.primitives.objective import Reduction
from posttrain.algorithm.primitives.policy_gradient import SEQUENCE_LOG_RATIO_CAP, sampled_k3_penalty, sequence_log_ratio
from posttrain.errors import TrainingError
from posttrain.model.policy import CausalPolicy
from tests.builders import exact_policy
from tests.unit.algorithm import reference
from tests.unit.algorithm.ragged import (
    EMPTY,
    LOSS_TYPES,
    MASKED,
    TRUNCATED,
    VOCAB,
    Ragged,
    TablePolicy,
    combined,
    distance,
    objective_of,
    ragged,
    table_result,
)

EPSILONS = ((0.2, 0.2), (0.1, 0.28), (-1.0, 0.2), (0.2, -1.0), (-1.0, -1.0))
KL: dict[str, dict[str, object]] = {
    "no-kl": {},
    "kl": {"kl_beta": 0.05},
    "kl-clamped": {"kl_beta": 0.05, "kl_coeff_clamp": 1.0},
}
TOLERANCE = 1e-10
EXACT = 1e-12


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    surrogate: str
    loss_type: str
    level: str
    kl: str
    old: str
    seed: int

    def __str__(self) -> str:
        return f"{self.surrogate}-{self.loss_type}-{self.level}-{self.kl}-{self.old}"

    @property
    def temperature(self) -> float:
        """The sampler's log-probabilities are raw ones; a plain policy gradient knows no temperature."""
        return 1.0 if self.old == "sampler" or self.surrogate == "legacy_pg" else (1.0, 0.7)[self.seed % 2]

    @property
    def shared(self) -> dict[str, object]:
        """Settings under the names that objective and reference share."""
        how: dict[str, object] = {"loss_type": self.loss_type, "epsilon_low": 0.2, "epsilon_high": 0.28, "temperature": self.temperature}
        # the sequence level has no dual clip
        return how | KL[self.kl] | {"lower_bound_ratio": 0.0 if self.level == "sequence" else (3.0, 0.0)[self.seed // 2 % 2]}

    def objective(self):
        own = {"use_rollout_logprobs_for_loss": True} if self.old == "sampler" else {}
        return objective_of(grpo_surrogate=self.surrogate, importance_sampling_level=self.level, **self.shared, **own)

    def expected(self, case: Ragged) -> tuple[float, list[torch.Tensor]]:
        return case.expected(old=self.old, surrogate=self.surrogate, level=self.level, **self.shared)

    def batches(self, case: Ragged, **cut: int):
        return case.batches(old=self.old, anchor=self.kl != "no-kl", **cut)

    def cuts(self, case: Ragged) -> list[dict[str, int]]:
        """By count and by tokens; micro-batches of unequal size need an objective that reports its weight."""
        longest = max(len(sample.prompt.token_ids) + len(sample.completion.token_ids) for sample in case.samples)
        counts = [{"count": n} for n in (8, 4, 2, 1)]
        return counts if self.surrogate == "legacy_pg" else [*counts, *({"tokens": n} for n in (longest, longest + 9, 40))]


GRID = [
    Cell("clipped", *values, seed)
    for seed, values in enumerate(product(LOSS_TYPES, ("token", "sequence"), KL, ("current", "perturbed", "sampler")))
] + [Cell("legacy_pg", "token-mean", "token", "no-kl", "current", seed) for seed in range(100, 104)]


@pytest.mark.parametrize("cell", GRID, ids=str)
def test_every_cell_matches_the_reference_in_every_cut(cell):
    case = ragged(seed=cell.seed, temperature=cell.temperature)
    objective = cell.objective()
    assert objective.reduction is (Reduction.MEAN if cell.surrogate == "legacy_pg" else Reduction.TOKEN_SUM)
    expected, expected_grads = cell.expected(case)
    for cut in cell.cuts(case):
        batches = cell.batches(case, **cut)
        loss, found = table_result(objective, case, batches)
        assert loss == pytest.approx(expected, rel=TOLERANCE), cut
        assert distance(found, expected_grads) <= TOLERANCE, cut


@cache
def gpt2() -> CausalPolicy:
    return exact_policy()


def own_logits(policy: CausalPolicy, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """[T, V] of one sequence alone, from the module's own forward."""
    if not ids:
        return torch.zeros(0, policy.module.config.vocab_size, dtype=torch.float64)
    return policy.module(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]


@cache
def real_case(seed: int, temperature: float) -> tuple[Ragged, list[torch.Tensor]]:
    """A batch around the real policy, and the logits of its sequences with their graph."""
    policy = gpt2()
    with torch.no_grad():
        case = ragged(seed=seed, temperature=temperature, logits_of=lambda prompt, ids: own_logits(policy, prompt, ids))
    return case, [own_logits(policy, sample.prompt.token_ids, sample.completion.token_ids) for sample in case.samples]


@pytest.mark.parametrize("cell", GRID, ids=str)
def test_every_cell_matches_the_reference_on_a_real_policy(cell):
    """Parameter gradients, in one packed row and in padded rows, one of them cut into micro-batches."""
    policy, parameters = gpt2(), list(gpt2().module.parameters())
    case, logits = real_case(cell.seed % 3, cell.temperature)
    expected, to_logits = cell.expected(case)
    used = [i for i, rows in enumerate(logits) if len(rows)]
    expected_grads = torch.autograd.grad([logits[i] for i in used], parameters, [to_logits[i] for i in used], retain_graph=True)
    objective = cell.objective()
    cuts = [{"count": 8}, cell.cuts(case)[-1]]
    for policy.packs, cut in zip((True, False), cuts if cell.seed % 2 else cuts[::-1], strict=True):
        loss, weight = combined(objective, policy, cell.batches(case, **cut))
        found = [parameter.grad / weight for parameter in parameters]
        policy.module.zero_grad()
        assert loss == pytest.approx(expected, rel=TOLERANCE), (policy.packs, cut)
        assert distance(found, expected_grads) <= TOLERANCE, (policy.packs, cut)


def test_the_grid_reaches_every_branch():
    """Both clips, the dual clip and both sides of the KL clamp decide at least one trained token or response."""
    seen: set[tuple[object, ...]] = set()
    for cell in GRID:
        case = ragged(seed=cell.seed, temperature=cell.temperature)
        if cell.surrogate == "legacy_pg" or cell.old == "current":
            continue
        olds = case.perturbed if cell.old == "perturbed" else case.sampled
        for i, rows in enumerate(case.logits):
            ratios: list[float] = []
            for t in range(len(rows)):
                if case.masks[i][t]:
                    logp = reference.token_logprob(rows[t].detach(), case.labels[i][t], cell.temperature).item()
                    ratios.append(logp - olds[i][t])
                    if cell.kl == "kl-clamped":
                        z = case.anchor[i][t] - logp
                        seen.add(("kl", "inside" if abs(z) <= 1 else "above" if z > 0 else "below"))
            if ratios and cell.level == "sequence":
                ratios = [sum(ratios) / len(ratios)]
            for value in ratios:
                ratio, dual = math.exp(value), cell.shared["lower_bound_ratio"]
                side = "low" if ratio < 0.8 else "dual" if dual and ratio > 3 else "high" if ratio > 1.28 else "inside"
                seen.add((cell.level, side, case.advantages[i] > 0))
    sides = set(product(("token", "sequence"), ("low", "high", "inside"), (True, False)))
    assert sides | {("token", "dual", False), ("kl", "inside"), ("kl", "above"), ("kl", "below")} <= seen
    assert len(GRID) >= 60
    for seed in range(5):
        case = ragged(seed=seed)
        assert case.labels[EMPTY] == [] and not any(case.masks[MASKED]) and not any(case.masks[TRUNCATED])
        assert all(any(case.masks[i]) for i in range(8) if i not in (EMPTY, MASKED, TRUNCATED))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("epsilon_low", "epsilon_high"), EPSILONS)
@pytest.mark.parametrize("lower_bound_ratio", [3.0, 0.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_bound_matches_the_reference(loss_type, lower_bound_ratio, epsilon_low, epsilon_high, temperature):
    how = {
        "loss_type": loss_type,
        "lower_bound_ratio": lower_bound_ratio,
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "temperature": temperature,
    }
    case = ragged(temperature=temperature)
    expected, expected_grads = case.expected(old="perturbed", surrogate="clipped", **how)
    loss, found = table_result(objective_of(**how), case, case.batches(old="perturbed"))
    assert loss == pytest.approx(expected, rel=EXACT, abs=EXACT)
    assert distance(found, expected_grads) <= EXACT


# -------------------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("old", ["current", "perturbed", "sampler"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_per_token_match_the_reference(loss_type, old, kl):
    case = ragged(seed=7, per_token=True)
    how = {"loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": 0.2, "lower_bound_ratio": 3.0, "temperature": 1.0, **KL[kl]}
    expected, expected_grads = case.expected(old=old, surrogate="clipped", **how)
    objective = objective_of(use_rollout_logprobs_for_loss=old == "sampler", **how)
    for cut in ({"count": 8}, {"count": 2}, {"count": 1}, {"tokens": 20}):
        loss, found = table_result(objective, case, case.batches(old=old, anchor=kl != "no-kl", **cut))
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert distance(found, expected_grads) <= TOLERANCE


def test_legacy_pg_takes_advantages_per_token():
    case = ragged(seed=7, per_token=True)
    cell = GRID[-1]
    expected, expected_grads = cell.expected(case)
    loss, found = table_result(cell.objective(), case, case.batches())
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    assert distance(found, expected_grads) <= TOLERANCE


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equal_advantages_per_token_are_one_advantage(loss_type):
    case = ragged(seed=3)
    spread = [replace(s, advantage=tuple(s.advantage for _ in s.completion.token_ids)) for s in case.samples]
    objective = objective_of(loss_type=loss_type)
    whole = table_result(objective, case, case.batches(old="perturbed"))
    other = replace(case, samples=spread)
    found = table_result(objective, other, other.batches(old="perturbed"))
    assert found[0] == whole[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], whole[1], strict=True))


def test_the_sequence_level_refuses_advantages_per_token():
    case = ragged(per_token=True)
    objective = objective_of(importance_sampling_level="sequence", lower_bound_ratio=0.0)
    with pytest.raises(TrainingError, match=r"importance_sampling_level=sequence .* per-token advantages"):
        objective.fn(TablePolicy(case), case.batches()[0])


# ---------------------------------------------------------------------------------------------------------- sequence level


@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_both_levels_agree_to_the_last_bit(loss_type, kl):
    case = ragged(seed=5)
    results = [
        table_result(
            objective_of(loss_type=loss_type, importance_sampling_level=level, lower_bound_ratio=0.0, **KL[kl]),
            case,
            case.batches(anchor=kl != "no-kl", count=4),
        )
        for level in ("token", "sequence")
    ]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_both_levels_agree_to_the_last_bit_on_a_real_policy(loss_type):
    policy, results = gpt2(), []
    case, _ = real_case(0, 1.0)
    policy.packs = True
    for level in ("token", "sequence"):
        objective = objective_of(loss_type=loss_type, importance_sampling_level=level, lower_bound_ratio=0.0)
        loss, _ = combined(objective, policy, case.batches())
        results.append((loss, [parameter.grad for parameter in policy.module.parameters()]))
        policy.module.zero_grad()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("epsilons", [(0.2, 0.28), (-1.0, -1.0)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_cap_of_the_response_ratio_binds_from_above_only(loss_type, epsilons):
    """Responses whose mean log-ratio is far above 10 or far below -10, whatever single tokens do."""
    case = ragged(seed=11)
    far = [{0: -30.0, 2: 14.0, 5: 25.0, 6: 11.0, 7: -12.0}.get(i, 0.0) for i in range(8)]
    shifted = [[v - far[i] + 9.0 * (t % 2) for t, v in enumerate(values)] for i, values in enumerate(case.perturbed)]
    case = replace(case, perturbed=shifted)
    how = {
        "loss_type": loss_type,
        "epsilon_low": epsilons[0],
        "epsilon_high": epsilons[1],
        "lower_bound_ratio": 0.0,
        "temperature": 1.0,
    }
    expected, expected_grads = case.expected(old="perturbed", surrogate="clipped", level="sequence", **how)
    objective = objective_of(importance_sampling_level="sequence", **how)
    for cut in ({"count": 8}, {"count": 1}, {"tokens": 25}):
        loss, found = table_result(objective, case, case.batches(old="perturbed", **cut))
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        for rows, wanted in zip(found, expected_grads, strict=True):  # one by one: some are far larger
            assert (rows - wanted).norm() <= TOLERANCE * wanted.norm()
    _, metrics = objective.fn(TablePolicy(case), case.batches(old="perturbed")[0])
    assert metrics["ratio_max"].value == pytest.approx(math.exp(SEQUENCE_LOG_RATIO_CAP), rel=EXACT)


def test_the_cap_belongs_to_the_mean_and_not_to_a_token():
    """Tokens at 12, 0 and (masked) 1000 nats: mean 6, not 5 and not capped. A response at -400 is not bounded at all."""
    logprobs = torch.tensor([0.0, 0.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    values = sequence_log_ratio(
        logprobs,
        old_logprobs=torch.tensor([-12.0, 0.0, -1000.0, 399.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, False, True]),
        sequence=torch.tensor([0, 0, 0, 2]),
        num_sequences=3,
    )
    assert values.tolist() == [6.0, 6.0, 6.0, -400.0]


# ---------------------------------------------------------------------------------------------------------------- KL term


@pytest.mark.parametrize("clamp", [None, 0.5, 1.0, 5.0, 19.5])
def test_the_penalty_keeps_its_value_and_its_gradient_is_linear_beyond_the_clamp(clamp):
    z = [-30.0, -20.5, -19.75, -6.0, -1.25, -0.75, -0.25, 0.0, 0.25, 0.75, 1.25, 4.0, 6.0, 19.75, 20.5, 300.0]
    logprobs = torch.zeros(len(z), dtype=torch.float64, requires_grad=True)
    penalty = sampled_k3_penalty(logprobs, reference_logprobs=torch.tensor(z, dtype=torch.float64), coeff_clamp=clamp)
    (gradient,) = torch.autograd.grad(penalty.losses.sum(), logprobs)
    assert torch.equal(penalty.values, penalty.losses.detach())
    for i, value in enumerate(z):
        held = max(-20.0, min(20.0, value))
        assert penalty.losses[i].item() == pytest.approx(math.exp(held) - held - 1, rel=EXACT, abs=1e-15)
        bounded = value if clamp is None else max(-clamp, min(clamp, value))
        assert gradient[i].item() == pytest.approx(1 - math.exp(bounded) if abs(value) < 20 else 0.0, rel=EXACT, abs=1e-15)
        slow = torch.zeros((), dtype=torch.float64, requires_grad=True)
        loss = reference.k3(slow, value, clamp)
        assert loss.item() == pytest.approx(penalty.losses[i].item(), rel=EXACT, abs=1e-15)
        slope = torch.autograd.grad(loss, slow)[0].item() if loss.requires_grad else 0.0
        assert slope == pytest.approx(gradient[i].item(), rel=EXACT, abs=1e-15)


def test_one_outlier_no_longer_owns_the_gradient():
    """A token nine nats under the reference: the loss is the same, its share of the gradient bounded by exp(c) - 1."""
    case = ragged(seed=2)
    case.anchor[0][0] += 9.0
    losses, norms = [], []
    for clamp in (None, 5.0):
        loss, found = table_result(objective_of(kl_beta=1.0, kl_coeff_clamp=clamp), case, case.batches(anchor=True))
        losses.append(loss)
        norms.append(found[0][0].norm().item())
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    assert norms[1] < norms[0] / 10


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_reference_equal_to_the_policy_adds_nothing(level):
    """z = 0 everywhere: value and gradient of the penalty are exact zeros."""
    case = ragged(seed=4)
    how = {"importance_sampling_level": level, "lower_bound_ratio": 0.0}
    scores = TablePolicy(case).score(case.batches()[0], temperature=1.0, dtype=torch.float64)
    results = [
        table_result(objective_of(**how, kl_beta=beta), case, [case.batches()[0].with_reference_logprobs(scores.logprobs.detach())])
        for beta in (0.0, 0.5)
    ]
    assert results[0][0] == results[1][0]
    assert distance(results[1][1], results[0][1]) <= 1e-15


def test_a_penalty_without_a_reference_is_refused():
    case = ragged()
    with pytest.raises(TrainingError, match="no reference log-probabilities"):
        objective_of(kl_beta=0.1).fn(TablePolicy(case), case.batches()[0])


# ------------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_order_of_the_sequences_does_not_matter(loss_type, level):
    case = ragged()
    objective = objective_of(loss_type=loss_type, importance_sampling_level=level, lower_bound_ratio=0.0, kl_beta=0.1)
    results = [
        table_result(objective, case, case.batches(old="perturbed", anchor=True, chosen=order))
        for order in (range(8), [5, 2, 7, 0, 1, 6, 3, 4])
    ]
    assert results[1][0] == pytest.approx(results[0][0], rel=EXACT)
    assert distance(results[1][1], results[0][1]) <= EXACT


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_have_no_influence(level):
    """Neither their logits nor their labels nor any other policy's log-probabilities reach the loss."""
    case = ragged()

    def poisoned(values: list[list[float]], poison: float) -> list[list[float]]:
        return [[v if m else poison for v, m in zip(*pair, strict=True)] for pair in zip(values, case.masks, strict=True)]

    logits = [
        torch.where(torch.tensor(mask, dtype=torch.bool)[:, None], rows.detach(), rows.detach() + 100.0 * torch.arange(VOCAB))
        for mask, rows in zip(case.masks, case.logits, strict=True)
    ]
    samples = [
        replace(
            s,
            completion=replace(s.completion, token_ids=tuple(i if m else 0 for i, m in zip(s.completion.token_ids, mask, strict=True))),
        )
        for s, mask in zip(case.samples, case.masks, strict=True)
    ]
    changed = replace(
        case,
        logits=[rows.requires_grad_() for rows in logits],
        samples=samples,
        perturbed=poisoned(case.perturbed, -500.0),
        anchor=poisoned(case.anchor, 900.0),
    )
    objective = objective_of(importance_sampling_level=level, lower_bound_ratio=0.0, kl_beta=0.1)
    results = [table_result(objective, one, one.batches(old="perturbed", anchor=True)) for one in (case, changed)]
    assert results[1][0] == pytest.approx(results[0][0], rel=EXACT)
    assert distance(results[1][1], results[0][1]) <= EXACT
    assert all(rows.isfinite().all() for rows in results[1][1])


@pytest.mark.parametrize("how", [{"grpo_surrogate": "legacy_pg"}, {}, {"importance_sampling_level": "sequence"}, {"kl_beta": 0.1}], ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_learn_from_is_a_zero_and_not_a_nan(how, loss_type):
    """Nothing but an empty, a truncated and a masked completion."""
    case = ragged()
    objective = objective_of(loss_type=loss_type, **how)
    for chosen in ([EMPTY], [EMPTY, TRUNCATED, MASKED]):
        batch = case.batches(anchor=True, chosen=chosen)[0]
        loss, metrics = objective.fn(TablePolicy(case), batch)
        loss.backward()
        objective.metric_adapter(metrics)
        assert loss.item() == 0.0
        assert all((rows.grad is None or (rows.grad == 0).all()) for rows in case.logits)
