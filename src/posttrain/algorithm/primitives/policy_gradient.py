"""Pure tensor mathematics of clipped and plain policy gradients.

Shapes: N response tokens, S sequences; every per-token tensor is flat [N] with `sequence` [N] naming the owner of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """Per-token losses of the clipped surrogate and what the clip did."""

    losses: torch.Tensor
    """[N], connected to the graph."""
    ratios: torch.Tensor
    """[N] importance ratios, detached."""
    clipped: torch.Tensor
    """bool [N]: the epsilon clip changed the token's loss."""
    dual_clipped: torch.Tensor
    """bool [N]: the dual clip changed the token's loss."""


def clipped_policy_gradient_loss(
    logprobs: torch.Tensor,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    lower_bound_ratio: float,
) -> ClippedLoss:
    """The PPO surrogate (arXiv 1707.06347, eq. 7) with asymmetric bounds (arXiv 2503.14476, eq. 10) and dual clip
    (arXiv 1912.09729, eq. 5), as a loss to minimise.

    With r = exp(logprobs - old_logprobs):
        objective = min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)
        where A < 0 and lower_bound_ratio = c > 0:  objective = max(objective, c A)

    Args:
        logprobs: [N] of the policy being trained.
        old_logprobs: [N], constant; equal to `logprobs` on-policy.
        advantages: [N], one per token.
        epsilon_low, epsilon_high: a negative value removes the bound of that side.
        lower_bound_ratio: c; 0 disables the dual clip.
    """
    ratios = torch.exp(logprobs - old_logprobs)
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
