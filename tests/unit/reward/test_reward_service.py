"""The reward stage: metrics and spread by hand, the contract of providers, and hung providers."""

from __future__ import annotations

import math
import threading
import time
from types import MappingProxyType

import pytest

from posttrain.errors import RewardError
from posttrain.records import Max, Mean, Score, Sum
from posttrain.reward.pointwise import CandidateFailure, map_candidates
from posttrain.reward.service import RewardFailure, RewardService


class Scripted:
    """Returns what it is told, group-natively."""

    name = "scripted"
    needs = frozenset()
    identity = MappingProxyType({"revision": 1})

    def __init__(self, answer):
        self.answer = answer
        self.closed = 0

    def score(self, group):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self):
        self.closed += 1


def service(scorer, *, timeout_s=5.0):
    return RewardService(map_candidates(scorer, name="mine", needs={"prompt"}, identity={"revision": 2}), timeout_s=timeout_s)


def test_totals_parts_spread_and_metrics(group):
    def scorer(candidate):
        return {"length": len(candidate.completion), "style": 0.5 if candidate.completion.startswith("b") else 0.0}

    result = service(scorer).score([group("a", "bbb", prompt_id="one@0"), group("cc", "dd", prompt_id="two@0")])
    first, second = result.groups
    assert [score.total for score in first.scores] == [1.0, 3.5] and [score.total for score in second.scores] == [2.0, 2.0]
    assert (first.spread, second.spread) == (2.5, 0.0)
    assert first.scores[1].parts == {"length": 3.0, "style": 0.5}
    metrics = result.metrics
    assert metrics["reward/mean"] == Mean(8.5, 4)
    assert metrics["reward/std"] == Mean(1.25, 2)  # 1.25 in the first group, 0 in the second
    assert metrics["reward/spread"] == Mean(2.5, 2)
    assert metrics["reward/zero_spread_frac"] == Mean(1.0, 2)
    assert metrics["reward/part/length"] == Mean(8.0, 4) and metrics["reward/part/style"] == Mean(0.5, 4)
    assert metrics["reward/failed"] == Sum(0.0) and result.failures == ()
    assert isinstance(metrics["reward/slowest_s"], Max) and isinstance(metrics["reward/time_s"], Sum)
    slowest = max(score.time_s for scored in result.groups for score in scored.scores)
    assert metrics["reward/slowest_s"].value == slowest > 0.0
    assert metrics["reward/time_s"].value >= sum(score.time_s for scored in result.groups for score in scored.scores)


def test_scorer_sees_the_candidate(group):
    seen = []
    row = {"level": 3}
    service(lambda candidate: seen.append(candidate) or 0.0).score([group("text", reference="ref", representations=row)])
    (candidate,) = seen
    assert (candidate.completion, candidate.prompt, candidate.reference, candidate.representations) == ("text", "<ask>", "ref", row)


def test_exceptions_are_failures_with_reasons_and_are_counted(group):
    def scorer(candidate):
        if candidate.completion == "bad":
            raise ValueError("cannot read it")
        if candidate.completion == "judge":
            raise CandidateFailure("the judge is away")
        return {"a": 1.0, "b": 1.0} if candidate.completion == "ok" else float("nan")

    result = service(scorer).score([group("ok", "bad", "judge", "nan")])
    assert [score.total for score in result.groups[0].scores] == [2.0, 0.0, 0.0, 0.0]
    assert result.failures == (
        RewardFailure("p1@0", 1, "ValueError: cannot read it"),
        RewardFailure("p1@0", 2, "the judge is away"),
        RewardFailure("p1@0", 3, "non-finite total nan"),
    )
    assert result.metrics["reward/failed"] == Sum(3.0)
    assert result.metrics["reward/mean"] == Mean(2.0, 4)
    assert result.metrics["reward/part/a"] == Mean(1.0, 1)  # the parts of failed candidates are unknown, not zero


def test_reward_errors_of_a_scorer_stop_the_run(group):
    def scorer(candidate):
        raise RewardError("the worker cannot start")

    with pytest.raises(RewardError, match=r"^the worker cannot start$"):
        service(scorer).score([group("a")])


def test_late_candidate_has_failed(group):
    def scorer(candidate):
        time.sleep(0.5 if candidate.completion == "slow" else 0.0)
        return 1.0

    result = service(scorer, timeout_s=0.35).score([group("quick", "slow")])
    assert [score.total for score in result.groups[0].scores] == [1.0, 0.0]
    assert result.failures == (RewardFailure("p1@0", 1, "timed out after 0.5s"),)


def test_hung_scorer_is_named_and_not_waited_for(group):
    release = threading.Event()

    def scorer(candidate):
        if candidate.completion == "hang":
            release.wait(60)
        return 1.0

    started = time.perf_counter()
    with pytest.raises(
        RewardError,
        match=r"reward 'mine', prompt 'p9@2', sample 1: still running after 0\.\ds, the deadline is 0.2s .*raise rl.reward_timeout_s",
    ):
        service(scorer, timeout_s=0.2).score([group("fine", "hang", "fine", prompt_id="p9@2")])
    assert time.perf_counter() - started < 5.0
    release.set()


def test_busy_loop_in_this_process_is_noticed_too(group):
    stop = []

    def scorer(candidate):
        while not stop:
            pass
        return 0.0

    with pytest.raises(RewardError, match="sample 0: still running"):
        service(scorer, timeout_s=0.2).score([group("x")])
    stop.append(True)


def test_hung_group_native_provider_is_named(group):
    release = threading.Event()

    class Hung(Scripted):
        def score(self, group):
            release.wait(60)
            return []

    with pytest.raises(
        RewardError, match=r"reward 'scripted', prompt 'p1@0', one of samples 0..1: .*deadline is 0.2s \(rl.reward_timeout_s=0.1\)"
    ):
        RewardService(Hung(None), timeout_s=0.1).score([group("a", "b")])
    release.set()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Score(1.0)], "reward 'scripted', prompt 'p1@0': 1 scores for 2 completions"),
        ([Score(1.0), 2.0], "sample 1: got float, must be a Score"),
        (KeyError("row"), "the provider raised KeyError: 'row'; it must return a failed Score"),
    ],
)
def test_provider_that_breaks_its_contract_stops_the_run(group, answer, message):
    with pytest.raises(RewardError, match=message):
        RewardService(Scripted(answer), timeout_s=5.0).score([group("a", "b")])


def test_declared_failure_keeps_the_providers_failure_value(group):
    answer = [Score(-1.0, failure="no video"), Score(math.inf, parts={"x": math.inf}, failure="overflow"), Score(2.0)]
    result = RewardService(Scripted(answer), timeout_s=5.0).score([group("a", "b", "c")])
    assert [score.total for score in result.groups[0].scores] == [-1.0, 0.0, 2.0]
    assert result.groups[0].spread == 3.0
    assert [failure.reason for failure in result.failures] == ["no video", "overflow"]
    assert "reward/part/x" not in result.metrics


def test_no_groups_and_close():
    provider = Scripted([])
    rewards = RewardService(provider, timeout_s=1.0)
    assert rewards.score([]).groups == ()
    rewards.close()
    assert provider.closed == 1
