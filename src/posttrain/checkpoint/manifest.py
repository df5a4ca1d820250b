"""The manifest of a save: every file with its size and digest, written last. What has no whole manifest was never saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from posttrain.checkpoint.layout import MANIFEST, write_durably
from posttrain.errors import CheckpointError

FORMAT = 1
_READ_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a save."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a save consists of."""

    model_step: int
    step: int
    """Collected batches."""
    components: tuple[str, ...]
    reason: str
    """`regular`, `validation`, `final` or `emergency`, joined by `+` where plans coincided."""
    provenance: str
    """Name of the attempt's provenance file in the run directory."""
    files: dict[str, FileRecord]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises CheckpointError naming the file when there is no readable manifest."""
        path = folder / MANIFEST
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the save was never completed") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        return cls.parse(content, where=str(path))

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Self:
        """From the file's content.

        Args:
            where: names it in errors.
        """
        try:
            raw: dict[str, Any] = json.loads(content)
            found = raw["format"]
            if found != FORMAT:
                raise CheckpointError(f"{where}: format {found} was written by another version; this one reads {FORMAT}")
            if raw.pop("sha256") != _own_digest(raw):
                raise CheckpointError(f"{where} has another content than was saved (SHA-256 differs)")
            files = {name: FileRecord(entry["size"], entry["sha256"]) for name, entry in raw["files"].items()}
            unsafe = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
            if unsafe:
                raise CheckpointError(f"{where} names files outside the save: {unsafe[:3]}")
            return cls(raw["model_step"], raw["step"], tuple(raw["components"]), raw["reason"], raw["provenance"], files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged ({type(error).__name__}: {error})") from error

    def write(self, folder: Path) -> None:
        """Atomically; the save counts from here on."""
        record = {
            "format": FORMAT,
            "model_step": self.model_step,
            "step": self.step,
            "components": list(self.components),
            "reason": self.reason,
            "provenance": self.provenance,
            "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())},
        }
        write_durably(folder / MANIFEST, json.dumps({**record, "sha256": _own_digest(record)}, indent=1) + "\n")

    def files_of(self, components: Sequence[str] | None) -> dict[str, FileRecord]:
        """The files of these components; None takes everything."""
        return {name: record for name, record in self.files.items() if components is None or name.partition("/")[0] in components}

    def problems(self, folder: Path, components: Sequence[str] | None = None) -> list[str]:
        """What of the save is missing, has another size or another content; empty when it is whole.

        Args:
            components: check only these; None checks everything.
        """
        with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter
            found = pool.map(lambda item: file_problem(folder / item[0], item[1]), self.files_of(components).items())
            return [problem for problem in found if problem is not None]


def records_of(folder: Path) -> dict[str, FileRecord]:
    """Sizes and digests of every file below a folder, the manifest left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(digest_of, paths)
        return {
            path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, digest)
            for path, digest in zip(paths, digests, strict=True)
        }


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_problem(path: Path, record: FileRecord) -> str | None:
    """How a file differs from what was saved; None when it does not."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes instead of {record.size}"
        if digest_of(path) != record.sha256:
            return f"{path} has another content than was saved (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    return None


def _own_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
