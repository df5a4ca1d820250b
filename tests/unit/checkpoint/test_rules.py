"""Which combinations of stores, archives and retention are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.checkpoint.object_store import ObjectStore
from posttrain.checkpoint.store import LocalStore, archive_store, primary_store, run_key
from posttrain.config.checkpoint import split_url
from posttrain.config.job import JobConfig
from posttrain.preflight.engine import store_violations
from tests.trees import refusals, root_of

BASE = ("algorithm=grpo", "rl.save_every=1")
OBJECT = (*BASE, "rl.checkpoint_store.kind=object", "rl.checkpoint_store.url=s3://bucket/runs")


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        ((*BASE, "rl.checkpoint_store.kind=object"), "rl.checkpoint_store.kind", "needs rl.checkpoint_store.url"),
        ((*BASE, "rl.checkpoint_store.url=s3://bucket"), "rl.checkpoint_store.url", "is read only with rl.checkpoint_store.kind=object"),
        ((*BASE, "rl.upload.url=https://bucket/x"), "rl.upload.url", "must be s3://bucket/prefix"),
        ((*BASE, "rl.upload.url=s3://key:secret@bucket/x"), "rl.upload.url", "must be s3://bucket/prefix, without credentials"),
        ((*BASE, "rl.upload.url=s3://B"), "rl.upload.url", "must be s3://bucket/prefix"),
        ((*BASE, "rl.upload.endpoint_url=http://localhost:9000"), "rl.upload.endpoint_url", "is read only with rl.upload.url"),
        (
            (*BASE, "rl.upload.url=s3://bucket", "rl.upload.endpoint_url=http://user:secret@host"),
            "rl.upload.endpoint_url",
            "must be the http(s) address of a server, without credentials",
        ),
        ((*OBJECT, "rl.upload.url=s3://bucket/archive"), "rl.upload.url", "archives a local store"),
        ((*OBJECT, "rl.keep_optim_last=2"), "rl.keep_optim_last", "nothing is removed from an object store"),
        ((*OBJECT, "rl.keep_model_last=2"), "rl.keep_model_last", "nothing is removed from an object store"),
    ],
)
def test_refused(overrides: tuple[str, ...], key: str, rule: str) -> None:
    found = refusals(*overrides)
    assert [violation.key for violation in found] == [key] and rule in found[0].rule and found[0].remedy


@pytest.mark.parametrize(
    "overrides",
    [
        OBJECT,
        (*OBJECT, "rl.keep_optim_last=0"),
        (*OBJECT, "rl.checkpoint_store.endpoint_url=https://s3.example.org:9000/path", "rl.save_async=true"),
        (*BASE, "rl.upload.url=s3://my-bucket.example/a/b", "rl.keep_model_last=2"),
    ],
)
def test_accepted(overrides: tuple[str, ...]) -> None:
    assert refusals(*overrides) == []


def test_stores_of_a_configuration(tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs/posttrain/x/3"
    local = root_of(*BASE)
    assert isinstance(primary_store(local, run_dir), LocalStore) and archive_store(local, run_dir) is None
    remote = root_of(*OBJECT, f"job.output_root={tmp_path}/outputs")
    store = primary_store(remote, run_dir)
    assert isinstance(store, ObjectStore) and store.place == "s3://bucket/runs/posttrain/x/3" and not store.prunes
    archive = archive_store(root_of(*BASE, "rl.upload.url=s3://b0b", f"job.output_root={tmp_path}/outputs"), run_dir)
    assert archive is not None and archive.place == "s3://b0b/posttrain/x/3"


def test_runs_and_sweep_members_have_keys_of_their_own(tmp_path: Path) -> None:
    job = JobConfig(group="g", name="n", output_root=str(tmp_path))
    assert run_key(job, tmp_path / "g/n") == "g/n" and run_key(job, tmp_path / "g/n_sweep/1") == "g/n_sweep/1"
    assert run_key(job, Path("/elsewhere")) == "g/n"
    assert split_url("s3://bucket") == ("bucket", "") and split_url("s3://bucket/a/b/") == ("bucket", "a/b")


def test_the_client_must_be_installed() -> None:
    for root in (root_of(*OBJECT), root_of(*BASE, "rl.upload.url=s3://bucket")):
        assert list(store_violations(root.rl, installed=lambda package: package == "boto3")) == []
        (violation,) = store_violations(root.rl, installed=lambda package: False)
        assert violation.key.endswith(".url") and "posttrain[s3]" in violation.remedy
    assert list(store_violations(root_of(*BASE).rl, installed=lambda package: False)) == []
