"""A save as a plain Hugging Face directory: `posttrain export RUN [--step N] [--output DIR]`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.checkpoint.layout import ARTIFACTS, CHECKPOINTS, MODEL, PARTIAL, fsync_directory, iteration_name, iteration_of
from posttrain.checkpoint.store import ArtifactStore, make_parent, primary_store
from posttrain.errors import CheckpointError, PosttrainError

if TYPE_CHECKING:
    from posttrain.config.root import RootConfig
    from posttrain.model.protocol import BuiltModel

CONFIG = "config_resolved"
EXPORT = "export"


def main(arguments: Sequence[str]) -> int:
    """The verb; returns the exit code."""
    parser = argparse.ArgumentParser("posttrain export", description="Write a checkpoint as a Hugging Face directory.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--step", type=int, metavar="N", help="model step of the checkpoint, as in iter_000000120; default: the latest")
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"a directory that does not exist yet; default: RUN/{EXPORT}/iter_N")
    chosen = parser.parse_args(list(arguments))
    try:
        print(export(chosen.run, step=chosen.step, output=chosen.output))
    except PosttrainError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return 2
    return 0


def export(run_dir: Path, step: int | None = None, output: Path | None = None) -> Path:
    """Write model and tokenizer of a save where transformers and engines load them by path; adapters are merged.

    Args:
        run_dir: a run directory; where it saved to an object store, the model is fetched.
        step: the model step of the save; None takes the latest.
        output: a directory that does not exist yet; None is `RUN/export/<save>`.

    Returns:
        The written directory, in which the weights have the dtype that the run kept them in.

    Raises:
        CheckpointError: no such save, a damaged one, or an output that exists.
    """
    root = _config_of(run_dir)
    store = primary_store(root, run_dir)
    area, name = _chosen(store, step)
    target = output if output is not None else run_dir / EXPORT / name
    if target.exists():
        raise CheckpointError(f"{target} exists: name another directory with --output, or remove it")
    scratch = target.with_name(target.name + PARTIAL)
    make_parent(target)
    save = store.fetch(area, name, [MODEL])
    built = _loaded(root, save)
    module: Any = built.module
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        module.save_pretrained(scratch)
        built.tokenizer.save_pretrained(scratch)
        scratch.rename(target)
        fsync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} was not written: {error}") from error
        raise
    return target


def _config_of(run_dir: Path) -> RootConfig:
    from posttrain.config import resolve
    from posttrain.config.compose import compose

    if not (run_dir / f"{CONFIG}.yaml").is_file():
        raise CheckpointError(f"{run_dir} is no run directory: it has no {CONFIG}.yaml")
    return resolve(compose([], config_dir=str(run_dir), config_name=CONFIG))


def _chosen(store: ArtifactStore, step: int | None) -> tuple[str, str]:
    """Area and name of the save to export."""
    known = {area: store.names(area) for area in (CHECKPOINTS, ARTIFACTS)}
    if step is None:
        latest = store.latest()
        if latest is not None:
            return CHECKPOINTS, latest
        if known[ARTIFACTS]:  # a run whose every save is partial
            return ARTIFACTS, known[ARTIFACTS][-1]
        raise CheckpointError(f"{store.place} holds no checkpoint yet: rl.save_every makes a run save")
    for area, names in known.items():
        if iteration_name(step) in names:
            return area, iteration_name(step)
    steps = sorted({number for names in known.values() for name in names if (number := iteration_of(name)) is not None})
    raise CheckpointError(f"{store.place} has no checkpoint of model step {step}; it has {', '.join(map(str, steps)) or 'none'}")


def _loaded(root: RootConfig, save: Path) -> BuiltModel:
    """The model of the run with the saved weights."""
    from transformers import PreTrainedModel

    from posttrain.checkpoint.initial import load_initial_weights, load_weights
    from posttrain.config import resolve_precision
    from posttrain.config.run import HFRunConfig
    from posttrain.model.build import build_model
    from posttrain.model.lora import add_adapters, lora_of, merged_parameters

    config: Any = root.model
    if not isinstance(root.rl, HFRunConfig):
        raise CheckpointError(f"a run of {type(root.rl).__name__} has no Hugging Face form")
    precision = resolve_precision(root.rl, config.dtype)
    built = build_model(config, precision=precision)
    if not isinstance(built.module, PreTrainedModel):
        raise CheckpointError(f"{type(built.module).__name__} is no transformers model: it has no Hugging Face form")
    lora = lora_of(config)
    if lora is None:
        load_weights(built.module, save, skip=[])
        return built
    add_adapters(built.module, lora)
    if root.rl.init_from:  # what the adapters were trained on
        load_initial_weights(built.module, root.rl.init_from, skip=root.rl.init_keys_to_skip_loading)
    load_weights(built.module, save, skip=[])
    plain = build_model(config, precision=precision)
    missing, unexpected = plain.module.load_state_dict(dict(merged_parameters(built.module)), strict=False)
    if unexpected or set(missing) & {name for name, _ in plain.module.named_parameters()}:
        raise CheckpointError(f"{save}: the merged adapters do not fit the base model: {[*missing, *unexpected][:4]}")
    return plain
