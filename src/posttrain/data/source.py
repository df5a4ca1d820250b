"""What a prompt source is: an ordered, endless, resumable stream of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.records import Prompt


@dataclass(frozen=True, slots=True)
class Cursor:
    """The exact position of a source: enough to continue as if nothing had happened."""

    epoch: int
    """Completed passes over the corpus."""
    index: int
    """Rows of the current epoch's order already consumed (skipped ones included)."""
    seed: int
    """The resolved data seed the order was made with."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a corpus before tokenization."""

    key: str
    """Stable id of the row inside its corpus."""
    prompt: str | tuple[Mapping[str, object], ...]
    reference: object | None
    representations: Mapping[str, object]
    """All remaining columns."""


class Corpus(Protocol):
    """A finite, random-access collection of rows."""

    columns: frozenset[str]
    """Names a reward may ask for: `prompt`, `reference` when there is one, and every other column."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class PromptSource(Protocol):
    """Draws prompts in a fixed order that depends on the data seed and the position alone."""

    columns: frozenset[str]
    skipped_too_long: int
    """Prompts left out so far because they exceed `max_prompt_tokens`."""

    def draw(self, count: int) -> Sequence[Prompt]:
        """The next `count` prompts; wraps at epoch boundaries."""
        ...

    def cursor(self) -> Cursor: ...

    def restore(self, cursor: Cursor) -> None:
        """Continue from a saved position; raises DataError when it was made with another seed."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
