"""What every registered reward provider promises; each example is one right and one wrong answer to the same prompt.

A new built-in joins by adding its example to `EXAMPLES`, and a test below fails until it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.records import Completion, Prompt, RolloutGroup, Score
from posttrain.reward.catalog import build_provider, describe, known_rewards
from posttrain.reward.service import RewardService

ENTRY = {"question": "1 + 5 =", "answer": "6", "metadata": {}}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "arithmetic": {"reference": 7, "right": "3 + 4 is 7", "wrong": "3 + 4 is 8"},
    "exact": {"reference": "Paris", "right": " Paris ", "wrong": "London"},
    "math": {"reference": "\\frac{1}{2}", "right": "\\boxed{0.5}", "wrong": "\\boxed{0.25}"},
    "reasoning_gym": {
        "right": "<answer>6</answer>",
        "wrong": "<answer>7</answer>",
        "columns": {"dataset": "chain_sum", "dataset_config": {}, "entry": ENTRY},
    },
}


def group(name: str, *texts: str) -> RolloutGroup:
    example = EXAMPLES[name]
    prompt = Prompt("p@0", "ask", "ask", (1,), reference=example.get("reference"), representations=example.get("columns", {}))
    return RolloutGroup(prompt, tuple(Completion((7,), (-0.5,), "stop", 0, text) for text in texts))


@pytest.fixture(scope="module")
def providers():
    """One of each, kept over the module: two of them start a process."""
    made = {name: build_provider(name, timeout_s=20.0) for name in EXAMPLES if describe(name).missing_extra is None}
    yield made
    for provider in made.values():
        provider.close()
        provider.close()  # closing twice is allowed


@pytest.fixture(params=list(EXAMPLES))
def name(request, providers) -> str:
    if request.param not in providers:
        pytest.skip(f"needs the extra {describe(request.param).missing_extra}")
    return request.param


def test_every_builtin_has_an_example():
    assert set(known_rewards()) == set(EXAMPLES)


def test_provider_is_what_the_catalog_says(providers, name):
    provider = providers[name]
    assert provider.name == name
    assert provider.needs == describe(name).needs
    assert provider.identity["reward"] == name and "revision" in provider.identity


def test_right_and_wrong_in_order(providers, name):
    right, wrong = EXAMPLES[name]["right"], EXAMPLES[name]["wrong"]
    scores = providers[name].score(group(name, wrong, right, right, wrong))
    assert [score.total for score in scores] == [0.0, 1.0, 1.0, 0.0]
    assert all(isinstance(score, Score) and score.failure is None and score.time_s > 0 for score in scores)


def test_hostile_completions_get_finite_totals(providers, name):
    texts = ["", " ", "\x00", "<answer>", "\\boxed{", "{" * 2000, "9" * 6000, "١٢", "\ud800", "-" * 5000, "a,b\n" * 500]
    for score in providers[name].score(group(name, *texts)):
        assert math.isfinite(score.total) and 0.0 <= score.total < 1.0


def test_scores_do_not_depend_on_the_company(providers, name):
    right, wrong = EXAMPLES[name]["right"], EXAMPLES[name]["wrong"]
    alone = providers[name].score(group(name, right))[0].total
    assert providers[name].score(group(name, wrong, "", right))[2].total == alone == 1.0


def test_service_makes_scored_groups_of_it(providers, name):
    right, wrong = EXAMPLES[name]["right"], EXAMPLES[name]["wrong"]
    result = RewardService(providers[name], timeout_s=20.0).score([group(name, right, wrong), group(name, right, right)])
    assert [scored.spread for scored in result.groups] == [1.0, 0.0]
    assert result.metrics["reward/mean"].value == 0.75
    assert result.metrics["reward/zero_spread_frac"].value == 0.5
    assert result.failures == ()
