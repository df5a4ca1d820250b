"""Score centering against the slow reference, and against itself switched off where sampler and trainer are one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.algorithm.primitives.score_centering import ImportanceWeight, score_centering
from posttrain.data.packer import PolicyBatch, pack, samples_of
from posttrain.errors import TrainingError
from posttrain.model.policy import CausalPolicy
from posttrain.records import Sum
from posttrain.trainer.recorder import ScoreRecorder
from tests.builders import ragged_groups, tiny_policy
from tests.unit.algorithm.ragged import LOSS_TYPES, TablePolicy, combined, distance, objective_of, ragged, table_result

COMPOSE = ("none", "tis", "mis")
TOLERANCE = 1e-10


@pytest.mark.parametrize(("per_token", "kl"), [(False, {}), (True, {"kl_beta": 0.05, "kl_coeff_clamp": 1.0})], ids=["scalar", "per-token"])
@pytest.mark.parametrize("compose", COMPOSE)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_weight_matches_the_reference_in_every_cut(loss_type, compose, per_token, kl):
    case = ragged(seed=LOSS_TYPES.index(loss_type) + 20, temperature=0.8, per_token=per_token)
    how = {"loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": 0.2, "lower_bound_ratio": 3.0, "temperature": 0.8, **kl}
    expected, expected_grads = case.expected(surrogate="clipped", centering=compose, **how)
    objective = objective_of(centering=compose, **how)
    for cut in ({"count": 8}, {"count": 4}, {"count": 2}, {"count": 1}, {"tokens": 20}):
        loss, found = table_result(objective, case, case.batches(anchor=bool(kl), **cut))
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert distance(found, expected_grads) <= TOLERANCE


@pytest.mark.parametrize("compose", ["tis", "mis"])
def test_the_batches_above_reach_both_sides_of_every_weight(compose):
    case = ragged(seed=20, temperature=0.8)
    _, metrics = objective_of(centering=compose, temperature=0.8).fn(TablePolicy(case), case.batches()[0])
    batch, weight = case.batches()[0], ImportanceWeight(compose, 1.5, 0.6, 2.0)
    logprobs = TablePolicy(case).score(batch, temperature=0.8, dtype=torch.float64).logprobs.detach()
    kept = weight(logprobs - batch.sampled_logprobs)[batch.loss_mask]
    assert metrics["sc_weight_mean"].value == pytest.approx(float(kept.mean()), rel=1e-12)
    if compose == "tis":
        assert bool((kept == 1.5).any()) and bool((kept < 1.5).any())
    else:
        assert bool((kept == 0).any()) and bool((kept > 0).any())


@pytest.mark.parametrize("compose", COMPOSE)
def test_the_expected_gradient_under_the_sampler_has_no_drift(compose):
    """Averaged over every label with the sampler's probabilities, surrogate and correction cancel, where outside the head the
    sampler really is proportional to the trainer."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=draw, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    head = logp.detach().topk(5).indices
    q_log = logp.detach().clone()
    q_log[head] += 0.4 * torch.randn(5, generator=draw, dtype=torch.float64)
    q_log -= q_log.logsumexp(0)
    weight = ImportanceWeight(compose, 1.1, 0.9, 1.2)
    total = torch.zeros((), dtype=torch.float64)
    for label in range(12):
        centred = score_centering(
            logp[label][None],
            logp[head][None],
            sampled_logprobs=q_log[label][None],
            sampled_head_logprobs=q_log[head][None],
            weight=weight,
        )
        total = total + q_log[label].exp() * (-centred.weights * logp[label] + centred.correction).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    assert float(gradient.norm()) <= 1e-14


@pytest.mark.parametrize("compose", COMPOSE)
def test_a_head_of_the_whole_vocabulary_leaves_no_tail(compose):
    """1 - sum(head) is rounding noise then: nothing divides by it, whatever its sign."""
    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(50, 8, generator=draw)).requires_grad_()
    logp = torch.log_softmax(logits, -1)
    q_log = torch.log_softmax(logits.detach() + 0.1 * torch.randn(50, 8, generator=draw), -1)
    weight = ImportanceWeight(compose, 2.0, 0.5, 5.0)
    centred = score_centering(logp[:, 0], logp, sampled_logprobs=q_log[:, 0], sampled_head_logprobs=q_log, weight=weight)
    assert torch.equal(centred.tail_ratio, torch.ones(50))
    (gradient,) = torch.autograd.grad(centred.correction.sum(), logits)
    mass = q_log.exp() * weight(logp.detach() - q_log)
    expected = mass - mass.sum(-1, keepdim=True) * logp.detach().exp()
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- one distribution


def identical(policy: CausalPolicy, temperature: float, k: int) -> PolicyBatch:
    """A batch whose sampler is the trainer itself, to the last bit."""
    batch = pack(samples_of(ragged_groups(policy)), pad_id=policy.pad_id)
    with torch.no_grad():
        vocabulary = torch.arange(policy.module.config.vocab_size)[None].expand(len(batch.labels), -1)
        everything = policy.score(batch, temperature=temperature, dtype=torch.float32, top_ids=vocabulary)
        assert everything.top_logprobs is not None
        top_ids = everything.top_logprobs.topk(k, -1).indices
        scores = policy.score(batch, temperature=temperature, dtype=torch.float32, top_ids=top_ids)
    mask = torch.rand(len(batch.labels), generator=torch.Generator().manual_seed(3)) < 0.8
    return replace(batch, sampled_logprobs=scores.logprobs, top_ids=top_ids, top_logprobs=scores.top_logprobs, loss_mask=mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("compose", COMPOSE)
@pytest.mark.parametrize(("pack_rows", "through_trainer"), [(True, True), (False, False)], ids=["packed-recorder", "padded-direct"])
def test_with_one_distribution_nothing_changes_to_the_last_bit(loss_type, compose, pack_rows, through_trainer):
    """Loss and gradient in float32 equal those of centering switched off, and the correction is an exact zero."""
    policy = tiny_policy()
    policy.packs = policy.packs and pack_rows
    batch = identical(policy, 0.9, 16)
    results = []
    for centering in (None, compose):
        objective = objective_of(centering=centering, loss_type=loss_type, temperature=0.9, logprob_dtype="float32")
        if through_trainer:
            recorder = ScoreRecorder(policy)
            loss, metrics = objective.fn(recorder, batch)
            assert recorder.backward(loss)
        else:
            loss, metrics = objective.fn(policy, batch)
            loss.backward()
        results.append((loss.detach(), [parameter.grad for parameter in policy.module.parameters()]))
        policy.module.zero_grad()
        if centering is not None:
            assert metrics["sc_correction_abs"].value == 0.0
            assert metrics["sc_weight_mean"].value == 1.0
            assert metrics["sc_tail_ratio_absdev"].value == 0.0
            assert metrics["sc_reweighted_frac"].value == 0.0
    assert torch.equal(results[0][0], results[1][0])
    assert any(bool(gradient.any()) for gradient in results[0][1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_different_sampler_does_change_the_gradient():
    """The other half of the test above: it would also pass if centering did nothing."""
    policy = tiny_policy()
    batch = identical(policy, 1.0, 16)
    assert batch.top_logprobs is not None
    noise = 0.05 * torch.randn(batch.top_logprobs.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, top_logprobs=batch.top_logprobs + noise)
    gradients = []
    for centering in (None, "none"):
        combined(objective_of(centering=centering, logprob_dtype="float32"), policy, [batch])
        gradients.append([parameter.grad for parameter in policy.module.parameters()])
        policy.module.zero_grad()
    assert distance(gradients[1], gradients[0]) > 1e-3


def test_centering_without_a_recorded_head_is_refused():
    case = ragged()
    batch = replace(case.batches()[0], top_ids=None, top_logprobs=None)
    with pytest.raises(TrainingError, match="recorded no head"):
        objective_of(centering="none").fn(TablePolicy(case), batch)


def test_a_batch_without_tokens_is_a_zero():
    case = ragged()
    loss, metrics = objective_of(centering="tis").fn(TablePolicy(case), case.batches(chosen=[1])[0])
    assert loss.item() == 0.0
    weight = metrics["objective_weight_sum"]
    assert isinstance(weight, Sum) and weight.total == 0.0
