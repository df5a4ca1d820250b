"""`rl.data.*` and `rl.validation.data.*`: where prompts come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.base import bounded
from posttrain.errors import Violation

OPERATORS = ("+", "-", "*")


@dataclass
class ArithmeticConfig:
    """The built-in arithmetic source; `data.split` selects `train` or the disjoint `held_out` problems."""

    low: int = 0
    """Smallest operand."""
    high: int = 20
    """Largest operand, inclusive."""
    operators: list[str] = field(default_factory=lambda: ["+"])
    """Any of + - *."""
    template: str = "What is {a} {op} {b}?"
    """Question text with {a}, {op} and {b}."""
    chat: bool = True
    """Ask as a user turn through the model's chat template; false sends the raw text."""
    held_out_fraction: float = bounded(0.15, ge=0.0, lt=1.0)
    """Share of all problems that training never sees."""


@dataclass
class ReasoningGymConfig:
    """Procedurally generated tasks of the reasoning-gym library."""

    dataset: str = ""
    """Name of a reasoning-gym data set, e.g. chain_sum; empty is unset."""
    size: int = bounded(1000, ge=1)
    """Tasks in the corpus."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The data set's own parameters."""
    instruction: str = ""
    """Text put in front of every question."""


@dataclass
class PromptEnvConfig:
    """One prompt source: `name` (Hugging Face), `path` (JSONL), `reasoning_gym.dataset`, or none of them for arithmetic."""

    name: str = ""
    """Hugging Face data set: a hub id or a local directory of parquet files."""
    subset: str = ""
    """The data set's own configuration name, e.g. main; required with `name` unless it is a directory."""
    split: str = "train"
    """Which split to read; the arithmetic and reasoning-gym sources know train and held_out."""
    path: str = ""
    """A JSONL file: every nonblank line an object."""
    prompt_column: str = ""
    """Column renamed to `prompt`; required with `name` and `path`."""
    response_column: str = ""
    """Column renamed to `reference`; required with `name`."""
    items_fn: str = ""
    """Dotted path of a deterministic row map `(row: dict) -> dict`, applied before renaming; needs `name`."""
    shuffle: bool = False
    """Permute the corpus every epoch with data seed + epoch."""
    max_prompt_tokens: int | None = bounded(None, ge=1)
    """Skip (and count) prompts longer than this many tokens; null keeps every prompt."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)

    @property
    def kind(self) -> str:
        """arithmetic, jsonl, huggingface or reasoning_gym, from the fields that are set."""
        if self.path:
            return "jsonl"
        if self.name:
            return "huggingface"
        return "reasoning_gym" if self.reasoning_gym.dataset else "arithmetic"

    def violations(self, path: str) -> Iterator[Violation]:
        chosen = {"path": self.path, "name": self.name, "reasoning_gym.dataset": self.reasoning_gym.dataset}
        given = [key for key, value in chosen.items() if value]
        if len(given) > 1:
            yield Violation(f"{path}.{given[0]}", chosen[given[0]], f"excludes {path}.{given[1]}", "keep one source")
        if (self.path or self.name) and not self.prompt_column:
            yield Violation(f"{path}.prompt_column", "", f"is required with {path}.{given[0]}", "name the column that holds the prompt")
        if self.name and not self.response_column:
            yield Violation(f"{path}.response_column", "", f"is required with {path}.name", "name the column that holds the answer")
        if self.items_fn and not self.name:
            yield Violation(f"{path}.items_fn", self.items_fn, f"needs {path}.name", "drop it or name a data set")
        if not given and self.prompt_column:
            rule = f"is required with {path}.prompt_column={self.prompt_column}"
            yield Violation(f"{path}.path", "", rule, f"set {path}.path to a JSONL file, or {path}.name to a data set")
            return
        for key in ("subset", "prompt_column", "response_column"):
            allowed = bool(self.name) or (bool(self.path) and key != "subset")
            if getattr(self, key) and not allowed:
                needs = f"{path}.name" if key == "subset" else f"{path}.name or {path}.path"
                yield Violation(f"{path}.{key}", getattr(self, key), f"is read only with {needs}", "drop it or name a source")
        if self.kind in ("arithmetic", "reasoning_gym") and self.split not in ("train", "held_out"):
            yield Violation(f"{path}.split", self.split, f"the {self.kind} source has train and held_out", f"set {path}.split=train")
        yield from self._arithmetic_violations(f"{path}.arithmetic")

    def _arithmetic_violations(self, path: str) -> Iterator[Violation]:
        node = self.arithmetic
        if node.low > node.high:
            yield Violation(f"{path}.low", node.low, f"must be <= {path}.high={node.high}", "lower it or raise high")
        unknown = [op for op in node.operators if op not in OPERATORS]
        if unknown or not node.operators:
            yield Violation(f"{path}.operators", list(node.operators), f"must be some of {' '.join(OPERATORS)}", "e.g. ['+']")
        missing = [name for name in ("{a}", "{op}", "{b}") if name not in node.template]
        if missing:
            yield Violation(f"{path}.template", node.template, f"must contain {', '.join(missing)}", "e.g. 'What is {a} {op} {b}?'")
