"""The one object a loop reports to: local files first, then every outside sink.

`metrics.jsonl`, `events.jsonl` and `samples/` are the truth and are written before anything else; an error there (a full disk)
propagates. The console and Weights & Biases are views: whatever they raise is reported once and the run goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.config.tracker import TrackerConfig
from posttrain.errors import ReportError
from posttrain.records import ScoredGroup, TrainGroup
from posttrain.track.console import ConsoleSink
from posttrain.track.formats import fixed
from posttrain.track.phases import PhaseClock
from posttrain.track.report import write_report
from posttrain.track.samples import TokenTexts, held_out_group_record, train_group_record
from posttrain.track.sinks import JsonLines, RunHeader, RunIdentity, Sink, StepRecord, TrackError, keep_steps
from posttrain.track.wandb_sink import WandbSink

HELD_OUT = "val/accuracy"


class Tracker:
    """Metrics, events, samples, console, outside trackers and the report of one run.

    Use it as a context manager: leaving it normally, by an error or by Ctrl-C finishes the run with the matching status, leaves
    complete files and writes the report.

    Args:
        run_dir: The run's directory; made if missing. An existing run in it is continued by appending.
        config: The `tracker` node.
        group: `job.group`.
        name: `job.name`.
        total_steps: Collected batches the run intends to train on.
        resolved_config: The whole configuration as plain containers, for outside trackers.
        sinks: Outside sinks, replacing the ones the config asks for.
        now: A monotonic clock in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: TrackerConfig,
        group: str,
        name: str,
        total_steps: int,
        resolved_config: Mapping[str, object],
        sinks: Sequence[Sink] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = RunIdentity(run_dir=run_dir, group=group, name=name, total_steps=total_steps, config=resolved_config)
        self._config = config
        self._now = now
        self._sinks: list[Sink] = list(sinks) if sinks is not None else _sinks_of(config, self.run)
        self._failed_sinks: set[str] = set()
        self._started_at = self._attempt_at = self._step_started_at = now()
        self._clock = PhaseClock(now)
        self._header: RunHeader | None = None
        self._metrics_file: JsonLines | None = None
        self._events_file: JsonLines | None = None
        self._step = 0
        self._held_out: list[StepRecord] = []
        self._resumed: Mapping[str, Any] | None = None
        self._finished = False
        self._closed = False

    # ------------------------------------------------------------------------------------------------------- lifecycle

    def start(self, header: RunHeader) -> None:
        """Open the files and every sink.

        Raises:
            TrackError: when a configured sink cannot start.
        """
        if self._header is not None:
            raise TrackError("the tracker was started twice; make one Tracker per run")
        self._header = header
        self._metrics_file = JsonLines(self.run.run_dir / "metrics.jsonl")
        self._events_file = JsonLines(self.run.run_dir / "events.jsonl")
        self._attempt_at = self._step_started_at = self._now()
        self._started_at = self._attempt_at - (self._resumed["time_s"] if self._resumed else 0.0)
        self.event(
            "run_started",
            resumed_after_step=self._step if self._resumed else None,
            group=self.run.group,
            name=self.run.name,
            total_steps=self.run.total_steps,
            algorithm=header.algorithm,
            model=header.model,
            seed=header.seed,
            device=header.device,
            details=dict(header.details),
        )
        for sink in self._sinks:
            sink.start(header)

    def state(self) -> dict[str, object]:
        """What a resumed run needs to go on telling the same story."""
        records = [self._held_out[0], self._held_out[-1]] if len(self._held_out) > 1 else self._held_out
        return {
            "time_s": self._time_s(),
            "held_out": [{"step": r.step, "model_step": r.model_step, "time_s": r.time_s, "metrics": dict(r.metrics)} for r in records],
        }

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on after `step`, before `start`: metrics of later steps, which this run will make again, are taken out of the file."""
        self._step = step
        self._resumed = state
        self._held_out = [StepRecord(**record) for record in state["held_out"]]
        keep_steps(self.run.run_dir / "metrics.jsonl", step)

    def finish(self, status: str, *, summary: Mapping[str, object] | None = None) -> None:
        """Record how the run ended (`completed`, `interrupted`, `failed`, or a reason of one's own). Later calls do nothing."""
        if self._finished or self._header is None:
            return
        self._finished = True
        summary = dict(summary or {})
        # phases after the last step (a final evaluation) belong to no metrics line
        phases = {phase: round(seconds, 6) for phase, seconds in self._clock.take().items()}
        self.event("run_finished", status=status, step=self._step, phases=phases, summary=summary)
        if len(self._held_out) > 1:
            first, last = (record.metrics.get(HELD_OUT) for record in (self._held_out[0], self._held_out[-1]))
            self.announce(f"held-out accuracy {fixed(first)} -> {fixed(last)} (seed {self._header.seed})")
        self._tell(lambda sink: sink.finish(status, summary))

    def close(self) -> None:
        """Close files and sinks and write the report; safe to call twice and before `start`."""
        if self._closed:
            return
        self._closed = True
        if self._header is None:
            return
        self.finish("completed")
        if self._config.report:
            self._write_report()
        self._tell(lambda sink: sink.close())
        for file in (self._metrics_file, self._events_file):
            if file is not None:
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.finish("interrupted")
        elif error is not None and self._header is not None and not self._finished:
            self.event("error", error=type(error).__name__, message=str(error))
            self.finish("failed")
        self.close()

    def ready(self) -> None:
        """Start-up is over: record what it took, and start the clock of the first step."""
        phases = self._clock.take()
        now = self._now()
        self.event("ready", seconds=round(now - self._attempt_at, 3), phases={name: round(value, 3) for name, value in phases.items()})
        self._step_started_at = now

    # ---------------------------------------------------------------------------------------------------------- records

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase (generate, reward, train, sync, validate, ...). A nested phase pauses the outer one."""
        outer = self._clock.current
        self.event("phase_started", phase=name)
        self._tell(lambda sink: sink.phase(name))
        started, failed = self._now(), True
        try:
            with self._clock.phase(name):
                yield
            failed = False
        finally:
            self.event("phase_ended", phase=name, duration_s=round(self._now() - started, 6), **({"failed": True} if failed else {}))
            self._tell(lambda sink: sink.phase(outer))

    def step(self, step: int, *, model_step: int, metrics: Mapping[str, float]) -> None:
        """One collected batch is done: write its line to metrics.jsonl and show it.

        The line also carries `time/<phase>_s` of every phase since the previous step, `time/step_s`, and the held-out metrics
        of an evaluation that has already been made of the same model step.
        """
        now = self._now()
        values: dict[str, float] = {key: float(value) for key, value in metrics.items()}
        if self._held_out and self._held_out[-1].model_step == model_step:
            values |= {key: value for key, value in self._held_out[-1].metrics.items() if value is not None and key not in values}
        values |= {f"time/{phase}_s": round(seconds, 6) for phase, seconds in self._clock.take().items()}
        values["time/step_s"] = round(now - self._step_started_at, 6)
        self._step_started_at, self._step = now, step
        record = self._record(step, model_step=model_step, metrics=values)
        self._open(self._metrics_file).write({"step": step, "model_step": model_step, "time_s": record.time_s, **record.metrics})
        self._tell(lambda sink: sink.step(record))

    def event(self, kind: str, **fields: object) -> None:
        """One line in events.jsonl. A `warning` with a `message` is also shown to the person watching."""
        self._open(self._events_file).write({"time_s": self._time_s(), "unix_s": round(time.time(), 3), "kind": kind, **fields})
        if kind == "warning":
            message = str(fields.get("message", ""))
            self._tell(lambda sink: sink.warning(message))

    def announce(self, text: str) -> None:
        """An important line: stdout in every console mode, and an event."""
        self.event("announcement", message=text)
        self._tell(lambda sink: sink.line(text))

    def wants_samples(self, step: int) -> bool:
        """Whether `samples` would write this step: the first, and every `tracker.samples_every`-th."""
        every = self._config.samples_every
        return every > 0 and (step == 1 or step % every == 0)

    def samples(
        self,
        step: int,
        *,
        groups: Sequence[TrainGroup],
        token_texts: TokenTexts,
        token_logprobs: Mapping[tuple[str, int], tuple[float, ...]],
    ) -> None:
        """Write samples/step_NNNNN.jsonl, one group a line; does nothing on a step that `wants_samples` declines."""
        if not self.wants_samples(step):
            return
        self._write_groups(
            f"step_{step:05d}.jsonl",
            (
                train_group_record(group, step=step, token_texts=token_texts, token_logprobs=token_logprobs)
                for group in groups[: self._config.samples_max_groups]
            ),
        )

    def validation(
        self,
        model_step: int,
        *,
        metrics: Mapping[str, float],
        step: int | None = None,
        groups: Sequence[ScoredGroup] = (),
        token_texts: TokenTexts | None = None,
    ) -> None:
        """A held-out evaluation of the policy at `model_step`: a `validation` event, samples/validation_NNNNN.jsonl, the sinks.

        Args:
            metrics: `val/...` keys; `val/accuracy` is the headline.
            step: the collected batch it follows, when that step's own line is not written yet; None is the last written one.
        """
        after = self._step if step is None else step
        record = self._record(after, model_step=model_step, metrics={key: float(value) for key, value in metrics.items()})
        self._held_out.append(record)
        self.event("validation", step=after, model_step=model_step, metrics=record.metrics)
        if groups and self._config.samples_every > 0:
            self._write_groups(
                f"validation_{model_step:05d}.jsonl",
                (
                    held_out_group_record(group, model_step=model_step, token_texts=token_texts)
                    for group in groups[: self._config.samples_max_groups]
                ),
            )
        self._tell(lambda sink: sink.held_out(record))

    # ------------------------------------------------------------------------------------------------------------ inside

    def _record(self, step: int, *, model_step: int, metrics: Mapping[str, float]) -> StepRecord:
        broken = [key for key, value in metrics.items() if not math.isfinite(value)]
        if broken:
            named = ", ".join(f"{key}={metrics[key]}" for key in broken)
            self.event("warning", message=f"step {step}: not finite, recorded as null: {named}", step=step, metrics=broken)
        return StepRecord(
            step=step,
            model_step=model_step,
            time_s=self._time_s(),
            metrics={key: value if math.isfinite(value) else None for key, value in metrics.items()},
        )

    def _write_groups(self, filename: str, records: Iterator[dict[str, object]]) -> None:
        file = JsonLines(self.run.run_dir / "samples" / filename, append=False)
        try:
            for record in records:
                file.write(record)
        finally:
            file.close()

    def _write_report(self) -> None:
        try:
            path = write_report(self.run.run_dir)
        except ReportError:
            return  # a run that ended before its first step has nothing to report
        except Exception as error:
            self.event("warning", message=f"report.html was not written: {type(error).__name__}: {error}")
            return
        self._tell(lambda sink: sink.line(f"report {path}"))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        """Fan out. A view that fails is named once, on the others and in events.jsonl; it is tried again next time."""
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:
                if sink.name in self._failed_sinks:
                    continue
                self._failed_sinks.add(sink.name)
                message = f"{sink.name} failed and may be incomplete; training goes on ({type(error).__name__}: {error})"
                self.event("warning", message=message, sink=sink.name)

    def _time_s(self) -> float:
        return round(self._now() - self._started_at, 6)

    def _open(self, file: JsonLines | None) -> JsonLines:
        if file is None:
            raise TrackError("the tracker was used before start(header)")
        return file


def _sinks_of(config: TrackerConfig, run: RunIdentity) -> list[Sink]:
    sinks: list[Sink] = [ConsoleSink(run, mode=config.console)]
    if config.wandb.mode != "disabled":
        sinks.append(WandbSink(run, config=config.wandb))
    return sinks
