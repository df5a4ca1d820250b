"""What every primary store of checkpoints promises.

A new kind joins by adding a maker to `STORES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.checkpoint.layout import ARTIFACTS, CHECKPOINTS, MANIFEST, MODEL, OPTIMIZER, TRAINING_STATE
from posttrain.checkpoint.lifecycle import find_resume_point
from posttrain.checkpoint.manifest import Manifest
from posttrain.checkpoint.object_store import ObjectStore
from posttrain.checkpoint.store import ArtifactStore, LocalStore
from posttrain.errors import CheckpointError
from tests.s3_server import BUCKET, s3_server
from tests.saves import Run, name, write_save

PART = 5 * 2**20
"""The smallest that S3 takes."""

Make = Callable[[Path], ArtifactStore]
"""A store of one and the same run, whose files lie in a folder."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


def local(request: pytest.FixtureRequest) -> Make:
    return LocalStore


def objects(request: pytest.FixtureRequest) -> Make:
    address, key = request.getfixturevalue("server"), request.node.name
    return lambda folder: ObjectStore(
        f"s3://{BUCKET}/some/prefix", key=key, run_dir=folder, endpoint_url=address, part_bytes=PART, first_delay_s=0.01
    )


STORES = {"local": local, "object": objects}


@pytest.fixture(params=list(STORES))
def make(request: pytest.FixtureRequest) -> Make:
    return STORES[request.param](request)


@pytest.fixture
def store(make: Make, tmp_path: Path) -> ArtifactStore:
    return make(tmp_path)


def commit(store: ArtifactStore, step: int, *, area: str = CHECKPOINTS, **save: object) -> Manifest:
    scratch = write_save(store.scratch(area, name(step)), step=step, **save)  # type: ignore[arg-type]
    manifest = Manifest.read(scratch)
    store.commit(scratch, area, name(step))
    assert not scratch.exists()
    return manifest


def test_an_empty_store_holds_nothing(store: ArtifactStore) -> None:
    assert store.names(CHECKPOINTS) == [] and store.latest() is None
    store.settle()
    with pytest.raises(CheckpointError, match=f"{name(1)}/{MANIFEST} is missing: the save was never completed"):
        store.manifest(CHECKPOINTS, name(1))
    with pytest.raises(CheckpointError, match="never completed"):
        store.fetch(CHECKPOINTS, name(1))


def test_what_was_committed_comes_back(store: ArtifactStore) -> None:
    manifests = {step: commit(store, step, value=str(step).encode()) for step in (1, 2)}
    assert store.names(CHECKPOINTS) == [name(1), name(2)] and store.names(ARTIFACTS) == []
    assert store.latest() == name(2)
    for step, manifest in manifests.items():
        assert store.manifest(CHECKPOINTS, name(step)) == manifest and store.problems(CHECKPOINTS, name(step)) == []
        folder = store.fetch(CHECKPOINTS, name(step))
        assert folder.name == name(step) and Manifest.read(folder) == manifest and manifest.problems(folder) == []
        assert (folder / MODEL / "__0_0.distcp").read_bytes() == str(step).encode() * 2000


def test_partial_saves_and_artifacts_move_no_pointer(store: ArtifactStore) -> None:
    commit(store, 1)
    commit(store, 2, area=ARTIFACTS, components=(MODEL,))
    assert store.latest() == name(1) and store.names(ARTIFACTS) == [name(2)]
    assert store.manifest(ARTIFACTS, name(2)).components == (MODEL,)


def test_a_save_of_the_same_name_is_replaced_as_a_whole(store: ArtifactStore) -> None:
    commit(store, 1, value=b"old", size=900)
    manifest = commit(store, 1, value=b"new")
    assert store.manifest(CHECKPOINTS, name(1)) == manifest and store.names(CHECKPOINTS) == [name(1)]
    assert (store.fetch(CHECKPOINTS, name(1)) / OPTIMIZER / "__0_0.distcp").read_bytes() == b"new" * 2000


def test_large_files_survive(store: ArtifactStore) -> None:
    manifest = commit(store, 1, size=2 * PART + 12345)
    assert manifest.problems(store.fetch(CHECKPOINTS, name(1))) == [] and store.problems(CHECKPOINTS, name(1)) == []


def test_empty_files_survive(store: ArtifactStore) -> None:
    manifest = commit(store, 1, size=0)
    assert manifest.problems(store.fetch(CHECKPOINTS, name(1))) == []


def test_one_component_is_enough_for_its_reader(store: ArtifactStore) -> None:
    manifest = commit(store, 1)
    folder = store.fetch(CHECKPOINTS, name(1), [MODEL])
    assert manifest.problems(folder, [MODEL]) == []
    assert manifest.problems(store.fetch(CHECKPOINTS, name(1))) == []


def test_another_process_sees_the_same(make: Make, tmp_path: Path) -> None:
    commit(make(tmp_path), 3)
    point = find_resume_point(tmp_path, "auto", make(tmp_path))
    assert point is not None and point.training_state == {"step": 3} and point.model.is_dir()


def test_a_run_saves_and_continues_in_any_store(make: Make, tmp_path: Path) -> None:
    with Run(tmp_path, store=make(tmp_path), keep_optim_last=0, save_async=True) as run:
        for step in (1, 2, 3):
            run.save(step)
    store = make(tmp_path)
    assert store.names(CHECKPOINTS) == [name(1), name(2), name(3)]
    assert [fields["store"] for kind, fields in run.events if kind == "checkpoint"] == [store.place] * 3
    point = find_resume_point(tmp_path, "auto", store)
    assert point is not None and point.training_state["step"] == 3
    point = find_resume_point(tmp_path, name(2), store)
    assert point is not None and point.training_state["step"] == 2 and (point.model / "__0_0.distcp").read_bytes() == b"2" * 2000
    with pytest.raises(CheckpointError, match=f"{name(9)}/{MANIFEST} is missing.*the newest whole checkpoint is {name(3)}"):
        find_resume_point(tmp_path, name(9), store)


def test_a_damaged_save_is_never_committed_as_whole(store: ArtifactStore) -> None:
    commit(store, 1)
    scratch = write_save(store.scratch(CHECKPOINTS, name(2)), step=2)
    (scratch / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        store.commit(scratch, CHECKPOINTS, name(2))
    assert store.latest() == name(1) and store.names(CHECKPOINTS) == [name(1)]


def test_components_are_what_they_are_called() -> None:
    assert (MODEL, OPTIMIZER, TRAINING_STATE) == ("model", "optimizer", "training_state")
