"""The chunked head against the plain one: log_softmax of the whole [N, V] logits, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from posttrain.errors import ModelError
from posttrain.model.head import chunked_token_logprobs

N, H, V = 11, 6, 53


def naive(hidden, weight, labels, *, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    """(logprobs, entropy) from all logits at once."""
    logits = hidden @ weight.T
    logits = logit_scale * (logits if bias is None else logits + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach()


def operands(*, dtype=torch.float64, bias=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=draw, dtype=torch.float64)
    weight = torch.randn(V, H, generator=draw, dtype=torch.float64)
    offset = torch.randn(V, generator=draw, dtype=torch.float64) if bias else None
    labels = torch.randint(V, (N,), generator=draw)
    labels[0], labels[1] = 0, V - 1
    upstream = torch.randn(N, generator=draw, dtype=torch.float64)
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (hidden, weight, offset)]
    return *leaves, labels, upstream.to(dtype)


def grads_of(logprobs, upstream, *leaves):
    return torch.autograd.grad(logprobs, [leaf for leaf in leaves if leaf is not None], upstream.to(logprobs.dtype))


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("temperature", "logit_scale"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.25)])
@pytest.mark.parametrize(("tokens", "vocab"), [(0, 0), (4, 9)])
def test_matches_log_softmax_in_float64(bias, softcap, temperature, logit_scale, tokens, vocab):
    hidden, weight, offset, labels, upstream = operands(bias=bias)
    how = {"bias": offset, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    logprobs, entropy = chunked_token_logprobs(hidden, weight, labels, **how, dtype=torch.float64, chunk_tokens=tokens, chunk_vocab=vocab)
    expected, expected_entropy = naive(hidden, weight, labels, **how)
    assert logprobs.dtype == torch.float64
    assert entropy.dtype == torch.float32
    assert not entropy.requires_grad
    assert relative(logprobs, expected) <= 1e-12
    assert relative(entropy, expected_entropy) <= 1e-7
    leaves = (hidden, weight, offset)
    for actual, reference in zip(grads_of(logprobs, upstream, *leaves), grads_of(expected, upstream, *leaves), strict=True):
        assert relative(actual, reference) <= 1e-12


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    hidden, weight, bias, _, _ = operands()
    small = tuple(leaf.detach().requires_grad_() for leaf in (hidden[:4, :2], weight[:7, :2], bias[:7]))

    def logprobs(hidden, weight, bias):
        how = {"bias": bias, "temperature": 0.8, "softcap": softcap}
        labels = torch.tensor([0, 6, 3, 3])
        return chunked_token_logprobs(hidden, weight, labels, **how, dtype=torch.float64, chunk_tokens=3, chunk_vocab=5)[0]

    assert torch.autograd.gradcheck(logprobs, small)


@pytest.mark.parametrize(("tokens", "vocab"), list(product([1, 3, 7, N, N + 5], [1, 16, V, V + 1])))
def test_tiling_changes_only_the_rounding(tokens, vocab):
    hidden, weight, bias, labels, upstream = operands()
    whole = chunked_token_logprobs(hidden, weight, labels, bias=bias, dtype=torch.float64, chunk_tokens=N, chunk_vocab=V)
    tiled = chunked_token_logprobs(hidden, weight, labels, bias=bias, dtype=torch.float64, chunk_tokens=tokens, chunk_vocab=vocab)
    assert relative(tiled[0], whole[0]) <= 1e-14
    assert relative(tiled[1], whole[1]) <= 1e-7
    leaves = (hidden, weight, bias)
    for actual, reference in zip(grads_of(tiled[0], upstream, *leaves), grads_of(whole[0], upstream, *leaves), strict=True):
        assert relative(actual, reference) <= 1e-14


def test_large_logits_neither_overflow_nor_lose_the_label():
    hidden, weight, _, labels, upstream = operands(bias=False)
    hidden = (hidden.detach() * 1e4).float().requires_grad_()
    weight = weight.detach().float().requires_grad_()
    logprobs, entropy = chunked_token_logprobs(hidden, weight, labels, chunk_vocab=8)
    expected, expected_entropy = naive(hidden.double(), weight.double(), labels)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5 * 1e4)
    torch.testing.assert_close(entropy, expected_entropy.float(), rtol=0, atol=1e-4)
    assert all(grad.isfinite().all() for grad in grads_of(logprobs, upstream, hidden, weight))


def test_float64_softmax_of_float32_operands():
    """`dtype` is the softmax's own: the products stay in float32 and the gradients come back in the operands' dtypes."""
    hidden, weight, bias, labels, upstream = operands(dtype=torch.float32)
    logprobs, _ = chunked_token_logprobs(hidden, weight, labels, bias=bias, dtype=torch.float64, chunk_vocab=16)
    expected, _ = naive(hidden.double(), weight.double(), labels, bias=bias.double())
    assert logprobs.dtype == torch.float64
    assert relative(logprobs, expected) <= 1e-6
    leaves = (hidden, weight, bias)
    for actual, reference in zip(grads_of(logprobs, upstream, *leaves), grads_of(expected, upstream, *leaves), strict=True):
        assert actual.dtype == torch.float32
        assert relative(actual, reference) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logprobs_are_rounded_once(dtype):
    hidden, weight, _, labels, _ = operands(dtype=torch.float32, bias=False)
    exact, _ = chunked_token_logprobs(hidden, weight, labels)
    rounded, _ = chunked_token_logprobs(hidden, weight, labels, dtype=dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("how", ["compute_dtype", "autocast", "parameters"])
def test_bfloat16_compute_stays_within_operand_rounding(how):
    """Rounding each operand to bfloat16 moves every product h_k w_k by at most about 2 * 2^-9 of itself, and nothing else rounds:
    |z - z'| <= 2^-8 * (1 + 2^-9) * max_v sum_k |h_k w_vk|, and a log-probability moves at most twice as far."""
    hidden, weight, _, labels, upstream = operands(dtype=torch.float32, bias=False)
    exact, exact_entropy = naive(hidden.double(), weight.double(), labels)
    exact_grads = grads_of(exact, upstream, hidden, weight)
    if how == "parameters":
        hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        logprobs, entropy = chunked_token_logprobs(
            hidden, weight, labels, compute_dtype=torch.bfloat16 if how == "compute_dtype" else None, chunk_tokens=4, chunk_vocab=16
        )
    assert logprobs.dtype == torch.float32
    bound = 2 * 2**-8 * (1 + 2**-9) * (hidden.detach().double().abs() @ weight.detach().double().abs().T).amax(1)
    error = (logprobs.double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-5, "nothing was rounded to bfloat16"
    torch.testing.assert_close(entropy, exact_entropy.float(), rtol=0.05, atol=0.05)
    for actual, reference, leaf in zip(grads_of(logprobs, upstream, hidden, weight), exact_grads, (hidden, weight), strict=True):
        assert actual.dtype == leaf.dtype
        assert relative(actual, reference) <= 0.02


def test_bfloat16_rounds_operands_and_nothing_else():
    """The same as float32 arithmetic on operands that were rounded beforehand, forward and in the hidden gradient."""
    hidden, weight, _, labels, upstream = operands(dtype=torch.float32, bias=False)
    logprobs, _ = chunked_token_logprobs(hidden, weight, labels, compute_dtype=torch.bfloat16)
    h, w = (t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight))
    expected, _ = naive(h, w, labels)
    torch.testing.assert_close(logprobs.double(), expected, rtol=2e-6, atol=2e-6)
    actual, reference = grads_of(logprobs, upstream, hidden)[0], grads_of(expected, upstream, h)[0]
    assert relative(actual, reference) <= 2e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_without_a_gradient_are_skipped_exactly(softcap):
    hidden, weight, bias, labels, upstream = operands()
    upstream[[0, 3, 4, 10]] = 0.0
    kept = upstream != 0
    how = {"bias": bias, "dtype": torch.float64, "chunk_tokens": 4, "chunk_vocab": 16, "softcap": softcap}
    leaves = (hidden, weight, bias)
    skipped = grads_of(chunked_token_logprobs(hidden, weight, labels, **how)[0], upstream, *leaves)
    expected = grads_of(naive(hidden, weight, labels, bias=bias, softcap=softcap)[0], upstream, *leaves)
    assert (skipped[0][~kept] == 0).all()
    for actual, reference in zip(skipped, expected, strict=True):
        assert relative(actual, reference) <= 1e-12
    nothing = grads_of(chunked_token_logprobs(hidden, weight, labels, **how)[0], torch.zeros_like(upstream), *leaves)
    assert all((grad == 0).all() and grad.shape == leaf.shape for grad, leaf in zip(nothing, leaves, strict=True))


def test_a_nonfinite_incoming_gradient_is_not_skipped():
    hidden, weight, _, labels, upstream = operands(bias=False)
    upstream[2] = torch.nan
    grad_hidden, grad_weight = grads_of(chunked_token_logprobs(hidden, weight, labels)[0], upstream, hidden, weight)
    assert grad_hidden[2].isnan().all()
    assert grad_weight.isnan().all()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_operands_get_no_gradient(frozen):
    hidden, weight, bias, labels, upstream = operands()
    expected = dict(
        zip(
            ("hidden", "weight", "bias"), grads_of(naive(hidden, weight, labels, bias=bias)[0], upstream, hidden, weight, bias), strict=True
        )
    )
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves[frozen].requires_grad_(False)
    logprobs, _ = chunked_token_logprobs(hidden, weight, labels, bias=bias, dtype=torch.float64, chunk_tokens=4, chunk_vocab=16)
    logprobs.backward(upstream)
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert relative(leaf.grad, expected[name]) <= 1e-12


def test_no_tokens():
    hidden, weight, bias, labels, _ = operands()
    empty = hidden.detach()[:0].requires_grad_()
    logprobs, entropy = chunked_token_logprobs(empty, weight, labels[:0], bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, H)
    assert weight.grad is not None and (weight.grad == 0).all()
    assert bias.grad is not None and (bias.grad == 0).all()


def test_a_tied_embedding_collects_both_gradients():
    _, weight, _, labels, upstream = operands(bias=False)
    ids = labels.flip(0)

    def run(score):
        weight.grad = None
        score(torch.nn.functional.embedding(ids, weight).sin(), weight, labels)[0].backward(upstream)
        return weight.grad.clone()

    actual = run(lambda *operands: chunked_token_logprobs(*operands, dtype=torch.float64, chunk_tokens=3, chunk_vocab=16))
    assert relative(actual, run(naive)) <= 1e-12


def test_no_graph_without_grad():
    hidden, weight, _, labels, _ = operands(bias=False)
    with torch.no_grad():
        logprobs, _ = chunked_token_logprobs(hidden, weight, labels, dtype=torch.float64)
    assert not logprobs.requires_grad
    assert relative(logprobs, naive(hidden, weight, labels)[0]) <= 1e-12


def test_the_backward_cannot_be_differentiated_silently():
    hidden, weight, _, labels, upstream = operands(bias=False)
    logprobs, _ = chunked_token_logprobs(hidden, weight, labels, dtype=torch.float64)
    (grad,) = torch.autograd.grad(logprobs, hidden, upstream.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.full((N,), V)}, r"labels must be in \[0, 53\).*got 53..53"),
        ({"labels": torch.full((N,), -1)}, r"labels must be in \[0, 53\).*got -1..-1"),
        ({"labels": torch.zeros(N - 1, dtype=torch.int64)}, r"hidden \[11, 6\], weight \[53, 6\], labels \[10\]"),
        ({"weight": torch.zeros(V, H + 1)}, r"weight \[53, 7\]"),
        ({"bias": torch.zeros(V + 1)}, r"bias \[54\]"),
        ({"temperature": 0.0}, r"temperature=0.0 must be > 0"),
        ({"softcap": -1.0}, r"softcap=-1.0 must be > 0"),
    ],
)
def test_rejects_operands_that_do_not_fit(change, message):
    hidden, weight, _, labels, _ = operands(dtype=torch.float32, bias=False)
    with pytest.raises(ModelError, match=message):
        chunked_token_logprobs(**{"hidden": hidden, "weight": weight, "labels": labels, **change})
