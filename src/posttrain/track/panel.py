"""Draws the live terminal panel with rich; nothing here decides what a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.track.formats import duration, fixed, number, sparkline

if TYPE_CHECKING:
    from posttrain.track.console import ConsoleState

DIAGNOSTICS = (
    ("ratio dev", "train/ratio_absdev"),
    ("logprob gap", "train/logprob_gap_mean"),
    ("clip frac", "train/clip_frac"),
    ("entropy", "train/entropy"),
    ("grad norm", "optim/grad_norm"),
    ("length", "train/response_len_mean"),
    ("truncated", "train/rollout_truncated_frac"),
    ("zero spread", "reward/zero_spread_frac"),
)
"""Label and metric key, shown when present."""
PHASE_STYLES = ("cyan", "magenta", "blue", "green", "yellow", "red")
_BAR_WIDTH = 36
_REFRESH_PER_SECOND = 4


def open_panel(state: ConsoleState, *, stream: TextIO, colour: bool) -> Live:
    """Start a panel that redraws itself from `state` until it is stopped."""
    console = Console(file=stream, force_terminal=True, no_color=not colour, highlight=False)
    live = Live(console=console, get_renderable=lambda: render(state), refresh_per_second=_REFRESH_PER_SECOND, transient=False)
    live.start()
    return live


def render(state: ConsoleState) -> RenderableType:
    """The whole panel for the current state."""
    header = state.header
    title = Text.assemble((state.run.name, "bold"), ("  " + "  ".join(part for part in (header.algorithm, header.model) if part), "dim"))
    rows: list[RenderableType] = [_progress(state), _rewards(state)]
    diagnostics = _diagnostics(state)
    if diagnostics is not None:
        rows += [Text(), diagnostics]
    phases = _phases(state)
    if phases is not None:
        rows += [Text(), phases]
    footer = Text(str(state.run.run_dir), style="dim", overflow="ellipsis", no_wrap=True)
    return Panel(Group(*rows), title=title, title_align="left", subtitle=footer, subtitle_align="left", padding=(1, 2), border_style="dim")


def _progress(state: ConsoleState) -> RenderableType:
    step, total = (state.last.step if state.last is not None else 0), state.run.total_steps
    eta = state.eta_s()
    grid = Table.grid(padding=(0, 2))
    clock = f"{duration(state.now() - state.started_at)} elapsed" + (f", {duration(eta)} left" if eta is not None and step < total else "")
    now = f"{state.phase} {duration(state.now() - state.phase_since)}" if state.phase else ""
    bar = ProgressBar(total=max(total, 1), completed=step, width=_BAR_WIDTH)
    grid.add_row(Text(f"step {step}/{total}", style="bold"), bar, Text(clock), Text(now, style="dim"))
    return grid


def _rewards(state: ConsoleState) -> RenderableType:
    line = Text.assemble(("reward ", "dim"), (fixed(state.value("reward/mean")), "bold green"), "  ", (sparkline(state.rewards), "green"))
    if state.accuracies:
        first, last = state.accuracies[0], state.accuracies[-1]
        line.append("\n")
        line.append("held-out accuracy ", "dim")
        line.append(fixed(last), "bold cyan")
        if len(state.accuracies) > 1:
            line.append(f"  from {fixed(first)}  ", "dim")
            line.append(sparkline(state.accuracies), "cyan")
    return line


def _diagnostics(state: ConsoleState) -> RenderableType | None:
    found = [(label, value) for label, key in DIAGNOSTICS if (value := state.value(key)) is not None]
    if not found:
        return None
    grid = Table.grid(padding=(0, 2))
    for start in range(0, len(found), 4):
        cells: list[Text] = []
        for label, value in found[start : start + 4]:
            cells += [Text(label, style="dim"), Text(number(value), justify="right")]
        grid.add_row(*cells)
    return grid


def _phases(state: ConsoleState) -> RenderableType | None:
    phases, step_s = state.phases(), state.value("time/step_s")
    if not phases or not step_s:
        return None
    line = Text()
    for index, seconds in enumerate(phases.values()):
        style = PHASE_STYLES[index % len(PHASE_STYLES)]
        line.append("█" * max(round(_BAR_WIDTH * seconds / step_s), 1), style)
    line.append("\n")
    for index, (phase, seconds) in enumerate(phases.items()):
        line.append(f"{phase} ", PHASE_STYLES[index % len(PHASE_STYLES)])
        line.append(f"{duration(seconds)} ")
        line.append(f"{seconds / step_s:.0%}   ", "dim")
    rate = state.value("rollout/tokens_per_s")
    if rate is not None:
        line.append(f"{number(rate)} tokens/s", "bold")
    if state.warnings:
        line.append(f"   {state.warnings} warning{'s' if state.warnings > 1 else ''}", "yellow")
    return line
