"""Being asked to end early: signals of a scheduler and a wall-clock limit. The run saves at its next safe point and says so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAVED_EXIT = 75
"""Exit code of a run that saved and can be continued (EX_TEMPFAIL of sysexits.h): neither success nor failure."""


class StopRequest:
    """Remembers why the run should end; a context manager that owns the signal handlers while it is open.

    Args:
        limit_s: wall-clock seconds after which the run should have ended; 0 is no limit.
        now: a monotonic clock in seconds.
    """

    def __init__(self, limit_s: float = 0.0, *, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._started = now()
        self._signal: str | None = None
        self._longest_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signal = signal.Signals(number).name

    def took(self, seconds: float) -> None:
        """Tell the duration of a whole step: the limit must leave room for another one."""
        self._longest_s = max(self._longest_s, seconds)

    def reason(self, *, step_ahead: bool) -> str | None:
        """Why to end now; None to go on.

        Args:
            step_ahead: a whole step would run before the next question, so that the limit must hold it.
        """
        if self._signal is not None:
            return f"signal {self._signal}"
        reach = self._now() - self._started + (self._longest_s if step_ahead else 0.0)
        if self._limit_s and reach >= self._limit_s:
            return f"rl.save_before_s={self._limit_s:g} leaves no time for another step"
        return None
