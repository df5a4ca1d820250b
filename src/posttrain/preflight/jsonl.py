"""A JSONL source: its file, its rows, and what they hold."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import PromptEnvConfig
from posttrain.data.columns import renamed_names
from posttrain.data.jsonl import scan_jsonl
from posttrain.errors import Violation
from posttrain.preflight.facts import LongPrompt, PromptContent, SourceFacts
from posttrain.preflight.prompt_tokens import most_tokens

MAX_ROWS = 200_000
"""Rows read by a check; the run reads all of them."""
MAX_BYTES = 64 << 20
"""Bytes read by a check, about a second of parsing."""
LISTED = 5
KEPT = 16
"""Longest prompts that are worth an exact token count."""


def jsonl_facts(path: str, data: PromptEnvConfig) -> tuple[list[Violation], SourceFacts | None]:
    """Every problem of the file in one violation per key, and its facts when there is none."""
    key = f"{path}.path"
    why = _unusable(Path(data.path))
    if why is not None:
        return [Violation(key, data.path, why, f"set {key} to a readable JSONL file")], None
    if not data.prompt_column:
        return [], None  # refused already; without it no row can be judged
    limit = _row_limit(data.path)
    scan = scan_jsonl(data.path, prompt_column=data.prompt_column, response_column=data.response_column, limit_rows=limit)
    problems = [(f"line {problem.line}" if problem.line else "the file", problem.message) for problem in scan]
    if problems:
        return list(_problem_violations(path, data, problems)), None
    return [], _facts(key, data, limit)


def _unusable(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "is a directory, not a file"
        if not path.exists():
            return "does not exist"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if not path.is_file():
        return "is not a regular file, and rows are read more than once"
    if not os.access(path, os.R_OK):
        return "is not readable (permission denied)"
    return None


def _row_limit(path: str) -> int:
    """Rows to read so that large files cost a bounded time, from the mean size of the first rows."""
    size = os.stat(path).st_size
    if size <= MAX_BYTES:
        return MAX_ROWS
    with Path(path).open("rb") as file:
        head = file.read(1 << 20)
    per_row = len(head) / max(head.count(b"\n"), 1)
    return max(1, min(MAX_ROWS, int(MAX_BYTES / per_row)))


def _problem_violations(path: str, data: PromptEnvConfig, problems: list[tuple[str, str]]) -> Iterator[Violation]:
    """Group the problems under the key that most likely is wrong: a column key when its column is nowhere, else the file."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for where, message in problems:
        key = next((name for name in ("prompt_column", "response_column") if f"has no {name.replace('_', ' ')} " in message), "path")
        groups.setdefault(key, []).append((where, message))
    for name, found in groups.items():
        listed = ", ".join(f"{where} {_reason(message)}" for where, message in found[:LISTED])
        more = f", and {len(found) - LISTED} more lines ({len(found)} in all)" if len(found) > LISTED else ""
        value = {"path": data.path, "prompt_column": data.prompt_column, "response_column": data.response_column}[name]
        remedies = [message.partition("; ")[2] for _, message in found]
        remedy = remedies[0] if name == "path" and len(set(remedies)) == 1 and remedies[0] else f"correct {path}.path or {path}.{name}"
        if name == "path" and len(set(remedies)) > 1:
            remedy = "correct these lines"
        yield Violation(f"{path}.{name}", value, f"{data.path}: {listed}{more}", remedy)


def _reason(message: str) -> str:
    """The message without its remedy; the columns that are there instead of a missing one are no remedy."""
    rule, _, rest = message.partition("; ")
    return f"{rule} ({rest})" if rest.startswith("its columns are") else rule


def _facts(key: str, data: PromptEnvConfig, limit: int) -> SourceFacts:
    shared: frozenset[str] | None = None
    conversation: tuple[str, str] | None = None
    longest: list[tuple[int, int, PromptContent]] = []
    for number, row in _rows(data.path, limit):
        names = frozenset(row)
        shared = names if shared is None else shared & names
        prompt: Any = row[data.prompt_column]
        content: PromptContent = prompt if isinstance(prompt, str) else tuple(prompt)
        if conversation is None and not isinstance(prompt, str):
            conversation = (key, f"line {number} of {data.path} holds a conversation")
        entry = (most_tokens(content), -number, content)
        if len(longest) < KEPT:
            heapq.heappush(longest, entry)
        elif entry[0] > longest[0][0]:
            heapq.heapreplace(longest, entry)
    columns = renamed_names(shared or frozenset(), prompt_column=data.prompt_column, response_column=data.response_column)
    ordered = sorted(longest, key=lambda entry: -entry[1])
    return SourceFacts(
        columns,
        complete=True,
        conversation=conversation,
        longest=tuple(LongPrompt(key, data.path, f"line {-number}", content) for _, number, content in ordered),
    )


def _rows(path: str, limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = 0
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if rows >= limit:
                return
            rows += 1
            yield number, json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
