"""What is saved when, where a run continues, and what a crash at any point leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from posttrain.checkpoint.layout import ARTIFACTS, CHECKPOINTS, LATEST, MANIFEST, MODEL, OPTIMIZER, TRAINING_STATE
from posttrain.checkpoint.lifecycle import Plan, find_resume_point
from posttrain.checkpoint.manifest import Manifest
from posttrain.config.run import COMPONENTS, ValidationConfig
from posttrain.errors import CheckpointError
from tests.saves import FileState, Run, flip_byte, name

FULL = Plan(COMPONENTS, ("regular",))
PARTIAL = Plan((MODEL,), ("regular",))


def latest(run_dir: Path) -> str:
    return (run_dir / CHECKPOINTS / LATEST).read_text().strip()


def test_a_save_holds_its_components_its_manifest_and_becomes_the_latest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3)
    folder = tmp_path / CHECKPOINTS / name(3)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "manifest.json",
        "model/__0_0.distcp",
        "optimizer/__0_0.distcp",
        "training_state/state.json",
    ]
    manifest = Manifest.read(folder)
    assert (manifest.model_step, manifest.step, manifest.components, manifest.reason) == (3, 3, COMPONENTS, "regular")
    assert manifest.files["model/__0_0.distcp"].size == 2000 and manifest.problems(folder) == []
    assert latest(tmp_path) == name(3)
    assert run.events == [("checkpoint", {"path": f"checkpoints/{name(3)}", "store": str(tmp_path), "step": 3, "reason": "regular"})]
    point = find_resume_point(tmp_path, "auto")
    assert point is not None and point.training_state == {"step": 3, "value": "3"} and point.manifest == manifest
    assert (point.model, point.optimizer) == (folder / MODEL, folder / OPTIMIZER)


# ------------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("step", "last", "evaluated", "components", "reasons"),
    [
        (1, False, False, None, None),
        (2, False, False, (MODEL,), ("regular",)),
        (3, False, True, (MODEL, OPTIMIZER, TRAINING_STATE), ("validation",)),
        (4, False, True, (MODEL, OPTIMIZER, TRAINING_STATE), ("regular", "validation")),
        (4, True, False, (MODEL,), ("regular", "final")),
        (5, True, False, (MODEL,), ("final",)),
    ],
)
@pytest.mark.filterwarnings("ignore:rl.checkpoint_components")
def test_plans_that_coincide_are_united(
    step: int, last: bool, evaluated: bool, components: object, reasons: object, tmp_path: Path
) -> None:
    validation = ValidationConfig(num_prompts=1, save_checkpoint=True)
    run = Run(tmp_path, save_every=2, checkpoint_components=[MODEL], validation=validation)
    plan = run.manager.plan(step=step, last=last, evaluated=evaluated)
    assert (None if plan is None else (plan.components, plan.reasons)) == (None if components is None else (components, reasons))


def test_a_union_of_two_partial_plans_can_be_full() -> None:
    plan = Plan.union([("regular", [TRAINING_STATE, MODEL]), ("validation", [OPTIMIZER, MODEL])])
    assert plan is not None and plan.full and plan.components == COMPONENTS
    assert Plan.union([]) is None


def test_a_partial_save_warns_goes_aside_and_moves_no_pointer(tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    with pytest.warns(UserWarning, match=r"rl.checkpoint_components=\['model'\] leaves out \['optimizer', 'training_state'\]"):
        run = Run(tmp_path, checkpoint_components=[MODEL])
    run.save(2)
    assert run.names(ARTIFACTS) == [name(2)] and run.names() == [name(1)] and latest(tmp_path) == name(1)
    assert Manifest.read(tmp_path / ARTIFACTS / name(2)).components == (MODEL,)
    assert [path.name for path in (tmp_path / ARTIFACTS / name(2)).iterdir() if path.is_dir()] == [MODEL]


def test_an_inactive_partial_selection_does_not_warn(tmp_path: Path) -> None:
    Run(tmp_path, validation=ValidationConfig(checkpoint_components=[MODEL]))
    Run(tmp_path, save_every=0, checkpoint_components=[MODEL])
    with pytest.warns(UserWarning, match="rl.validation.checkpoint_components"):
        Run(tmp_path, validation=ValidationConfig(num_prompts=1, save_checkpoint=True, checkpoint_components=[MODEL]))


@pytest.mark.filterwarnings("ignore:rl.checkpoint_components")
def test_an_emergency_save_is_full_and_nothing_is_saved_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_components=[MODEL])
    run.save(4, plan=run.manager.emergency())
    assert run.names() == [name(4)] and Manifest.read(tmp_path / CHECKPOINTS / name(4)).reason == "emergency"
    before = (tmp_path / CHECKPOINTS / name(4) / MANIFEST).stat().st_mtime_ns
    run.save(4, plan=run.manager.emergency())
    assert (tmp_path / CHECKPOINTS / name(4) / MANIFEST).stat().st_mtime_ns == before
    run.save(5, plan=run.manager.emergency())
    assert latest(tmp_path) == name(5)


# -------------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("knobs", "kept", "resumable"),
    [
        ({}, [1, 2, 3, 4, 5], [5]),
        ({"keep_optim_last": 0}, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ({"keep_optim_last": 2}, [1, 2, 3, 4, 5], [4, 5]),
        ({"keep_model_last": 3}, [3, 4, 5], [5]),
        ({"keep_model_last": 2, "keep_optim_last": 0}, [4, 5], [4, 5]),
        ({"keep_model_last": 1, "keep_optim_last": 3}, [5], [5]),
    ],
)
def test_retention(knobs: dict[str, int], kept: list[int], resumable: list[int], tmp_path: Path) -> None:
    run = Run(tmp_path, **knobs)
    for step in range(1, 6):
        run.save(step)
    assert run.names() == [name(step) for step in kept]
    folder = tmp_path / CHECKPOINTS
    manifests = {step: Manifest.read(folder / name(step)) for step in kept}
    assert [step for step, manifest in manifests.items() if manifest.components == COMPONENTS] == resumable
    for step, manifest in manifests.items():
        assert manifest.problems(folder / name(step)) == []
        directories = sorted(path.name for path in (folder / name(step)).iterdir() if path.is_dir())
        assert directories == sorted(manifest.components)


def test_a_run_that_went_back_keeps_what_lies_ahead_until_it_is_made_again(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_optim_last=0)
    for step in (1, 2, 3):
        run.save(step)
    assert find_resume_point(tmp_path, name(1)).manifest.step == 1  # pyright: ignore[reportOptionalMemberAccess]
    again = Run(tmp_path, keep_model_last=1)
    again.save(2, value=b"B")
    assert again.names() == [name(2), name(3)] and latest(tmp_path) == name(2)
    again.save(3, value=b"B")
    assert again.names() == [name(3)]
    assert find_resume_point(tmp_path, "auto").training_state["value"] == "B"  # pyright: ignore[reportOptionalMemberAccess]


def test_a_reduction_that_was_interrupted_is_finished_later(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.save(2)
    (tmp_path / CHECKPOINTS / name(1) / OPTIMIZER).mkdir()
    (tmp_path / CHECKPOINTS / name(1) / OPTIMIZER / "left").write_text("behind")
    run.save(3)
    assert not (tmp_path / CHECKPOINTS / name(1) / OPTIMIZER).exists()


# ---------------------------------------------------------------------------------------------------------------- crashes


CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "open")


def die_before_change(number: int, action: Callable[[], None]) -> bool:
    """Fork; the child runs `action` and dies without any clean-up before its `number`-th change. True when it came that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
                return
            if event in CHANGES:
                count += 1
                if count == number:
                    os._exit(9)

        try:
            sys.addaudithook(hook)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code == 9


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("step", [2, 3], ids=["replacing the latest save", "a new save"])
def test_a_crash_at_any_point_leaves_the_old_or_the_new_save(step: int, tmp_path: Path, stack: ExitStack) -> None:
    if os.access("/dev/shm", os.W_OK):  # hundreds of fsyncs
        tmp_path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
    origin = tmp_path / "origin"
    run = Run(origin)
    run.save(1)
    run.save(2)
    number, seen = 0, set()
    while True:
        number += 1
        run_dir = tmp_path / f"crash{number}"
        shutil.copytree(origin, run_dir)
        crashed = die_before_change(number, lambda: Run(run_dir).save(step, value=b"N"))  # noqa: B023
        point = find_resume_point(run_dir, "auto")
        assert point is not None
        found = (point.manifest.step, point.training_state["value"])
        assert found in {(2, "2"), (step, "N")}, f"crash {number}: {found}"
        assert set(point.folder.parent.joinpath(point.folder.name, MODEL, "__0_0.distcp").read_text()) == {found[1]}
        seen.add(found)
        after = Run(run_dir)
        after.save(4)
        assert latest(run_dir) == name(4)
        assert [n for n in after.names() if not n[5:].isdigit()] == [], "leftovers"
        shutil.rmtree(run_dir)
        if not crashed:
            break
    assert number > 12 and seen == {(2, "2"), (step, "N")}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("boom"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_earlier_saves_and_names_the_cause(error: BaseException, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise error

    state = FileState()
    run = Run(tmp_path, state=state)
    run.save(1)
    state.on_write = fail
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run.save(2)
    else:
        with pytest.raises(CheckpointError, match=rf"checkpoints/{name(2)} .*not saved: .*{error.args[-1]}; earlier checkpoints"):
            run.save(2)
    assert run.names() == [name(1)] and latest(tmp_path) == name(1)
    state.on_write = None
    run.save(2)
    assert latest(tmp_path) == name(2)


def test_a_save_that_will_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.state.size = 2**60
    state = run.state
    state.staged = None  # type: ignore[assignment,method-assign]
    with pytest.raises(CheckpointError, match=r"GiB are free and this save needs about 2147483648.00 GiB; free space, or lower"):
        run.save(2)
    assert run.names() == [name(1)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / CHECKPOINTS).write_text("a file")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoints cannot be created"):
        run.save(1)


# ------------------------------------------------------------------------------------------------------------- background


def test_a_background_save_lets_training_go_on_and_is_the_state_of_its_step(tmp_path: Path) -> None:
    writing, gate = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        writing.set()
        assert gate.wait(10)

    state = FileState(on_write=slow)
    run = Run(tmp_path, state=state, save_async=True)
    run.save(1)
    assert writing.wait(10)
    assert run.names() == [f"{name(1)}.partial"] and not run.events
    state.value = b"changed"
    gate.set()
    run.manager.wait()
    assert run.names() == [name(1)] and run.events[0][0] == "checkpoint"
    assert (tmp_path / CHECKPOINTS / name(1) / MODEL / "__0_0.distcp").read_bytes() == b"1" * 2000


def test_a_failed_background_save_is_raised_at_the_next_step_but_not_in_the_way_of_an_emergency(tmp_path: Path) -> None:
    state = FileState()
    run = Run(tmp_path, state=state, save_async=True)

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    state.on_write = fail
    run.save(1)
    assert run.manager._writer is not None
    run.manager._writer.join()
    with pytest.raises(CheckpointError, match=r"written in the background failed: .*No space left"):
        run.manager.plan(step=2, last=False, evaluated=False)
    run.save(2)
    run.manager._writer.join()
    state.on_write = None
    run.save(3, plan=run.manager.emergency(), wait=True)
    assert run.names() == [name(3)] and any("No space left" in message for message in run.events.messages())


def test_leaving_the_manager_waits_for_the_background_write(tmp_path: Path) -> None:
    with Run(tmp_path, save_async=True, state=FileState(on_write=lambda folder: threading.Event().wait(0.1) and None)) as run:
        run.save(1)
    assert run.names() == [name(1)]


# ------------------------------------------------------------------------------------------------------------ where to go on


def damage(kind: str, save: Path) -> str:
    """Returns what the message must name."""
    model = save / MODEL / "__0_0.distcp"
    if kind == "truncated":
        model.write_bytes(model.read_bytes()[:-100])
        return f"{model} has 1900 bytes instead of 2000"
    if kind == "flipped byte":
        flip_byte(model)
        return f"{model} has another content than was saved (SHA-256 differs)"
    if kind == "missing file":
        model.unlink()
        return f"{model} is missing"
    if kind == "missing manifest":
        (save / MANIFEST).unlink()
        return f"{save / MANIFEST} is missing: the save was never completed"
    if kind == "truncated manifest":
        (save / MANIFEST).write_text((save / MANIFEST).read_text()[:50])
        return f"{save / MANIFEST} is damaged"
    text = (save / MANIFEST).read_text()
    (save / MANIFEST).write_text(text.replace('"step": 3', '"step": 2'))
    return f"{save / MANIFEST} has another content than was saved"


@pytest.mark.parametrize(
    "kind", ["truncated", "flipped byte", "missing file", "missing manifest", "truncated manifest", "flipped byte in the manifest"]
)
def test_a_damaged_save_is_refused_and_the_newest_whole_one_is_offered(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, keep_optim_last=3)
    for step in (1, 2, 3):
        run.save(step)
    expected = damage(kind, tmp_path / CHECKPOINTS / name(3))
    with pytest.raises(CheckpointError) as caught:
        find_resume_point(tmp_path, "auto")
    text = str(caught.value)
    assert expected in text and f"the newest whole checkpoint is {name(2)}: resume it with rl.resume={name(2)}" in text
    assert find_resume_point(tmp_path, name(2)).training_state["step"] == 2  # pyright: ignore[reportOptionalMemberAccess]
    for step in (1, 2):
        shutil.rmtree(tmp_path / CHECKPOINTS / name(step))
    with pytest.raises(CheckpointError, match=r"no whole checkpoint is left, or start again with rl\.resume=off"):
        find_resume_point(tmp_path, "auto")


def test_what_can_be_resumed_by_name(tmp_path: Path) -> None:
    assert find_resume_point(tmp_path, "auto") is None and find_resume_point(tmp_path, "off") is None
    run = Run(tmp_path)
    run.save(1)
    run.save(2)
    assert find_resume_point(tmp_path, "off") is None
    with pytest.raises(CheckpointError, match="it holds only model, which is not enough to continue exactly; the newest whole"):
        find_resume_point(tmp_path, name(1))
    with pytest.raises(CheckpointError, match=rf"{name(7)}/manifest.json is missing.*{name(2)}"):
        find_resume_point(tmp_path, name(7))
    (tmp_path / CHECKPOINTS / LATEST).write_text("\n")
    with pytest.raises(CheckpointError, match="'' is not the name of a checkpoint"):
        find_resume_point(tmp_path, "auto")


def test_a_manifest_of_another_format_or_with_foreign_paths_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).save(1)
    path = tmp_path / CHECKPOINTS / name(1) / MANIFEST
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 2}))
    with pytest.raises(CheckpointError, match="format 2 was written by another version; this one reads 1"):
        Manifest.read(path.parent)
    manifest = Manifest.parse(json.dumps(raw).encode(), where="m")
    manifest.files["../outside"] = manifest.files.pop("model/__0_0.distcp")
    manifest.write(path.parent)
    with pytest.raises(CheckpointError, match="names files outside the save"):
        Manifest.read(path.parent)
