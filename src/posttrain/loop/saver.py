"""The loop's side of saving: what a straight run would know at this point, and the safe points at which a run may end early."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from posttrain.checkpoint.lifecycle import CheckpointManager, Plan
from posttrain.errors import EmergencyStop
from posttrain.runtime import random_state
from posttrain.runtime.stop import StopRequest
from posttrain.trainer.core import Trainer

LoopState = dict[str, Any]


class RunSaver:
    """Saves the trainer together with the loop's own clocks.

    Between two steps the loop hands over its state with `mark`. A stop that is asked for while a batch is being collected saves
    that state: nothing has been trained since, and the resumed run collects the batch again, bit for bit.
    """

    def __init__(self, manager: CheckpointManager, *, trainer: Trainer, stop: StopRequest, exact: Mapping[str, Any], resume: str) -> None:
        """
        Args:
            resume: `rl.resume`, for the advice on how to continue.
            exact: what an exact resume compares; see `posttrain.checkpoint.exactness`.
        """
        self._manager, self._trainer, self._stop = manager, trainer, stop
        self._exact, self._resume = dict(exact), resume
        self._marked: LoopState | None = None
        self._last_mark: float | None = None

    def mark(self, state: LoopState) -> None:
        """The state between two steps, `state["step"]` being the last finished one."""
        now = time.monotonic()
        if self._last_mark is not None:
            self._stop.took(now - self._last_mark)
        self._last_mark = now
        self._marked = {
            **state,
            "model_step": self._trainer.model_step,
            "trainer": self._trainer.state(),
            "random": random_state.capture(),
            "exact": self._exact,
        }

    def save_if_due(self, *, last: bool, evaluated: bool) -> None:
        """After `mark`: the regular, validation and final saves.

        Raises:
            CheckpointError: writing failed.
        """
        assert self._marked is not None
        plan = self._manager.plan(step=self._marked["step"], last=last, evaluated=evaluated)
        if plan is not None:
            self._save(plan, wait=last)

    def stop_if_asked(self, *, step_ahead: bool = False) -> None:
        """A safe point.

        Args:
            step_ahead: a whole step would follow before the next safe point that could still meet a wall-clock limit.

        Raises:
            EmergencyStop: the run should end; everything is saved.
        """
        reason = self._stop.reason(step_ahead=step_ahead)
        if reason is None or self._marked is None:
            return
        self._save(self._manager.emergency(), wait=True)
        step = self._marked["step"]
        how = "the same command" if self._resume == "auto" else "the same command with rl.resume=auto"
        raise EmergencyStop(f"{reason}: saved after step {step}; {how} continues from there")

    def finish(self) -> None:
        """Wait for a save that is still being written; raises what it failed with."""
        self._manager.wait()

    def _save(self, plan: Plan, *, wait: bool) -> None:
        assert self._marked is not None
        state = self._marked
        self._manager.save(plan, step=state["step"], model_step=state["model_step"], training_state=state, wait=wait)
