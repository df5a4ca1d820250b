"""The immutable records that the stages of a run hand to each other.

prompt -> rollout group -> scored group -> train group -> (packed batch) -> step result -> published weights. A stage never
fills in a field of the record it received: it returns the next type. The packed batch holds tensors and lives with the
packer (`posttrain.data.packer`); nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, object]
"""One chat turn: a string `role` and a `content`."""

SPREAD_TOLERANCE = 1e-9
"""Rewards closer than this tie: the group carries no signal and its advantages are exactly zero."""

Advantage = float | tuple[float, ...]
"""Of one completion: one number for all its tokens, or one per token."""

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended the completion itself; `length`: it was cut at the token budget."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task drawn from a prompt source, already tokenized.

    The id is unique for the life of a run: it names the row and the epoch, so every random draw that concerns the prompt can
    be seeded from it.
    """

    id: str
    content: str | tuple[Message, ...]
    """What the source gave: raw text, or a conversation."""
    text: str
    """The exact text the token ids encode (the chat template applied)."""
    token_ids: tuple[int, ...]
    reference: object | None = None
    """Ground truth for a reward, under the name the wiring uses; None where the source has none."""
    representations: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Every other column of the row, unchanged."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    """Sample on past the end-of-sequence token, up to the budget."""
    top_tokens: int = 0
    """Record this many of the most likely tokens at every position."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Draw `group_size` completions of one prompt. The seed alone decides the draws, never the batch they run in."""

    prompt: Prompt
    group_size: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k most likely tokens of the sampler's own distribution at each of T positions. Arrays, because they are k times the
    size of the completion; full precision, because a rounded head would make an identical trainer look different."""

    ids: np.ndarray
    """int32 [T, k]."""
    logprobs: np.ndarray
    """float32 [T, k], in nats."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopTokens) and self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> tuple[tuple[int, ...], bytes, bytes]:
        return self.ids.shape, self.ids.tobytes(), self.logprobs.tobytes()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer with what the sampler knew about it."""

    token_ids: tuple[int, ...]
    """[T] ids, the end-of-sequence token included when the model produced it."""
    logprobs: tuple[float, ...]
    """[T] natural-log probabilities of the ids under the distribution they were drawn from (temperature and truncation
    applied), in nats."""
    finish_reason: FinishReason
    weight_version: int
    """The committed version of the weights that produced every token."""
    text: str
    """Decoded answer without special tokens: what a reward reads."""
    top: TopTokens | None = None
    """The most likely tokens at every position; None unless the request asked for them."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion needs one logprob per token; got {len(self.token_ids)} tokens and {len(self.logprobs)} logprobs"
            )
        if self.top is not None and len(self.top.ids) != len(self.token_ids):
            raise ValueError(f"a completion of {len(self.token_ids)} tokens came with top tokens of {len(self.top.ids)} positions")


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All completions of one prompt; group statistics are only valid on the complete group."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        if not self.completions:
            raise ValueError(f"rollout group {self.prompt.id!r} has no completions")


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion."""

    total: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Named components of the total, for metrics and the report."""
    time_s: float = 0.0
    failure: str | None = None
    """Why the provider could not score this completion; None when it did. A failed score's total is the provider's declared
    failure value, and the failure is counted: it is never a silent zero."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A rollout group with its rewards and their spread, recorded once, here."""

    rollout: RolloutGroup
    scores: tuple[Score, ...]
    spread: float
    """max - min of the totals."""

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.rollout.completions):
            raise ValueError(f"group {self.rollout.prompt.id!r}: {len(self.rollout.completions)} completions but {len(self.scores)} scores")

    @property
    def informative(self) -> bool:
        """Whether the rewards differ, so that the group has an advantage: the one owner of the word."""
        return self.spread > SPREAD_TOLERANCE


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A scored group, annotated on the complete group and ready to be split over batches."""

    scored: ScoredGroup
    advantages: tuple[Advantage, ...]
    """One per completion: a number, or one number per token."""
    loss_masks: tuple[tuple[bool, ...], ...]
    """One flag per completion token; False leaves the token out of the loss and of its denominator."""

    def __post_init__(self) -> None:
        lengths = [len(completion.token_ids) for completion in self.scored.rollout.completions]
        per_token = [len(a) if isinstance(a, tuple) else n for a, n in zip(self.advantages, lengths, strict=False)]
        if len(self.advantages) != len(lengths) or per_token != lengths or [len(mask) for mask in self.loss_masks] != lengths:
            raise ValueError(
                f"group {self.scored.rollout.prompt.id!r}: advantages and loss masks must match completions of lengths {lengths}"
            )


# ----------------------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean that can be merged without becoming a mean of means."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or amount that adds up over micro-batches and ranks."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of the observed values."""

    largest: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


Metric = Mean | Sum | Max
"""A number that knows how it combines over micro-batches, ranks and optimizer steps."""


def merge_metrics(into: dict[str, Metric], new: Mapping[str, Metric]) -> None:
    """Merge `new` into `into` in place; a name that changes its reduction is a bug and raises TypeError."""
    for name, metric in new.items():
        known = into.get(name)
        if known is None:
            into[name] = metric
        elif type(known) is type(metric):
            into[name] = known.merge(metric)  # type: ignore[arg-type]  # same type on both sides
        else:
            raise TypeError(f"metric {name!r} was {type(known).__name__} and is now {type(metric).__name__}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the trainer did with one collected batch."""

    model_step: int
    """Committed optimizer steps since the start of the run, this batch included."""
    applied_steps: int
    """Optimizer steps applied for this batch."""
    rejection: str | None
    """Why a window was rejected (nothing was applied from it on); None when every step was applied."""
    metrics: Mapping[str, Metric]
    """Public names (`train/...`, `optim/...`)."""
    token_logprobs: Mapping[tuple[str, int], tuple[float, ...]]
    """(prompt id, sample index) -> [T] log-probabilities under the policy of the first pass, for samples and the report."""
