"""A whole micro-batch as one row of tokens without padding.

Every prompt is laid out once, followed by the completions that belong to it, so that the linear layers (nearly all of the work)
see no padding and no repeated prompt. Attention alone takes the row apart again: prompts among themselves, and each completion
over its prompt and its own tokens, in classes of similar length. The classes bound what padding costs there, and every class is
one call of scaled dot-product attention, on any device.

The layout reaches the attention layers as a keyword argument of the model's forward, not as global state, so that activation
checkpointing computes the same thing again. `CausalPolicy.check_packing` proves that a model's layers really use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.data.packer import PolicyBatch

IMPLEMENTATION = "posttrain_packed"
"""Under this name transformers finds `packed_attention`."""

LENGTH_CLASS = 0.6
"""A class holds lengths from this share of its longest one upwards."""


@dataclass(frozen=True, slots=True)
class AttentionClass:
    """Rows of similar length that attend in one call: B rows of up to Lq queries over up to Lk keys."""

    queries: torch.Tensor
    """int64 [B, Lq] positions in the packed row; padding repeats a valid position."""
    keys: torch.Tensor
    """int64 [B, Lk] positions of what they attend to."""
    mask: torch.Tensor | None
    """bool [B or 1, 1, Lq, Lk]; None is plain causal attention of a row over itself."""
    kept: torch.Tensor
    """int64 [K] indices into the flattened [B * Lq] queries that are not padding."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where everything of one micro-batch lies in its row of T tokens."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T] position of each token in its own sequence."""
    predictors: torch.Tensor
    """int64 [N] the position whose hidden state predicts each response token."""
    classes: tuple[AttentionClass, ...]
    order: torch.Tensor
    """int64 [T]: brings the classes' kept outputs, one after another, back into the row."""

    @classmethod
    def of(cls, batch: PolicyBatch) -> PackedLayout:
        """Raises nothing: every `PolicyBatch` with at least one sequence has a layout."""
        prompt_lengths, owners = batch.prompt_lengths.tolist(), batch.prompt_of.tolist()
        fed = [max(length - 1, 0) for length in batch.lengths.tolist()]
        members: list[list[int]] = [[] for _ in prompt_lengths]
        for sequence, owner in enumerate(owners):
            members[owner].append(sequence)
        prompt_starts, starts, total = [0] * len(prompt_lengths), [0] * len(fed), 0
        for owner, sequences in enumerate(members):
            prompt_starts[owner], total = total, total + prompt_lengths[owner]
            for sequence in sequences:
                starts[sequence], total = total, total + fed[sequence]
        device, width = batch.labels.device, int(batch.prompts.shape[1])
        ids = torch.empty(total, dtype=torch.int64, device=device)
        positions = torch.empty_like(ids)
        for owner, (start, length) in enumerate(zip(prompt_starts, prompt_lengths, strict=True)):
            ids[start : start + length] = batch.prompts[owner, width - length :]
            positions[start : start + length] = torch.arange(length, device=device)
        for sequence, (start, length) in enumerate(zip(starts, fed, strict=True)):
            first = prompt_lengths[owners[sequence]]
            ids[start : start + length] = batch.completions[sequence, :length]
            positions[start : start + length] = torch.arange(first, first + length, device=device)
        predictors: list[int] = []
        for sequence, length in enumerate(batch.lengths.tolist()):
            if length:
                last = prompt_starts[owners[sequence]] + prompt_lengths[owners[sequence]] - 1
                predictors += [last, *range(starts[sequence], starts[sequence] + length - 1)]
        classes = [_prompt_class(group, device) for group in _length_classes(list(zip(prompt_starts, prompt_lengths, strict=True)))]
        spans = [(starts[s], fed[s], prompt_starts[owners[s]], prompt_lengths[owners[s]]) for s in range(len(fed)) if fed[s]]
        for lengths in _by_length([span[1] for span in spans]):
            classes.append(_completion_class([spans[i] for i in lengths], device))
        written = torch.cat([part.queries.flatten()[part.kept] for part in classes])
        order = torch.empty_like(written)
        order[written] = torch.arange(total, device=device)
        return cls(ids, positions, torch.tensor(predictors, dtype=torch.int64, device=device), tuple(classes), order)


def _by_length(lengths: list[int]) -> list[list[int]]:
    """Indices in classes of similar length, longest first."""
    classes: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not classes or lengths[i] < LENGTH_CLASS * lengths[classes[-1][0]]:
            classes.append([])
        classes[-1].append(i)
    return classes


def _length_classes(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [[spans[i] for i in members] for members in _by_length([length for _, length in spans])]


def _ranges(spans: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, L] positions of (start, length) spans with padding at a span's start, bool [B, L] what is not padding)."""
    starts, lengths = (torch.tensor(column, dtype=torch.int64, device=device)[:, None] for column in zip(*spans, strict=True))
    steps = torch.arange(int(lengths.max()), device=device)
    valid = steps < lengths
    return starts + torch.where(valid, steps, 0), valid


def _prompt_class(spans: list[tuple[int, int]], device: torch.device) -> AttentionClass:
    """Prompts attend to themselves. Padding sits behind them, where causal attention never looks."""
    positions, valid = _ranges(spans, device)
    return AttentionClass(positions, positions, None, valid.flatten().nonzero().squeeze(1))


def _completion_class(spans: list[tuple[int, int, int, int]], device: torch.device) -> AttentionClass:
    """Completions attend to their prompt and causally to themselves; spans are (start, length, prompt start, prompt length)."""
    own, valid = _ranges([(start, length) for start, length, _, _ in spans], device)
    prompt, prompt_valid = _ranges([(start, length) for _, _, start, length in spans], device)
    if bool(prompt_valid.all()):
        prompt_valid = prompt_valid[:1]  # one mask serves every row
    rows, longest = prompt_valid.shape[0], own.shape[1]
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    mask = torch.cat([prompt_valid[:, None].expand(rows, longest, -1), causal.expand(rows, longest, longest)], -1)
    return AttentionClass(own, torch.cat([prompt, own], 1), mask[:, None], valid.flatten().nonzero().squeeze(1))


def register() -> None:
    """Make `packed_attention` known to transformers; safe to call again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: scaled dot-product attention, taken apart by `packed` where the forward has one.

    Args:
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D] of a packed row (any batch without a layout).

    Returns:
        [1, T, Hq, D], and no weights.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    outputs: list[torch.Tensor] = []
    for part in packed.classes:
        queries, keys, values = q[part.queries], k[part.keys], v[part.keys]
        attended = _attend(queries, keys, values, part.mask, dropout=dropout, scaling=scaling)
        outputs.append(attended.flatten(0, 1)[part.kept])
    return torch.cat(outputs)[packed.order][None], None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, dropout: float, scaling: float | None
) -> torch.Tensor:
    """[B, Lq, Hq, D] over [B, Lk, Hkv, D] -> [B, Lq, Hq, D].

    Query heads that share a key head are laid out as further queries of that head, so that keys are not repeated in memory; with
    a mask that is free, while plain causal attention keeps its faster kernel by repeating them.
    """
    batch, length, heads, width = q.shape
    shared = heads // k.shape[2]
    if mask is None:
        k, v = (tensor.repeat_interleave(shared, 2) if shared > 1 else tensor for tensor in (k, v))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
        return out.transpose(1, 2)
    folded = q.view(batch, length, -1, shared, width).permute(0, 2, 3, 1, 4).reshape(batch, -1, shared * length, width)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.repeat(1, 1, shared, 1), dropout_p=dropout, scale=scaling
    )
    return out.view(batch, -1, shared, length, width).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, width)
