"""How a window of samples is cut into micro-batches. The cut changes memory and speed, never the update."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.data.packer.text import TrainSample
from posttrain.errors import TrainingError


def micro_batches(samples: Sequence[TrainSample], *, count: int, tokens: int) -> list[Sequence[TrainSample]]:
    """Consecutive samples, so that completions of one prompt stay together and share it.

    Args:
        count: samples per micro-batch, read when `tokens` is 0.
        tokens: at most so many prompt and completion tokens per micro-batch, a prompt counted once for its completions. The
            number of micro-batches is the least that consecutive filling needs; they are then made as equal as that allows.
    """
    if tokens:
        return by_tokens(samples, tokens)
    return [samples[i : i + count] for i in range(0, len(samples), count)]


def by_tokens(samples: Sequence[TrainSample], budget: int) -> list[Sequence[TrainSample]]:
    """See `micro_batches`.

    Raises:
        TrainingError: one sample alone exceeds the budget.
    """
    if not samples:
        return []
    longest = max(_cost(sample, None) for sample in samples)
    if longest > budget:
        raise TrainingError(
            f"rl.micro_batch_tokens={budget} is smaller than one sample of {longest} prompt and completion tokens; raise it, or lower "
            "rl.data.max_prompt_tokens or rollout.max_tokens"
        )
    needed = len(_fill(samples, budget))
    low, high = longest, budget
    while low < high:  # the smallest largest micro-batch that needs no more of them
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(samples, middle)) <= needed else (middle + 1, high)
    return _fill(samples, low)


def _fill(samples: Sequence[TrainSample], budget: int) -> list[Sequence[TrainSample]]:
    starts, used = [0], 0
    for i, sample in enumerate(samples):
        previous = samples[i - 1] if i > starts[-1] else None
        cost = _cost(sample, previous)
        if previous is not None and used + cost > budget:
            starts.append(i)
            used, cost = 0, _cost(sample, None)
        used += cost
    return [samples[start:end] for start, end in zip(starts, [*starts[1:], len(samples)], strict=True)]


def _cost(sample: TrainSample, previous: TrainSample | None) -> int:
    """Tokens that a sample adds behind the previous one of its micro-batch."""
    shared = previous is not None and previous.prompt.id == sample.prompt.id
    return len(sample.completion.token_ids) + (0 if shared else len(sample.prompt.token_ids))
