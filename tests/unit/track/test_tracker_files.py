"""metrics.jsonl, events.jsonl and samples/: what is written, when, and what survives a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from synthetic import FakeClock, Vocabulary, train_group

from posttrain.config.tracker import TrackerConfig
from posttrain.errors import PosttrainError
from posttrain.records import Completion, Prompt, RolloutGroup, Score, ScoredGroup, TrainGroup
from posttrain.track import RunHeader, Tracker, TrackError
from posttrain.track.sinks import Sink, StepRecord

HEADER = RunHeader(algorithm="grpo", model="tiny", seed=3)


class RecordingSink:
    """Remembers every call; raises in the methods named by `breaks`."""

    name = "recorder"

    def __init__(self, *breaks: str) -> None:
        self.calls: list[tuple[str, object]] = []
        self._breaks = breaks

    def _note(self, call: str, value: object) -> None:
        self.calls.append((call, value))
        if call in self._breaks:
            raise ConnectionError("service down")

    def start(self, header: RunHeader) -> None:
        self._note("start", header)

    def phase(self, name: str | None) -> None:
        self._note("phase", name)

    def step(self, record: StepRecord) -> None:
        self._note("step", record)

    def held_out(self, record: StepRecord) -> None:
        self._note("held_out", record)

    def warning(self, message: str) -> None:
        self._note("warning", message)

    def line(self, text: str) -> None:
        self._note("line", text)

    def finish(self, status: str, summary: Mapping[str, object]) -> None:
        self._note("finish", status)

    def close(self) -> None:
        self._note("close", None)

    def of(self, call: str) -> list[object]:
        return [value for name, value in self.calls if name == call]


def tracker_in(run_dir: Path, *sinks: Sink, clock: FakeClock | None = None, **config: object) -> Tracker:
    settings = TrackerConfig(**{"console": "quiet", "report": False, **config})  # type: ignore[arg-type]
    return Tracker(
        run_dir, config=settings, group="g", name=run_dir.name, total_steps=4, resolved_config={}, sinks=sinks, now=clock or FakeClock()
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in lines(run_dir / "events.jsonl") if event["kind"] == kind]


def a_group(prompt_id: str = "p0") -> tuple[TrainGroup, Vocabulary]:
    vocabulary = Vocabulary()
    prompt = Prompt(id=prompt_id, content="1+1?", text="1+1?", token_ids=(9,), reference=2)
    completions = (
        Completion(vocabulary.ids(["It", " is", " 2"]), (-0.1, -0.25, -0.5), "stop", 4, "It is 2"),
        Completion(vocabulary.ids([" 3", "!"]), (-1.5, -math.inf), "length", 4, "3!"),
    )
    scores = (Score(1.0, {"correct": 1.0}), Score(0.0, failure="timed out"))
    scored = ScoredGroup(RolloutGroup(prompt, completions), scores, spread=1.0)
    return TrainGroup(scored, (1.0, -1.0), ((True, True, True), (True, False))), vocabulary


def test_a_step_line_holds_metrics_phases_and_the_step_time(tmp_path: Path) -> None:
    clock = FakeClock()
    tracker = tracker_in(tmp_path, clock=clock)
    tracker.start(HEADER)
    with tracker.phase("generate"):
        clock.advance(5.0)
    with tracker.phase("train"):
        clock.advance(7.5)
    clock.advance(0.5)
    tracker.step(1, model_step=2, metrics={"reward/mean": 0.25, "train/loss": -0.5})
    with tracker.phase("train"):
        clock.advance(2.0)
    tracker.step(2, model_step=4, metrics={"reward/mean": 0.5})
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "model_step": 2,
            "time_s": 13.0,
            "reward/mean": 0.25,
            "train/loss": -0.5,
            "time/generate_s": 5.0,
            "time/train_s": 7.5,
            "time/step_s": 13.0,
        },
        {"step": 2, "model_step": 4, "time_s": 15.0, "reward/mean": 0.5, "time/train_s": 2.0, "time/step_s": 2.0},
    ]


def test_each_line_is_on_disk_before_the_next_call(tmp_path: Path) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start(HEADER)
    tracker.step(1, model_step=1, metrics={"reward/mean": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1  # before close
    assert [event["kind"] for event in lines(tmp_path / "events.jsonl")] == ["run_started"]
    tracker.close()


def test_nested_phases_are_counted_once(tmp_path: Path) -> None:
    clock, sink = FakeClock(), RecordingSink()
    tracker = tracker_in(tmp_path, sink, clock=clock)
    tracker.start(HEADER)
    with tracker.phase("train"):
        clock.advance(1.0)
        with tracker.phase("sync"):
            clock.advance(2.0)
        clock.advance(4.0)
    tracker.step(1, model_step=1, metrics={})
    tracker.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["time/train_s"], line["time/sync_s"], line["time/step_s"]) == (5.0, 2.0, 7.0)
    assert sink.of("phase") == ["train", "sync", "train", None]


def test_phases_are_events_and_a_failed_one_says_so(tmp_path: Path) -> None:
    clock = FakeClock()
    tracker = tracker_in(tmp_path, clock=clock)
    tracker.start(HEADER)
    with pytest.raises(ZeroDivisionError), tracker.phase("reward"):
        clock.advance(1.25)
        raise ZeroDivisionError
    tracker.close()
    (ended,) = events(tmp_path, "phase_ended")
    assert (ended["phase"], ended["duration_s"], ended["failed"]) == ("reward", 1.25, True)
    assert events(tmp_path, "phase_started")[0]["phase"] == "reward"


def test_non_finite_metrics_become_null_with_a_warning(tmp_path: Path) -> None:
    sink = RecordingSink()
    tracker = tracker_in(tmp_path, sink)
    tracker.start(HEADER)
    tracker.step(1, model_step=1, metrics={"optim/grad_norm": math.nan, "train/loss": math.inf, "reward/mean": 0.5})
    tracker.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["optim/grad_norm"] is None and line["train/loss"] is None and line["reward/mean"] == 0.5
    (warning,) = events(tmp_path, "warning")
    assert warning["metrics"] == ["optim/grad_norm", "train/loss"]
    assert sink.of("warning") == ["step 1: not finite, recorded as null: optim/grad_norm=nan, train/loss=inf"]


def test_samples_round_trip(tmp_path: Path) -> None:
    group, vocabulary = a_group()
    tracker = tracker_in(tmp_path)
    tracker.start(HEADER)
    tracker.samples(1, groups=[group], token_texts=vocabulary.texts, token_logprobs={("p0", 0): (-0.11, -0.2, -0.4)})
    tracker.close()
    assert lines(tmp_path / "samples" / "step_00001.jsonl") == [
        {
            "prompt_id": "p0",
            "prompt": "1+1?",
            "reference": 2,
            "reward_mean": 0.5,
            "spread": 1.0,
            "step": 1,
            "completions": [
                {
                    "text": "It is 2",
                    "reward": 1.0,
                    "parts": {"correct": 1.0},
                    "failure": None,
                    "finish_reason": "stop",
                    "weight_version": 4,
                    "num_tokens": 3,
                    "tokens": ["It", " is", " 2"],
                    "logprobs": [-0.1, -0.25, -0.5],
                    "advantage": 1.0,
                    "trained_logprobs": [-0.11, -0.2, -0.4],
                    "loss_mask": [1, 1, 1],
                },
                {
                    "text": "3!",
                    "reward": 0.0,
                    "parts": {},
                    "failure": "timed out",
                    "finish_reason": "length",
                    "weight_version": 4,
                    "num_tokens": 2,
                    "tokens": [" 3", "!"],
                    "logprobs": [-1.5, None],
                    "advantage": -1.0,
                    "trained_logprobs": None,
                    "loss_mask": [1, 0],
                },
            ],
        }
    ]


@pytest.mark.parametrize(("every", "written"), [(1, [1, 2, 3, 4]), (3, [1, 3]), (0, [])])
def test_samples_every(tmp_path: Path, every: int, written: list[int]) -> None:
    group, vocabulary = a_group()
    tracker = tracker_in(tmp_path, samples_every=every, samples_max_groups=2)
    tracker.start(HEADER)
    for step in (1, 2, 3, 4):
        tracker.samples(step, groups=[group] * 5, token_texts=vocabulary.texts, token_logprobs={})
        assert tracker.wants_samples(step) == (step in written)
    tracker.close()
    found = sorted((tmp_path / "samples").glob("*")) if written else []
    assert [path.name for path in found] == [f"step_{step:05d}.jsonl" for step in written]
    assert all(len(lines(path)) == 2 for path in found)


def test_validation_is_an_event_a_sample_file_and_part_of_a_step_of_the_same_weights(tmp_path: Path) -> None:
    group, vocabulary = a_group("held")
    tracker = tracker_in(tmp_path)
    tracker.start(HEADER)
    tracker.validation(0, metrics={"val/accuracy": 0.25}, groups=[group.scored], token_texts=vocabulary.texts)
    tracker.step(1, model_step=5, metrics={"reward/mean": 0.1})
    tracker.validation(10, metrics={"val/accuracy": 0.75}, groups=[group.scored])
    tracker.step(2, model_step=10, metrics={"reward/mean": 0.2})
    tracker.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert "val/accuracy" not in first and second["val/accuracy"] == 0.75
    assert [(event["step"], event["model_step"], event["metrics"]) for event in events(tmp_path, "validation")] == [
        (0, 0, {"val/accuracy": 0.25}),
        (1, 10, {"val/accuracy": 0.75}),
    ]
    (start,) = lines(tmp_path / "samples" / "validation_00000.jsonl")
    (end,) = lines(tmp_path / "samples" / "validation_00010.jsonl")
    assert start["completions"][0]["tokens"] == ["It", " is", " 2"] and end["completions"][0]["tokens"] is None  # type: ignore[index]
    assert start["model_step"] == 0 and "advantage" not in start["completions"][0]  # type: ignore[index]


def test_a_failing_sink_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    broken, healthy = RecordingSink("step", "finish", "close"), RecordingSink()
    with tracker_in(tmp_path, broken, healthy) as tracker:
        tracker.start(HEADER)
        for step in (1, 2, 3):
            tracker.step(step, model_step=step, metrics={"reward/mean": 0.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 3
    message = "recorder failed and may be incomplete; training goes on (ConnectionError: service down)"
    assert [event["message"] for event in events(tmp_path, "warning")] == [message]
    assert len(healthy.of("step")) == len(broken.of("step")) == 3
    assert healthy.calls[-1] == ("close", None)


def test_a_sink_that_cannot_start_is_fatal(tmp_path: Path) -> None:
    class Unstartable(RecordingSink):
        def start(self, header: RunHeader) -> None:
            raise TrackError("not installed")

    with pytest.raises(TrackError, match="not installed"), tracker_in(tmp_path, Unstartable()) as tracker:
        tracker.start(HEADER)
    assert issubclass(TrackError, PosttrainError) and issubclass(TrackError, RuntimeError)
    assert events(tmp_path, "run_finished")[0]["status"] == "failed"


@pytest.mark.parametrize(("error", "status"), [(None, "completed"), (KeyboardInterrupt(), "interrupted"), (ValueError("boom"), "failed")])
def test_leaving_the_context_records_how_it_ended(tmp_path: Path, error: BaseException | None, status: str) -> None:
    clock, sink = FakeClock(), RecordingSink()
    try:
        with tracker_in(tmp_path, sink, clock=clock, report=True) as tracker:
            tracker.start(HEADER)
            tracker.step(1, model_step=1, metrics={"reward/mean": 0.5})
            with tracker.phase("validate"):
                clock.advance(3.0)
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError) as raised:
        assert raised is error
    (finished,) = events(tmp_path, "run_finished")
    assert finished["status"] == status and finished["phases"] == {"validate": 3.0}
    assert sink.of("finish") == [status] and len(sink.of("close")) == 1
    assert (tmp_path / "report.html").is_file()
    assert [event["message"] for event in events(tmp_path, "error")] == (["boom"] if status == "failed" else [])


def test_a_continued_run_appends_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "model_step": 1, "time_s": 1.0}\n{"step": 2, "mod', encoding="utf-8")
    tracker = tracker_in(tmp_path)
    tracker.start(HEADER)
    tracker.step(2, model_step=2, metrics={})
    tracker.close()
    written = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert written[1] == '{"step": 2, "mod' and json.loads(written[2])["step"] == 2


def test_text_that_is_not_unicode_is_still_one_json_line(tmp_path: Path) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start(HEADER)
    tracker.event("note", message="half a pair \ud83d and\na line break")
    tracker.close()
    assert events(tmp_path, "note")[0]["message"] == "half a pair \ud83d and\na line break"


def test_the_headline_is_announced_and_finish_is_idempotent(tmp_path: Path) -> None:
    sink = RecordingSink()
    with tracker_in(tmp_path, sink) as tracker:
        tracker.start(HEADER)
        tracker.validation(0, metrics={"val/accuracy": 0.3125})
        tracker.validation(9, metrics={"val/accuracy": 0.875})
        tracker.finish("completed", summary={"versions": 9})
        tracker.finish("failed")
    assert sink.of("line") == ["held-out accuracy 0.31 -> 0.88 (seed 3)"]
    assert sink.of("finish") == ["completed"]
    assert events(tmp_path, "run_finished")[0]["summary"] == {"versions": 9}


def test_use_out_of_order_is_refused(tmp_path: Path) -> None:
    tracker = tracker_in(tmp_path)
    with pytest.raises(TrackError, match="before start"):
        tracker.step(1, model_step=1, metrics={})
    tracker.start(HEADER)
    with pytest.raises(TrackError, match="started twice"):
        tracker.start(HEADER)
    tracker.close()
    tracker.close()


def test_the_synthetic_advantages_are_group_relative() -> None:
    group, _ = a_group()
    assert train_group(group.scored).advantages == (1.0, -1.0)


def test_an_evaluation_inside_a_step_belongs_to_that_step(tmp_path: Path) -> None:
    tracker = tracker_in(tmp_path)
    tracker.start(RunHeader(algorithm="grpo", model="tiny"))
    tracker.validation(0, metrics={"val/accuracy": 0.25})
    tracker.ready()
    tracker.validation(1, step=1, metrics={"val/accuracy": 0.5})
    tracker.step(1, model_step=1, metrics={"reward/mean": 0.1})
    tracker.close()
    assert [(event["step"], event["model_step"]) for event in events(tmp_path, "validation")] == [(0, 0), (1, 1)]
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["val/accuracy"] == 0.5


def test_start_up_does_not_count_as_the_first_step(tmp_path: Path) -> None:
    clock = FakeClock()
    tracker = tracker_in(tmp_path, clock=clock)
    tracker.start(RunHeader(algorithm="grpo", model="tiny"))
    with tracker.phase("load"):
        clock.advance(40)
    tracker.ready()
    clock.advance(2)
    tracker.step(1, model_step=1, metrics={})
    tracker.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["time/step_s"] == 2 and "time/load_s" not in line
    assert events(tmp_path, "ready")[0]["phases"] == {"load": 40}
