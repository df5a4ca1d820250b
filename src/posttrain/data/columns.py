"""What a row must look like, and the renaming of its columns to the wiring names `prompt` and `reference`.

Columns are renamed, not projected: every column that is not renamed stays available to rewards under its own name. A reward
asks for columns in one namespace, so no other column may already bear one of the two wiring names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.data.source import Row


def row_problem(row: object, *, prompt_column: str, response_column: str) -> str | None:
    """Why `row` cannot be used, as "what is wrong; what to do", or None. An empty `response_column` means no reference."""
    if not isinstance(row, Mapping):
        return f"must be an object with named columns, got {type(row).__name__}; write one JSON object per line"
    if prompt_column not in row:
        return f"has no prompt column {prompt_column!r}; its columns are {_names(row)}"
    problem = prompt_problem(row[prompt_column], prompt_column)
    if problem is not None:
        return problem
    if response_column and response_column not in row:
        return f"has no response column {response_column!r}; its columns are {_names(row)}"
    if response_column and row[response_column] is None:
        return f"column {response_column!r} is null, a reference must be present; drop the row or fill it in"
    for taken, chosen, key in (("prompt", prompt_column, "prompt_column"), ("reference", response_column, "response_column")):
        if taken in row and chosen != taken:
            return f"has a column {taken!r} beside {key}={chosen!r}, which would be renamed to it; rename the column or set {key}={taken}"
    return None


def prompt_problem(value: object, column: str) -> str | None:
    """Why `value` is neither a text nor a conversation, or None."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list | tuple):
        return f"column {column!r} must hold a text or a list of chat turns, got {type(value).__name__}; convert it"
    if not value:
        return f"column {column!r} holds an empty conversation; give it at least one turn"
    for number, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str) or "content" not in turn:
            return f'column {column!r}, turn {number}: must be {{"role": <text>, "content": ...}}, got {_short(turn)}; fix the turn'
    return None


def renamed(row: Mapping[str, Any], *, key: str, prompt_column: str, response_column: str) -> Row:
    """The row with its columns under the wiring names; `row_problem` must have found nothing."""
    prompt = row[prompt_column]
    return Row(
        key=key,
        prompt=prompt if isinstance(prompt, str) else tuple(dict(turn) for turn in prompt),
        reference=row[response_column] if response_column else None,
        representations={name: value for name, value in row.items() if name not in (prompt_column, response_column)},
    )


def renamed_names(names: frozenset[str], *, prompt_column: str, response_column: str) -> frozenset[str]:
    """The names a reward may ask for, given the names before renaming."""
    kept = names - {prompt_column, response_column}
    return kept | ({"prompt", "reference"} if response_column else {"prompt"})


def _names(row: Mapping[Any, Any]) -> str:
    return ", ".join(repr(name) for name in row) or "none"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
