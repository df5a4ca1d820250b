"""The trainer's tensors as the checkpoint lifecycle sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint import tensors
from posttrain.checkpoint.layout import MODEL, OPTIMIZER
from posttrain.model.lora import saved_tensors
from posttrain.trainer.ranks import ALONE, Ranks


class TrainerState:
    """Implements `posttrain.checkpoint.lifecycle.SavedState` for a module and its optimizer; with several ranks, for this rank's
    shards, and every rank makes the same calls."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        self._module, self._optimizer, self._ranks = module, optimizer, ranks
        self._buffers: dict[str, dict[str, torch.Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        """Host memory of the last copy; a save begins only when the one before it is written."""

    def staged(self, components: Sequence[str], *, copy: bool = True) -> dict[str, dict[str, Any]]:
        """See `SavedState.staged`."""
        states: dict[str, dict[str, Any]] = {}
        if MODEL in components:
            states[MODEL] = tensors.model_state(self._module)
        if OPTIMIZER in components:
            states[OPTIMIZER] = tensors.optimizer_state(self._module, self._optimizer)
        if not copy:
            return states
        mesh = self._ranks.host_mesh
        return {name: tensors.stage(state, host_mesh=mesh, buffers=self._buffers[name]) for name, state in states.items()}

    def write(self, staged: dict[str, dict[str, Any]], folder: Path) -> None:
        """See `SavedState.write`."""
        for component, state in staged.items():
            tensors.save(state, folder / component, group=self._ranks.saving)

    def state_bytes(self, components: Sequence[str]) -> int:
        """See `SavedState.state_bytes`; moments are counted even before the first step makes them."""
        parameters = {id(p): p for p in self._module.parameters()}.values()
        total = 0
        if MODEL in components:
            saved = saved_tensors(dict(self._module.named_parameters())).values()
            total += sum(p.numel() * p.element_size() for p in saved)
        if OPTIMIZER in components:
            total += 2 * sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        return total

    def restore(self, model: Path, optimizer: Path) -> None:
        """Load both in place.

        Raises:
            CheckpointError: they do not fit.
        """
        tensors.restore_model(self._module, model)
        tensors.restore_optimizer(self._module, self._optimizer, optimizer)
