"""Scoring response tokens: layouts, heads, precision."""

from __future__ import annotations

import pytest
import torch

from posttrain.config import Precision
from posttrain.data.packer import pack, samples_of
from posttrain.errors import ModelError
from posttrain.model.native import tiny
from posttrain.model.policy import CausalPolicy
from tests.builders import FP32, exact_policy, ragged_groups, tiny_policy


def scores(policy: CausalPolicy, pack_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch = pack(samples_of(ragged_groups(policy)), pad_id=policy.pad_id, dtype=torch.float64)
    policy.packs = pack_rows
    policy.module.zero_grad()
    out = policy.score(batch, temperature=0.8, dtype=torch.float64)
    (out.logprobs * torch.linspace(-1, 1, len(out.logprobs), dtype=torch.float64)).sum().backward()
    return out.logprobs.detach(), torch.cat([p.grad.flatten().clone() for p in policy.module.parameters()])


def test_sharing_a_prompt_changes_neither_values_nor_gradients() -> None:
    policy = exact_policy()
    shared, shared_gradient = scores(policy, True)
    rows, row_gradient = scores(policy, False)
    assert torch.allclose(shared, rows, rtol=0, atol=1e-13)
    assert float((shared_gradient - row_gradient).norm() / row_gradient.norm()) <= 1e-12


@pytest.mark.parametrize("pack_rows", [True, False])
def test_scores_are_those_of_each_sequence_alone(pack_rows: bool) -> None:
    policy = exact_policy()
    samples = samples_of(ragged_groups(policy))
    batch = pack(samples, pad_id=policy.pad_id)
    policy.packs = pack_rows
    flat = policy.score(batch, temperature=1.0, dtype=torch.float64).logprobs
    expected: list[float] = []
    for sample in samples:
        ids = torch.tensor([sample.prompt.token_ids + sample.completion.token_ids])
        logprobs = torch.log_softmax(policy.module(input_ids=ids).logits[0], -1).detach()
        start = len(sample.prompt.token_ids) - 1
        expected += [float(logprobs[start + t, token]) for t, token in enumerate(sample.completion.token_ids)]
    assert flat.detach().tolist() == pytest.approx(expected, abs=1e-12)


def test_a_batch_of_empty_completions_scores_nothing() -> None:
    policy = tiny_policy()
    samples = [s for s in samples_of(ragged_groups(policy)) if not s.completion.token_ids]
    assert samples
    for policy.packs in (True, False):
        assert policy.score(pack(samples, pad_id=0), temperature=1.0, dtype=torch.float32).logprobs.shape == (0,)


def test_a_head_that_transforms_its_logits_in_an_unknown_way_is_refused() -> None:
    policy = tiny_policy()
    probe = policy.tokenizer.encode("a fixed probe", add_special_tokens=False)
    assert policy.check_head(probe, tolerance=1e-5) <= 1e-5
    forward = policy.module.forward

    def scaled(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out

    policy.module.forward = scaled
    with pytest.raises(ModelError, match="transformed in a way posttrain does not know"):
        policy.check_head(probe, tolerance=1e-3)


def test_known_logit_transforms_are_followed() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokenizer = tiny.byte_tokenizer()
    torch.manual_seed(0)
    for module in (
        Gemma2ForCausalLM(Gemma2Config(vocab_size=288, head_dim=32, final_logit_softcapping=1.5, **sizes)),
        GraniteForCausalLM(GraniteConfig(vocab_size=288, logits_scaling=7.0, **sizes)),
    ):
        module.eval()
        policy = CausalPolicy(tiny.BuiltModel(module, tokenizer, None), precision=FP32)
        assert policy.check_head(list(b"a fixed probe"), tolerance=1e-4) <= 1e-4


def test_sliding_windows_do_not_share_prompts() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    policy = CausalPolicy(tiny.BuiltModel(MistralForCausalLM(config).eval(), tiny.byte_tokenizer(), None), precision=FP32)
    assert not policy.packs
    assert tiny_policy().packs


def test_autocast_keeps_master_weights_and_stays_near_float32() -> None:
    exact = tiny_policy()
    groups = ragged_groups(exact)
    mixed = tiny_policy(precision=Precision("bfloat16", "float32", "float32", True))
    batch = pack(samples_of(groups), pad_id=exact.pad_id)
    reference = exact.score(batch, temperature=1.0, dtype=torch.float32).logprobs
    approximate = mixed.score(batch, temperature=1.0, dtype=torch.float32).logprobs
    approximate.sum().backward()
    gap = float((reference - approximate).detach().abs().max())
    # bf16 keeps 8 bits: logits of a few units move by a few hundredths
    assert 0 < gap < 0.2
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in mixed.module.parameters())


def test_the_tiny_model_is_the_same_everywhere() -> None:
    first, second, other = tiny_policy(), tiny_policy(), tiny_policy(seed=1)
    for (name, a), b, c in zip(first.module.named_parameters(), second.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or not torch.equal(a, c), name
    with pytest.raises(ModelError, match=r"model\.model_config\.layers"):
        tiny.build({"layers": 3}, dtype="float32")
