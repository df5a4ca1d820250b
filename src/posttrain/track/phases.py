"""Exclusive wall time of the named phases of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds per phase. A phase entered inside another pauses the outer one, so no second is counted twice and the
    phases of a step never add up to more than the step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: list[str] = []
        self._since = now()
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str | None:
        """The innermost open phase."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last take, in order of first appearance; starts over."""
        self._charge()
        taken, self._seconds = self._seconds, {}
        return taken

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now
