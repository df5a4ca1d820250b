"""What the checks learn about a model and a prompt source without building either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.preflight.prompt_tokens import PromptTokens

PromptContent = str | tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One of the longest prompts of a source."""

    key: str
    """The configuration key that brought it in."""
    value: str
    """That key's value."""
    where: str
    """How to find it: "line 17" or the text itself."""
    content: PromptContent


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A prompt source as far as it can be known before it is built."""

    columns: frozenset[str]
    """Columns that every row certainly has, under the names a reward asks for."""
    complete: bool
    """Whether `columns` is all there is; false when rows may bring more."""
    conversation: tuple[str, str] | None
    """Key and reason why prompts are conversations; None when they are raw text or nobody knows."""
    longest: tuple[LongPrompt, ...] = ()
    rows: int | None = None
    """Prompts in one epoch; None when only opening the source would tell."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as far as its files tell."""

    context: int | None = None
    """Positions the model was built for; None when unknown."""
    has_chat_template: bool | None = None
    """None when no tokenizer file is at hand."""
    tokens: PromptTokens | None = None
    """Counts the tokens of a prompt; None when no tokenizer file is at hand."""
