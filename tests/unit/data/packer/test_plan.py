"""Micro-batches by a token budget against brute force over every way to cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.packer import TrainSample, micro_batches, pack
from posttrain.data.packer.plan import by_tokens
from posttrain.errors import TrainingError
from posttrain.records import Completion, Prompt


def samples(groups: Sequence[tuple[int, Sequence[int]]]) -> list[TrainSample]:
    """(prompt length, completion lengths) of each group, with at least one prompt token."""
    return [
        TrainSample(prompt, index, Completion((2,) * length, (-1.0,) * length, "stop", 0, ""), 1.0, (True,) * length)
        for number, (tokens, lengths) in enumerate(groups)
        for prompt in [Prompt(f"p{number}", "", "", (1,) * tokens)]
        for index, length in enumerate(lengths)
    ]


def cost(batch: Sequence[TrainSample]) -> int:
    """Tokens of a packed batch, counted in its tensors."""
    packed = pack(batch, pad_id=0)
    return int(packed.prompt_lengths.sum() + packed.lengths.sum())


def every_cut(members: Sequence[TrainSample]) -> list[list[Sequence[TrainSample]]]:
    cuts: list[list[Sequence[TrainSample]]] = []
    for inner in itertools.product((False, True), repeat=max(len(members) - 1, 0)):
        bounds = [0, *(i for i, cut in enumerate(inner, 1) if cut), len(members)]
        cuts.append([members[a:b] for a, b in itertools.pairwise(bounds)])
    return cuts


def greedy_count(members: Sequence[TrainSample], budget: int) -> int:
    """Fill one after the other, measuring each attempt anew."""
    count, current = 0, []
    for member in members:
        if current and cost([*current, member]) <= budget:
            current.append(member)
        else:
            count, current = count + 1, [member]
    return count


GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=4)), min_size=1, max_size=8)
SMALL = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, slack=st.integers(0, 40))
def test_every_micro_batch_fits_and_nothing_moves(groups: list[tuple[int, list[int]]], slack: int) -> None:
    members = samples(groups)
    budget = max(cost([member]) for member in members) + slack
    cut = by_tokens(members, budget)
    assert [id(member) for batch in cut for member in batch] == [id(member) for member in members]
    assert all(cut) and max(cost(batch) for batch in cut) <= budget
    assert len(cut) == greedy_count(members, budget)


@settings(max_examples=40, deadline=None)
@given(groups=SMALL, slack=st.integers(0, 20))
def test_as_few_as_possible_and_then_as_equal_as_possible(groups: list[tuple[int, list[int]]], slack: int) -> None:
    members = samples(groups)
    budget = max(cost([member]) for member in members) + slack
    cut = by_tokens(members, budget)
    largest = [(len(other), max(map(cost, other))) for other in every_cut(members)]
    fewest = min(count for count, worst in largest if worst <= budget)
    assert len(cut) == fewest
    assert max(map(cost, cut)) == min(worst for count, worst in largest if count == fewest)


def test_a_prompt_is_paid_once_for_consecutive_completions() -> None:
    members = samples([(10, (5, 5, 5))])
    assert [len(batch) for batch in by_tokens(members, 25)] == [3]
    assert [len(batch) for batch in by_tokens(members, 24)] == [2, 1]
    assert [len(batch) for batch in by_tokens(members, 15)] == [1, 1, 1]


def test_a_prompt_that_returns_later_is_paid_again() -> None:
    a, b = samples([(10, (1, 1))]), samples([(1, (1,)), (10, (1,))])[1:]
    assert [len(batch) for batch in by_tokens([a[0], b[0], a[1]], 33)] == [3]
    assert [len(batch) for batch in by_tokens([a[0], b[0], a[1]], 32)] == [2, 1]


def test_micro_batches_are_levelled() -> None:
    members = samples([(1, (9,))] * 4)
    for number, member in enumerate(members):
        assert member.prompt.id == f"p{number}"
    # greedy filling of 30 tokens leaves 3 + 1
    assert [len(batch) for batch in by_tokens(members, 30)] == [2, 2]


def test_empty_completions_cost_nothing_but_their_prompt() -> None:
    assert [len(batch) for batch in by_tokens(samples([(4, (0, 0, 6))]), 10)] == [3]
    assert by_tokens([], 10) == []


def test_a_sample_beyond_the_budget_is_refused_with_the_remedies() -> None:
    members = samples([(10, (5, 7)), (3, (2,))])
    with pytest.raises(TrainingError) as caught:
        by_tokens(members, 16)
    text = str(caught.value)
    assert "rl.micro_batch_tokens=16" in text and "one sample of 17 prompt and completion tokens" in text
    assert "rl.data.max_prompt_tokens" in text and "rollout.max_tokens" in text


def test_zero_tokens_cuts_by_count() -> None:
    members = samples([(3, (1, 2, 3)), (2, (1, 1))])
    assert [len(batch) for batch in micro_batches(members, count=2, tokens=0)] == [2, 2, 1]
    assert micro_batches(members, count=2, tokens=12) == by_tokens(members, 12)
