"""Weights & Biases: a real offline run, and every way an online one can fail (with a hand-written stand-in for the package)."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.config.tracker import TrackerConfig, WandbConfig
from posttrain.track import RunHeader, Tracker, TrackError
from posttrain.track.sinks import RunIdentity, StepRecord
from posttrain.track.wandb_sink import WandbSink, run_id

HEADER = RunHeader(algorithm="grpo", model="tiny")


class UsageError(Exception):
    pass


class AuthenticationError(Exception):
    pass


class FakeRun:
    def __init__(self, *, log_error: Exception | None, hang: threading.Event | None) -> None:
        self.logged: list[dict[str, object]] = []
        self.config = SimpleNamespace(update=lambda values, allow_val_change: None)
        self.summary: dict[str, object] = {}
        self.exit_code: int | None = None
        self._log_error, self._hang = log_error, hang

    def define_metric(self, name: str, *, step_metric: str) -> None:
        pass

    def log(self, values: dict[str, object]) -> None:
        if self._hang is not None:
            self._hang.wait(20)
        if self._log_error is not None:
            raise self._log_error
        self.logged.append(values)

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb:
    """The part of the wandb package that the sink uses."""

    errors = SimpleNamespace(UsageError=UsageError, AuthenticationError=AuthenticationError)

    def __init__(
        self, *, init_errors: dict[str, Exception] | None = None, log_error: Exception | None = None, hang: threading.Event | None = None
    ) -> None:
        self.inits: list[dict[str, object]] = []
        self.run = FakeRun(log_error=log_error, hang=hang)
        self._init_errors = init_errors or {}

    def Settings(self, **values: object) -> dict[str, object]:
        return values

    def init(self, **values: object) -> FakeRun:
        self.inits.append(values)
        error = self._init_errors.get(str(values["mode"]))
        if error is not None:
            raise error
        return self.run


def identity(run_dir: Path) -> RunIdentity:
    return RunIdentity(run_dir=run_dir, group="arith", name="demo", total_steps=3, config={"rl": {"seed": 1}, "path": run_dir})


def sink_in(run_dir: Path, module: FakeWandb, *, mode: str = "online", finish_timeout_s: float = 10.0) -> WandbSink:
    config = WandbConfig(mode=mode, project="p", entity="e", tags=["t"])
    return WandbSink(identity(run_dir), config=config, module=module, init_timeout_s=7.0, finish_timeout_s=finish_timeout_s)


def record(step: int) -> StepRecord:
    return StepRecord(step=step, model_step=2 * step, time_s=1.5, metrics={"reward/mean": 0.5, "train/loss": None})


def tracked(run_dir: Path, sink: WandbSink) -> list[dict[str, object]]:
    """Three steps through a Tracker; returns its warning events."""
    config = TrackerConfig(console="quiet", report=False)
    with Tracker(run_dir, config=config, group="arith", name="demo", total_steps=3, resolved_config={}, sinks=[sink]) as tracker:
        tracker.start(HEADER)
        for step in (1, 2, 3):
            tracker.step(step, model_step=step, metrics={"reward/mean": 0.5})
            time.sleep(0.02)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "warning"]


def test_an_online_run_is_named_grouped_and_logged(tmp_path: Path) -> None:
    wandb = FakeWandb()
    sink = sink_in(tmp_path, wandb)
    sink.start(HEADER)
    sink.step(record(1))
    sink.finish("completed", {"versions": 3})
    sink.close()
    (init,) = wandb.inits
    expected = {"project": "p", "entity": "e", "tags": ["t"], "group": "arith", "name": "demo", "mode": "online", "resume": "allow"}
    assert {key: init[key] for key in expected} == expected
    assert init["config"] == {"rl": {"seed": 1}, "path": str(tmp_path)} and init["settings"]["init_timeout"] == 7.0  # type: ignore[index]
    assert wandb.run.logged == [{"step": 1, "model_step": 2, "time_s": 1.5, "reward/mean": 0.5}]
    assert wandb.run.summary == {"status": "completed", "versions": 3} and wandb.run.exit_code == 0


def test_the_run_id_is_made_once_and_reused(tmp_path: Path) -> None:
    made = run_id(tmp_path)
    assert run_id(tmp_path) == made and json.loads((tmp_path / "tracker_state.json").read_text()) == {"wandb_run_id": made}
    (tmp_path / "tracker_state.json").write_text("{torn")
    assert run_id(tmp_path) != made


def test_an_outage_while_training_is_one_warning(tmp_path: Path) -> None:
    warnings = tracked(tmp_path, sink_in(tmp_path, FakeWandb(log_error=ConnectionError("503 from the service"))))
    assert [warning["sink"] for warning in warnings] == ["wandb"]
    assert "503 from the service" in str(warnings[0]["message"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_hanging_service_blocks_neither_steps_nor_the_end(tmp_path: Path) -> None:
    hang = threading.Event()
    begun = time.monotonic()
    warnings = tracked(tmp_path, sink_in(tmp_path, FakeWandb(hang=hang), finish_timeout_s=0.3))
    assert time.monotonic() - begun < 5
    hang.set()
    assert len(warnings) == 1 and "did not end within 0.3 s" in str(warnings[0]["message"])


def test_an_unreachable_service_at_the_start_falls_back_to_a_local_copy(tmp_path: Path) -> None:
    wandb = FakeWandb(init_errors={"online": TimeoutError("no route to host")})
    warnings = tracked(tmp_path, sink_in(tmp_path, wandb))
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"] and len(wandb.run.logged) == 3
    assert len(warnings) == 1 and "logging offline instead" in str(warnings[0]["message"])


@pytest.mark.parametrize("error", [UsageError("no API key"), AuthenticationError("bad key")])
def test_a_refused_login_is_fatal_before_training(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(TrackError, match=r"wandb refused to start .*wandb login"):
        sink_in(tmp_path, FakeWandb(init_errors={"online": error})).start(HEADER)


def test_offline_that_cannot_start_is_fatal(tmp_path: Path) -> None:
    with pytest.raises(TrackError, match=r"could not start .*disk full"):
        sink_in(tmp_path, FakeWandb(init_errors={"offline": OSError("disk full")}), mode="offline").start(HEADER)


def test_a_missing_package_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(TrackError, match=r"needs the wandb package, which is not installed; pip install 'posttrain\[wandb\]'"):
        WandbSink(identity(tmp_path), config=WandbConfig(mode="offline")).start(HEADER)


def test_a_real_offline_run_leaves_a_copy_to_sync(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = TrackerConfig(console="quiet", report=False, wandb=WandbConfig(mode="offline", project="posttrain-test"))
    with Tracker(tmp_path, config=config, group="arith", name="demo", total_steps=2, resolved_config={"rl": {"seed": 0}}) as tracker:
        tracker.start(HEADER)
        for step in (1, 2):
            tracker.step(step, model_step=step, metrics={"reward/mean": 0.25 * step})
        tracker.validation(2, metrics={"val/accuracy": 0.5})
    name = run_id(tmp_path)
    (copy,) = (tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    content = b""
    for _ in range(500):  # wandb's own service process may flush a moment after finish() has returned
        content = copy.read_bytes()
        if b"val/accuracy" in content:
            break
        time.sleep(0.02)
    assert b"reward/mean" in content and b"val/accuracy" in content and b"posttrain-test" in content
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "warning"] == []
