"""What posttrain needs from a policy, whoever built it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from posttrain.data.packer import PolicyBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the response tokens of a batch under a policy."""

    logprobs: torch.Tensor
    """[N] natural-log probabilities of the labels, connected to the graph; dtype is the requested one."""
    entropy: torch.Tensor
    """[N] entropy of the predicted distributions in nats, detached."""
    top_logprobs: torch.Tensor | None = None
    """[N, k] log-probabilities of the requested `top_ids`, connected to the graph."""


class PolicyModel(Protocol):
    """A causal policy that scores the response tokens of a packed batch."""

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype, top_ids: torch.Tensor | None = None) -> TokenScores:
        """Log-probabilities over response positions only; the [tokens, vocabulary] matrix never exists as a whole.

        Args:
            temperature: divides the logits.
            dtype: of the log-softmax, independent of the compute dtype.
            top_ids: int64 [N, k] further tokens to score at every position.
        """
        ...


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """What a model builder returns."""

    module: torch.nn.Module
    """A transformers causal language model (or one with the same surface)."""
    tokenizer: Any
    """A transformers tokenizer."""
    directory: Path | None
    """A Hugging Face directory with the same configuration and tokenizer, for engines that load from disk; None when the
    builder made the model in memory."""


def special_ids(tokenizer: Any) -> Sequence[int]:
    """Ids that end a completion."""
    eos = tokenizer.eos_token_id
    return [int(e) for e in eos] if isinstance(eos, list | tuple) else [] if eos is None else [int(eos)]
