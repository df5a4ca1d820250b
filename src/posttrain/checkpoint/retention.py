"""Which saves are kept. Neither the only resumable state nor anything not yet archived is ever deleted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.checkpoint.layout import CHECKPOINTS, LATEST, MODEL, UPLOADED, fsync_directory, iterations, remove_directory
from posttrain.checkpoint.manifest import Manifest
from posttrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Retention:
    """How many saves of `checkpoints/` are kept."""

    optimizer: int
    """Newest saves that stay resumable; 0 keeps all."""
    model: int
    """Newest saves that are kept at all; 0 keeps all."""
    archive: str = ""
    """Place of the archive without whose copy nothing is deleted; empty without one."""


def prune(run_dir: Path, rules: Retention) -> None:
    """Apply `keep_optim_last` and `keep_model_last` to `checkpoints/`.

    A save that loses its optimizer keeps its model under a new manifest, which is written before anything is deleted. The one
    that `latest_checkpoint.txt` names is out of reach of both rules, and so are later ones: a run that went back to an earlier
    save leaves them behind until it reaches them again.
    """
    folder = run_dir / CHECKPOINTS
    pointer = folder / LATEST
    latest = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
    saves = [save for save in iterations(folder) if save.name <= latest]
    for age, save in enumerate(reversed(saves)):
        if save.name == latest or (rules.archive and not is_archived(save, rules.archive)):
            continue
        if rules.model and age >= rules.model:
            remove_directory(save)
        elif rules.optimizer and age >= rules.optimizer:
            _keep_model_only(save)


def is_archived(save: Path, place: str) -> bool:
    """Whether a verified copy lies in the archive at `place`."""
    marker = save / UPLOADED
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == place


def _keep_model_only(save: Path) -> None:
    try:
        manifest = Manifest.read(save)
    except CheckpointError:
        return  # not ours to repair; it will be named when someone tries to load it
    if manifest.components != (MODEL,):
        replace(manifest, components=(MODEL,), files=manifest.files_of([MODEL])).write(save)
    for child in save.iterdir():  # also what an interrupted call left behind
        if child.is_dir() and child.name != MODEL:
            shutil.rmtree(child)
    fsync_directory(save)
