"""What the trainer hands to an objective in place of the policy: it remembers scores and owns the backward pass.

An objective differentiates with respect to the log-probabilities only. The graph is therefore cut there: the loss is
differentiated down to the scores first, and the model's own backward runs only where that gradient is not exactly zero. Groups
whose rewards tie have zero advantages, so for them the expensive two thirds of a training step are skipped, bit for bit.
"""

from __future__ import annotations

import torch

from posttrain.data.packer import PolicyBatch
from posttrain.model.protocol import PolicyModel, TokenScores
from posttrain.trainer.ranks import ALONE, Ranks


class ScoreRecorder:
    """A `PolicyModel` around the policy, for one micro-batch at a time."""

    def __init__(self, policy: PolicyModel, ranks: Ranks = ALONE) -> None:
        self._policy, self._ranks = policy, ranks
        self._cuts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.logprobs: torch.Tensor | None = None
        """[N] of the last call, detached."""

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype, top_ids: torch.Tensor | None = None) -> TokenScores:
        scores = self._policy.score(batch, temperature=temperature, dtype=dtype, top_ids=top_ids)
        self.logprobs = scores.logprobs.detach()
        if not scores.logprobs.requires_grad:
            return scores
        top = None if scores.top_logprobs is None else self._cut(scores.top_logprobs)
        return TokenScores(self._cut(scores.logprobs), scores.entropy, top)

    def _cut(self, output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach().clone().requires_grad_()
        self._cuts.append((output, leaf))
        return leaf

    def backward(self, loss: torch.Tensor | None) -> bool:
        """Accumulate the gradient of `loss`, a scalar of the scores, into the policy's parameters.

        Args:
            loss: None on a rank that has no part in this micro-batch.

        Returns:
            Whether the model's backward ran: False when the loss does not depend on any score, on any rank.
        """
        cuts, self._cuts = self._cuts, []
        if loss is not None and loss.requires_grad:
            loss.backward()
        live = [(output, leaf.grad) for output, leaf in cuts if leaf.grad is not None and bool((leaf.grad != 0).any())]
        if not self._ranks.alone and any(self._ranks.gather(float(bool(live)))):
            # the backward of a sharded module is a collective: every rank takes part, with zeros where it has nothing to say
            live = [(output, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for output, leaf in cuts]
        if live:
            # one call: both outputs of a batch share a graph, which a second call would find freed
            torch.autograd.backward([output for output, _ in live], [gradient for _, gradient in live])
        return bool(live)

    def by_sequence(self, batch: PolicyBatch) -> dict[tuple[str, int], tuple[float, ...]]:
        """The last log-probabilities, cut into completions."""
        if self.logprobs is None:
            return {}
        parts = self.logprobs.float().cpu().split(batch.lengths.tolist())
        return {key: tuple(part.tolist()) for key, part in zip(batch.keys, parts, strict=True)}
