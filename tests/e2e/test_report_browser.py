"""The report in a real browser: no console error, rows on the page, links into it, and filters that stay fast."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "track"))

from synthetic import make_run

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
    "--window-size=1400,1400",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome on PATH"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps with 4 groups of 8: 1,280 trained completions, one of them malicious."""
    run_dir = tmp_path_factory.mktemp("outputs") / "arith" / "demo"
    make_run(run_dir, steps=40, evil=True)
    return run_dir / "report.html"


def visit(report: Path, profile: Path, fragment: str = "") -> tuple[str, dict[str, str]]:
    """Open the page; returns the DOM and the table's measurements, after checking that the console stayed silent."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"{report.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-ready="1"' in done.stdout, "the page's script did not reach its end"
    table = re.search(r'<div id="groups"[^>]*>', done.stdout)
    assert table is not None
    return done.stdout, dict(re.findall(r'data-([\w-]+)="([^"]*)"', table.group()))


def assert_fast(table: dict[str, str]) -> None:
    """Far above what an idle machine needs (about 1 and 30 ms), far below what a person would call slow."""
    assert float(table["filter-ms"]) < 100 and float(table["draw-ms"]) < 1000


def rows(dom: str) -> int:
    return dom.count('<div class="row">')


def test_the_page_opens_offline_and_renders(report: Path, tmp_path: Path) -> None:
    dom, table = visit(report, tmp_path)
    assert "grpo" in dom and "held-out accuracy" in dom
    assert dom.count("<svg") > 20
    drawn = dom.split('<script type="application/json"')[0]
    assert "<dd>token-mean</dd>" in drawn and "[object" not in drawn and "NaN" not in drawn and "undefined" not in drawn
    assert (table["total"], table["shown"], table["samples"]) == ("240", "160", "1280")  # held-out rows wait behind the step selector
    assert 0 < rows(dom) == int(table["rendered"]) < 160, "rows are rendered as they are scrolled to"
    assert_fast(table)


def test_a_link_filters_sorts_and_opens(report: Path, tmp_path: Path) -> None:
    dom, table = visit(report, tmp_path, "#step=train:1&sort=step&dir=asc&open=1&color=ratio")
    assert table["shown"] == "4" == str(rows(dom))
    assert dom.count('<article class="completion">') == 8
    assert 'class="masked"' in dom and "background: rgb(var(--pos)" in dom and "background: rgb(var(--neg)" in dom
    # the malicious completion is text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in dom and "<img" not in dom


@pytest.mark.parametrize(
    ("fragment", "keep"),
    [
        ("#spread=zero", lambda row: row["spread"] == 0),
        ("#trunc=only", lambda row: any(item["finish"] == "length" for item in row["completions"])),
        ("#failed=only", lambda row: any(item["failure"] for item in row["completions"])),
        ("#min=0.8", lambda row: row["mean"] >= 0.8),
        ("#q=carry%20ONE", lambda row: any("carry one" in item["text"].lower() for item in row["completions"])),
    ],
)
def test_filters_agree_with_the_data_and_are_fast(report: Path, tmp_path: Path, fragment: str, keep: object) -> None:
    from posttrain.track.report_data import page_data, read_run

    expected = [row for row in page_data(read_run(report.parent))["groups"] if not row["held_out"] and keep(row)]  # type: ignore[operator]
    _, table = visit(report, tmp_path, fragment)
    assert 0 < len(expected) < 160 and int(table["shown"]) == len(expected)
    assert_fast(table)


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    from posttrain.track import write_report

    run_dir = tmp_path / "g" / "cut"
    make_run(run_dir, steps=2, total_steps=9, finish=None)
    with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "mod')
    dom, table = visit(write_report(run_dir), tmp_path / "profile", "#step=all")
    assert "has not recorded an end" in dom and "its last line is cut off" in dom and table["shown"] == "40"
