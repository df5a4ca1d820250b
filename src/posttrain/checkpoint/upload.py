"""The archive of a local primary store: a thread copies finished saves to an object store and marks them once the copy is verified.

It never holds up training and never fails a run. What it could not copy is named at the end and copied by the next start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from posttrain.checkpoint.layout import AREAS, CHECKPOINTS, LATEST, MANIFEST, UPLOADED, iterations, write_durably
from posttrain.checkpoint.manifest import Manifest
from posttrain.checkpoint.retention import is_archived
from posttrain.config.run import COMPONENTS
from posttrain.errors import CheckpointError

FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 120.0
"""Between two attempts at the same save, doubling."""
DRAIN_S = 600.0
"""Longest wait for the archive when a run ends by itself."""
SHORT_DRAIN_S = 10.0
"""The same when the run ends early or fails: the next start goes on."""
FINAL_ATTEMPTS = 3
"""Attempts at a save that fails during the wait at the end."""
PROGRESS_S = 10.0
_JOIN_S = 1.0

Say = Callable[..., None]
"""`say(kind, **fields)`, callable from any thread."""


class ArchiveStore(Protocol):
    """What an archive needs of a store; `posttrain.checkpoint.object_store.ObjectStore` is one."""

    place: str

    def check(self) -> None: ...
    def put(self, folder: Path, area: str, name: str) -> None: ...
    def set_latest(self, name: str) -> None: ...
    def stop(self) -> None: ...


class Archive:
    """Copies the saves below a run directory, the oldest first."""

    def __init__(
        self,
        store: ArchiveStore,
        run_dir: Path,
        *,
        lock: Any,
        say: Say,
        on_archived: Callable[[], None],
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        """
        Args:
            lock: held while a save is renamed, marked or removed.
            on_archived: called after every mark, in the archive's thread.
        """
        self._store, self._run_dir, self._lock = store, run_dir, lock
        self._say, self._on_archived, self._first_delay_s = say, on_archived, first_delay_s
        self._wake = threading.Condition()
        self._waiting: dict[Path, float] = {}
        """Save -> time before which it is not tried."""
        self._delays: dict[Path, float] = {}
        self._failures: dict[Path, str] = {}
        self._late_attempts: dict[Path, int] = {}
        self._draining = self._closed = False
        for area in AREAS:
            for save in iterations(run_dir / area):
                if not is_archived(save, store.place):
                    self._waiting[save] = 0.0
        self._thread = threading.Thread(target=self._work, name="archive", daemon=True)
        self._thread.start()

    def submit(self, save: Path) -> None:
        """Archive a save; returns at once."""
        with self._wake:
            self._waiting[save] = 0.0
            self._delays.pop(save, None)
            self._wake.notify_all()

    def pending(self) -> list[Path]:
        """Saves without a verified copy, oldest first."""
        with self._wake:
            return sorted(self._waiting, key=lambda save: save.name)

    def drain(self, limit_s: float, *, announce: Callable[[str], None], progress_s: float = PROGRESS_S) -> list[Path]:
        """Wait until everything is archived, at most `limit_s`; a save that keeps failing is given up. Ends the thread.

        Returns:
            What is not archived.
        """
        end = time.monotonic() + limit_s
        with self._wake:
            self._draining = True
            self._delays.clear()
            for save in self._waiting:
                self._waiting[save] = 0.0
            self._wake.notify_all()
        told = time.monotonic() - progress_s
        while True:
            with self._wake:
                left = [save for save in self._waiting if self._late_attempts.get(save, 0) < FINAL_ATTEMPTS]
                remaining = end - time.monotonic()
                if not left or remaining <= 0:
                    break
                due = time.monotonic() - told >= progress_s
                if not due:
                    self._wake.wait(min(remaining, progress_s))
            if due:
                told = time.monotonic()
                announce(f"archiving {len(left)} save(s), {_gib(left)} GiB, to {self._store.place}")
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        lost = self.pending()
        if lost:
            self._store.stop()
            causes = "; ".join(dict.fromkeys(self._failures[save] for save in lost if save in self._failures)) or "there was no time left"
            names = ", ".join(str(save.relative_to(self._run_dir)) for save in lost)
            self._say("warning", message=f"not archived: {names} ({causes}); the next start of this run uploads them")
        self._thread.join(_JOIN_S if lost else None)
        return lost

    # -------------------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            self._store.check()
        except CheckpointError as error:
            self._say("warning", message=f"the archive cannot be reached now and will be tried again: {error}")
        while (save := self._next()) is not None:
            try:
                archived = self._archive(save)
            except Exception as error:  # nothing that happens here may end the run, or this thread
                self._failed(save, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
                continue
            if archived:
                self._done(save)

    def _next(self) -> Path | None:
        """The oldest save that is due; waits for one. None ends the thread."""
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                due = [save for save, start in self._waiting.items() if start <= now and not self._given_up(save)]
                if due:
                    return min(due, key=lambda save: save.name)
                starts = [start for save, start in self._waiting.items() if not self._given_up(save)]
                self._wake.wait(min(starts) - now if starts else None)
        return None

    def _given_up(self, save: Path) -> bool:
        return self._late_attempts.get(save, 0) >= FINAL_ATTEMPTS

    def _archive(self, save: Path) -> bool:
        """Copy one save and mark it; False when another one of the same name took its place meanwhile."""
        if not save.is_dir():
            return True  # removed by someone else: nothing to archive
        before = (save / MANIFEST).read_bytes()
        started = time.monotonic()
        self._store.put(save, save.parent.name, save.name)
        latest = self._latest(save)
        if latest is not None:
            self._store.set_latest(latest)
        with self._lock:
            if (save / MANIFEST).read_bytes() != before:
                return False
            write_durably(save / UPLOADED, self._store.place + "\n")
        path = str(save.relative_to(self._run_dir))
        self._say("archived", path=path, place=self._store.place, seconds=round(time.monotonic() - started, 3))
        return True

    def _latest(self, copied: Path) -> str | None:
        """The newest resumable save, up to the run's own latest one, of which the archive has a copy."""
        folder = self._run_dir / CHECKPOINTS
        pointer = folder / LATEST
        own = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
        for save in reversed(iterations(folder)):
            if save.name <= own and (save == copied or is_archived(save, self._store.place)) and _is_resumable(save):
                return save.name
        return None

    def _done(self, save: Path) -> None:
        with self._wake:
            if not save.is_dir() or is_archived(save, self._store.place):  # else replaced, and handed in, once more meanwhile
                self._waiting.pop(save, None)
            for known in (self._delays, self._failures, self._late_attempts):
                known.pop(save, None)
            self._wake.notify_all()
        self._on_archived()

    def _failed(self, save: Path, cause: str) -> None:
        with self._wake:
            delay = self._delays.get(save, self._first_delay_s)
            self._delays[save] = min(2 * delay, LONGEST_DELAY_S)
            self._waiting[save] = time.monotonic() + delay
            if self._draining:
                self._late_attempts[save] = self._late_attempts.get(save, 0) + 1
            news = self._failures.get(save) != cause
            self._failures[save] = cause
            self._wake.notify_all()
        if news:
            self._say("warning", message=f"{save.name} is not archived yet, the run goes on and it will be tried again: {cause}")


def _is_resumable(save: Path) -> bool:
    try:
        return Manifest.read(save).components == COMPONENTS
    except CheckpointError:
        return False


def _gib(saves: list[Path]) -> str:
    total = 0
    for save in saves:
        try:
            total += sum(path.stat().st_size for path in save.rglob("*") if path.is_file())
        except OSError:
            continue  # it is being replaced right now
    return f"{total / 2**30:.2f}"
