"""The transformers engine on the policy's own parameters."""

from __future__ import annotations

import pytest
import torch

from posttrain.config import HFRolloutConfig
from posttrain.errors import RolloutError
from posttrain.records import RolloutRequest, SamplingParams
from posttrain.rollout.hf_engine import HFEngine
from tests.builders import engine, prompt, requests, tiny_policy


def test_recorded_logprobs_are_those_of_a_full_forward() -> None:
    policy = tiny_policy()
    for temperature in (1.0, 0.6):
        groups = engine(policy).generate(requests(policy, prompts=3, group_size=3, max_tokens=12, temperature=temperature))
        for group in groups:
            for completion in group.completions:
                ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
                logits = policy.module(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1]
                naive = torch.log_softmax(logits.double() / temperature, -1)
                expected = naive.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_tokens_depend_on_the_request_alone() -> None:
    policy = tiny_policy()
    all_requests = requests(policy, prompts=4, group_size=3, max_tokens=10)
    together = engine(policy).generate(all_requests)
    alone = [engine(policy).generate([request])[0] for request in all_requests]
    in_pieces = engine(policy, max_batch=5).generate(all_requests)
    tokens = [[c.token_ids for c in group.completions] for group in together]
    assert tokens == [[c.token_ids for c in group.completions] for group in alone]
    assert tokens == [[c.token_ids for c in group.completions] for group in in_pieces]
    assert len({c for group in tokens for c in group}) > 6


def test_greedy_equals_the_arg_max_of_full_forwards() -> None:
    policy = tiny_policy()
    request = requests(policy, prompts=2, group_size=1, max_tokens=10, temperature=0.0)[1]
    (group,) = engine(policy).generate([request])
    ids = list(request.prompt.token_ids)
    for token in group.completions[0].token_ids:
        expected = int(policy.module(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        assert token == expected
        ids.append(token)


def test_finish_reasons_and_the_end_token() -> None:
    policy = tiny_policy()
    (group,) = engine(policy).generate([RolloutRequest(prompt(policy, 0, "hello"), 64, SamplingParams(40), seed=3)])
    reasons = {c.finish_reason for c in group.completions}
    assert reasons == {"stop", "length"}
    for completion in group.completions:
        ended = completion.token_ids[-1] in policy.eos_ids
        assert ended == (completion.finish_reason == "stop")
        assert not any(token in policy.eos_ids for token in completion.token_ids[:-1])
        assert len(completion.token_ids) == 40 or ended
        assert "<|end|>" not in completion.text


def test_nothing_is_generated_before_a_version_is_committed() -> None:
    policy = tiny_policy()
    fresh = HFEngine(HFRolloutConfig(), policy=policy)
    with pytest.raises(RolloutError, match="before a weight version was committed"):
        fresh.generate(requests(policy, prompts=1, group_size=1, max_tokens=2))
    fresh.commit(7)
    (group,) = fresh.generate(requests(policy, prompts=1, group_size=1, max_tokens=2))
    assert group.completions[0].weight_version == 7


def test_a_prompt_beyond_the_context_is_refused_with_the_remedy() -> None:
    policy = tiny_policy(max_position_embeddings=32)
    with pytest.raises(RolloutError, match=r"30 tokens.*context of 32.*rl\.data\.max_prompt_tokens=28"):
        engine(policy).generate([RolloutRequest(prompt(policy, 0, "x" * 30), 1, SamplingParams(4), seed=0)])


def test_repetition_penalty_reaches_prompt_and_completion() -> None:
    policy = tiny_policy()
    request = RolloutRequest(prompt(policy, 0, "abc"), 1, SamplingParams(30, temperature=0.0, repetition_penalty=1e6), seed=0)
    (group,) = engine(policy).generate([request])
    ids = group.completions[0].token_ids
    positive = [t for t in ids if t in request.prompt.token_ids]
    assert len(set(ids)) == len(ids) and not positive


def test_ignore_eos_samples_on_to_the_budget() -> None:
    policy = tiny_policy()
    request = RolloutRequest(prompt(policy, 0, "hello"), 64, SamplingParams(40, ignore_eos=True), seed=3)
    (group,) = engine(policy).generate([request])
    assert all(len(c.token_ids) == 40 and c.finish_reason == "length" for c in group.completions)
    assert any(token in policy.eos_ids for c in group.completions for token in c.token_ids[:-1])
