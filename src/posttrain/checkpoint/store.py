"""Where the saves of a run lie: the protocol of a primary store, the one of the run directory, and which one a run has.

A save is written to a scratch directory, gets its manifest, and is committed: a crash at any point leaves either a whole save
or something that no one will load.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from posttrain.checkpoint.layout import AREAS, CHECKPOINTS, LATEST, PARTIAL, iterations, put_in_place, recover, write_durably
from posttrain.checkpoint.manifest import Manifest
from posttrain.config.run import COMPONENTS
from posttrain.errors import CheckpointError

if TYPE_CHECKING:
    from posttrain.checkpoint.object_store import ObjectStore
    from posttrain.config.job import JobConfig
    from posttrain.config.root import RootConfig


class ArtifactStore(Protocol):
    """A primary store. Every method raises CheckpointError naming the file or object and the cause."""

    place: str
    """Names the store in messages."""
    prunes: bool
    """Whether old saves can be removed from it."""

    def scratch(self, area: str, name: str) -> Path:
        """Where a save is written before it is committed; its parent exists."""
        ...

    def commit(self, scratch: Path, area: str, name: str) -> None:
        """Make a finished scratch directory the save `area/name`, replacing one of that name as a whole. A resumable save becomes
        the latest one. The directory is used up."""
        ...

    def names(self, area: str) -> list[str]:
        """Finished saves, oldest first."""
        ...

    def manifest(self, area: str, name: str) -> Manifest: ...

    def problems(self, area: str, name: str) -> list[str]:
        """What of a save is missing or damaged, found without fetching it."""
        ...

    def fetch(self, area: str, name: str, components: Sequence[str] | None = None) -> Path:
        """A local directory with these components, verified; None takes all."""
        ...

    def latest(self) -> str | None:
        """The save to resume from."""
        ...

    def settle(self) -> None:
        """Finish or undo what a crash left half done; no other process may be using the store."""
        ...


class LocalStore:
    """Saves below the run directory, loaded in place."""

    prunes = True

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.place = str(run_dir)
        self.lock = threading.RLock()
        """Held while saves are renamed, marked or removed."""

    def scratch(self, area: str, name: str) -> Path:
        """See `ArtifactStore.scratch`."""
        path = self._run_dir / area / (name + PARTIAL)
        make_parent(path)
        return path

    def commit(self, scratch: Path, area: str, name: str) -> None:
        """See `ArtifactStore.commit`."""
        target = self._run_dir / area / name
        full = Manifest.read(scratch).components == COMPONENTS
        try:
            with self.lock:
                put_in_place(scratch, target)
                if full and area == CHECKPOINTS:
                    write_durably(target.parent / LATEST, name + "\n")
        except OSError as error:
            raise CheckpointError(f"{target} was not saved: {error}") from error

    def names(self, area: str) -> list[str]:
        """See `ArtifactStore.names`."""
        return [path.name for path in iterations(self._run_dir / area)]

    def manifest(self, area: str, name: str) -> Manifest:
        """See `ArtifactStore.manifest`."""
        return Manifest.read(self._run_dir / area / name)

    def problems(self, area: str, name: str) -> list[str]:
        """See `ArtifactStore.problems`."""
        folder = self._run_dir / area / name
        return Manifest.read(folder).problems(folder)

    def fetch(self, area: str, name: str, components: Sequence[str] | None = None) -> Path:
        """See `ArtifactStore.fetch`: the save itself."""
        folder = self._run_dir / area / name
        problems = Manifest.read(folder).problems(folder, components)
        if problems:
            raise CheckpointError("; ".join(problems[:3]))
        return folder

    def latest(self) -> str | None:
        """See `ArtifactStore.latest`."""
        pointer = self._run_dir / CHECKPOINTS / LATEST
        try:
            return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{pointer} cannot be read ({error})") from error

    def settle(self) -> None:
        """See `ArtifactStore.settle`."""
        try:
            for area in AREAS:
                recover(self._run_dir / area)
        except OSError as error:
            raise CheckpointError(f"{self._run_dir}: what an earlier attempt left half written cannot be removed: {error}") from error


def run_key(job: JobConfig, run_dir: Path) -> str:
    """The name of a run inside a shared store: its place below `job.output_root`, so that runs and sweep members never meet."""
    root = Path(job.output_root).expanduser().absolute()
    absolute = run_dir.absolute()
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else f"{job.group}/{job.name}"


def primary_store(root: RootConfig, run_dir: Path) -> ArtifactStore:
    """The store that `rl.checkpoint_store` selects."""
    config = root.rl.checkpoint_store
    if config.kind == "local":
        return LocalStore(run_dir)
    from posttrain.checkpoint.object_store import ObjectStore

    return ObjectStore(config.url, key=run_key(root.job, run_dir), run_dir=run_dir, endpoint_url=config.endpoint_url)


def archive_store(root: RootConfig, run_dir: Path) -> ObjectStore | None:
    """The archive that `rl.upload` asks for; None without one."""
    config = root.rl.upload
    if not config.url:
        return None
    from posttrain.checkpoint.object_store import ObjectStore

    return ObjectStore(config.url, key=run_key(root.job, run_dir), run_dir=run_dir, endpoint_url=config.endpoint_url)


def make_parent(path: Path) -> None:
    """Create the folder of a path; names it when that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be created: {error}") from error
