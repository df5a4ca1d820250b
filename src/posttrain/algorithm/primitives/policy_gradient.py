"""Pure tensor mathematics of clipped and plain policy gradients.

Shapes: N response tokens, S sequences; every per-token tensor is flat [N] with `sequence` [N] naming the owner of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SEQUENCE_LOG_RATIO_CAP = 10.0
"""Upper bound of a response's mean log-ratio, in nats; beyond it the gradient is zero. There is none from below: the epsilon clip
already zeroes the gradient of a positive advantage far off-policy, and without a dual clip this cap is the only bound on a
negative one."""

KL_LOG_RATIO_BOUND = 20.0
"""Nats beyond which the log-ratio of the KL penalty is clamped, value and gradient alike."""


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """Per-token losses of the clipped surrogate and what the clip did."""

    losses: torch.Tensor
    """[N], connected to the graph."""
    ratios: torch.Tensor
    """[N] importance ratios, detached; at the sequence level every token carries its response's."""
    clipped: torch.Tensor
    """bool [N]: the epsilon clip changed the token's loss."""
    dual_clipped: torch.Tensor
    """bool [N]: the dual clip changed the token's loss."""


def clipped_policy_gradient_loss(
    log_ratios: torch.Tensor,
    *,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    lower_bound_ratio: float,
) -> ClippedLoss:
    """The PPO surrogate (arXiv 1707.06347, eq. 7) with asymmetric bounds (arXiv 2503.14476, eq. 10) and dual clip
    (arXiv 1912.09729, eq. 5), as a loss to minimise.

    With r = exp(log_ratios):
        objective = min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)
        where A < 0 and lower_bound_ratio = c > 0:  objective = max(objective, c A)

    Args:
        log_ratios: [N] of the policy being trained over the old one: per token, or `sequence_log_ratio`.
        advantages: [N], one per token.
        epsilon_low, epsilon_high: a negative value removes the bound of that side.
        lower_bound_ratio: c; 0 disables the dual clip.
    """
    ratios = torch.exp(log_ratios)
    low = 1.0 - epsilon_low if epsilon_low >= 0 else None
    high = 1.0 + epsilon_high if epsilon_high >= 0 else None
    bounded = ratios if low is None and high is None else ratios.clamp(min=low, max=high)
    unclipped_losses, bounded_losses = -ratios * advantages, -bounded * advantages
    losses = torch.maximum(unclipped_losses, bounded_losses)
    clipped = bounded_losses > unclipped_losses
    dual_clipped = torch.zeros_like(clipped)
    if lower_bound_ratio > 0:
        ceiling = -lower_bound_ratio * advantages
        dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    return ClippedLoss(losses, ratios.detach(), clipped, dual_clipped)


def sequence_log_ratio(
    logprobs: torch.Tensor, *, old_logprobs: torch.Tensor, loss_mask: torch.Tensor, sequence: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """The response's mean log-ratio on each of its tokens, in the stop-gradient form of GSPO-token (arXiv 2507.18071, eq. 14).

    With c_t = logprobs and z_i the mean of c_t - old_t over the masked tokens of response i:
        l_t = min(sg[z_i] + (c_t - sg[c_t]), 10)
    The value is z_i on every token and the gradient reaches that token's own log-probability alone, which for one advantage
    per response equals the paper's sequence objective in value, clip decision and parameter gradient.

    Args:
        logprobs: [N], connected to the graph; old_logprobs: [N]; loss_mask: bool [N]; sequence: int64 [N].
    """
    own = logprobs.detach()
    masked = torch.where(loss_mask, own - old_logprobs, torch.zeros_like(own))
    counts = per_sequence_sum(loss_mask.to(own.dtype), sequence, num_sequences).clamp(min=1)
    mean = per_sequence_sum(masked, sequence, num_sequences) / counts
    return (mean[sequence] + (logprobs - own)).clamp(max=SEQUENCE_LOG_RATIO_CAP)


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """Per-token estimates of the divergence from the reference."""

    losses: torch.Tensor
    """[N] k3, connected to the graph through the clamped coefficient."""
    values: torch.Tensor
    """[N] exact k3, detached: what is logged."""


def sampled_k3_penalty(logprobs: torch.Tensor, *, reference_logprobs: torch.Tensor, coeff_clamp: float | None) -> KLPenalty:
    """The GRPO estimator of KL(policy || reference) from sampled tokens (arXiv 2402.03300, eq. 4).

    With z = reference - policy log-probability, clamped to +-20 nats: k3 = exp(z) - z - 1 >= 0. Differentiated through the
    policy's log-probability its coefficient is 1 - exp(z), which is unbounded for z > 0; `coeff_clamp` = c keeps the value and
    gives it the gradient of k3's linear extension beyond |z| = c, so that the coefficient is 1 - exp(clamp(z, -c, c)).

    Args:
        logprobs: [N], connected to the graph; reference_logprobs: [N], constant.
        coeff_clamp: nats in (0, 20); None keeps the exact gradient.
    """
    z = (reference_logprobs - logprobs).clamp(-KL_LOG_RATIO_BOUND, KL_LOG_RATIO_BOUND)
    exact = torch.expm1(z) - z
    if coeff_clamp is None:
        return KLPenalty(exact, exact.detach())
    values = exact.detach()
    slope = -torch.expm1(z.detach().clamp(-coeff_clamp, coeff_clamp))
    inside = (reference_logprobs - logprobs.detach()).abs() < KL_LOG_RATIO_BOUND
    slope = torch.where(inside, slope, torch.zeros_like(slope))
    return KLPenalty(values + slope * (logprobs - logprobs.detach()), values)


def per_sequence_sum(values: torch.Tensor, sequence: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[N] -> [S] sums by owner; differentiable."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add(0, sequence, values)


def reduce_policy_gradient_loss(
    losses: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
    loss_type: str,
    max_response_length: int,
) -> tuple[torch.Tensor, float]:
    """Numerator and weight of a policy-gradient loss; the loss is numerator / weight with a global weight.

    `token-mean`: numerator = sum of masked tokens, weight = masked tokens (DAPO, arXiv 2503.14476, eq. 8).
    The others weigh sequences that keep at least one token, with numerator
    `seq-mean-token-sum`: sum of token sums;
    `seq-mean-token-mean`: sum of token means (GRPO, arXiv 2402.03300, eq. 3);
    `seq-mean-token-sum-fixed`: sum of token sums / max_response_length (Dr-GRPO, arXiv 2503.20783).

    Args:
        losses: [N]; loss_mask: bool [N]; sequence: int64 [N].
    """
    # where, not multiplication: a masked token may hold inf or nan, and 0 * inf is nan
    kept = torch.where(loss_mask, losses, torch.zeros_like(losses))
    if loss_type == "token-mean":
        return kept.sum(), float(loss_mask.sum())
    counts = per_sequence_sum(loss_mask.to(losses.dtype), sequence, num_sequences)
    weight = float((counts > 0).sum())
    if loss_type == "seq-mean-token-mean":
        return (kept / counts.clamp(min=1)[sequence]).sum(), weight
    if loss_type == "seq-mean-token-sum":
        return kept.sum(), weight
    if loss_type == "seq-mean-token-sum-fixed":
        return kept.sum() / max_response_length, weight
    raise ValueError(f"loss_type={loss_type!r} is unknown")
