"""Names on disk: where checkpoints and artifacts of a run lie and what their parts are called."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from posttrain.config.run import COMPONENTS

MODEL, OPTIMIZER, TRAINING_STATE = COMPONENTS

CHECKPOINTS = "checkpoints"
"""Exactly resumable saves."""
ARTIFACTS = "checkpoint_artifacts"
"""Partial saves, which never become the point to resume from."""
AREAS = (CHECKPOINTS, ARTIFACTS)
OUTBOX = "checkpoint_outbox"
"""Saves on their way to an object store; empty unless one could not be delivered."""
CACHE = "checkpoint_cache"
"""The save that was last fetched from an object store."""
LATEST = "latest_checkpoint.txt"
MANIFEST = "manifest.json"
STATE_FILE = "state.json"
"""The file of the component `training_state`."""
PARTIAL = ".partial"
"""Suffix of a directory that is still being written."""
REPLACED = ".replaced"
"""Suffix of a save whose successor of the same name is being put in its place."""
DELETING = ".deleting"
"""Suffix of a directory that is being removed."""
UPLOADED = ".uploaded"
"""Marker of a directory whose archive copy was verified; it holds the archive's place."""

_NAME = re.compile(r"^iter_(\d{9})$")


def iteration_name(model_step: int) -> str:
    """`iter_000000120`: names sort as steps do."""
    return f"iter_{model_step:09d}"


def iteration_of(name: str) -> int | None:
    """The model step of a directory name; None for anything else."""
    match = _NAME.match(name)
    return int(match.group(1)) if match else None


def iterations(folder: Path) -> list[Path]:
    """Finished saves below a folder, oldest first. Directories still being written are not among them."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and iteration_of(path.name) is not None)


def write_durably(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new one."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    fsync_directory(path.parent)


def put_in_place(scratch: Path, target: Path) -> None:
    """Rename a finished directory to its name. One that is already there steps aside first and goes last, so that a crash at any
    point leaves a whole one behind: `recover` gives it its name back."""
    aside = target.with_name(target.name + REPLACED)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    scratch.rename(target)
    fsync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_directory(folder: Path) -> None:
    """Remove a directory so that a crash midway leaves nothing under its name."""
    doomed = folder.with_name(folder.name + DELETING)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def recover(folder: Path) -> None:
    """Undo what a crash left half done: a save that was about to be replaced gets its name back, the rest goes."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name.endswith(REPLACED):
            target = path.with_name(path.name.removesuffix(REPLACED))
            if target.exists():
                shutil.rmtree(path)
            else:
                path.rename(target)
        elif path.is_dir() and path.name.endswith((PARTIAL, DELETING)):
            shutil.rmtree(path)


def fsync_directory(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
