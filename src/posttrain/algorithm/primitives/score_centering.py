"""Score centering: the policy gradient corrected to have no drift under the sampler's own distribution.

Sampler q and trainer p are the same weights run by two programs, so q differs from p by rounding, and the gradient estimate
A * grad log p(y), y ~ q, is biased: its expectation over y contains A * sum_v q_v grad log p_v, which vanishes only for q = p.
The sampler reports its k most likely tokens (the head H); outside it q is taken proportional to p. The expectation is then known
and subtracted.

Shapes: N response tokens, k head tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TAIL_FLOOR = 1e-6
"""Tail mass below which 1 - sum(head) is rounding noise: such tails count as equal."""


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """f(r) of the ratio r = p / q: `none` is 1, `tis` min(r, tis_clip), `mis` r where mis_low <= r <= mis_high and 0 elsewhere."""

    compose: str
    tis_clip: float
    mis_low: float
    mis_high: float

    def __call__(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """[...] weights of [...] log-ratios, constant."""
        if self.compose == "none":
            return torch.ones_like(log_ratio)
        ratio = log_ratio.detach().exp()
        if self.compose == "tis":
            return ratio.clamp(max=self.tis_clip)
        kept = (ratio >= self.mis_low) & (ratio <= self.mis_high)
        return torch.where(kept, ratio, torch.zeros_like(ratio))


@dataclass(frozen=True, slots=True)
class ScoreCentering:
    """What centering adds to a surrogate."""

    correction: torch.Tensor
    """[N], connected to the graph; multiplied by the advantage it is added to the loss. Exactly 0 in value and gradient where
    q = p."""
    weights: torch.Tensor
    """[N] f(p / q) of the sampled tokens, constant: scales the surrogate."""
    head_mass: torch.Tensor
    """[N] q mass of the head."""
    tail_ratio: torch.Tensor
    """[N] q mass over p mass outside the head."""
    coefficients: torch.Tensor
    """[N] sum over the head of |q w - alpha p|: the size of the correction."""


def score_centering(
    logprobs: torch.Tensor,
    head_logprobs: torch.Tensor,
    *,
    sampled_logprobs: torch.Tensor,
    sampled_head_logprobs: torch.Tensor,
    weight: ImportanceWeight,
) -> ScoreCentering:
    """The correction sum_{v in H} sg[q_v w_v - alpha p_v] log p_v of every token.

    With w_v = f(p_v / q_v), rho = q_tail / p_tail and alpha = rho f(1 / rho), its gradient is E_q[f(p / q) grad log p] under
    the tail model q_v = rho p_v.

    Args:
        logprobs: [N] log p of the sampled tokens; head_logprobs: [N, k] log p of the head, connected to the graph.
        sampled_logprobs: [N] log q of the sampled tokens; sampled_head_logprobs: [N, k] log q of the head.
    """
    p_log = head_logprobs.detach()
    p, q = p_log.exp(), sampled_head_logprobs.exp()
    p_tail, q_tail = 1.0 - p.sum(-1), 1.0 - q.sum(-1)
    measurable = (p_tail > TAIL_FLOOR) & (q_tail > TAIL_FLOOR)
    ratio = torch.where(measurable, q_tail / p_tail.clamp(min=TAIL_FLOOR), torch.ones_like(p_tail))
    alpha = ratio * weight(-ratio.log())
    coefficients = q * weight(p_log - sampled_head_logprobs) - alpha[:, None] * p
    return ScoreCentering(
        correction=(coefficients * head_logprobs).sum(-1),
        weights=weight(logprobs.detach() - sampled_logprobs),
        head_mass=q.sum(-1),
        tail_ratio=ratio,
        coefficients=coefficients.abs().sum(-1),
    )
