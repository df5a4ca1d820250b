"""When and how a run saves, what it keeps, and where it continues.

Only the full plan (model, optimizer, training state) is exactly resumable and becomes the latest checkpoint; any other goes to
`checkpoint_artifacts/`. How a save is committed is the store's part, see `posttrain.checkpoint.store`.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from posttrain.checkpoint.layout import (
    ARTIFACTS,
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    STATE_FILE,
    TRAINING_STATE,
    fsync_directory,
    iteration_name,
    iteration_of,
    write_durably,
)
from posttrain.checkpoint.manifest import Manifest, records_of
from posttrain.checkpoint.retention import Retention, prune
from posttrain.checkpoint.store import ArtifactStore, LocalStore
from posttrain.checkpoint.upload import DRAIN_S, SHORT_DRAIN_S, Archive, ArchiveStore
from posttrain.config.run import COMPONENTS, RunConfig
from posttrain.errors import CheckpointError

SPACE_MARGIN = 1.05
"""Free space that a save asks for, as a multiple of its tensors."""


class SavedState(Protocol):
    """What the lifecycle saves: the trainer with its tensors, wherever their shards are."""

    def staged(self, components: Sequence[str], *, copy: bool) -> Any:
        """The tensors of these components.

        Args:
            copy: copies that are safe from later updates; without it the tensors themselves, to be written before anything moves
                them.
        """
        ...

    def write(self, staged: Any, folder: Path) -> None:
        """Write them below `folder`, a folder per component."""
        ...

    def state_bytes(self, components: Sequence[str]) -> int:
        """Size of these components on disk, within a few percent."""
        ...


EMERGENCY = "emergency"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to save now, and why."""

    components: tuple[str, ...]
    reasons: tuple[str, ...]

    @classmethod
    def union(cls, plans: Iterable[tuple[str, Sequence[str]]]) -> Plan | None:
        """Plans that coincide are written once; None when there is none."""
        wanted = list(plans)
        components = tuple(name for name in COMPONENTS if any(name in chosen for _, chosen in wanted))
        return cls(components, tuple(reason for reason, _ in wanted)) if wanted else None

    @property
    def full(self) -> bool:
        return self.components == COMPONENTS


class CheckpointManager:
    """Saves of one run; a context manager that leaves nothing half written and waits for the archive.

    Every method is called by the thread that trains. Under `save_async` a thread of the manager writes, and with an archive another
    one copies; what they have to tell reaches the tracker from the training thread.
    """

    def __init__(
        self,
        rl: RunConfig,
        run_dir: Path,
        *,
        state: SavedState,
        provenance: str,
        event: Callable[..., None],
        announce: Callable[[str], None] | None = None,
        store: ArtifactStore | None = None,
        archive: ArchiveStore | None = None,
    ) -> None:
        """
        Args:
            provenance: name of this attempt's provenance file.
            event: `event(kind, **fields)` of the tracker.
            announce: shows a line to the person watching; None makes it an event.
            store: the primary store; None is the run directory.
            archive: takes copies of the saves in the run directory.
        """
        self._rl, self._run_dir, self._state, self._provenance = rl, run_dir, state, provenance
        self._event = event
        self._announce = announce or (lambda text: event("announcement", message=text))
        self._store = store or LocalStore(run_dir)
        self._store.settle()
        self._tidying = self._store.lock if isinstance(self._store, LocalStore) else threading.RLock()
        keep = rl.keep_optim_last
        self._retention = Retention(1 if keep is None else keep, rl.keep_model_last, archive.place if archive is not None else "")
        self._messages: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last_full: tuple[int, int] | None = None
        """Step and model step of the last resumable save of this process."""
        self._stopping = False
        self._archive: Archive | None = None
        if archive is not None:
            self._archive = Archive(archive, run_dir, lock=self._tidying, say=self._say, on_archived=self._prune)
        self._warn_about_partial_saves()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close(hurry=kind is not None)

    def close(self, *, hurry: bool = False) -> None:
        """Wait for the background write and for the archive. A write that failed becomes a warning: `wait` raises.

        Args:
            hurry: leave what takes long to archive to the next start.
        """
        try:
            self.wait()
        except CheckpointError as error:
            self._event("warning", message=str(error))
        archive, self._archive = self._archive, None
        if archive is not None:
            archive.drain(SHORT_DRAIN_S if hurry or self._stopping else DRAIN_S, announce=self._announce)
        self._tell()

    def plan(self, *, step: int, last: bool, evaluated: bool) -> Plan | None:
        """What is due after collected batch `step`.

        Raises:
            CheckpointError: a write in the background has failed meanwhile.
        """
        self._tell()
        self._raise_failure()
        rl = self._rl
        due: list[tuple[str, Sequence[str]]] = []
        if rl.save_every and step % rl.save_every == 0:
            due.append(("regular", rl.checkpoint_components))
        if rl.validation.save_checkpoint and evaluated:
            due.append(("validation", rl.validation.checkpoint_components))
        if last and rl.save_every:
            due.append(("final", rl.checkpoint_components))
        return Plan.union(due)

    def emergency(self) -> Plan:
        """Everything, whatever the selections say."""
        return Plan(COMPONENTS, (EMERGENCY,))

    def save(self, plan: Plan, *, step: int, model_step: int, training_state: dict[str, Any], wait: bool = False) -> None:
        """Save under the name of `model_step`.

        Args:
            training_state: JSON data that a straight run would have at this point.
            wait: write in this thread even under `save_async`.

        Raises:
            CheckpointError: this save, or the one before it in the background, failed; earlier saves are untouched. An emergency
                save is tried whatever happened to the one before it.
        """
        self._stopping = emergency = EMERGENCY in plan.reasons
        try:
            self.wait()
        except CheckpointError as error:
            if not emergency:
                raise
            self._event("warning", message=str(error))
        if emergency and self._last_full == (step, model_step):
            return  # just saved
        area, name = CHECKPOINTS if plan.full else ARTIFACTS, iteration_name(model_step)
        scratch = self._store.scratch(area, name)
        self._check_space(scratch.parent, plan)
        inline = wait or not self._rl.save_async
        staged = self._state.staged(plan.components, copy=not inline)
        manifest = Manifest(model_step, step, plan.components, "+".join(plan.reasons), self._provenance, {})

        def write() -> None:
            self._write(scratch, area, manifest, staged=staged, training_state=training_state)

        if inline:
            write()
            self._tell()
            return

        def background() -> None:
            try:
                write()
            except BaseException as error:  # handed to the training thread
                self._failure = error

        self._writer = threading.Thread(target=background, name="checkpoint", daemon=False)
        self._writer.start()

    def wait(self) -> None:
        """Until nothing is being written; raises what the background write failed with."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self._tell()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the checkpoint written in the background failed: {failure}") from failure

    def _check_space(self, parent: Path, plan: Plan) -> None:
        needed = self._state.state_bytes(plan.components)
        free = shutil.disk_usage(parent).free
        if free < needed * SPACE_MARGIN:
            remedy = ", or lower rl.keep_model_last" if self._store.prunes else ""
            raise CheckpointError(
                f"{parent}: {free / 2**30:.2f} GiB are free and this save needs about {needed / 2**30:.2f} GiB; free space{remedy}"
            )

    def _write(self, scratch: Path, area: str, manifest: Manifest, *, staged: Any, training_state: dict[str, Any]) -> None:
        name = iteration_name(manifest.model_step)
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            self._state.write(staged, scratch)
            if TRAINING_STATE in manifest.components:
                folder = scratch / TRAINING_STATE
                folder.mkdir(exist_ok=True)
                write_durably(folder / STATE_FILE, json.dumps(training_state) + "\n")
            manifest.files.update(records_of(scratch))
            for folder in (path for path in scratch.rglob("*") if path.is_dir()):
                fsync_directory(folder)
            manifest.write(scratch)
        except BaseException as error:  # torch's own checkpoint errors are no Exceptions
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            where = f"{area}/{name} in {self._store.place}"
            raise CheckpointError(f"{where} was not saved: {_cause(error)}; earlier checkpoints are untouched") from error
        self._store.commit(scratch, area, name)
        if manifest.components == COMPONENTS:
            self._last_full = (manifest.step, manifest.model_step)
        self._say("checkpoint", path=f"{area}/{name}", store=self._store.place, step=manifest.step, reason=manifest.reason)
        if self._archive is not None:
            self._archive.submit(self._run_dir / area / name)
        self._prune()

    def _prune(self) -> None:
        if not self._store.prunes:
            return
        try:
            with self._tidying:
                prune(self._run_dir, self._retention)
        except OSError as error:
            self._say("warning", message=f"an old checkpoint could not be removed: {error}")

    def _say(self, kind: str, **fields: Any) -> None:
        """An event from any thread; the training thread hands it on."""
        self._messages.put((kind, fields))

    def _tell(self) -> None:
        while True:
            try:
                kind, fields = self._messages.get_nowait()
            except Empty:
                return
            self._event(kind, **fields)

    def _warn_about_partial_saves(self) -> None:
        rl = self._rl
        regular = ("rl.checkpoint_components", rl.checkpoint_components, rl.save_every > 0)
        validation = ("rl.validation.checkpoint_components", rl.validation.checkpoint_components, rl.validation.save_checkpoint)
        for key, chosen, active in (regular, validation):
            if active and set(chosen) != set(COMPONENTS):
                warnings.warn(
                    f"{key}={list(chosen)} leaves out {sorted(set(COMPONENTS) - set(chosen))}: such saves go to {ARTIFACTS}/ and cannot "
                    "be resumed from",
                    UserWarning,
                    stacklevel=3,
                )


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A whole, exactly resumable save."""

    folder: Path
    manifest: Manifest
    training_state: dict[str, Any]
    verified_s: float = 0.0
    """How long it took to fetch and verify."""

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def optimizer(self) -> Path:
        return self.folder / OPTIMIZER


def find_resume_point(run_dir: Path, resume: str, store: ArtifactStore | None = None) -> ResumePoint | None:
    """Where `rl.resume` says to continue: nowhere (`off`, or `auto` without a save), the latest save, or a named one.

    Args:
        store: the run's primary store; None is the run directory.

    Raises:
        CheckpointError: the chosen save is damaged or not resumable, names the file and the newest save that is whole; or the run
            starts again where an object store holds saves of an earlier one, which cannot be moved aside.
    """
    store = store or LocalStore(run_dir)
    if resume == "off":
        if not store.prunes and (earlier := store.latest()) is not None:
            raise CheckpointError(
                f"rl.resume=off, and {store.place} holds {earlier} of an earlier run: choose another job.name, rl.run_ts or "
                "rl.checkpoint_store.url, or remove that run from the store"
            )
        return None
    store.settle()
    name = store.latest() if resume == "auto" else resume
    if name is None:
        return None
    try:
        return _open(store, name)
    except CheckpointError as error:
        other = _newest_whole(store, without=name)
        offer = f"the newest whole checkpoint is {other}: resume it with rl.resume={other}" if other else "no whole checkpoint is left"
        again = ", or start again with rl.resume=off" if store.prunes else ""
        raise CheckpointError(f"cannot resume from {store.place}/{CHECKPOINTS}/{name}: {error}; {offer}{again}") from error


def _open(store: ArtifactStore, name: str) -> ResumePoint:
    if iteration_of(name) is None:
        raise CheckpointError(f"{name!r} is not the name of a checkpoint")
    manifest = store.manifest(CHECKPOINTS, name)
    if manifest.components != COMPONENTS:
        raise CheckpointError(f"it holds only {', '.join(manifest.components)}, which is not enough to continue exactly")
    started = time.monotonic()
    folder = store.fetch(CHECKPOINTS, name)
    verified_s = round(time.monotonic() - started, 3)
    state = json.loads((folder / TRAINING_STATE / STATE_FILE).read_text(encoding="utf-8"))
    return ResumePoint(folder, manifest, state, verified_s)


def _newest_whole(store: ArtifactStore, *, without: str) -> str | None:
    try:
        names = store.names(CHECKPOINTS)
    except CheckpointError:
        return None  # the store itself is out of reach, as the error at hand says
    for name in reversed(names):
        try:
            if name != without and store.manifest(CHECKPOINTS, name).components == COMPONENTS and not store.problems(CHECKPOINTS, name):
                return name
        except CheckpointError:
            continue
    return None


def archive_leftovers(run_dir: Path, archive: ArchiveStore, *, announce: Callable[[str], None]) -> list[Path]:
    """Upload what an earlier attempt of a finished run could not.

    Returns:
        What is still not archived.
    """
    store = LocalStore(run_dir)
    store.settle()

    def say(kind: str, **fields: Any) -> None:
        if kind == "warning":
            announce(str(fields["message"]))

    return Archive(archive, run_dir, lock=store.lock, say=say, on_archived=lambda: None).drain(DRAIN_S, announce=announce)


def _cause(error: BaseException) -> str:
    """One line. What failed in torch's checkpoint writer comes wrapped, with the traceback of every rank in its text."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}"
