"""Starting a run from the weights of another one (`rl.init_from`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.checkpoint.layout import CHECKPOINTS, LATEST, MANIFEST, MODEL
from posttrain.checkpoint.manifest import Manifest
from posttrain.checkpoint.tensors import model_state, restore_base, restore_model
from posttrain.errors import CheckpointError
from posttrain.model.lora import base_tensors, holds_adapters


def resolve_save(source: str | Path) -> Path:
    """The save that a path names: itself, or the latest one of a run directory.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file():
        return path
    pointer = path / CHECKPOINTS / LATEST
    if pointer.is_file():
        return path / CHECKPOINTS / pointer.read_text(encoding="utf-8").strip()
    raise CheckpointError(f"{path} is neither a checkpoint (no {MANIFEST}) nor a run directory with one (no {CHECKPOINTS}/{LATEST})")


def load_initial_weights(module: torch.nn.Module, source: str, *, skip: Sequence[str]) -> None:
    """Load the model component of a save into a module. In a module with adapters a save of full weights fills the base, and one of
    adapters the adapters.

    Args:
        skip: names that only the source has and that are left out.

    Raises:
        CheckpointError: the save is damaged, lacks a tensor of the module, or has one that nobody named.
    """
    save = resolve_save(source)
    manifest = Manifest.read(save)
    if MODEL not in manifest.components:
        raise CheckpointError(f"rl.init_from={source!r}: {save} holds no model")
    problems = manifest.problems(save, [MODEL])
    if problems:
        raise CheckpointError(f"rl.init_from={source!r}: {'; '.join(problems[:3])}")
    load_weights(module, save, skip=skip)


def load_weights(module: torch.nn.Module, save: Path, *, skip: Sequence[str]) -> None:
    """The same from a save whose files have been verified."""
    saved = _names(save)
    state = model_state(module)
    fills_base = holds_adapters(state) and not holds_adapters(saved)
    wanted = set(base_tensors(module) if fills_base else state)
    missing, extra = sorted(wanted - saved), sorted(saved - wanted - set(skip))
    if missing or extra:
        beyond = " beyond rl.init_keys_to_skip_loading" if skip else ""
        raise CheckpointError(
            f"{save} does not fit the model: it lacks {missing[:4] or 'nothing'}, and has {extra[:4] or 'nothing'}{beyond}"
        )
    unknown = sorted(set(skip) - saved)
    if unknown:
        raise CheckpointError(f"rl.init_keys_to_skip_loading names {unknown[:4]}, which {save} does not have")
    (restore_base if fills_base else restore_model)(module, save / MODEL)


def is_adapter_save(source: str) -> bool:
    """Whether a save's model component holds adapters instead of full weights."""
    return holds_adapters(_names(resolve_save(source)))


def _names(save: Path) -> set[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return set(FileSystemReader(str(save / MODEL)).read_metadata().state_dict_metadata)
    except OSError as error:
        raise CheckpointError(f"{save} holds no readable model: {error}") from error
