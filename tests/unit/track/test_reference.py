"""The metric reference is complete, and the committed page is the one it generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from posttrain.track.reference import METRICS, describe, metrics_page

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
LINE_KEYS = {"step", "model_step", "time_s"}


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), "write posttrain.track.reference.metrics_page() to docs/metrics.md"


def test_the_page_lists_every_key_once_under_its_area() -> None:
    page = metrics_page()
    area = ""
    listed: list[str] = []
    for line in page.splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        if line.startswith("| `"):
            key, unit, better, meaning = (cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|"))
            assert key.strip("`").startswith(f"{area}/")
            doc = METRICS[key.strip("`")]
            assert (unit, meaning) == (doc.unit, doc.meaning.replace("|", "¦"))
            assert better == {"up": "higher", "down": "lower", "none": ""}[doc.better]
            listed.append(key.strip("`"))
    assert listed == list(METRICS) and page.count("\n## ") == len({key.partition("/")[0] for key in METRICS})


def test_exact_entries_win_over_patterns_and_the_longest_pattern_over_others() -> None:
    assert describe("sync/gib") is METRICS["sync/gib"] and describe("sync/other") is METRICS["sync/*"]
    assert describe("reward/part/right") is METRICS["reward/part/*"]
    assert describe("nothing/like_it") is None


def test_the_shipped_objective_and_the_reward_service_report_nothing_undocumented() -> None:
    from posttrain.algorithm.grpo import METRIC_ADAPTER

    assert all(describe(name) is not None for name in METRIC_ADAPTER.names.values())


@pytest.mark.slow
def test_every_metric_of_a_real_run_is_documented_and_every_entry_can_occur(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", "experiment=tiny", "tracker.report=false", "tracker.samples_every=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "GOMP_SPINCOUNT": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "outputs/posttrain/tiny/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    written = {key for line in lines for key in line} - LINE_KEYS
    assert {key for key in written if describe(key) is None} == set()
    by_name = {key for key in written if key in METRICS or key.startswith("time/")}
    assert written - by_name == set(), "these keys are only described by a pattern"
    # What this run cannot show: parts of a reward, and the probe of an engine with weights of its own.
    elsewhere = {"reward/part/*", "sync/probe_gap", "sync/*"}
    never = {name for name in METRICS if not any(fnmatchcase(key, name) for key in written)}
    assert never <= elsewhere, never - elsewhere
