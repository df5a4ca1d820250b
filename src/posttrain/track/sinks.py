"""What a tracker writes to: the protocol of an outside sink, and the append-only JSON-lines file that is the local truth.

An outside sink is a view (a console, a service). It may fail at any time without the run noticing; only a sink that was asked
for and cannot even start raises, as `TrackError`, before any training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

from posttrain.errors import PosttrainError


class TrackError(PosttrainError, RuntimeError):
    """A tracker that was asked for and cannot start, or one that is used out of order."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a person wants to know about a run before its first step."""

    algorithm: str
    model: str
    seed: int = 0
    device: str = ""
    details: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """More label -> text pairs to show, e.g. parameters, prompts, effective objective in one line."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The names and sizes that every sink shares."""

    run_dir: Path
    group: str
    name: str
    total_steps: int
    """Collected batches the run intends to train on."""
    config: Mapping[str, object]
    """The resolved configuration, as plain containers."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    """Collected batches so far, this one included; 1-based."""
    model_step: int
    """Committed optimizer steps."""
    time_s: float
    """Seconds since the start of this attempt."""
    metrics: Mapping[str, float | None]
    """`area/name` keys; None where the value was not finite."""


class Sink(Protocol):
    """An outside view of a run. Every method but `start` may raise without consequences for the run."""

    name: str

    def start(self, header: RunHeader) -> None:
        """Open the sink; raises TrackError when it cannot."""
        ...

    def phase(self, name: str | None) -> None:
        """The run entered a phase, or left the last one (None)."""
        ...

    def step(self, record: StepRecord) -> None: ...

    def held_out(self, record: StepRecord) -> None:
        """A held-out evaluation of the policy at `record.model_step`."""
        ...

    def warning(self, message: str) -> None: ...

    def line(self, text: str) -> None:
        """A line that a person must see whatever the mode."""
        ...

    def finish(self, status: str, summary: Mapping[str, object]) -> None: ...

    def close(self) -> None:
        """Free everything within a bounded time; called exactly once, also after an interrupt."""
        ...


class JsonLines:
    """A file of one JSON object per line, flushed line by line: a crash loses at most the line being written."""

    def __init__(self, path: Path, *, append: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = append and _ends_mid_line(path)
        # backslashreplace: a lone surrogate (possible in untrusted text) becomes its JSON escape instead of an exception
        self._file: IO[str] = open(path, "a" if append else "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        if torn:  # an earlier attempt died here; its fragment must not swallow our first line
            self._file.write("\n")

    def write(self, record: Mapping[str, object]) -> None:
        # one write call per line, so that an interrupt between two calls never tears a line
        self._file.write(dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after `last`, and a torn one, in one replacement of the file."""
    if not path.is_file():
        return
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", 0) <= last and line.endswith(b"\n"):
            kept.append(line)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(b"".join(kept))
    scratch.replace(path)


def _ends_mid_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def dumps(record: object) -> str:
    """Compact strict JSON; numbers that JSON cannot hold become null, objects it does not know become their text."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False, separators=(", ", ": "), default=str)


def finite(value: object) -> object:
    """The same containers with every non-finite float replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
