"""Annotation of complete groups: conflicting prefixes against brute force, truncation, and estimators of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.annotators.advantage import group_advantages
from posttrain.algorithm.annotators.group import GroupAnnotator, GroupRelative
from posttrain.algorithm.annotators.prefix import conflicting_prefix_lengths
from posttrain.config import GRPOConfig
from posttrain.data.packer import pack, samples_of
from posttrain.errors import ConfigError, TrainingError
from posttrain.records import Advantage, Completion, FinishReason, Prompt, RolloutGroup, Score, ScoredGroup


def scored(
    completions: Sequence[tuple[int, ...]], rewards: Sequence[float], *, reasons: Sequence[FinishReason] | None = None, name: str = "p7"
) -> ScoredGroup:
    members = tuple(
        Completion(ids, (-1.0,) * len(ids), reason, 0, "")
        for ids, reason in zip(completions, reasons or ["stop"] * len(completions), strict=True)
    )
    spread = max(rewards) - min(rewards)
    return ScoredGroup(RolloutGroup(Prompt(name, "", "", (1, 2)), members), tuple(map(Score, rewards)), spread)


def annotator(**knobs: object) -> GroupAnnotator:
    return GroupAnnotator.of(GRPOConfig(objective_builder="unused", **knobs))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- conflicting prefixes


def brute_force(completions: Sequence[tuple[int, ...]], rewards: Sequence[float], min_tokens: int) -> list[int]:
    """Every pair, token by token."""
    lengths: list[int] = []
    for mine, reward in zip(completions, rewards, strict=True):
        longest = 0
        for other, its in zip(completions, rewards, strict=True):
            if abs(reward - its) <= 1e-9:
                continue
            span = 0
            while span < min(len(mine), len(other)) and mine[span] == other[span]:
                span += 1
            longest = max(longest, span)
        lengths.append(longest if longest >= min_tokens else 0)
    return lengths


GROUPS = st.integers(1, 9).flatmap(
    lambda size: st.tuples(
        st.lists(st.lists(st.integers(0, 1), max_size=7).map(tuple), min_size=size, max_size=size),
        st.lists(st.sampled_from((0.0, 0.0, 1e-12, 0.5, 1.0)), min_size=size, max_size=size),
    )
)


@settings(max_examples=200, deadline=None)
@given(group=GROUPS, min_tokens=st.integers(1, 5))
def test_conflicting_prefixes_equal_brute_force(group: tuple[list[tuple[int, ...]], list[float]], min_tokens: int) -> None:
    completions, rewards = group
    found = conflicting_prefix_lengths(completions, rewards, min_tokens=min_tokens)
    assert found == brute_force(completions, rewards, min_tokens)


@settings(max_examples=100, deadline=None)
@given(group=GROUPS, min_tokens=st.integers(1, 4))
def test_the_mask_hides_exactly_the_conflicting_prefix(group: tuple[list[tuple[int, ...]], list[float]], min_tokens: int) -> None:
    completions, rewards = group
    masks = annotator(min_filter_prefix_tokens=min_tokens)(scored(completions, rewards)).loss_masks
    for ids, mask, hidden in zip(completions, masks, brute_force(completions, rewards, min_tokens), strict=True):
        assert mask == (False,) * hidden + (True,) * (len(ids) - hidden)


def test_a_prefix_below_the_threshold_stays() -> None:
    group = scored([(5, 6, 7), (5, 6, 8)], [1, 0])
    for threshold, hidden in ((1, 2), (2, 2), (3, 0)):
        assert [mask.count(False) for mask in annotator(min_filter_prefix_tokens=threshold)(group).loss_masks] == [hidden] * 2
    assert all(map(all, annotator()(group).loss_masks)), "off by default"


def test_a_prefix_shared_under_equal_rewards_is_no_conflict() -> None:
    assert conflicting_prefix_lengths([(5, 6, 7), (5, 6, 8), (9,)], [1, 1, 0], min_tokens=1) == [0, 0, 0]
    # rewards that differ by rounding tie as well
    assert conflicting_prefix_lengths([(5, 6), (5, 6)], [0.1 + 0.2, 0.3], min_tokens=1) == [0, 0]


def test_equal_completions_under_different_rewards_are_hidden_whole() -> None:
    assert conflicting_prefix_lengths([(5, 6), (5, 6), (5,), ()], [1, 0, 0, 0], min_tokens=1) == [2, 2, 1, 0]


def test_a_rival_behind_a_completion_of_the_same_reward_is_found() -> None:
    # sorted, the nearest neighbour has the same reward; the conflict lies beyond it
    assert conflicting_prefix_lengths([(1, 1, 1), (1, 1, 2), (1, 2)], [1, 1, 0], min_tokens=1) == [1, 1, 1]


def test_hidden_tokens_leave_the_advantages_alone() -> None:
    group = scored([(5, 6), (5, 7), (8,)], [1, 0, 0])
    assert annotator(min_filter_prefix_tokens=1)(group).advantages == group_advantages([1, 0, 0], unbiased=False)


# ---------------------------------------------------------------------------------------------------------------- truncation


def test_a_truncated_completion_leaves_the_loss_and_stays_in_the_statistics() -> None:
    group = scored([(5, 6), (7,), (8, 9, 5)], [1, 0, 0], reasons=["length", "stop", "length"])
    masked = annotator(mask_truncated_completions=True)(group)
    assert masked.loss_masks == ((False, False), (True,), (False,) * 3)
    plain = annotator()(group)
    assert all(map(all, plain.loss_masks))
    assert masked.advantages == plain.advantages == group_advantages([1, 0, 0], unbiased=False)
    assert masked.scored is group and group.informative


def test_only_the_truncated_member_separates_the_rewards() -> None:
    group = scored([(5,), (6,)], [1, 0], reasons=["length", "stop"])
    masked = annotator(mask_truncated_completions=True)(group)
    assert masked.scored.informative and masked.advantages[1] < 0 and masked.loss_masks == ((False,), (True,))


def test_truncation_and_prefixes_are_both_hidden() -> None:
    group = scored([(5, 6, 7), (5, 6, 8), (5, 9)], [1, 0, 0], reasons=["stop", "length", "stop"])
    masks = annotator(mask_truncated_completions=True, min_filter_prefix_tokens=1)(group).loss_masks
    # a truncated completion is still a member: its prefix conflicts with the first one's
    assert masks == ((False, False, True), (False, False, False), (False, True))


# ---------------------------------------------------------------------------------------------------- estimators of one's own


def best_only(group: ScoredGroup) -> list[float]:
    best = max(score.total for score in group.scores)
    return [float(score.total == best) for score in group.scores]


def rising(group: ScoredGroup) -> list[Advantage]:
    """A number for the first completion and one number per token for the others."""
    return [0.5 if i == 0 else tuple(i + 0.1 * t for t in range(len(c.token_ids))) for i, c in enumerate(group.rollout.completions)]


def rising_lists(group: ScoredGroup) -> list[object]:
    return [list(values) if isinstance(values, tuple) else values for values in rising(group)]


def rising_arrays(group: ScoredGroup) -> list[object]:
    return [np.asarray(values) for values in rising(group)]


def rising_tensors(group: ScoredGroup) -> list[object]:
    return [torch.tensor(values, dtype=torch.float64) for values in rising(group)]


def one_tensor(group: ScoredGroup) -> torch.Tensor:
    return torch.tensor(best_only(group))


def too_few(group: ScoredGroup) -> list[float]:
    return best_only(group)[1:]


def too_many_tokens(group: ScoredGroup) -> list[Advantage]:
    return [(1.0,) * (len(completion.token_ids) + 1) for completion in group.rollout.completions]


def words(group: ScoredGroup) -> list[object]:
    return [None] * len(group.scores)


nameless = lambda group: [0.0] * len(group.scores)  # noqa: E731


def _make() -> object:
    def nested(group: ScoredGroup) -> list[float]:
        return [0.0] * len(group.scores)

    return nested


nested_function = _make()

GROUP = scored([(5, 6), (7,), (8, 9, 5)], [1, 0, 3])


def named(function: str) -> GroupAnnotator:
    return annotator(advantage_estimator=f"{__name__}.{function}")


def test_an_estimator_is_found_by_its_path_and_sees_the_whole_group() -> None:
    assert named("best_only")(GROUP).advantages == (0.0, 0.0, 1.0)
    assert annotator(unbiased_advantage=True)(GROUP).advantages == GroupRelative(True)(GROUP) != GroupRelative(False)(GROUP)


@pytest.mark.parametrize("function", ["rising", "rising_lists", "rising_arrays", "rising_tensors"])
def test_advantages_per_token_reach_the_batch(function: str) -> None:
    group = named(function)(GROUP)
    assert group.advantages == (0.5, (1.0,), (2.0, 2.1, 2.2))
    batch = pack(samples_of([group]), pad_id=0, dtype=torch.float64)
    assert batch.advantages_of_tokens().tolist() == pytest.approx([0.5, 0.5, 1.0, 2.0, 2.1, 2.2])
    assert batch.advantages.tolist() == pytest.approx([0.5, 1.0, 2.1])


def test_advantages_may_come_as_one_tensor() -> None:
    assert named("one_tensor")(GROUP).advantages == (0.0, 0.0, 1.0)
    assert all(type(value) is float for value in named("one_tensor")(GROUP).advantages)


@pytest.mark.parametrize("function", ["too_few", "too_many_tokens", "words"])
def test_advantages_that_do_not_match_the_group_are_refused_by_its_name(function: str) -> None:
    with pytest.raises(TrainingError, match=r"advantage estimator.*'p7'"):
        named(function)(GROUP)


@pytest.mark.parametrize("function", ["nameless", "nested_function"])
def test_an_estimator_without_a_path_of_its_own_is_refused(function: str) -> None:
    with pytest.raises(ConfigError, match="lambda or a nested function"):
        named(function)


def test_an_estimator_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attribute 'missing'"):
        named("missing")
