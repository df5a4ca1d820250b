"""Small saves for tests of the checkpoint lifecycle: a state that is a few files, and a run that saves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.checkpoint.layout import CHECKPOINTS, iteration_name
from posttrain.checkpoint.lifecycle import CheckpointManager, Plan
from posttrain.checkpoint.manifest import Manifest, records_of
from posttrain.checkpoint.store import ArtifactStore
from posttrain.config.run import COMPONENTS, RunConfig

SIZE = 2000
"""Bytes of a component's file."""


class FileState:
    """Implements `SavedState`: `value` repeated in a file per component."""

    def __init__(self, *, size: int = SIZE, on_write: Callable[[Path], None] | None = None) -> None:
        self.value, self.size, self.on_write = b"a", size, on_write

    def staged(self, components: Sequence[str], *, copy: bool) -> dict[str, bytes]:
        return {name: self.value * self.size for name in components if name != "training_state"}

    def write(self, staged: dict[str, bytes], folder: Path) -> None:
        for name, content in staged.items():
            (folder / name).mkdir()
            (folder / name / "__0_0.distcp").write_bytes(content)
        if self.on_write is not None:
            self.on_write(folder)

    def state_bytes(self, components: Sequence[str]) -> int:
        return self.size * len([name for name in components if name != "training_state"])


class Events(list[tuple[str, dict[str, Any]]]):
    """What a tracker was told."""

    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))

    def messages(self) -> list[str]:
        return [str(fields["message"]) for kind, fields in self if kind in ("warning", "announcement")]


class Run:
    """A manager with a state whose content names the step."""

    def __init__(
        self, run_dir: Path, *, store: ArtifactStore | None = None, archive: Any = None, state: FileState | None = None, **rl: Any
    ):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.dir, self.state, self.events = run_dir, state or FileState(), Events()
        self.rl = RunConfig(objective_builder="unused", **{"save_every": 1, **rl})
        self.manager = CheckpointManager(
            self.rl, run_dir, state=self.state, provenance="provenance.1.json", event=self.events, store=store, archive=archive
        )

    def save(self, step: int, *, plan: Plan | None = None, value: bytes | None = None, wait: bool = False) -> None:
        self.state.value = value or str(step % 10).encode()
        chosen = plan or self.manager.plan(step=step, last=False, evaluated=False)
        assert chosen is not None
        self.manager.save(chosen, step=step, model_step=step, training_state={"step": step, "value": self.state.value.decode()}, wait=wait)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def names(self, area: str = CHECKPOINTS) -> list[str]:
        folder = self.dir / area
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def write_save(folder: Path, *, step: int, components: Sequence[str] = COMPONENTS, size: int = SIZE, value: bytes = b"x") -> Path:
    """A finished directory with manifest."""
    for name in components:
        (folder / name).mkdir(parents=True)
        (folder / name / ("state.json" if name == "training_state" else "__0_0.distcp")).write_bytes(
            b'{"step": %d}' % step if name == "training_state" else value * size
        )
    Manifest(step, step, tuple(components), "regular", "provenance.1.json", records_of(folder)).write(folder)
    return folder


def flip_byte(path: Path, position: int = 7) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def name(step: int) -> str:
    return iteration_name(step)
