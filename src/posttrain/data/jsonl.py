"""The local JSONL corpus: one JSON object per nonblank line.

Every line is checked when the corpus is made, so a run cannot fail on line 90,000 after a day. Only byte offsets are kept;
rows are parsed again when they are drawn. `scan_jsonl` makes the same checks and builds nothing, for preflight.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.data.columns import renamed, renamed_names, row_problem
from posttrain.data.source import Row
from posttrain.errors import DataError

_LISTED = 5
"""Problems spelled out in one error; a file with a systematic mistake has one per line."""


@dataclass(frozen=True, slots=True)
class LineProblem:
    """One reason why a JSONL file cannot be used."""

    line: int
    """1-based; 0 when the problem is the file as a whole."""
    message: str


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    offset: int
    row: Any
    problem: str | None


def scan_jsonl(path: str | Path, *, prompt_column: str, response_column: str = "", limit_rows: int | None = None) -> Iterator[LineProblem]:
    """Every problem of the file, in line order; looks at the first `limit_rows` nonblank lines only when that is given."""
    rows = 0
    try:
        for line in islice(_lines(Path(path), prompt_column=prompt_column, response_column=response_column), limit_rows):
            rows += 1
            if line.problem is not None:
                yield LineProblem(line.number, line.problem)
    except OSError as error:
        yield LineProblem(0, f"cannot be read ({error.strerror}); check data.path")
        return
    if not rows and limit_rows != 0:
        yield LineProblem(0, "holds no rows; write one JSON object per line")


class JsonlCorpus:
    """Random access to the rows of a validated JSONL file."""

    def __init__(self, path: str | Path, *, prompt_column: str, response_column: str = "") -> None:
        self._path = Path(path)
        self._prompt_column = prompt_column
        self._response_column = response_column
        self._offsets = array("q")
        self._numbers = array("q")
        problems: list[LineProblem] = []
        shared: frozenset[str] | None = None
        try:
            self._stamp = _stamp(os.stat(self._path))
            for line in _lines(self._path, prompt_column=prompt_column, response_column=response_column):
                if line.problem is not None:
                    problems.append(LineProblem(line.number, line.problem))
                    continue
                self._offsets.append(line.offset)
                self._numbers.append(line.number)
                names = frozenset(line.row)
                shared = names if shared is None else shared & names
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror}); check data.path") from error
        if problems:
            raise DataError(_listed(self._path, problems))
        if shared is None:
            raise DataError(f"{self._path}: holds no rows; write one JSON object per line")
        # A reward may rely only on columns that every row has.
        self.columns = renamed_names(shared, prompt_column=prompt_column, response_column=response_column)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        number = self._numbers[index]
        with self._path.open("rb") as file:
            # Offsets into a file that was rewritten would silently deliver other rows, or halves of them.
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise DataError(f"{self._path}: changed since the run opened it, rows must stay what they were; restart the run")
            file.seek(self._offsets[index])
            row, _ = _parsed(file.readline(), number)
        return renamed(row, key=f"{self._path.name}:{number}", prompt_column=self._prompt_column, response_column=self._response_column)


def _lines(path: Path, *, prompt_column: str, response_column: str) -> Iterator[_Line]:
    offset = 0
    # Bytes, because text mode also ends lines at characters that may stand unescaped inside a JSON string.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            row, problem = _parsed(raw, number)
            if problem is None:
                problem = row_problem(row, prompt_column=prompt_column, response_column=response_column)
            yield _Line(number, start, row, problem)


def _parsed(raw: bytes, number: int) -> tuple[Any, str | None]:
    try:
        # Some editors put a byte-order mark in front of the first line.
        return json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8")), None
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 (byte {error.start} of the line); re-encode the file"
    except json.JSONDecodeError as error:
        return None, f"is not JSON: {error.msg} (column {error.colno}); write one JSON object per line"
    except RecursionError:
        return None, "is nested too deeply to parse; flatten it"


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _listed(path: Path, problems: list[LineProblem]) -> str:
    lines = [f"{path}:{problem.line}: {problem.message}" for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"{path}: and {len(problems) - _LISTED} more lines with problems")
    return "\n".join(lines)
