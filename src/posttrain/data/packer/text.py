"""Packs text completions into a `PolicyBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.data.packer.batch import PolicyBatch
from posttrain.records import Completion, Prompt, TrainGroup


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion of a train group with its own annotations: the unit that batches are counted in."""

    prompt: Prompt
    index: int
    """Position inside its group."""
    completion: Completion
    advantage: float
    loss_mask: tuple[bool, ...]


def samples_of(groups: Sequence[TrainGroup]) -> list[TrainSample]:
    """All completions of the groups, group by group."""
    return [
        TrainSample(group.scored.rollout.prompt, index, completion, group.advantages[index], group.loss_masks[index])
        for group in groups
        for index, completion in enumerate(group.scored.rollout.completions)
    ]


def pack(samples: Sequence[TrainSample], *, pad_id: int, dtype: torch.dtype = torch.float32) -> PolicyBatch:
    """One micro-batch. Consecutive samples of one prompt share its row; see `PolicyBatch` for the layout.

    Args:
        pad_id: fills unused positions; any valid token id does, since masks and lengths rule.
        dtype: of advantages and sampled log-probabilities.
    """
    prompts: list[tuple[int, ...]] = []
    prompt_of: list[int] = []
    last_id: str | None = None
    for sample in samples:
        if sample.prompt.id != last_id:
            prompts.append(sample.prompt.token_ids)
            last_id = sample.prompt.id
        prompt_of.append(len(prompts) - 1)
    lengths = torch.tensor([len(sample.completion.token_ids) for sample in samples], dtype=torch.int64)
    return PolicyBatch(
        prompts=_padded(prompts, pad_id, left=True),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts], dtype=torch.int64),
        prompt_of=torch.tensor(prompt_of, dtype=torch.int64),
        completions=_padded([sample.completion.token_ids for sample in samples], pad_id, left=False),
        lengths=lengths,
        labels=torch.tensor([token for sample in samples for token in sample.completion.token_ids], dtype=torch.int64),
        sequence=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        loss_mask=torch.tensor([flag for sample in samples for flag in sample.loss_mask], dtype=torch.bool),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=dtype),
        sampled_logprobs=torch.tensor([value for sample in samples for value in sample.completion.logprobs], dtype=dtype),
        truncated=torch.tensor([sample.completion.finish_reason == "length" for sample in samples], dtype=torch.bool),
        keys=tuple((sample.prompt.id, sample.index) for sample in samples),
    )


def _padded(rows: Sequence[tuple[int, ...]], pad_id: int, *, left: bool) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    for i, row in enumerate(rows):
        if row:
            span = slice(width - len(row), width) if left else slice(0, len(row))
            out[i, span] = torch.tensor(row, dtype=torch.int64)
    return out
