"""Damaged files, disks that fill up or turn read-only, and object stores that fail: nothing is lost, and the message says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.checkpoint.layout import CACHE, CHECKPOINTS, MANIFEST, MODEL, OUTBOX, UPLOADED
from posttrain.checkpoint.lifecycle import find_resume_point
from posttrain.checkpoint.object_store import ObjectStore
from posttrain.errors import CheckpointError
from tests.s3_server import BUCKET, CREDENTIALS, Proxy, proxied, s3_server
from tests.saves import FileState, Run, flip_byte, name

ROOT = Path(__file__).resolve().parents[2]
PART = 5 * 2**20
TINY = ("experiment=tiny", "rl.save_every=1", "rl.max_steps=2", "rl.validation.num_prompts=0", "tracker.report=false")


def posttrain(*arguments: str, cwd: Path, code: int = 0, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key.startswith(("step", "train/", "optim/"))} for line in lines]


# ------------------------------------------------------------------------------------------------------------ damaged files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("saved")
    posttrain(*TINY, "rl.keep_optim_last=0", cwd=cwd)
    return cwd


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncated file", "flipped byte", "missing manifest"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_works(kind: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "outputs/posttrain/tiny" / CHECKPOINTS
    newest = folder / name(2)
    tensors = next((newest / MODEL).glob("*.distcp"))
    if kind == "truncated file":
        tensors.write_bytes(tensors.read_bytes()[:-1])
        expected = f"{tensors} has {tensors.stat().st_size} bytes instead of {tensors.stat().st_size + 1}"
    elif kind == "flipped byte":
        flip_byte(tensors, tensors.stat().st_size // 2)
        expected = f"{tensors} has another content than was saved"
    else:
        (newest / MANIFEST).unlink()
        expected = f"{newest / MANIFEST} is missing: the save was never completed"
    printed = posttrain(*TINY, "rl.keep_optim_last=0", "rl.max_steps=3", cwd=tmp_path, code=1)
    assert expected in printed and f"resume it with rl.resume={name(1)}" in printed and "Traceback" not in printed
    posttrain(*TINY, "rl.keep_optim_last=0", "rl.max_steps=3", f"rl.resume={name(1)}", cwd=tmp_path)
    assert [line["step"] for line in metrics(tmp_path / "outputs/posttrain/tiny")] == [1, 2, 3]
    assert metrics(tmp_path / "outputs/posttrain/tiny")[:2] == metrics(saved / "outputs/posttrain/tiny")


# -------------------------------------------------------------------------------------------------------------------- disks


def in_a_small_disk(script: str, folder: Path, *, megabytes: int) -> str:
    """Run Python on a file system of its own, mounted at `folder`."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no test mount a file system: a full disk cannot be tested")
    program = f"import sys; from pathlib import Path; folder = Path({str(folder)!r})\n{textwrap.dedent(script)}"
    (folder.parent / "program.py").write_text(program)
    command = f"{mount} && exec {sys.executable} {folder.parent / 'program.py'}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


FILL = """
    import torch
    from posttrain.checkpoint import tensors
    from posttrain.checkpoint.lifecycle import find_resume_point
    from posttrain.errors import CheckpointError
    from tests.saves import FileState, Run, name

    def big(scratch):
        tensors.save({"w": torch.zeros(2**20)}, scratch / "more")

    run = Run(folder / "run")
    run.save(1)
    (folder / "filler").write_bytes(b"x" * (1500 * 1024))
"""


def test_a_disk_that_fills_up_while_writing_loses_nothing(tmp_path: Path) -> None:
    printed = in_a_small_disk(
        FILL
        + """
    run.state.on_write = big
    try:
        run.save(2)
    except CheckpointError as error:
        print(error)
    print(run.names(), find_resume_point(folder / "run", "auto").training_state["step"])
    (folder / "filler").unlink()
    run.state.on_write = None
    run.save(2)
    print(find_resume_point(folder / "run", "auto").training_state["step"])
    """,
        tmp_path / "disk",
        megabytes=3,
    )
    error, names, after = printed.strip().splitlines()
    assert f"checkpoints/{name(2)} in" in error and "earlier checkpoints are untouched" in error, error
    assert "No space left on device" in error or "file write failed" in error or "enforce fail" in error, error
    assert names == f"['{name(1)}'] 1" and after == "2"


def test_a_disk_without_room_is_refused_before_writing(tmp_path: Path) -> None:
    printed = in_a_small_disk(
        FILL
        + """
    run.state.size = 2**20
    try:
        run.save(2)
    except CheckpointError as error:
        print(error)
    print(run.names(), find_resume_point(folder / "run", "auto").training_state["step"])
    """,
        tmp_path / "disk",
        megabytes=3,
    )
    error, names = printed.strip().splitlines()
    assert (
        "GiB are free and this save needs about 0.00 GiB; free space, or lower rl.keep_model_last" in error and names == f"['{name(1)}'] 1"
    )


def test_a_directory_that_turned_read_only_is_named(tmp_path: Path) -> None:
    printed = in_a_small_disk(
        FILL
        + """
    import subprocess
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        run.save(2)
    except CheckpointError as error:
        print(error)
    print(find_resume_point(folder / "run", "auto").training_state["step"])
    """,
        tmp_path / "disk",
        megabytes=3,
    )
    error, step = printed.strip().splitlines()
    assert f"checkpoints/{name(2)} in" in error and "Read-only file system" in error and step == "1"


# ------------------------------------------------------------------------------------------------------------ object stores


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(server) as opened:
        yield opened


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", "/").replace("]", "")


def store_at(address: str, key: str, run_dir: Path) -> ObjectStore:
    return ObjectStore(f"s3://{BUCKET}", key=key, run_dir=run_dir, endpoint_url=address, part_bytes=PART, first_delay_s=0.01)


def unfinished(server: str, key: str) -> list[str]:
    import boto3

    client = boto3.client("s3", endpoint_url=server)
    found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=key).get("Uploads", [])
    client.close()
    return [upload["Key"] for upload in found]


def resumed_step(store: ObjectStore, run_dir: Path) -> int:
    point = find_resume_point(run_dir, "auto", store)
    assert point is not None
    return point.training_state["step"]


def test_a_store_that_answers_500_and_recovers_costs_nothing_but_time(proxy: Proxy, key: str, tmp_path: Path) -> None:
    run = Run(tmp_path, store=store_at(proxy.address, key, tmp_path), keep_optim_last=0)
    run.save(1)
    left = 4

    def judge(method: str, path: str) -> int | None:
        nonlocal left
        if method == "PUT" and left:
            left -= 1
            return (500, 503)[left % 2]
        return None

    proxy.judge = judge
    run.save(2)
    assert left == 0 and run.events.messages() == [] and resumed_step(store_at(proxy.address, key, tmp_path), tmp_path) == 2


def test_a_store_that_stays_broken_is_named_and_the_next_start_delivers(proxy: Proxy, key: str, tmp_path: Path) -> None:
    run = Run(tmp_path, store=store_at(proxy.address, key, tmp_path), keep_optim_last=0)
    run.save(1)
    proxy.judge = lambda method, path: 500 if method == "PUT" else None
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    text = str(caught.value)
    assert f"{name(2)}/model/__0_0.distcp" in text and "failed (5 attempts): the server answered 500 InternalError" in text
    assert f"the save is whole in {tmp_path / OUTBOX / CHECKPOINTS / name(2)}, and the next start of this run uploads it" in text
    proxy.judge = lambda method, path: None
    store = store_at(proxy.address, key, tmp_path)
    assert store.latest() == name(1) and store.names(CHECKPOINTS) == [name(1)]
    assert resumed_step(store, tmp_path) == 2 and not any((tmp_path / OUTBOX / CHECKPOINTS).iterdir())


def test_a_store_that_dies_in_the_middle_of_a_multipart_upload_loses_nothing(server: str, proxy: Proxy, key: str, tmp_path: Path) -> None:
    state = FileState(size=3 * PART + 99)
    run = Run(tmp_path, store=store_at(proxy.address, key, tmp_path), state=state, keep_optim_last=0)
    run.save(1)
    dead = False

    def judge(method: str, path: str) -> str | None:
        nonlocal dead
        dead = dead or "partNumber=3" in path
        return "cut" if dead else None

    proxy.judge = judge
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    text = str(caught.value)
    assert f"{name(2)}/model/__0_0.distcp" in text and "part " in text and "of 4, failed (5 attempts)" in text, text
    assert "ConnectionClosedError" in text or "ConnectionError" in text, text
    assert unfinished(server, key)  # the dead store could not be told
    proxy.judge = lambda method, path: None
    store = store_at(proxy.address, key, tmp_path)
    assert store.latest() == name(1) and store.problems(CHECKPOINTS, name(1)) == []
    assert resumed_step(store, tmp_path) == 2 and unfinished(server, key) == []
    assert (tmp_path / CACHE / name(2) / MODEL / "__0_0.distcp").read_bytes() == b"2" * state.size


def test_a_connection_that_is_cut_once_is_repeated(proxy: Proxy, key: str, tmp_path: Path) -> None:
    cut: list[str] = []

    def judge(method: str, path: str) -> str | None:
        if "partNumber=2" in path and len(cut) < 2:
            cut.append(path)
            return "cut"
        return None

    proxy.judge = judge
    run = Run(tmp_path, store=store_at(proxy.address, key, tmp_path), state=FileState(size=2 * PART + 1), keep_optim_last=0)
    run.save(1)
    assert len(cut) == 2 and resumed_step(store_at(proxy.address, key, tmp_path), tmp_path) == 1


def test_an_archive_that_is_down_holds_up_nothing_and_gets_everything_later(proxy: Proxy, key: str, tmp_path: Path) -> None:
    proxy.judge = lambda method, path: "cut"
    run = Run(tmp_path, archive=store_at(proxy.address, key, tmp_path))
    for step in (1, 2, 3):
        run.save(step)
    assert run.names() == [name(1), name(2), name(3)]
    run.manager.close(hurry=True)
    assert "not archived: " in run.events.messages()[-1] and find_resume_point(tmp_path, "auto") is not None
    proxy.judge = lambda method, path: None
    with Run(tmp_path, archive=store_at(proxy.address, key, tmp_path)) as again:
        pass
    assert not [m for m in again.events.messages() if "not archived" in m]
    assert all((tmp_path / CHECKPOINTS / name(step) / UPLOADED).is_file() for step in (1, 2, 3))
    # the archive is laid out as a primary store: a run whose disk is gone continues from it
    elsewhere = tmp_path / "elsewhere"
    assert resumed_step(store_at(proxy.address, key, elsewhere), elsewhere) == 3


@pytest.mark.parametrize(
    ("damage", "expected"),
    [("missing object", "is missing"), ("other content", "has another content than was saved"), ("no bucket", "NoSuchBucket")],
)
def test_a_damaged_store_is_refused_by_name(damage: str, expected: str, server: str, key: str, tmp_path: Path) -> None:
    import boto3

    store = store_at(server, key, tmp_path)
    run = Run(tmp_path, store=store, keep_optim_last=0)
    run.save(1)
    run.save(2)
    client = boto3.client("s3", endpoint_url=server)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{key}/checkpoints/{name(2)}/")["Contents"]
    target = next(entry["Key"] for entry in found if "/model/" in entry["Key"])
    if damage == "missing object":
        client.delete_object(Bucket=BUCKET, Key=target)
    elif damage == "other content":
        client.put_object(Bucket=BUCKET, Key=target, Body=b"3" * 2000)
    else:
        store = ObjectStore("s3://no-such-bucket", key=key, run_dir=tmp_path, endpoint_url=server)
    client.close()
    with pytest.raises(CheckpointError) as caught:
        find_resume_point(tmp_path, "auto", store)
    assert expected in str(caught.value)
    if damage != "no bucket":
        assert target in str(caught.value) and f"the newest whole checkpoint is {name(1)}" in str(caught.value)


def test_starting_again_over_an_earlier_run_of_the_store_is_refused(server: str, key: str, tmp_path: Path) -> None:
    Run(tmp_path, store=store_at(server, key, tmp_path), keep_optim_last=0).save(1)
    with pytest.raises(CheckpointError, match=f"rl.resume=off, and s3://{BUCKET}/{key} holds {name(1)} of an earlier run"):
        find_resume_point(tmp_path, "off", store_at(server, key, tmp_path))


def test_missing_credentials_are_named(server: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CREDENTIALS:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store_at(server, key, tmp_path).latest()


# ------------------------------------------------------------------------------------------------- the program, end to end


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["object", "archive"])
def test_a_run_whose_disk_is_gone_continues_from_the_store(kind: str, server: str, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{kind}"
    primary = ("rl.checkpoint_store.kind=object", f"rl.checkpoint_store.url={url}", f"rl.checkpoint_store.endpoint_url={server}")
    first = primary if kind == "object" else (f"rl.upload.url={url}", f"rl.upload.endpoint_url={server}")
    posttrain(*TINY, *first, cwd=tmp_path, env=CREDENTIALS)
    run_dir = tmp_path / "outputs/posttrain/tiny"
    assert (run_dir / CHECKPOINTS).is_dir() == (kind == "archive")
    for path in run_dir.rglob("*"):
        assert not path.is_file() or CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path
    shutil.rmtree(tmp_path / "outputs")
    printed = posttrain(*TINY, *primary, "rl.max_steps=4", cwd=tmp_path, env=CREDENTIALS)
    assert f"resumed from {name(2)} after step 2 of 4" in printed
    straight = tmp_path / "straight"
    straight.mkdir()
    posttrain(*TINY, "rl.save_every=0", "rl.max_steps=4", cwd=straight)
    assert metrics(run_dir) == metrics(straight / "outputs/posttrain/tiny")[2:]
    exported = posttrain("export", str(run_dir), cwd=tmp_path, env=CREDENTIALS).strip()
    assert exported.endswith(f"export/{name(4)}") and (Path(tmp_path, exported) / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_finished_run_uploads_what_it_still_owes(proxy: Proxy, tmp_path: Path) -> None:
    upload = (f"rl.upload.url=s3://{BUCKET}/owed", f"rl.upload.endpoint_url={proxy.address}", "rl.max_steps=1")
    proxy.judge = lambda method, path: 403
    printed = posttrain(*TINY, *upload, cwd=tmp_path, env=CREDENTIALS)
    assert f"not archived: checkpoints/{name(1)}" in printed and "403" in printed
    proxy.judge = lambda method, path: None
    printed = posttrain(*TINY, *upload, cwd=tmp_path, env=CREDENTIALS)
    save = tmp_path / "outputs/posttrain/tiny" / CHECKPOINTS / name(1)
    assert "this run is finished" in printed and f"archiving 1 save(s), 0.00 GiB, to s3://{BUCKET}/owed/posttrain/tiny" in printed
    assert (save / UPLOADED).read_text().strip() == f"s3://{BUCKET}/owed/posttrain/tiny"
