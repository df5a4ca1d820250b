"""The most likely tokens that the transformers engine records, and their way into a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.data.packer import PolicyBatch, pack, samples_of
from posttrain.model.policy import CausalPolicy
from posttrain.records import RolloutGroup, TopTokens
from tests.builders import engine, requests, tiny_policy, train_groups


def sampled(
    policy: CausalPolicy, *, top_tokens: int, temperature: float = 1.0, group_size: int = 3, max_tokens: int = 10
) -> list[RolloutGroup]:
    asked = requests(policy, prompts=3, group_size=group_size, max_tokens=max_tokens, temperature=temperature)
    return engine(policy).generate([replace(r, sampling=replace(r.sampling, top_tokens=top_tokens)) for r in asked])


def distributions(policy: CausalPolicy, group: RolloutGroup, index: int, temperature: float) -> torch.Tensor:
    """float64 [T, V] log-probabilities of a full forward at every position of a completion."""
    ids = torch.tensor([group.prompt.token_ids + group.completions[index].token_ids])
    with torch.no_grad():
        logits = policy.module(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_top_tokens_are_those_of_a_full_forward(temperature: float) -> None:
    policy = tiny_policy()
    lengths = set()
    for group in sampled(policy, top_tokens=5, temperature=temperature, group_size=6, max_tokens=48):
        for index, completion in enumerate(group.completions):
            top = completion.top
            assert top is not None
            lengths.add(len(completion.token_ids))
            assert top.ids.shape == top.logprobs.shape == (len(completion.token_ids), 5)
            assert top.ids.dtype == np.int32 and top.logprobs.dtype == np.float32
            full = distributions(policy, group, index, temperature)
            best = full.topk(6, -1)
            assert np.allclose(top.logprobs, best.values[:, :5].numpy(), atol=1e-5)
            # the order is certain wherever neighbours are further apart than the two forwards are
            apart = (best.values[:, :-1] - best.values[:, 1:]) > 1e-4
            clear = (apart & torch.cat([torch.ones_like(apart[:, :1]), apart[:, :-1]], 1)).numpy()
            assert clear.mean() > 0.9
            assert np.array_equal(top.ids[clear], best.indices[:, :5].numpy()[clear])
            for position, token in enumerate(completion.token_ids):
                if token in top.ids[position]:
                    own = top.logprobs[position][top.ids[position] == token]
                    assert own.tolist() == pytest.approx([completion.logprobs[position]], abs=1e-6)
    assert len(lengths) > 1, "completions that end early belong to the test"


def test_recording_changes_no_draw() -> None:
    policy = tiny_policy()
    recorded, plain = sampled(policy, top_tokens=4), sampled(policy, top_tokens=0)
    for with_top, without in zip(recorded, plain, strict=True):
        assert [replace(c, top=None) for c in with_top.completions] == list(without.completions)


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert all(c.top is None for group in sampled(tiny_policy(), top_tokens=0) for c in group.completions)


def test_at_most_the_vocabulary_is_recorded() -> None:
    policy = tiny_policy()
    vocabulary = policy.module.get_output_embeddings().weight.shape[0]
    completion = sampled(policy, top_tokens=10_000, max_tokens=2)[0].completions[0]
    assert completion.top is not None and completion.top.ids.shape[1] == vocabulary
    assert sorted(completion.top.ids[0].tolist()) == list(range(vocabulary))
    assert float(np.exp(completion.top.logprobs.astype(np.float64)).sum(1).max()) == pytest.approx(1, abs=1e-5)


def test_requests_with_and_without_them_may_be_mixed() -> None:
    policy = tiny_policy()
    first, second, _ = requests(policy, prompts=3, group_size=2, max_tokens=4)
    with_top, without = engine(policy).generate([replace(first, sampling=replace(first.sampling, top_tokens=3)), second])
    assert all(c.top is not None for c in with_top.completions) and all(c.top is None for c in without.completions)


def batch_of(groups: list[RolloutGroup]) -> PolicyBatch:
    return pack(samples_of(train_groups(groups)), pad_id=0)


def test_the_packer_lines_top_tokens_up_with_the_labels() -> None:
    policy = tiny_policy()
    groups = sampled(policy, top_tokens=5)
    batch = batch_of(groups)
    assert batch.top_ids is not None and batch.top_logprobs is not None
    assert batch.top_ids.dtype == torch.int64 and batch.top_logprobs.dtype == batch.sampled_logprobs.dtype
    tops = [c.top for group in groups for c in group.completions]
    assert batch.top_ids.tolist() == [row for top in tops if top for row in top.ids.tolist()]
    assert batch.top_logprobs.tolist() == [row for top in tops if top for row in top.logprobs.tolist()]
    assert len(batch.top_ids) == len(batch.labels)
    # scored by the trainer on the same weights they are the same numbers
    with torch.no_grad():
        scores = policy.score(batch, temperature=1.0, dtype=torch.float32, top_ids=batch.top_ids)
    assert scores.top_logprobs is not None
    assert torch.allclose(scores.top_logprobs, batch.top_logprobs, atol=1e-5)
    assert torch.allclose(scores.logprobs, batch.sampled_logprobs, atol=1e-5)


def test_a_batch_needs_top_tokens_on_every_completion() -> None:
    policy = tiny_policy()
    assert batch_of(sampled(policy, top_tokens=0)).top_ids is None
    first, *rest = sampled(policy, top_tokens=3)
    bare = RolloutGroup(first.prompt, tuple(replace(c, top=None) for c in first.completions))
    assert batch_of([bare, *rest]).top_ids is None and batch_of([bare, *rest]).top_logprobs is None


def test_a_completion_refuses_top_tokens_of_another_length() -> None:
    completion = sampled(tiny_policy(), top_tokens=3)[0].completions[0]
    assert completion.top is not None
    with pytest.raises(ValueError, match="top tokens of"):
        replace(completion, top=TopTokens(completion.top.ids[1:], completion.top.logprobs[1:]))
