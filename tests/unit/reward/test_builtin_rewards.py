"""The built-in scorers against values worked out by hand."""

from __future__ import annotations

import pytest

from posttrain.reward.builtin import (
    build_arithmetic,
    build_exact,
    build_math,
    build_reasoning_gym,
    extracted_answer,
    last_integer,
)

TIMEOUT_S = 10.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("no digits", None),
        ("42", "42"),
        ("3 + 4 = 7.", "7"),
        ("it is -4", "-4"),
        ("it is −4", "-4"),  # the typographic minus
        ("=-4", "-4"),
        ("5-3", "3"),  # an operand before the minus: a subtraction
        ("(5)-3", "3"),
        ("5 - 3", "3"),
        ("5 -3", "-3"),
        ("-0", "0"),
        ("007", "7"),
        ("1,234", "1234"),
        ("-1,234,567 dollars", "-1234567"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("7 or 3.5", "7"),  # 3.5 is no integer, and neither are its halves
        ("1,234.5", None),
        ("**12**", "12"),
        ("$-12$", "-12"),
        ("9" * 5000, "9" * 5000),  # more digits than int() converts
    ],
)
def test_last_integer(text, expected):
    assert last_integer(text) == expected


def totals(provider, group):
    return [score.total for score in provider.score(group)]


def failures(provider, group):
    return [score.failure for score in provider.score(group)]


@pytest.mark.parametrize("reference", [-4, "-4", " -4 ", -4.0])
def test_arithmetic(group, reference):
    provider = build_arithmetic(TIMEOUT_S)
    assert totals(provider, group("so -4", "4", "-4 no wait 5", "", "9" * 5000, reference=reference)) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert failures(provider, group("1", reference=reference)) == [None]


@pytest.mark.parametrize("reference", [None, "four", 4.5, True, "4 or 5"])
def test_arithmetic_with_a_reference_that_is_no_integer_fails_every_candidate(group, reference):
    provider = build_arithmetic(TIMEOUT_S)
    (score,) = provider.score(group("4", reference=reference))
    assert (score.total, score.failure) == (0.0, f"the reference {reference!r} is not an integer")


def test_exact(group):
    provider = build_exact(TIMEOUT_S)
    assert totals(provider, group(" Paris\n", "paris", "Paris.", "", reference="Paris ")) == [1.0, 0.0, 0.0, 0.0]
    assert totals(provider, group("12", reference=12)) == [1.0]
    assert failures(provider, group("", reference=None)) == ["the prompt has no reference"]


def test_math(group):
    provider = build_math(TIMEOUT_S)
    try:
        half = group("\\boxed{\\frac{1}{2}}", "the answer is 0.5", "$\\frac{2}{4}$", "\\boxed{2}", "no idea", "", reference="1/2")
        assert totals(provider, half) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert failures(provider, half) == [None] * 6
        assert totals(provider, group("\\boxed{3\\pi}", "\\boxed{3}", reference="3 \\pi")) == [1.0, 0.0]
        assert totals(provider, group("\\boxed{x^2+2x+1}", "$x^2$", reference="$(x+1)^2$")) == [1.0, 0.0]
        assert totals(provider, group("#### 18", "17", reference=18)) == [1.0, 0.0]
        assert failures(provider, group("1", reference=None)) == ["the prompt has no reference"]
        assert failures(provider, group("1", reference="")) == ["ValueError: the reference '' is not a mathematical expression"]
    finally:
        provider.close()


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("  7 ", "7"),
        ("<answer>1</answer> no: <answer> 2 </answer> done", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("think <answer>", "think <answer>"),
        ("</answer> x", "</answer> x"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
    ],
)
def test_extracted_answer(completion, answer):
    assert extracted_answer(completion) == answer


def test_reasoning_gym_uses_the_data_sets_own_scorer(group):
    gym = pytest.importorskip("reasoning_gym")
    provider = build_reasoning_gym(TIMEOUT_S)
    try:
        entry = gym.create_dataset("chain_sum", seed=0, size=1)[0]
        row = {"dataset": "chain_sum", "dataset_config": {}, "entry": entry}
        right = entry["answer"]
        chain = group(f"hm <answer>{right}</answer>", right, "<answer>x</answer>", representations=row)
        assert totals(provider, chain) == [1.0, 1.0, 0.0]
        # A data set without a single right answer: 20 from 3, 5 and 7 can be reached in many ways.
        config = {"min_numbers": 4, "max_numbers": 4}
        countdown = gym.create_dataset("countdown", seed=0, size=1, **config)
        entry = countdown[0]
        row = {"dataset": "countdown", "dataset_config": config, "entry": entry}
        rewritten = f"0 + {entry['metadata']['expression']}"
        texts = [entry["metadata"]["expression"], "1 + 1", rewritten]
        expected = [countdown.score_answer(text, entry) for text in texts]
        assert totals(provider, group(*texts, representations=row)) == expected and expected[0] == 1.0 > expected[1]
        assert failures(provider, group("1", representations={"dataset": "chain_sum", "dataset_config": {}})) == ["KeyError: 'entry'"]
        bad = {**row, "dataset": "nowhere"}
        assert failures(provider, group("1", representations=bad)) == ["ValueError: Dataset 'nowhere' not registered"]
    finally:
        provider.close()
