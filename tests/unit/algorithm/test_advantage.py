"""Group advantages with hand-computed values."""

from __future__ import annotations

import math

import pytest

from posttrain.algorithm.annotators.advantage import STD_EPSILON, group_advantages
from posttrain.algorithm.annotators.group import GroupAnnotator, GroupRelative
from posttrain.records import Completion, Prompt, RolloutGroup, Score, ScoredGroup


def test_mean_and_sample_deviation_of_the_group() -> None:
    # mean 0.5, squared deviations sum to 1, sample variance 1/3
    scale = math.sqrt(1 / 3) + STD_EPSILON
    assert group_advantages([1, 0, 0, 1], unbiased=False) == pytest.approx([0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale])
    assert group_advantages([1, 0, 0, 1], unbiased=False)[0] == pytest.approx(0.8659, abs=1e-4)


def test_unbiased_only_centres() -> None:
    assert group_advantages([3, 0, 0], unbiased=True) == pytest.approx([2, -1, -1])


@pytest.mark.parametrize("unbiased", [True, False])
def test_rewards_that_tie_give_exact_zeros(unbiased: bool) -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3], unbiased=unbiased) == (0.0, 0.0, 0.0)


def test_annotation_trains_on_every_sampled_token() -> None:
    completions = (Completion((4, 5), (-1.0, -2.0), "stop", 0, "x"), Completion((), (), "length", 0, ""))
    group = GroupAnnotator(GroupRelative(True))(
        ScoredGroup(RolloutGroup(Prompt("a", "", "", (1,)), completions), (Score(1.0), Score(0.0)), 1.0)
    )
    assert group.loss_masks == ((True, True), ()) and group.advantages == (0.5, -0.5)
