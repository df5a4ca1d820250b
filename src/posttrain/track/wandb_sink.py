"""Weights & Biases as an outside sink: what can block is bounded, and an outage never reaches the run.

After the start, every call to wandb runs on one daemon thread fed by a queue. A hanging service therefore blocks only that
thread; what it raised is raised again on the next call here, where the tracker reports it.
"""

from __future__ import annotations

import importlib
import json
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.tracker import WandbConfig
from posttrain.track.sinks import RunHeader, RunIdentity, StepRecord, TrackError

STATE_FILE = "tracker_state.json"
_QUEUE_LIMIT = 10_000


class WandbSink:
    """Logs a run to Weights & Biases.

    Args:
        module: The `wandb` package; imported at the start when None.
        init_timeout_s: Longest wait for the service at the start.
        finish_timeout_s: Longest wait for the upload at the end; what is not uploaded by then stays in `run_dir/wandb`.
    """

    name = "wandb"

    def __init__(
        self,
        run: RunIdentity,
        *,
        config: WandbConfig,
        module: Any = None,
        init_timeout_s: float = 30.0,
        finish_timeout_s: float = 60.0,
    ) -> None:
        self._run = run
        self._config = config
        self._module = module
        self._init_timeout_s = init_timeout_s
        self._finish_timeout_s = finish_timeout_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=_QUEUE_LIMIT)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wandb_run: Any = None
        self._notes: list[str] = []
        self._exit_code = 0

    def start(self, header: RunHeader) -> None:
        if self._module is None:
            try:
                self._module = importlib.import_module("wandb")
            except ImportError as error:
                raise TrackError(
                    f"tracker.wandb.mode={self._config.mode} needs the wandb package, which is not installed; "
                    "pip install 'posttrain[wandb]' or set tracker.wandb.mode=disabled"
                ) from error
        wandb = self._module
        try:
            self._wandb_run = self._init(self._config.mode)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise TrackError(
                f"tracker.wandb.mode={self._config.mode}: wandb refused to start ({error}); "
                "run `wandb login`, or set tracker.wandb.mode=offline or disabled"
            ) from error
        except Exception as error:
            if self._config.mode != "online":
                raise TrackError(
                    f"tracker.wandb.mode={self._config.mode}: wandb could not start ({type(error).__name__}: {error}); "
                    "set tracker.wandb.mode=disabled"
                ) from error
            self._start_offline(error)
        self._wandb_run.define_metric("*", step_metric="step")
        self._wandb_run.define_metric("val/*", step_metric="model_step")
        self._thread = threading.Thread(target=self._serve, name="wandb-sink", daemon=True)
        self._thread.start()
        about = {"algorithm": header.algorithm, "model": header.model, "seed": header.seed, "device": header.device}
        self._calls.put(lambda: self._wandb_run.config.update({"run": about}, allow_val_change=True))

    def phase(self, name: str | None) -> None:
        """wandb gets phase times with the step."""

    def step(self, record: StepRecord) -> None:
        self._log(record)

    def held_out(self, record: StepRecord) -> None:
        self._log(record)

    def warning(self, message: str) -> None:
        """Warnings stay in events.jsonl."""

    def line(self, text: str) -> None:
        """Lines are for the person at the console."""

    def finish(self, status: str, summary: Mapping[str, object]) -> None:
        self._exit_code = 0 if status == "completed" else 1
        values = {"status": status, **summary}
        self._submit(lambda: self._wandb_run.summary.update(values))

    def close(self) -> None:
        """Upload what is left, within `finish_timeout_s`."""
        if self._thread is None:
            return
        exit_code = self._exit_code
        try:
            self._calls.put_nowait(lambda: self._wandb_run.finish(exit_code=exit_code))
            self._calls.put_nowait(None)
        except queue.Full:
            pass  # the thread has been stuck for ten thousand calls; the join below states it
        self._thread.join(self._finish_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the upload did not end within {self._finish_timeout_s:g} s; `wandb sync` can send {self._run.run_dir / 'wandb'} later"
            )
        self._raise_pending()

    def _init(self, mode: str) -> Any:
        wandb = self._module
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            tags=list(self._config.tags),
            group=self._run.group,
            name=self._run.name,
            id=run_id(self._run.run_dir),
            # an offline run cannot look up an earlier one; `wandb sync` appends by id
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(self._run.run_dir),
            config=json.loads(json.dumps(self._run.config, default=str)),
            settings=wandb.Settings(
                init_timeout=self._init_timeout_s,
                finish_timeout=self._finish_timeout_s,
                console="off",  # the console is ours; wandb must not wrap stdout
                silent=True,
                disable_git=True,
                disable_job_creation=True,
            ),
        )

    def _start_offline(self, cause: Exception) -> None:
        try:
            self._wandb_run = self._init("offline")
        except Exception as error:
            raise TrackError(
                f"tracker.wandb.mode=online: the service is unreachable ({cause}) and the offline copy could not start either "
                f"({type(error).__name__}: {error}); set tracker.wandb.mode=disabled"
            ) from error
        # raised by the first call after the start, where the tracker turns it into a warning
        folder = self._run.run_dir / "wandb"
        self._errors.put(
            ConnectionError(f"service unreachable, logging offline instead; `wandb sync {folder}/offline-*` sends it: {cause}")
        )

    def _log(self, record: StepRecord) -> None:
        values: dict[str, object] = {"step": record.step, "model_step": record.model_step, "time_s": record.time_s}
        values |= {key: value for key, value in record.metrics.items() if value is not None}
        self._submit(lambda: self._wandb_run.log(values))

    def _submit(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"wandb has not answered for {_QUEUE_LIMIT} calls; dropping the newest") from None
        self._raise_pending()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # handed to the tracker by the next call
                self._errors.put(error)

    def _raise_pending(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()


def run_id(run_dir: Path) -> str:
    """The run's own wandb id: made once, kept in tracker_state.json, so that a continued run stays one run."""
    path = run_dir / STATE_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["wandb_run_id"]
        if isinstance(known, str) and known:
            return known
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    made = secrets.token_hex(6)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"wandb_run_id": made}) + "\n", encoding="utf-8")
    temporary.replace(path)
    return made
