"""Reads a run directory into the plain data that the report page shows.

Nothing here is fatal but a directory without metrics: a run may have been killed in the middle of a line, or be running still.
What could not be read is counted and shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from posttrain.errors import ReportError
from posttrain.track.reference import MetricDoc, describe

Line = dict[str, Any]

SAMPLES_BUDGET_BYTES = 48 * 1024 * 1024
"""Sample files embedded in the page; beyond it, steps are thinned evenly and the page says so."""
_STEP_KEYS = ("step", "model_step", "time_s")
_QUIET_EVENTS = ("phase_started", "phase_ended", "validation", "announcement")
_SAMPLE_FILE = re.compile(r"(step|validation)_(\d+)\.jsonl")
_EMPTY_DOC = MetricDoc("", "")


@dataclass
class RunFiles:
    """Everything found in a run directory, line by line."""

    run_dir: Path
    metrics: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    samples: dict[str, list[Line]] = field(default_factory=dict)
    """File stem (`step_00001`, `validation_00010`) -> groups."""
    num_sample_files: int = 0
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    """What could not be read, one sentence each."""


def read_run(run_dir: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        ReportError: when it is no directory, has no metrics.jsonl, or no complete metrics line.
    """
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory; give the run directory, e.g. outputs/<job.group>/<job.name>")
    if not (run_dir / "metrics.jsonl").is_file():
        raise ReportError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    files = RunFiles(run_dir)
    by_step = {line["step"]: line for line in _read_lines(run_dir / "metrics.jsonl", files.damage) if isinstance(line.get("step"), int)}
    if not by_step:
        raise ReportError(f"{run_dir}: metrics.jsonl holds no complete step; the run ended before its first step")
    files.metrics = [by_step[step] for step in sorted(by_step)]  # a resumed run repeats steps: the later line holds
    files.events = _read_lines(run_dir / "events.jsonl", files.damage)
    _read_samples(files)
    config_path = run_dir / "config_resolved.yaml"
    if config_path.is_file():
        files.config_text = config_path.read_text(encoding="utf-8", errors="replace")
        files.config = _read_config(config_path, files.damage)
    return files


def _read_lines(path: Path, damage: list[str]) -> list[Line]:
    if not path.is_file():
        return []
    lines: list[Line] = []
    raw = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    broken = 0
    for text in raw:
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError:
            broken += 1
            continue
        if isinstance(value, dict):
            lines.append(value)
        else:
            broken += 1
    if broken:
        cut = "its last line is cut off" if raw[-1].strip() and broken == 1 else f"{broken} line{'s are' if broken > 1 else ' is'} damaged"
        damage.append(f"{path.name}: {cut}; the rest is shown")
    return lines


def _read_samples(files: RunFiles) -> None:
    found = sorted(path for path in (files.run_dir / "samples").glob("*.jsonl") if _SAMPLE_FILE.fullmatch(path.name))
    files.num_sample_files = len(found)
    for path in _thinned(found):
        files.samples[path.stem] = _read_lines(path, files.damage)


def _thinned(paths: list[Path]) -> list[Path]:
    """First and last of each kind, and evenly spaced ones between, within the budget."""
    total = sum(path.stat().st_size for path in paths)
    if total <= SAMPLES_BUDGET_BYTES:
        return paths
    share = SAMPLES_BUDGET_BYTES / total
    kept: list[Path] = []
    for kind in ("step", "validation"):
        own = [path for path in paths if path.name.startswith(kind)]
        count = max(int(len(own) * share), min(len(own), 2))
        kept += [own[round(index * (len(own) - 1) / max(count - 1, 1))] for index in range(count)]
    return kept


def _read_config(path: Path, damage: list[str]) -> Mapping[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # any YAML or OmegaConf error: the text itself is still shown
        damage.append(f"{path.name} cannot be parsed: {type(error).__name__}")
        return {}
    return {str(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}


# ------------------------------------------------------------------------------------------------------------------- page


def page_data(files: RunFiles) -> dict[str, Any]:
    """The index of the page: everything but the tokens, which `sample_details` holds per sample file."""
    keys = list(dict.fromkeys(key for line in files.metrics for key in line if key not in _STEP_KEYS))
    docs = {key: describe(key) or _EMPTY_DOC for key in keys}
    return {
        "run": _run_facts(files),
        "docs": {key: [doc.unit, doc.meaning, doc.better] for key, doc in docs.items()},
        "steps": [line["step"] for line in files.metrics],
        "model_steps": [line.get("model_step") for line in files.metrics],
        "series": {key: [_number(line.get(key)) for line in files.metrics] for key in keys},
        "validations": _validations(files),
        "leftover_phases": (_last(files.events, "run_finished") or {}).get("phases", {}),
        "objective": files.config.get("effective_objective"),
        "config": files.config_text,
        "events": [event for event in files.events if event.get("kind") not in _QUIET_EVENTS],
        "groups": [_row(stem, index, group) for stem, groups in files.samples.items() for index, group in enumerate(groups)],
    }


def sample_details(groups: list[Line]) -> list[list[Line]]:
    """Per group and completion: token texts, log-probabilities and mask, the bulk that a page parses only when asked."""
    return [
        [
            {
                "t": completion.get("tokens"),
                "s": _rounded(completion.get("logprobs")),
                "p": _rounded(completion.get("trained_logprobs")),
                "m": _masked(completion.get("loss_mask")),
            }
            for completion in group.get("completions", [])
        ]
        for group in groups
    ]


def _run_facts(files: RunFiles) -> Line:
    started, finished = _last(files.events, "run_started") or {}, _last(files.events, "run_finished")
    if finished is not None and files.events.index(finished) < files.events.index(started):
        finished = None  # the run was continued after it had finished
    model = files.config.get("model")
    named = (model.get("name_or_path") or model.get("model_id")) if isinstance(model, Mapping) else None
    times = [float(line.get("time_s") or 0.0) for line in (*files.metrics, *files.events)]
    return {
        "name": started.get("name") or files.run_dir.name,
        "group": started.get("group") or files.run_dir.parent.name,
        "algorithm": started.get("algorithm") or "",
        "model": started.get("model") or named or "",
        "device": started.get("device") or "",
        "seed": started.get("seed"),
        "details": started.get("details") or {},
        "total_steps": started.get("total_steps"),
        "started_unix_s": started.get("unix_s"),
        "status": finished.get("status") if finished is not None else "unfinished",
        "summary": finished.get("summary") if finished is not None else {},
        "duration_s": max(times, default=0.0),
        "damage": files.damage,
        "sample_files": [len(files.samples), files.num_sample_files],
    }


def _validations(files: RunFiles) -> list[Line]:
    """Held-out evaluations by model step, from their events; from the step lines where a run has no such events."""
    events = [event for event in files.events if event.get("kind") == "validation" and isinstance(event.get("metrics"), dict)]
    if events:
        by_step = {event.get("model_step"): event for event in events}
        found = [[event.get("step", 0), event.get("model_step", 0), event["metrics"]] for event in by_step.values()]
    else:
        found = [
            [line["step"], line.get("model_step", line["step"]), {key: line[key] for key in line if key.startswith("val/")}]
            for line in files.metrics
            if isinstance(line.get("val/accuracy"), (int, float))
        ]
    return [{"step": step, "model_step": model_step, "metrics": metrics} for step, model_step, metrics in found]


def _row(stem: str, index: int, group: Line) -> Line:
    completions = group.get("completions", [])
    held_out = stem.startswith("validation")
    return {
        "file": stem,
        "index": index,
        "held_out": held_out,
        "step": int(stem.rsplit("_", 1)[1]),
        "id": str(group.get("prompt_id", "")),
        "prompt": str(group.get("prompt", "")),
        "reference": None if group.get("reference") is None else str(group.get("reference")),
        "mean": _number(group.get("reward_mean")),
        "spread": _number(group.get("spread")),
        "completions": [
            {
                "text": str(item.get("text", "")),
                "reward": _number(item.get("reward")),
                "parts": item.get("parts") or {},
                "failure": item.get("failure"),
                "finish": item.get("finish_reason"),
                "advantage": _number(item.get("advantage")),
                "version": item.get("weight_version"),
                "length": item.get("num_tokens", len(item.get("logprobs") or [])),
            }
            for item in completions
        ],
    }


def _last(events: list[Line], kind: str) -> Line | None:
    return next((event for event in reversed(events) if event.get("kind") == kind), None)


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _rounded(values: list[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if value is None else round(value, 5) for value in values]


def _masked(mask: list[int] | None) -> list[int] | None:
    """None when every token is trained on, which is the usual case."""
    return None if mask is None or all(mask) else mask
