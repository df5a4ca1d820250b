"""What the report holds: numbers, tolerance of damaged files, escaping of untrusted text, and refusals."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_run

from posttrain.errors import ReportError
from posttrain.track import METRICS, describe, report_data, write_report


class Scripts(html.parser.HTMLParser):
    """The page's script elements, as an HTML parser sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open = tag == "script"
        if self._open:
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._open:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = False


def parse(path: Path) -> Scripts:
    parser = Scripts()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def embedded(path: Path, element_id: str = "run-data") -> Any:
    (text,) = [text for attributes, text in parse(path).scripts if attributes.get("id") == element_id]
    return json.loads(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "arith" / "demo", steps=20, evil=True)
    return tmp_path / "arith" / "demo"


def test_the_page_holds_the_numbers_of_the_run(run_dir: Path) -> None:
    data = embedded(write_report(run_dir))
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert data["steps"] == list(range(1, 21))
    assert data["series"]["reward/mean"] == [line["reward/mean"] for line in metrics]
    assert data["series"]["optim/grad_norm"][16] is None  # step 17 was not finite
    assert [(item["step"], item["model_step"]) for item in data["validations"]] == [(0, 0), (10, 10), (20, 20)]
    run = data["run"]
    assert (run["name"], run["group"], run["algorithm"], run["status"], run["seed"]) == ("demo", "arith", "grpo", "completed", 0)
    assert (run["total_steps"], run["damage"], run["sample_files"]) == (20, [], [23, 23])
    assert run["duration_s"] == max(event["time_s"] for event in read_lines(run_dir / "events.jsonl"))
    assert data["leftover_phases"] == {"validate": pytest.approx(1.6)}
    assert data["objective"]["loss_type"] == "token-mean" and data["config"].startswith("# resolved by posttrain")
    assert data["docs"]["train/entropy"] == ["nats", METRICS["train/entropy"].meaning, "none"]
    assert {event["kind"] for event in data["events"]} == {"run_started", "warning", "run_finished"}


def test_rows_and_token_details_match_the_sample_files(run_dir: Path) -> None:
    path = write_report(run_dir)
    rows = [row for row in embedded(path)["groups"] if row["file"] == "step_00003"]
    details = embedded(path, "samples-step_00003")
    written = read_lines(run_dir / "samples" / "step_00003.jsonl")
    assert len(rows) == len(details) == len(written) == 4
    for row, detail, group in zip(rows, details, written, strict=True):
        assert (row["prompt"], row["mean"], row["spread"], row["step"]) == (group["prompt"], group["reward_mean"], group["spread"], 3)
        for item, tokens, completion in zip(row["completions"], detail, group["completions"], strict=True):
            assert (item["reward"], item["advantage"], item["finish"]) == (
                completion["reward"],
                completion["advantage"],
                completion["finish_reason"],
            )
            assert tokens["t"] == completion["tokens"] and item["length"] == len(tokens["t"])
            assert tokens["s"] == pytest.approx(completion["logprobs"], abs=1e-5)
            assert tokens["p"] == pytest.approx(completion["trained_logprobs"], abs=1e-5)
            assert tokens["m"] == (None if all(completion["loss_mask"]) else completion["loss_mask"])


def test_untrusted_text_cannot_leave_its_data_block(run_dir: Path) -> None:
    path = write_report(run_dir)
    page, parser = path.read_text(encoding="utf-8"), parse(path)
    assert "alert(1)" in page and "<script>alert(1)" not in page and "onerror=alert(2)>" not in page and "<!-- <img" not in page
    assert "img" not in parser.tags
    assert len([tag for tag in parser.tags if tag == "script"]) == 1 + 23 + 1  # data, one per sample file, code
    evil = embedded(path, "samples-step_00001")[0][0]["t"]
    assert evil[:3] == ["</script>", "<script>alert(1)</script>", "<!--"] and evil[4] == " @@data@@ "


def test_a_malicious_run_name_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "g" / "<b>&name", steps=1)
    assert "<title>&lt;b&gt;&amp;name · posttrain</title>" in (tmp_path / "g" / "<b>&name" / "report.html").read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_from_outside(run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    for reference in ('src="', "@import", "url(", "fetch(", "XMLHttpRequest", "https://"):
        assert reference not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_truncated_last_line_is_tolerated_and_named(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    sample = run_dir / "samples" / "step_00020.jsonl"
    sample.write_bytes(sample.read_bytes()[:-100])
    data = embedded(write_report(run_dir))
    assert data["steps"] == list(range(1, 20))
    assert data["run"]["damage"] == [
        "metrics.jsonl: its last line is cut off; the rest is shown",
        "step_00020.jsonl: its last line is cut off; the rest is shown",
    ]
    assert len([row for row in data["groups"] if row["file"] == "step_00020"]) == 3


def test_an_unfinished_run_is_shown_as_such(tmp_path: Path) -> None:
    make_run(tmp_path / "g" / "cut", steps=3, total_steps=10, finish=None)
    assert not (tmp_path / "g" / "cut" / "report.html").exists()
    assert embedded(write_report(tmp_path / "g" / "cut"))["run"]["status"] == "unfinished"


def test_a_repeated_step_shows_its_last_line(tmp_path: Path) -> None:
    text = '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n{"step": 2, "reward/mean": 0.9}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    data = embedded(write_report(tmp_path))
    assert data["series"]["reward/mean"] == [0.1, 0.9] and data["run"]["name"] == tmp_path.name


def test_samples_beyond_the_budget_are_thinned_evenly(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(path.stat().st_size for path in (run_dir / "samples").glob("*"))
    monkeypatch.setattr(report_data, "SAMPLES_BUDGET_BYTES", total // 4 + 1)
    data = embedded(write_report(run_dir))
    steps = sorted({row["step"] for row in data["groups"] if not row["held_out"]})
    assert steps == [1, 6, 11, 15, 20] and data["run"]["sample_files"] == [7, 23]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no metrics.jsonl"), ("", "no complete step"), ('{"step": 1, "rew', "no complete step")]
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=message):
        write_report(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a directory"):
        write_report(tmp_path / "nowhere")


def test_metric_docs() -> None:
    assert describe("time/generate_s") is METRICS["time/*"] and describe("time/step_s") is METRICS["time/step_s"]
    assert describe("reward/part/format") is METRICS["reward/part/*"] and describe("mine/own") is None
    assert all(doc.meaning.endswith(".") or ";" in doc.meaning for doc in METRICS.values())
