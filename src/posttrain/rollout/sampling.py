"""From logits to tokens: the processed distribution, and draws that depend on a sequence's own seed alone."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.records import SamplingParams

_BLOCK = 256


def uniforms(seed: int, index: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the whole stream of one completion, independent of every other."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index]))).random(count)


def processed_logprobs(logits: torch.Tensor, sampling: SamplingParams, *, seen: torch.Tensor | None) -> torch.Tensor:
    """float32 [B, V] log-probabilities of the distribution that is sampled, in the order engines apply it: repetition
    penalty, temperature, top-k, top-p.

    Args:
        logits: float32 [B, V] at temperature 1.
        seen: bool [B, V] tokens present in prompt or completion; needed with a repetition penalty only.
    """
    if sampling.repetition_penalty != 1.0:
        if seen is None:
            raise ValueError("a repetition penalty needs the tokens seen so far")
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.temperature > 0 and 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if sampling.temperature > 0 and sampling.top_p < 1.0:
        ascending, order = logits.sort(-1)
        mass = ascending.softmax(-1).cumsum(-1)
        drop = mass <= 1.0 - sampling.top_p
        drop[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))
    return torch.log_softmax(logits, -1)


def draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [B] tokens by inversion of the cumulative distribution, one uniform per row.

    Two levels keep it exact and fast: cumulative sums over a large vocabulary in float32 would lose the tail, so blocks are
    summed in float64 first and only the chosen block is resolved.

    Args:
        logprobs: float32 [B, V].
        uniform: float64 [B] in [0, 1).
    """
    rows, vocabulary = logprobs.shape
    padding = -vocabulary % _BLOCK
    probabilities = torch.nn.functional.pad(logprobs.exp(), (0, padding)).view(rows, -1, _BLOCK)
    block_mass = probabilities.sum(-1, dtype=torch.float64)
    cumulative = block_mass.cumsum(-1)
    target = uniform * cumulative[:, -1]
    block = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=cumulative.shape[1] - 1)
    before = cumulative.gather(1, block) - block_mass.gather(1, block)
    inside = probabilities.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(-1)
    offset = torch.searchsorted(inside, target[:, None] - before, right=True)
    # rounding may land past the block's last possible token: take that one
    last = torch.searchsorted(inside, inside[:, -1:].contiguous(), right=False)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]
