"""`job.*`: the run's place on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import MISSING

from posttrain.errors import Violation


@dataclass
class JobConfig:
    """Names that decide the run directory `output_root/group/name`."""

    group: str = "posttrain"
    """First directory level; also the group of outside trackers."""
    name: str = MISSING
    """Run name: one directory, one tracker run. An earlier run of the same name is moved aside, never overwritten."""
    output_root: str = "outputs"

    def violations(self, path: str) -> Iterator[Violation]:
        for name in ("group", "name"):
            value = getattr(self, name)
            if not value or value in (".", "..") or "/" in value or "\0" in value:
                yield Violation(f"{path}.{name}", value, "must be one directory name", "use letters, digits, '-', '_' and '.'")
