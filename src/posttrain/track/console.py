"""The console view of a run: a live panel on a terminal, one plain line per step elsewhere, almost nothing when quiet.

This file decides what is shown and when; `panel.py` draws the live panel. Important lines go to stdout as plain text in every
mode, so that a log or a pipe always holds the result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from posttrain.track.formats import duration, fixed, number
from posttrain.track.sinks import RunHeader, RunIdentity, StepRecord

if TYPE_CHECKING:
    from rich.live import Live

SHORT_PHASES = {"generate": "gen", "validate": "val"}
_ETA_WINDOW = 10
_YELLOW, _RESET = "\x1b[33m", "\x1b[0m"


class ConsoleState:
    """What has been seen so far; shared by the plain lines and the live panel."""

    def __init__(self, run: RunIdentity, now: Callable[[], float]) -> None:
        self.run = run
        self.now = now
        self.header = RunHeader(algorithm="", model="")
        self.started_at = now()
        self.last: StepRecord | None = None
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self.step_seconds: list[float] = []
        self.phase: str | None = None
        self.phase_since = now()
        self.warnings = 0

    def add_step(self, record: StepRecord) -> None:
        self.last = record
        reward, seconds = record.metrics.get("reward/mean"), record.metrics.get("time/step_s")
        if reward is not None:
            self.rewards.append(reward)
        if seconds is not None:
            # evaluations come rarely: what is left is mostly plain steps
            self.step_seconds.append(seconds - (record.metrics.get("time/validate_s") or 0.0))

    def value(self, key: str) -> float | None:
        return self.last.metrics.get(key) if self.last is not None else None

    def phases(self) -> dict[str, float]:
        """Seconds per phase of the last step."""
        if self.last is None:
            return {}
        return {
            key.removeprefix("time/").removesuffix("_s"): seconds
            for key, seconds in self.last.metrics.items()
            if key.startswith("time/") and key != "time/step_s" and seconds is not None
        }

    def eta_s(self) -> float | None:
        """Seconds left, from the recent step times."""
        if self.last is None or not self.step_seconds:
            return None
        recent = self.step_seconds[-_ETA_WINDOW:]
        return max(self.run.total_steps - self.last.step, 0) * sum(recent) / len(recent)


class ConsoleSink:
    """Shows a run to the person who started it.

    Args:
        mode: `tracker.console`: auto, live, plain or quiet.
        stream: Where everything goes; stdout if None.
    """

    name = "console"

    def __init__(self, run: RunIdentity, *, mode: str, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._mode = ("live" if self._is_terminal else "plain") if mode == "auto" else mode
        self._colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self._state = ConsoleState(run, now)
        self._live: Live | None = None

    def start(self, header: RunHeader) -> None:
        self._state.header = header
        if self._mode == "live":
            from posttrain.track.panel import open_panel

            self._live = open_panel(self._state, stream=self._stream, colour=self._colour)
        elif self._mode == "plain":
            self.line(_header_line(self._state))

    def phase(self, name: str | None) -> None:
        self._state.phase, self._state.phase_since = name, self._state.now()

    def step(self, record: StepRecord) -> None:
        self._state.add_step(record)
        if self._live is not None:
            self._live.refresh()
        elif self._mode == "plain":
            self.line(step_line(self._state))

    def held_out(self, record: StepRecord) -> None:
        accuracy = record.metrics.get("val/accuracy")
        if accuracy is not None:
            self._state.accuracies.append(accuracy)
        if self._mode == "plain":
            truncated = record.metrics.get("val/truncated_frac")
            extra = f"  truncated {truncated:.0%}" if truncated else ""
            self.line(f"held-out accuracy {fixed(accuracy)} at model step {record.model_step}{extra}")

    def warning(self, message: str) -> None:
        self._state.warnings += 1
        self.line(f"warning: {message}", colour=_YELLOW)

    def line(self, text: str, *, colour: str = "") -> None:
        if self._live is not None:
            # above the panel; no markup and no highlighting, so the text arrives as written
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True, style="yellow" if colour and self._colour else "")
        else:
            print(f"{colour}{text}{_RESET}" if colour and self._colour else text, file=self._stream, flush=True)

    def finish(self, status: str, summary: Mapping[str, object]) -> None:
        self.phase(None)
        state = self._state
        done = state.last.step if state.last is not None else 0
        shown = "".join(f"  {key} {number(value) if isinstance(value, float) else value}" for key, value in summary.items())
        elapsed = duration(state.now() - state.started_at)
        self.line(f"{status} after {done}/{state.run.total_steps} steps in {elapsed}{shown}  {state.run.run_dir}")

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


def _header_line(state: ConsoleState) -> str:
    header = state.header
    parts = [f"{state.run.group}/{state.run.name}", header.algorithm, header.model, header.device, f"seed {header.seed}"]
    parts += [f"{label} {text}" for label, text in header.details.items()]
    return "  ".join(part for part in parts if part) + f"  -> {state.run.run_dir}"


def step_line(state: ConsoleState) -> str:
    """`step 3/20  reward 0.42  acc 0.31  gen 5.1s train 7.4s  gap 2e-05  eta 3m12s`; what is unknown is left out."""
    last = state.last
    parts = [f"step {last.step if last is not None else 0}/{state.run.total_steps}", f"reward {fixed(state.value('reward/mean'))}"]
    if state.accuracies:
        parts.append(f"acc {fixed(state.accuracies[-1])}")
    parts.append(" ".join(f"{SHORT_PHASES.get(phase, phase)} {duration(seconds)}" for phase, seconds in state.phases().items()))
    gap, eta = state.value("train/logprob_gap_mean"), state.eta_s()
    if gap is not None:
        parts.append(f"gap {number(gap)}")
    if eta is not None and last is not None and last.step < state.run.total_steps:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(part for part in parts if part)
