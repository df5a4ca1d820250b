"""Keeps what a policy scored while an objective runs, for the old-policy cache and for samples."""

from __future__ import annotations

import torch

from posttrain.data.packer import PolicyBatch
from posttrain.model.protocol import PolicyModel, TokenScores


class ScoreRecorder:
    """A `PolicyModel` that remembers the log-probabilities of the last batch."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self.logprobs: torch.Tensor | None = None
        """[N] of the last call, detached."""

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype) -> TokenScores:
        scores = self._policy.score(batch, temperature=temperature, dtype=dtype)
        self.logprobs = scores.logprobs.detach()
        return scores

    def by_sequence(self, batch: PolicyBatch) -> dict[tuple[str, int], tuple[float, ...]]:
        """The last log-probabilities, cut into completions."""
        if self.logprobs is None:
            return {}
        parts = self.logprobs.float().cpu().split(batch.lengths.tolist())
        return {key: tuple(part.tolist()) for key, part in zip(batch.keys, parts, strict=True)}
