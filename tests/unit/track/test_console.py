"""What the console shows, line by line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from synthetic import FakeClock

from posttrain.track.console import ConsoleSink
from posttrain.track.formats import duration, number, sparkline
from posttrain.track.sinks import RunHeader, RunIdentity, StepRecord

RUN = RunIdentity(run_dir=Path("outputs/arith/demo"), group="arith", name="demo", total_steps=20, config={})
HEADER = RunHeader(algorithm="grpo", model="tiny-qwen3", seed=0, device="cpu", details={"prompts": "arithmetic"})
STEP = StepRecord(
    step=3,
    model_step=3,
    time_s=30.0,
    metrics={
        "reward/mean": 0.4219,
        "train/logprob_gap_mean": 2.04e-5,
        "train/clip_frac": 0.0125,
        "rollout/tokens_per_s": 1234.5,
        "optim/grad_norm": None,
        "time/generate_s": 5.1,
        "time/train_s": 7.42,
        "time/step_s": 11.3,
    },
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(mode: str, stream: io.StringIO) -> str:
    clock = FakeClock()
    console = ConsoleSink(RUN, mode=mode, stream=stream, now=clock)
    console.start(HEADER)
    console.held_out(StepRecord(step=0, model_step=0, time_s=0.0, metrics={"val/accuracy": 0.3125, "val/truncated_frac": 0.25}))
    console.phase("generate")
    clock.advance(65.0)
    console.phase(None)
    console.step(STEP)
    console.warning("[red]step 3[/red]: grad_norm is not finite")
    console.line("held-out accuracy 0.31 -> 0.88 (seed 0)")
    console.finish("completed", {"versions": 3})
    console.close()
    return stream.getvalue()


def test_plain_lines() -> None:
    assert play("auto", io.StringIO()).splitlines() == [
        "arith/demo  grpo  tiny-qwen3  cpu  seed 0  prompts arithmetic  -> outputs/arith/demo",
        "held-out accuracy 0.31 at model step 0  truncated 25%",
        "step 3/20  reward 0.42  acc 0.31  gen 5.1s train 7.4s  gap 2e-05  eta 3m12s",
        "warning: [red]step 3[/red]: grad_norm is not finite",
        "held-out accuracy 0.31 -> 0.88 (seed 0)",
        "completed after 3/20 steps in 1m05s  versions 3  outputs/arith/demo",
    ]


def test_quiet_prints_only_warnings_and_final_lines() -> None:
    assert play("quiet", io.StringIO()).splitlines() == [
        "warning: [red]step 3[/red]: grad_norm is not finite",
        "held-out accuracy 0.31 -> 0.88 (seed 0)",
        "completed after 3/20 steps in 1m05s  versions 3  outputs/arith/demo",
    ]


def test_colour_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[33mwarning" in play("plain", Terminal())
    assert "\x1b" not in play("plain", io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in play("plain", Terminal())


def test_the_live_panel_shows_the_run_and_keeps_important_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = play("auto", Terminal())
    for text in (
        "step 3/20",
        "reward",
        "0.42",
        "held-out accuracy",
        "logprob gap",
        "2e-05",
        "clip frac",
        "0.0125",
        "generate",
        "5.1s",
        "45%",
    ):
        assert text in shown
    assert "1234 tokens/s" in shown and "3m12s left" in shown and "outputs/arith/demo" in shown
    assert "held-out accuracy 0.31 -> 0.88 (seed 0)" in shown
    assert "warning: [red]step 3[/red]: grad_norm is not finite" in shown  # text, not markup


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in play("auto", Terminal())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.04e-5, "2e-05"),
        (2.16e-5, "2.2e-05"),
        (0.42189, "0.422"),
        (12.0, "12"),
        (1234.4, "1234"),
        (12345.0, "12.3k"),
        (None, "n/a"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0s"), (5.1, "5.1s"), (59.96, "1m00s"), (192.0, "3m12s"), (7500.0, "2h05m"), (273_600.0, "3d04h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 0.5]) == "▄▄"
    assert sparkline(range(100), width=3) == "▁▅█" and sparkline([]) == ""
