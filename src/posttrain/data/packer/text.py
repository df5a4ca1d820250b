"""Packs text completions into a `PolicyBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.data.packer.batch import PolicyBatch
from posttrain.records import Advantage, Completion, Prompt, TrainGroup


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion of a train group with its own annotations: the unit that batches are counted in."""

    prompt: Prompt
    index: int
    """Position inside its group."""
    completion: Completion
    advantage: Advantage
    loss_mask: tuple[bool, ...]

    @property
    def has_signal(self) -> bool:
        """Whether any token has an advantage."""
        return any(self.advantage) if isinstance(self.advantage, tuple) else self.advantage != 0


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
        advantages=torch.tensor([_mean(sample.advantage) for sample in samples], dtype=dtype),
        sampled_logprobs=torch.tensor([value for sample in samples for value in sample.completion.logprobs], dtype=dtype),
        keys=tuple((sample.prompt.id, sample.index) for sample in samples),
        token_advantages=_token_advantages(samples, dtype),
        **_top_tokens(samples, dtype),
    )


def _mean(advantage: Advantage) -> float:
    return sum(advantage) / max(len(advantage), 1) if isinstance(advantage, tuple) else advantage


def _token_advantages(samples: Sequence[TrainSample], dtype: torch.dtype) -> torch.Tensor | None:
    """float [N] as soon as one sample has an advantage per token."""
    if not any(isinstance(sample.advantage, tuple) for sample in samples):
        return None
    values: list[float] = []
    for sample in samples:
        own = sample.advantage
        values += own if isinstance(own, tuple) else [own] * len(sample.completion.token_ids)
    return torch.tensor(values, dtype=dtype)


def _top_tokens(samples: Sequence[TrainSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """ids and log-probabilities [N, k] where the sampler recorded them on every completion."""
    tops = [sample.completion.top for sample in samples]
    if not tops or any(top is None for top in tops):
        return {}
    return {
        "top_ids": torch.cat([torch.from_numpy(top.ids) for top in tops if top is not None]).to(torch.int64),
        "top_logprobs": torch.cat([torch.from_numpy(top.logprobs) for top in tops if top is not None]).to(dtype),
    }


def _padded(rows: Sequence[tuple[int, ...]], pad_id: int, *, left: bool) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    for i, row in enumerate(rows):
        if row:
            span = slice(width - len(row), width) if left else slice(0, len(row))
            out[i, span] = torch.tensor(row, dtype=torch.int64)
    return out
