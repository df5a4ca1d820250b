"""The chunked head with several labels per row against log_softmax and gather, in float64."""

from __future__ import annotations

import pytest
import torch

from posttrain.model.head import chunked_token_logprobs

N, H, V, K = 13, 6, 53, 5


def naive(hidden, weight, labels, *, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    """[N, K] from all logits at once."""
    logits = hidden @ weight.T
    logits = logit_scale * (logits if bias is None else logits + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, labels)


def operands(*, bias=True):
    """Hidden states, weight, bias, labels and an incoming gradient. Row 2 names one token five times, rows 3 and 7 have no
    gradient, row 4 one on its first label only and row 5 one that cancels."""
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((N, H), (V, H), (V,))]
    labels = torch.stack([torch.randperm(V, generator=draw)[:K] for _ in range(N)])
    labels[0, :2] = torch.tensor([0, V - 1])
    labels[2] = 17
    upstream = torch.randn(N, K, generator=draw, dtype=torch.float64)
    upstream[[3, 7]] = 0
    upstream[4, 1:] = 0
    upstream[5] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0])
    return leaves[0], leaves[1], leaves[2] if bias else None, labels, upstream


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("temperature", "logit_scale"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.25)])
@pytest.mark.parametrize(("tokens", "vocab"), [(0, 0), (4, 9), (1, 53)])
def test_values_and_gradients_match_log_softmax(bias, softcap, temperature, logit_scale, tokens, vocab):
    hidden, weight, offset, labels, upstream = operands(bias=bias)
    how = {"bias": offset, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    logprobs, entropy = chunked_token_logprobs(hidden, weight, labels, **how, dtype=torch.float64, chunk_tokens=tokens, chunk_vocab=vocab)
    expected = naive(hidden, weight, labels, **how)
    assert logprobs.shape == (N, K) and entropy.shape == (N,)
    assert relative(logprobs, expected) <= 1e-12
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    found, wanted = (torch.autograd.grad(value, leaves, upstream) for value in (logprobs, expected))
    for actual, reference in zip(found, wanted, strict=True):
        assert relative(actual, reference) <= 1e-12
    assert torch.equal(found[0][[3, 7]], torch.zeros(2, H, dtype=torch.float64))
    for row in range(N):  # one by one, so that no row hides behind the others
        assert (found[0][row] - wanted[0][row]).norm() <= 1e-12 * wanted[0].norm()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_gradient_on_the_first_label_alone_is_that_of_a_single_label(softcap):
    """To the last bit in float32: further labels that carry no gradient must not change a rounding."""
    hidden, weight, bias, labels, upstream = operands()
    leaves = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight, bias)]
    how = {"bias": leaves[2], "softcap": softcap, "temperature": 0.9, "chunk_tokens": 4, "chunk_vocab": 16}
    single, _ = chunked_token_logprobs(leaves[0], leaves[1], labels[:, 0], **how)
    several, _ = chunked_token_logprobs(leaves[0], leaves[1], labels, **how)
    assert torch.equal(several[:, 0], single)
    first = torch.zeros(N, K)
    first[:, 0] = upstream[:, 0]
    found = torch.autograd.grad(several, leaves, first)
    wanted = torch.autograd.grad(single, leaves, first[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_no_gradient_at_all_and_no_rows():
    hidden, weight, bias, labels, _ = operands()
    logprobs, _ = chunked_token_logprobs(hidden, weight, labels, bias=bias, dtype=torch.float64)
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(logprobs, (hidden, weight, bias), torch.zeros(N, K, dtype=torch.float64)))
    none, entropy = chunked_token_logprobs(hidden[:0], weight, labels[:0], bias=bias, dtype=torch.float64)
    assert none.shape == (0, K) and entropy.shape == (0,)
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(none.sum(), (hidden, weight, bias)))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    hidden, weight, bias, _, _ = operands()
    small = tuple(leaf.detach().requires_grad_() for leaf in (hidden[:4, :2], weight[:7, :2], bias[:7]))
    labels = torch.tensor([[0, 6], [6, 6], [3, 2], [5, 0]])

    def logprobs(hidden, weight, bias):
        how = {"bias": bias, "temperature": 0.8, "softcap": softcap}
        return chunked_token_logprobs(hidden, weight, labels, **how, dtype=torch.float64, chunk_tokens=3, chunk_vocab=5)[0]

    assert torch.autograd.gradcheck(logprobs, small)
