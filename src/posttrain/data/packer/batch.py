"""The tensors of one micro-batch.

Every per-token quantity of the loss is flat over the response tokens, [N], whatever the layout of the forward is. The layout
lists each prompt once with the completions that belong to it, so that a model which can (see `posttrain.model`) computes a
prompt shared by several completions only once.

Example: prompt (7, 8) with completions (1, 2) and (3,), where N = 3:
    prompts       [[7, 8]]            prompt_of [0, 0]
    completions   [[1, 2], [3, pad]]  lengths   [2, 1]
    labels        [1, 2, 3]           sequence  [0, 0, 1]
labels[0] = 1 is predicted from the prompt's last position, labels[1] = 2 from the position of token 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One forward's worth of responses: P distinct prompts, S sequences, N response tokens."""

    prompts: torch.Tensor
    """int64 [P, max prompt length], left-padded."""
    prompt_lengths: torch.Tensor
    """int64 [P], each >= 1."""
    prompt_of: torch.Tensor
    """int64 [S]: the prompt row of each sequence."""
    completions: torch.Tensor
    """int64 [S, max completion length], right-padded."""
    lengths: torch.Tensor
    """int64 [S] completion lengths; 0 for an empty completion."""
    labels: torch.Tensor
    """int64 [N]: the response tokens in sequence order."""
    sequence: torch.Tensor
    """int64 [N]: which sequence each response token belongs to."""
    loss_mask: torch.Tensor
    """bool [N]: recorded by the sampler and the annotators, never derived from pad ids."""
    advantages: torch.Tensor
    """float [S]: one per sequence; where an annotator gave one per token, their mean over the sequence."""
    sampled_logprobs: torch.Tensor
    """float [N]: what the sampler recorded, in nats."""
    keys: tuple[tuple[str, int], ...]
    """(prompt id, sample index) of each sequence."""
    old_logprobs: torch.Tensor | None = None
    """float [N] of the frozen old policy; None while the old policy is the current one."""
    reference_logprobs: torch.Tensor | None = None
    """float [N] of the frozen reference; None where the objective asked for none."""
    token_advantages: torch.Tensor | None = None
    """float [N]: one per token; None while every sequence has a single one."""
    top_ids: torch.Tensor | None = None
    """int64 [N, k]: the sampler's most likely tokens at each position; None where it recorded none."""
    top_logprobs: torch.Tensor | None = None
    """float [N, k]: their log-probabilities under the sampler, in nats."""

    @property
    def num_sequences(self) -> int:
        return int(self.lengths.shape[0])

    def with_old_logprobs(self, old_logprobs: torch.Tensor) -> PolicyBatch:
        return replace(self, old_logprobs=old_logprobs)

    def with_reference_logprobs(self, reference_logprobs: torch.Tensor) -> PolicyBatch:
        return replace(self, reference_logprobs=reference_logprobs)

    def advantages_of_tokens(self) -> torch.Tensor:
        """float [N]."""
        return self.advantages[self.sequence] if self.token_advantages is None else self.token_advantages

    def to(self, device: torch.device) -> PolicyBatch:
        """The same batch on another device."""
        moved = {name: value.to(device) for name in self.__dataclass_fields__ if isinstance(value := getattr(self, name), torch.Tensor)}
        return replace(self, **moved)
