"""The GRPO family from the papers, one token at a time in float64.

Slow on purpose, and written without a look at `posttrain.algorithm`: loops and `if` instead of masks, so that it shares no
mistake with the code it checks. Clipping is equation 7 of PPO (arXiv 1707.06347) with the asymmetric bounds of DAPO
(arXiv 2503.14476), the dual clip is arXiv 1912.09729, GRPO is arXiv 2402.03300 and the fixed divisor is Dr-GRPO
(arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def token_logprob(row: torch.Tensor, label: int, temperature: float) -> torch.Tensor:
    """log softmax(row / temperature)[label]; row is [V]."""
    z = row / temperature
    top = z.detach().max()
    return z[label] - top - torch.log(torch.exp(z - top).sum())


def token_objective(
    logp: torch.Tensor, old: torch.Tensor, advantage: float, *, epsilon_low: float, epsilon_high: float, lower_bound_ratio: float
) -> torch.Tensor:
    """min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), for A < 0 no less than lower_bound_ratio * A."""
    ratio = torch.exp(logp - old)
    clipped = ratio
    if epsilon_low >= 0 and ratio.item() < 1 - epsilon_low:
        clipped = torch.full_like(ratio, 1 - epsilon_low)
    if epsilon_high >= 0 and ratio.item() > 1 + epsilon_high:
        clipped = torch.full_like(ratio, 1 + epsilon_high)
    objective = ratio * advantage if (ratio * advantage).item() <= (clipped * advantage).item() else clipped * advantage
    if lower_bound_ratio > 0 and advantage < 0 and objective.item() < lower_bound_ratio * advantage:
        objective = torch.full_like(ratio, lower_bound_ratio * advantage)
    return objective


def reference_loss(
    logits: Sequence[torch.Tensor],
    labels: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    advantages: Sequence[float],
    old_logprobs: Sequence[Sequence[float]] | None,
    *,
    surrogate: str,
    loss_type: str,
    epsilon_low: float,
    epsilon_high: float,
    lower_bound_ratio: float,
    temperature: float,
    max_tokens: int,
) -> tuple[float, list[torch.Tensor]]:
    """The loss of a ragged batch of S sequences, and its gradient in the logits.

    Args:
        logits: float64 [T_i, V] per sequence, leaves that require a gradient; T_i may be 0.
        labels, masks: T_i per sequence.
        advantages: S.
        old_logprobs: T_i per sequence under the frozen old policy; None: the current policy is the old one.
        surrogate: `clipped` or `legacy_pg`.
    """
    if surrogate == "legacy_pg":
        loss = torch.zeros((), dtype=torch.float64)
        for i, rows in enumerate(logits):
            for t in range(len(rows)):
                if masks[i][t]:
                    loss = loss - advantages[i] * token_logprob(rows[t], labels[i][t], 1.0)
        return _with_grads(loss / len(logits), logits)
    sequences: list[list[torch.Tensor]] = []
    for i, rows in enumerate(logits):
        losses: list[torch.Tensor] = []
        for t in range(len(rows)):
            if not masks[i][t]:
                continue
            logp = token_logprob(rows[t], labels[i][t], temperature)
            old = logp.detach() if old_logprobs is None else torch.tensor(old_logprobs[i][t], dtype=torch.float64)
            clip = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "lower_bound_ratio": lower_bound_ratio}
            losses.append(-token_objective(logp, old, advantages[i], **clip))
        if losses:
            sequences.append(losses)
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
    grads = torch.autograd.grad(loss, list(logits), allow_unused=True)
    return loss.item(), [torch.zeros_like(rows) if grad is None else grad for rows, grad in zip(logits, grads, strict=True)]
