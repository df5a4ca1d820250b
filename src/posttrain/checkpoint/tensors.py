"""Tensors of the model and the optimizer to and from disk, in torch's distributed checkpoint format.

The state is keyed by parameter names and stored as global tensors, so a save of n ranks loads on any other number. Staging
copies it to host memory first: training may go on while a thread writes, at the price of one extra copy of the state.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import CheckpointError
from posttrain.model.lora import base_tensors, holds_adapters, saved_tensors

UNTOUCHED = "posttrain.untouched"
"""Saved in place of the state of an optimizer that has not stepped."""


def model_state(module: torch.nn.Module) -> dict[str, Any]:
    """Every parameter and persistent buffer by name, or the adapters alone where there are some; shards stay shards."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return saved_tensors(get_model_state_dict(module))


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Moments, step counters and group settings, keyed by parameter name.

    An optimizer that has not stepped has no state, and torch would make one by a step of its own, which counts: it is saved as
    what it is.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    if not optimizer.state:
        return {UNTOUCHED: torch.ones(())}
    return get_optimizer_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def restore_model(module: torch.nn.Module, folder: Path) -> None:
    """Load the saved tensors in place.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = model_state(module)
    _load(state, folder)
    set_model_state_dict(module, state, options=StateDictOptions(strict=not holds_adapters(state)))


def restore_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load moments and step counters in place."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

    if UNTOUCHED in FileSystemReader(str(folder)).read_metadata().state_dict_metadata:
        return
    state = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    _load(state, folder)
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(flatten_optimizer_state_dict=True))


def restore_base(module: torch.nn.Module, folder: Path) -> None:
    """Load full weights, saved without adapters, into the base of a module with adapters."""
    _load(base_tensors(module), folder)


def stage(state: dict[str, Any], *, host_mesh: Any = None, buffers: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """A copy in host memory that later updates do not touch.

    Args:
        host_mesh: the mesh of sharded tensors, over host memory; None keeps their own, for a mesh that is there already.
        buffers: memory of an earlier copy by name, filled again and added to: most of the time of a copy goes into getting fresh
            memory from the system. None copies into fresh memory.
    """
    memory = {} if buffers is None else buffers
    return {name: _host_copy(name, value, host_mesh, memory) for name, value in state.items()}


def _host_copy(name: str, value: Any, host_mesh: Any, memory: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        local = _filled(name, value.to_local(), memory)
        mesh = value.device_mesh if host_mesh is None else host_mesh
        return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())
    return _filled(name, value, memory)


def _filled(name: str, value: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
    own = memory.get(name)
    if own is None or own.shape != value.shape or own.dtype != value.dtype:
        own = memory[name] = torch.empty(value.shape, dtype=value.dtype)
    return own.copy_(value.detach())


def save(state: dict[str, Any], folder: Path, *, group: Any = None) -> None:
    """Write a state; with several ranks every one of them calls it at the same time.

    Args:
        group: a process group that nothing else uses meanwhile; None in a single process.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    folder.mkdir(parents=True, exist_ok=True)
    _a_single_process_is_meant()
    try:
        dcp_save(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # no Exception, but a BaseException
        raise OSError(_first_failure(error)) from error


def _first_failure(error: Any) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}" if rank else str(cause)


def _load(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.tensor import DTensor

    _a_single_process_is_meant()
    # not whether there is a process group: an engine in this process may have made one of its own
    sharded = any(isinstance(value, DTensor) for value in state.values())
    try:
        dcp_load(state, checkpoint_id=str(folder), no_dist=not sharded)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(f"{folder} does not fit this run's model or optimizer: {error}") from error


def _a_single_process_is_meant() -> None:
    """torch warns whenever no process group exists, even where `no_dist` says that this is intended. Not `catch_warnings`, which
    another thread would notice."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
