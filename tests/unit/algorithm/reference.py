"""The GRPO family from the papers, one token at a time in float64.

Slow on purpose, and written without a look at `posttrain.algorithm`: loops and `if` instead of masks, so that it shares no
mistake with the code it checks. Clipping is equation 7 of PPO (arXiv 1707.06347) with the asymmetric bounds of DAPO
(arXiv 2503.14476), the dual clip is arXiv 1912.09729, GRPO and its KL term are arXiv 2402.03300, the fixed divisor is Dr-GRPO
(arXiv 2503.20783) and the sequence level is equation 5 of GSPO (arXiv 2507.18071), differentiated as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Centering:
    """What the sampler said about its own distribution q, and the importance weight f."""

    compose: str
    """`none`, `tis` or `mis`."""
    tis_clip: float
    mis_low: float
    mis_high: float
    sampled: Sequence[Sequence[float]]
    """log q of the labels, T_i per sequence."""
    head_ids: Sequence[Sequence[Sequence[int]]]
    """k most likely tokens at each position."""
    head_logprobs: Sequence[Sequence[Sequence[float]]]
    """Their log q."""

    def weight(self, ratio: float) -> float:
        """f(p / q)."""
        if self.compose == "tis":
            return min(ratio, self.tis_clip)
        if self.compose == "mis":
            return ratio if self.mis_low <= ratio <= self.mis_high else 0.0
        return 1.0


def token_logprob(row: torch.Tensor, label: int, temperature: float) -> torch.Tensor:
    """log softmax(row / temperature)[label]; row is [V]."""
    z = row / temperature
    top = z.detach().max()
    return z[label] - top - torch.log(torch.exp(z - top).sum())


def clipped_objective(
    log_ratio: torch.Tensor, advantage: float, *, epsilon_low: float, epsilon_high: float, lower_bound_ratio: float
) -> torch.Tensor:
    """min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), for A < 0 no less than lower_bound_ratio * A."""
    ratio = torch.exp(log_ratio)
    clipped = ratio
    if epsilon_low >= 0 and ratio.item() < 1 - epsilon_low:
        clipped = torch.full_like(ratio, 1 - epsilon_low)
    if epsilon_high >= 0 and ratio.item() > 1 + epsilon_high:
        clipped = torch.full_like(ratio, 1 + epsilon_high)
    objective = ratio * advantage if (ratio * advantage).item() <= (clipped * advantage).item() else clipped * advantage
    if lower_bound_ratio > 0 and advantage < 0 and objective.item() < lower_bound_ratio * advantage:
        objective = torch.full_like(ratio, lower_bound_ratio * advantage)
    return objective


def response_log_ratio(logps: Sequence[torch.Tensor], olds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean log-ratio of a response. Above 10 nats it is 10, with no slope; below there is no bound."""
    mean = sum((logp - old for logp, old in zip(logps, olds, strict=True)), torch.zeros((), dtype=torch.float64)) / len(logps)
    return torch.full_like(mean, 10.0) if mean.item() > 10.0 else mean


def k3(logp: torch.Tensor, anchor: float, coeff_clamp: float | None) -> torch.Tensor:
    """exp(z) - z - 1 with z = anchor - logp held within 20 nats; beyond |z| = coeff_clamp the value stays and the slope is that of
    the tangent at the bound."""
    z = anchor - logp
    if abs(z.item()) > 20.0:
        z = torch.full_like(z, math.copysign(20.0, z.item()))
    exact = torch.exp(z) - z - 1
    if coeff_clamp is None or abs(z.item()) <= coeff_clamp:
        return exact
    bound = math.copysign(coeff_clamp, z.item())
    tangent = (math.exp(bound) - bound - 1) + (math.exp(bound) - 1) * (z - bound)
    return tangent + (exact.item() - tangent.item())


def centering_term(row: torch.Tensor, temperature: float, head: Sequence[int], head_q: Sequence[float], how: Centering) -> torch.Tensor:
    """Value: sum over the head of (q w - alpha p) log p. Gradient: the expectation of f(p / q) grad log p over the whole
    vocabulary under q, which is the sampler's in the head and proportional to p outside."""
    logp = [token_logprob(row, v, temperature) for v in range(len(row))]
    p = [value.exp().item() for value in logp]
    q = {v: math.exp(value) for v, value in zip(head, head_q, strict=True)}
    p_tail, q_tail = 1.0 - sum(p[v] for v in q), 1.0 - sum(q.values())
    rho = q_tail / p_tail if p_tail > 1e-6 and q_tail > 1e-6 else 1.0
    alpha = rho * how.weight(1.0 / rho)
    value = sum((q[v] * how.weight(p[v] / q[v]) - alpha * p[v]) * logp[v].item() for v in q)
    expectation = torch.zeros((), dtype=torch.float64)
    for v in range(len(row)):
        mass = q[v] if v in q else rho * p[v]
        expectation = expectation + mass * how.weight(p[v] / mass) * logp[v]
    return expectation + (value - expectation.item())


def reference_loss(
    logits: Sequence[torch.Tensor],
    labels: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    advantages: Sequence[float | Sequence[float]],
    old_logprobs: Sequence[Sequence[float]] | None,
    *,
    surrogate: str,
    loss_type: str,
    epsilon_low: float,
    epsilon_high: float,
    lower_bound_ratio: float,
    temperature: float,
    max_tokens: int,
    level: str = "token",
    kl_beta: float = 0.0,
    kl_coeff_clamp: float | None = None,
    anchor_logprobs: Sequence[Sequence[float]] | None = None,
    centering: Centering | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """The loss of a ragged batch of S sequences, and its gradient in the logits.

    Args:
        logits: float64 [T_i, V] per sequence, leaves that require a gradient; T_i may be 0.
        labels, masks: T_i per sequence.
        advantages: S numbers, or T_i of them for a sequence.
        old_logprobs: T_i per sequence of the old policy, which may be the sampler; None: the current policy is the old one.
        surrogate: `clipped` or `legacy_pg`.
        level: `token` or `sequence`.
        anchor_logprobs: T_i per sequence of the frozen reference of the KL term.
    """

    def advantage(i: int, t: int) -> float:
        own = advantages[i]
        return own if isinstance(own, int | float) else own[t]

    if surrogate == "legacy_pg":
        loss = torch.zeros((), dtype=torch.float64)
        for i, rows in enumerate(logits):
            for t in range(len(rows)):
                if masks[i][t]:
                    loss = loss - advantage(i, t) * token_logprob(rows[t], labels[i][t], 1.0)
        return _with_grads(loss / len(logits), logits)
    clip = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "lower_bound_ratio": lower_bound_ratio}
    sequences: list[list[torch.Tensor]] = []
    for i, rows in enumerate(logits):
        kept = [t for t in range(len(rows)) if masks[i][t]]
        if not kept:
            continue
        logps = {t: token_logprob(rows[t], labels[i][t], temperature) for t in kept}
        olds = {t: logps[t].detach() if old_logprobs is None else torch.tensor(old_logprobs[i][t], dtype=torch.float64) for t in kept}
        if level == "sequence":
            # one objective for the response, counted once per token by the reductions that count tokens
            own = advantages[i]
            assert isinstance(own, int | float)
            whole = clipped_objective(response_log_ratio(list(logps.values()), list(olds.values())), own, **clip)
            losses = dict.fromkeys(kept, -whole)
        else:
            losses = {t: -clipped_objective(logps[t] - olds[t], advantage(i, t), **clip) for t in kept}
        for t in kept:
            if centering is not None:
                weight = centering.weight(math.exp(logps[t].item() - centering.sampled[i][t]))
                term = centering_term(rows[t], temperature, centering.head_ids[i][t], centering.head_logprobs[i][t], centering)
                losses[t] = losses[t] * weight + advantage(i, t) * term
            if kl_beta > 0:
                assert anchor_logprobs is not None
                losses[t] = losses[t] + kl_beta * k3(logps[t], anchor_logprobs[i][t], kl_coeff_clamp)
        sequences.append(list(losses.values()))
    sums = [sum(losses, torch.zeros((), dtype=torch.float64)) for losses in sequences]
    if loss_type == "token-mean":
        loss = sum(sums) / sum(len(losses) for losses in sequences)
    elif loss_type == "seq-mean-token-sum":
        loss = sum(sums) / len(sums)
    elif loss_type == "seq-mean-token-mean":
        loss = sum(total / len(losses) for total, losses in zip(sums, sequences, strict=True)) / len(sums)
    elif loss_type == "seq-mean-token-sum-fixed":
        loss = sum(total / max_tokens for total in sums) / len(sums)
    else:
        raise ValueError(loss_type)
    assert isinstance(loss, torch.Tensor)
    return _with_grads(loss, logits)


def _with_grads(loss: torch.Tensor, logits: Sequence[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    if not loss.requires_grad:
        return loss.item(), [torch.zeros_like(rows) for rows in logits]
    grads = torch.autograd.grad(loss, list(logits), allow_unused=True)
    return loss.item(), [torch.zeros_like(rows) if grad is None else grad for rows, grad in zip(logits, grads, strict=True)]
