"""Each alarm at its threshold, at its beginning, and switched off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.tracker import AlarmConfig
from posttrain.loop.alarms import MEMORY_WINDOW, Alarms

OFF = {"first_ratio": 0.0, "logprob_gap": 0.0, "uninformative_steps": 0, "memory_slope_mib": 0.0}


def alarms(*, single_step: bool = True, **thresholds: float) -> Alarms:
    """Only the named alarms are on."""
    return Alarms(AlarmConfig(**{**OFF, **thresholds}), single_step=single_step)  # type: ignore[arg-type]


def raised(watch: Alarms, steps: Sequence[Mapping[str, float]]) -> list[list[str]]:
    return [[alarm.name for alarm in watch.observe(step, metrics)] for step, metrics in enumerate(steps, 1)]


def gaps(*values: float) -> list[dict[str, float]]:
    return [{"train/logprob_gap_mean": value} for value in values]


def test_the_gap_alarm_fires_past_its_threshold_when_it_begins_and_again_after_it_ended() -> None:
    found = raised(alarms(logprob_gap=0.1), gaps(0.1, 0.1001, 0.5, 0.09, 0.2, 0.2))
    assert found == [[], ["logprob_gap"], [], [], ["logprob_gap"], []]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gap_that_is_not_finite_fires(value: float) -> None:
    assert raised(alarms(logprob_gap=0.1), gaps(0.0, value, value)) == [[], ["logprob_gap"], []]


def test_zero_switches_every_alarm_off() -> None:
    awful = {"train/logprob_gap_mean": math.nan, "train/first_ratio_absdev": 9.0, "train/informative_groups": 0.0}
    steps = [{**awful, "memory/rss_gib": float(step)} for step in range(40)]
    assert not any(raised(alarms(), steps))
    # the same run raises each of them under the defaults
    found = [name for names in raised(Alarms(AlarmConfig(), single_step=True), steps) for name in names]
    assert sorted(found) == ["first_ratio", "logprob_gap", "memory_slope_mib", "uninformative_steps"]


def test_the_first_ratio_is_read_at_the_first_step_only() -> None:
    def ratios(*values: float) -> list[dict[str, float]]:
        return [{"train/first_ratio_absdev": value} for value in values]

    assert raised(alarms(first_ratio=0.02), ratios(0.021, 0.5)) == [["first_ratio"], []]
    assert raised(alarms(first_ratio=0.02), ratios(0.02, 0.5, 0.5)) == [[], [], []]
    assert raised(alarms(first_ratio=0.02), ratios(math.nan)) == [["first_ratio"]]


def test_a_batch_of_one_step_has_its_ratio_in_the_ordinary_metric() -> None:
    off = [{"train/ratio_absdev": 0.5}]
    assert raised(alarms(first_ratio=0.02, single_step=True), off) == [["first_ratio"]]
    # with several steps of one batch the ordinary metric also holds the later steps, whose ratios have every right to move
    assert raised(alarms(first_ratio=0.02, single_step=False), off) == [[]]


def test_the_cached_ratio_of_the_first_step_is_preferred() -> None:
    moved_later = [{"train/ratio_absdev": 0.5, "train/first_ratio_absdev": 0.001}]
    wrong_at_once = [{"train/ratio_absdev": 0.001, "train/first_ratio_absdev": 0.5}]
    for single_step in (True, False):
        assert raised(alarms(first_ratio=0.02, single_step=single_step), moved_later) == [[]]
        assert raised(alarms(first_ratio=0.02, single_step=single_step), wrong_at_once) == [["first_ratio"]]


def test_tied_steps_are_counted_in_a_row() -> None:
    steps = [{"train/informative_groups": value} for value in (0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0)]
    found = raised(alarms(uninformative_steps=3), steps)
    assert [step for step, names in enumerate(found, 1) if names] == [6, 11]


def test_the_step_and_the_value_are_named() -> None:
    watch = alarms(logprob_gap=0.1, uninformative_steps=2)
    watch.observe(1, {"train/informative_groups": 0.0})
    gap, tied = watch.observe(2, {"train/informative_groups": 0.0, "train/logprob_gap_mean": 0.2345})
    assert "step 2" in gap.message and "0.234 nats" in gap.message
    assert "for 2 steps" in tied.message and "rl.group_size" in tied.message


@settings(deadline=None, max_examples=150)
@given(
    readings=st.lists(st.integers(0, 4000), min_size=MEMORY_WINDOW - 2, max_size=3 * MEMORY_WINDOW),
    drift=st.integers(-100, 100),
    threshold=st.integers(1, 80),
)
def test_the_memory_slope_is_a_least_squares_fit_over_the_window(readings: list[int], drift: int, threshold: int) -> None:
    mib = [10_000 + drift * i + reading / 4 for i, reading in enumerate(readings)]
    above: list[bool] = []
    for end in range(1, len(mib) + 1):
        window = mib[max(0, end - MEMORY_WINDOW) : end]
        slope = float(np.polyfit(np.arange(len(window)), window, 1)[0]) if len(window) == MEMORY_WINDOW else -math.inf
        if abs(slope - threshold) < 1e-6:
            return  # too close to call in floating point
        above.append(slope > threshold)
    begins = [now and not before for before, now in zip([False, *above], above, strict=False)]
    found = raised(alarms(memory_slope_mib=float(threshold)), [{"memory/rss_gib": value / 1024} for value in mib])
    assert [bool(names) for names in found] == begins


def test_a_leak_is_reported_in_mib_a_step_once_the_window_is_full() -> None:
    watch = alarms(memory_slope_mib=64.0)
    found = [watch.observe(step, {"memory/rss_gib": 4 + step * 100 / 1024}) for step in range(1, MEMORY_WINDOW + 3)]
    assert [len(new) for new in found] == [0] * (MEMORY_WINDOW - 1) + [1, 0, 0]
    assert "grew by 100 MiB a step over the last 20 steps" in found[MEMORY_WINDOW - 1][0].message


def test_metrics_that_are_absent_raise_nothing() -> None:
    assert not any(raised(Alarms(AlarmConfig(), single_step=True), [{}] * 30))
