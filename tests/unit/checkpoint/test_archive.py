"""The archive of a local run: in the background, verified, retried, and honest about what it could not do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.checkpoint.layout import ARTIFACTS, CHECKPOINTS, MODEL, OPTIMIZER, UPLOADED
from posttrain.checkpoint.lifecycle import archive_leftovers
from posttrain.checkpoint.upload import Archive
from posttrain.errors import CheckpointError
from tests.saves import FileState, Run, name


class FakeStore:
    """An archive that can be slow, or fail a number of times."""

    place = "s3://bucket/run"

    def __init__(self) -> None:
        self.open, self.stopped = threading.Event(), False
        self.open.set()
        self.failures, self.put_calls, self.got = 0, list[str](), dict[str, bytes]()
        self.latest = ""
        self.reachable = True

    def check(self) -> None:
        if not self.reachable:
            raise CheckpointError("reaching s3://bucket failed: the server answered 403 Forbidden: no")

    def put(self, folder: Path, area: str, name: str) -> None:
        self.put_calls.append(f"{area}/{name}")
        assert self.open.wait(20)
        if self.failures:
            self.failures -= 1
            raise CheckpointError(f"uploading {name} failed: the server answered 500")
        self.got[f"{area}/{name}"] = (folder / MODEL / "__0_0.distcp").read_bytes()

    def set_latest(self, name: str) -> None:
        self.latest = name

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    made.open.set()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.checkpoint.upload.LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr("posttrain.checkpoint.lifecycle.SHORT_DRAIN_S", 0.3)


def marked(run: Run, area: str = CHECKPOINTS) -> list[str]:
    return [n for n in run.names(area) if (run.dir / area / n / UPLOADED).exists()]


@pytest.mark.filterwarnings("ignore:rl.checkpoint_components")
def test_saves_are_copied_marked_and_the_newest_is_named(store: FakeStore, tmp_path: Path) -> None:
    with Run(tmp_path, archive=store, keep_optim_last=0) as run:
        run.save(1)
        run.save(2)
    with Run(tmp_path, archive=store, checkpoint_components=[MODEL]) as partial:
        partial.save(3)
    assert store.got == {
        f"checkpoints/{name(1)}": b"1" * 2000,
        f"checkpoints/{name(2)}": b"2" * 2000,
        f"{ARTIFACTS}/{name(3)}": b"3" * 2000,
    }
    assert marked(run) == [name(1), name(2)] and marked(run, ARTIFACTS) == [name(3)] and store.latest == name(2)
    assert [fields["path"] for kind, fields in run.events if kind == "archived"] == [f"checkpoints/{name(1)}", f"checkpoints/{name(2)}"]


def test_a_slow_archive_never_holds_up_a_step(store: FakeStore, tmp_path: Path) -> None:
    store.open.clear()
    with Run(tmp_path, archive=store) as run:
        started = time.monotonic()
        for step in range(1, 5):
            run.save(step)
        assert time.monotonic() - started < 5 and not store.got
        # nothing that is not archived is touched by retention
        assert run.names() == [name(step) for step in range(1, 5)]
        assert all((tmp_path / CHECKPOINTS / name(step) / OPTIMIZER).is_dir() for step in range(1, 5))
        store.open.set()
    assert len(store.got) == 4
    assert [(tmp_path / CHECKPOINTS / name(step) / OPTIMIZER).is_dir() for step in range(1, 5)] == [False, False, False, True]


def test_failures_are_told_once_and_repeated_until_it_works(store: FakeStore, tmp_path: Path) -> None:
    store.failures = 4
    run = Run(tmp_path, archive=store)
    run.manager._archive._first_delay_s = 0.01  # pyright: ignore[reportOptionalMemberAccess]
    run.save(1)
    for _ in range(200):
        if store.got:
            break
        time.sleep(0.02)
    run.manager.close()
    assert len(store.put_calls) == 5 and marked(run) == [name(1)]
    assert [m for m in run.events.messages() if "500" in m] == [
        f"{name(1)} is not archived yet, the run goes on and it will be tried again: uploading {name(1)} failed: the server answered 500"
    ]


def test_what_cannot_be_archived_is_named_at_the_end_and_copied_by_the_next_start(store: FakeStore, tmp_path: Path) -> None:
    store.failures = 10**6
    run = Run(tmp_path, archive=store)
    run.manager._archive._first_delay_s = 0.01  # pyright: ignore[reportOptionalMemberAccess]
    run.save(1)
    run.save(2)
    run.manager.close()
    last = run.events.messages()[-1]
    assert last.startswith(f"not archived: checkpoints/{name(1)}, checkpoints/{name(2)} (uploading")
    assert last.endswith("the next start of this run uploads them") and "500" in last
    assert any(m.startswith("archiving 2 save(s), 0.00 GiB, to s3://bucket/run") for m in run.events.messages())
    assert store.stopped and marked(run) == [] and run.names() == [name(1), name(2)]
    store.failures = 0
    said: list[str] = []
    assert archive_leftovers(tmp_path, store, announce=said.append) == []
    assert marked(run) == [name(1), name(2)] and store.latest == name(2)


def test_a_run_that_ends_early_does_not_wait_long(store: FakeStore, tmp_path: Path) -> None:
    store.open.clear()
    run = Run(tmp_path, archive=store)
    run.save(1, plan=run.manager.emergency())
    started = time.monotonic()
    run.manager.close()
    assert time.monotonic() - started < 5
    assert f"not archived: checkpoints/{name(1)} (there was no time left)" in run.events.messages()[-1]


def test_a_save_that_is_replaced_while_it_is_copied_is_copied_again(store: FakeStore, tmp_path: Path) -> None:
    store.open.clear()
    with Run(tmp_path, archive=store) as run:
        run.save(1, value=b"A")
        while not store.put_calls:
            time.sleep(0.01)
        run.save(1, value=b"B")
        store.open.set()
    assert store.got == {f"checkpoints/{name(1)}": b"B" * 2000} and marked(run) == [name(1)]
    assert len(store.put_calls) >= 2


def test_a_marker_of_another_archive_does_not_count(store: FakeStore, tmp_path: Path) -> None:
    with Run(tmp_path, archive=store) as run:
        run.save(1)
    other = FakeStore()
    other.place = "s3://elsewhere/run"
    with Run(tmp_path, archive=other):
        pass
    assert list(other.got) == [f"checkpoints/{name(1)}"]


def test_an_archive_that_cannot_be_reached_is_told_at_the_start(store: FakeStore, tmp_path: Path) -> None:
    store.reachable = False
    with Run(tmp_path, archive=store) as run:
        pass
    assert any("the archive cannot be reached now" in m and "403" in m for m in run.events.messages())


def test_no_thread_but_the_training_one_talks_to_the_tracker(store: FakeStore, tmp_path: Path) -> None:
    threads: set[str] = set()

    class Watched(list):  # type: ignore[type-arg]
        def append(self, item: object) -> None:
            threads.add(threading.current_thread().name)

    run = Run(tmp_path, archive=store, save_async=True, state=FileState())
    run.manager._event = lambda kind, **fields: Watched().append(kind)
    run.save(1)
    run.save(2)
    run.manager.close()
    assert threads == {threading.current_thread().name}


def test_draining_reports_progress(store: FakeStore, tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    store.open.clear()
    lines: list[str] = []
    archive = Archive(store, tmp_path, lock=threading.RLock(), say=lambda kind, **fields: None, on_archived=lambda: None)
    threading.Timer(0.5, store.open.set).start()
    assert archive.drain(10, announce=lines.append, progress_s=0.1) == []
    assert 3 <= len(lines) <= 7 and lines[0] == "archiving 1 save(s), 0.00 GiB, to s3://bucket/run"
