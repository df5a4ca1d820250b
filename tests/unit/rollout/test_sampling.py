"""Draws and processed distributions against naive computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.records import SamplingParams
from posttrain.rollout.sampling import draw, processed_logprobs, uniforms


def test_inversion_picks_the_token_whose_interval_holds_the_uniform() -> None:
    logprobs = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()[None].expand(6, -1)
    uniform = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.999], dtype=torch.float64)
    assert draw(logprobs, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_inversion_agrees_with_a_float64_cumulative_sum_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(64, 5000, generator=generator) * 3, -1)
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    cumulative = logprobs.double().exp().cumsum(-1)
    expected = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    assert (draw(logprobs, uniform) != expected).sum() <= 1  # float32 probabilities may move one boundary


def test_a_token_without_probability_is_never_drawn() -> None:
    logprobs = torch.full((1000, 700), float("-inf"))
    logprobs[:, 300] = np.log(0.3)
    logprobs[:, 5] = np.log(0.7)
    uniform = torch.cat([torch.linspace(0, 1 - 1e-16, 999, dtype=torch.float64), torch.tensor([1 - 2**-53], dtype=torch.float64)])
    assert set(draw(logprobs, uniform).tolist()) == {5, 300}


def test_draw_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniform = torch.from_numpy(uniforms(7, 0, 40_000))
    drawn = draw(probabilities.log()[None].expand(40_000, -1), uniform)
    frequencies = torch.bincount(drawn, minlength=4) / 40_000
    # four standard errors of the least certain frequency
    assert torch.allclose(frequencies, probabilities, atol=4 * (0.24 / 40_000) ** 0.5)


def test_streams_are_reproducible_and_independent() -> None:
    assert uniforms(1, 2, 5).tolist() == uniforms(1, 2, 9)[:5].tolist()
    assert uniforms(1, 2, 5).tolist() != uniforms(1, 3, 5).tolist()
    assert uniforms(1, 2, 5).tolist() != uniforms(2, 2, 5).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.log_softmax(logits / temperature, -1)
    assert torch.equal(processed_logprobs(logits, SamplingParams(1, temperature), seen=None), expected)


def test_top_k_keeps_the_k_largest() -> None:
    out = processed_logprobs(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), SamplingParams(1, top_k=2), seen=None)
    assert out.isinf().tolist() == [[True, False, False, True]]
    assert out[0, 1:3].exp().sum() == pytest.approx(1.0)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = processed_logprobs(logits, SamplingParams(1, top_p=0.75), seen=None).isfinite().tolist()
    assert kept == [[True, True, False, False]]
    always = processed_logprobs(logits, SamplingParams(1, top_p=1e-9), seen=None).isfinite().tolist()
    assert always == [[True, False, False, False]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    seen = torch.tensor([[True, True, False]])
    out = processed_logprobs(torch.tensor([[2.0, -2.0, 1.0]]), SamplingParams(1, repetition_penalty=2.0), seen=seen)
    assert torch.equal(out, torch.log_softmax(torch.tensor([[1.0, -4.0, 1.0]]), -1))
