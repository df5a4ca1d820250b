"""The arithmetic corpus against plain enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.config.data import ArithmeticConfig
from posttrain.data.arithmetic import ArithmeticCorpus, held_out_residues, is_held_out
from posttrain.errors import DataError


def problems(config, split):
    corpus = ArithmeticCorpus(config, split=split)
    return [tuple(corpus[index].representations.values()) for index in range(len(corpus))]


@pytest.mark.parametrize(
    "config",
    [
        ArithmeticConfig(),
        ArithmeticConfig(low=-7, high=5, operators=["+", "-", "*"], held_out_fraction=0.4),
        ArithmeticConfig(low=3, high=4, held_out_fraction=0.5, operators=["*", "+"]),
    ],
)
def test_splits_are_the_enumeration_divided_by_the_rule(config):
    everything = [
        (a, op, b) for op in config.operators for a in range(config.low, config.high + 1) for b in range(config.low, config.high + 1)
    ]
    held = {problem for problem in everything if is_held_out(*problem, fraction=config.held_out_fraction)}
    train_rows, held_rows = problems(config, "train"), problems(config, "held_out")
    assert len(train_rows) + len(held_rows) == len(everything)
    assert set(held_rows) == held
    assert set(train_rows) == set(everything) - held


def test_more_operands_than_residues():
    config = ArithmeticConfig(low=-260, high=260, operators=["-"], held_out_fraction=0.2)
    values = np.arange(-260, 261)
    # Independently of the index arithmetic: every problem looked up by its residues.
    held = np.array([held_out_residues(int(a), "-", fraction=0.2)[values % 512] for a in values])
    for split, expected in (("train", ~held), ("held_out", held)):
        corpus = ArithmeticCorpus(config, split=split)
        assert len(corpus) == expected.sum()
        rows = [corpus[index].representations for index in range(0, len(corpus), 29)]
        assert all(expected[row["a"] + 260, row["b"] + 260] for row in rows)
        assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_held_out_share_is_about_the_fraction():
    config = ArithmeticConfig(low=0, high=99, held_out_fraction=0.15)
    # binomial, 10,000 problems: standard deviation 35.7
    assert abs(len(problems(config, "held_out")) - 1500) < 5 * 36


def test_membership_does_not_depend_on_the_range_or_the_template():
    small = set(problems(ArithmeticConfig(low=0, high=20), "held_out"))
    large = set(problems(ArithmeticConfig(low=-5, high=40, template="{a}{op}{b}"), "train"))
    assert small and not small & large


def test_rows():
    corpus = ArithmeticCorpus(
        ArithmeticConfig(low=-2, high=3, operators=["-"], template="{a} {op} {b} in \\boxed{}", chat=False, held_out_fraction=0.0)
    )
    row = next(row for row in map(corpus.__getitem__, range(len(corpus))) if row.representations == {"a": -2, "op": "-", "b": 3})
    assert (row.key, row.prompt, row.reference) == ("-2-3", "-2 - 3 in \\boxed{}", -5)
    assert corpus.columns == {"prompt", "reference", "a", "op", "b"}
    chat = ArithmeticCorpus(ArithmeticConfig(low=2, high=2, operators=["*"], held_out_fraction=0.0))[0]
    assert (chat.prompt, chat.reference) == (({"role": "user", "content": "What is 2 * 2?"},), 4)


def test_keys_are_unique():
    corpus = ArithmeticCorpus(ArithmeticConfig(low=-12, high=12, operators=["+", "-", "*", "-"]))
    assert len({corpus[index].key for index in range(len(corpus))}) == len(corpus)


def test_huge_ranges_are_indexed_not_enumerated():
    config = ArithmeticConfig(low=-(10**8), high=10**8, operators=["+", "-", "*"])
    train, held = ArithmeticCorpus(config), ArithmeticCorpus(config, split="held_out")
    assert len(train) + len(held) == 3 * (2 * 10**8 + 1) ** 2
    assert abs(len(held) / (len(train) + len(held)) - 0.15) < 0.01
    seen = set()
    for corpus, expected in ((train, False), (held, True)):
        for index in (0, 1, 12345678901234, len(corpus) // 2, len(corpus) - 1):
            a, op, b = corpus[index].representations.values()
            assert is_held_out(a, op, b, fraction=0.15) is expected
            assert -(10**8) <= a <= 10**8 and -(10**8) <= b <= 10**8
            seen.add((a, op, b))
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("config", "split", "message"),
    [
        (ArithmeticConfig(held_out_fraction=0.0), "held_out", "no problem of 0..20 .*held_out_fraction=0.0.*widen"),
        (ArithmeticConfig(), "test", "split='test': the arithmetic source has train and held_out; set split=train"),
        (ArithmeticConfig(operators=["/"]), "train", "'/' is not an operator"),
        (ArithmeticConfig(operators=[]), "train", "at least one"),
        (ArithmeticConfig(low=2, high=1), "train", "arithmetic.low=2: must be <= arithmetic.high=1"),
        (ArithmeticConfig(high=10**10), "train", "more than 2\\*\\*63 problems"),
    ],
)
def test_errors(config, split, message):
    with pytest.raises(DataError, match=message):
        ArithmeticCorpus(config, split=split)
    with pytest.raises(IndexError):
        ArithmeticCorpus(ArithmeticConfig())[10**6]
