"""The collection rules against a slow simulation written from the contract, over random tables of informative groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import GRPOConfig
from posttrain.errors import TrainingError
from posttrain.loop.batching import Collection, DynamicSampling, collect, informative_quota_per_cell, prompts_per_data_cell
from posttrain.records import Completion, Mean, Prompt, RolloutGroup, Score, ScoredGroup, Sum

COMBINATIONS = [
    pytest.param(short, pooled, whole, proceed, id="-".join(names))
    for (short, pooled, whole, proceed), names in zip(
        itertools.product((False, True), repeat=4),
        itertools.product(("all", "short_cells"), ("cell", "pooled"), ("per_round", "whole_budget"), ("raise", "proceed")),
        strict=True,
    )
]

PLAIN = DynamicSampling(
    quota=0, max_extra_rounds=4, refill_short_cells_only=False, pooled=False, whole_budget=False, proceed_when_exhausted=False
)


def group(name: str, informative: bool) -> ScoredGroup:
    """Tied groups differ by a rounding error, as sums of reward parts do."""
    low = 0.0 if informative else 1.0 - 1e-12
    completions = tuple(Completion((1,), (-1.0,), "stop", 0, "") for _ in range(2))
    return ScoredGroup(RolloutGroup(Prompt(name, "", "", (1,)), completions), (Score(1.0), Score(low)), spread=1.0 - low)


def name_of(scored: ScoredGroup) -> str:
    return scored.rollout.prompt.id


@dataclass
class Cells:
    """Data cells with a cursor each over a table of informative flags; remembers every call."""

    table: Sequence[Sequence[bool]]

    def __post_init__(self) -> None:
        self.groups = [[group(f"{cell}/{i}", flag) for i, flag in enumerate(row)] for cell, row in enumerate(self.table)]
        self.taken = [0] * len(self.table)
        self.calls: list[dict[int, int]] = []

    def __call__(self, prompts: Mapping[int, int]) -> Mapping[int, Sequence[ScoredGroup]]:
        self.calls.append(dict(prompts))
        found: dict[int, Sequence[ScoredGroup]] = {}
        for cell, count in prompts.items():
            found[cell] = self.groups[cell][self.taken[cell] : self.taken[cell] + count]
            self.taken[cell] += count
        return found


# ---------------------------------------------------------------------------------------------------- the slow simulation


@dataclass(frozen=True)
class Expected:
    batch: list[str]
    calls: list[dict[int, int]]
    rounds: int
    missing: int


def best_share(flags: Sequence[bool], share: int) -> list[int]:
    """Places of a cell's part of the batch: replace the last tied group by a later informative one while there is any."""
    chosen = list(range(share))
    for place in range(share, len(flags)):
        tied = [i for i in chosen if not flags[i]]
        if flags[place] and tied:
            chosen.remove(tied[-1])
            chosen.append(place)
    return sorted(chosen)


def simulate(table: Sequence[Sequence[bool]], rules: DynamicSampling, share: int) -> Expected:
    cells = range(len(table))
    quotas = [0 for _ in cells]
    for unit in range(rules.quota):
        quotas[unit % len(table)] += 1
    drawn = [share for _ in cells]
    calls = [dict.fromkeys(cells, share)]
    rounds = 0
    while True:
        seen = [list(table[cell][: drawn[cell]]) for cell in cells]
        parts = [best_share(flags, share) for flags in seen]
        useful = [sum(seen[cell][i] for i in parts[cell]) for cell in cells]
        lacking = [max(0, quotas[cell] - seen[cell].count(True)) for cell in cells]
        missing = max(0, rules.quota - sum(useful)) if rules.pooled else sum(lacking)
        if missing == 0 or rounds == rules.max_extra_rounds:
            batch = [f"{cell}/{i}" for cell in cells for i in parts[cell]]
            return Expected(batch, calls, rounds, missing)
        owing = [cell for cell in cells if (useful[cell] < share if rules.pooled else lacking[cell])]
        more = rules.max_extra_rounds - rounds if rules.whole_budget else 1
        members = owing if rules.refill_short_cells_only else list(cells)
        for cell in members:
            drawn[cell] += more * share
        calls.append(dict.fromkeys(members, more * share))
        rounds += more


# ------------------------------------------------------------------------------------------------------------- properties


@dataclass(frozen=True)
class Case:
    table: list[list[bool]]
    share: int
    quota: int
    budget: int

    @property
    def groups_per_step(self) -> int:
        return self.share * len(self.table)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cells, share, budget = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = share * (1 + budget)
    # cells of different difficulty: the probability that one of them runs dry while another overflows must be large
    rates = [draw(st.sampled_from((0, 1, 2, 5, 10))) for _ in range(cells)]
    table = [draw(st.lists(st.integers(0, 9).map(lambda n, r=rate: n < r), min_size=length, max_size=length)) for rate in rates]
    return Case(table, share, draw(st.integers(0, cells * share)), budget)


@pytest.mark.parametrize(("short", "pooled", "whole", "proceed"), COMBINATIONS)
@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_every_rule_on_random_tables(short: bool, pooled: bool, whole: bool, proceed: bool, case: Case) -> None:
    rules = DynamicSampling(case.quota, case.budget, short, pooled, whole, proceed)
    expected = simulate(case.table, rules, case.share)
    cells = Cells(case.table)
    if expected.missing and not proceed:
        with pytest.raises(TrainingError, match=f"{expected.missing} informative groups short of its quota of {case.quota}"):
            collect(rules, cells, groups_per_step=case.groups_per_step, cells=len(case.table))
        assert cells.calls == expected.calls
        return
    got = collect(rules, cells, groups_per_step=case.groups_per_step, cells=len(case.table))
    assert cells.calls == expected.calls
    assert [name_of(g) for g in got.groups] == expected.batch
    assert (got.shortfall, got.extra_rounds, got.refill_dispatches) == (expected.missing, expected.rounds, len(expected.calls) - 1)
    check_batch(got, case)
    check_effort(got, cells, rules, case)
    assert collect(rules, Cells(case.table), groups_per_step=case.groups_per_step, cells=len(case.table)) == got


def check_batch(got: Collection, case: Case) -> None:
    """What any batch must satisfy, whatever the rules were."""
    assert len(got.groups) == case.groups_per_step
    assert got.informative == sum(g.informative for g in got.groups)
    places = [tuple(map(int, name_of(g).split("/"))) for g in got.groups]
    assert places == sorted(set(places)), "cell by cell, in the order drawn, nothing twice"
    for cell in range(len(case.table)):
        assert sum(owner == cell for owner, _ in places) == case.share


def check_effort(got: Collection, cells: Cells, rules: DynamicSampling, case: Case) -> None:
    """Budget, quota, filler and starvation."""
    assert cells.calls[0] == dict.fromkeys(range(len(case.table)), case.share)
    assert got.drawn == sum(sum(call.values()) for call in cells.calls) == sum(cells.taken)
    assert got.extra_rounds <= rules.max_extra_rounds
    assert got.extra_rounds == sum(next(iter(call.values())) for call in cells.calls[1:]) // case.share
    assert got.shortfall == 0 or got.extra_rounds == rules.max_extra_rounds
    found = [row[:taken] for row, taken in zip(case.table, cells.taken, strict=True)]
    quotas = informative_quota_per_cell(rules.quota, len(case.table))
    if rules.quota == 0:
        assert cells.calls == cells.calls[:1]
        return
    for cell, flags in enumerate(found):
        part = [g for g in got.groups if name_of(g).startswith(f"{cell}/")]
        assert sum(g.informative for g in part) == min(case.share, sum(flags)), "filler never displaces an informative group"
        if not rules.pooled and not got.shortfall:
            assert sum(g.informative for g in part) >= quotas[cell]
    if not got.shortfall:
        assert got.informative >= rules.quota
    if rules.pooled:
        assert got.shortfall == max(0, rules.quota - got.informative)
    # no cell starves: before each refill, whoever owes takes part in it
    taken = [case.share] * len(case.table)
    for call in cells.calls[1:]:
        for cell, row in enumerate(case.table):
            owes = sum(row[: taken[cell]]) < (case.share if rules.pooled else quotas[cell])
            assert not owes or cell in call
            assert not rules.refill_short_cells_only or owes or cell not in call
            taken[cell] += call.get(cell, 0)


# ---------------------------------------------------------------------------------------------------------- worked examples


def flags(text: str) -> list[bool]:
    """`x` is informative."""
    return [letter == "x" for letter in text]


def test_collection_stops_with_the_round_that_meets_the_quota() -> None:
    cells = Cells([flags("..x. x..x xxxx xxxx".replace(" ", ""))])
    got = collect(replace(PLAIN, quota=3), cells, groups_per_step=4)
    assert [name_of(g) for g in got.groups] == ["0/0", "0/2", "0/4", "0/7"]
    assert (got.informative, got.extra_rounds, got.refill_dispatches, got.drawn, got.shortfall) == (3, 1, 1, 8, 0)


def test_the_whole_budget_goes_out_in_one_call_and_only_to_short_cells() -> None:
    rules = replace(PLAIN, quota=4, max_extra_rounds=3, refill_short_cells_only=True, whole_budget=True)
    cells = Cells([flags("xx......"), flags(".......x")])
    with pytest.raises(TrainingError, match="1 informative groups short of its quota of 4 after 3 extra round"):
        collect(rules, cells, groups_per_step=4, cells=2)
    assert cells.calls == [{0: 2, 1: 2}, {1: 6}]


def test_a_cell_short_of_its_share_is_short_although_the_batch_holds_the_quota() -> None:
    table = [flags("xxxx"), flags("....")]
    rules = replace(PLAIN, quota=2, max_extra_rounds=1)
    with pytest.raises(TrainingError, match="1 informative groups short"):
        collect(rules, Cells(table), groups_per_step=4, cells=2)
    pooled = collect(replace(rules, pooled=True), Cells(table), groups_per_step=4, cells=2)
    assert (pooled.extra_rounds, pooled.informative, pooled.shortfall) == (0, 2, 0)


def test_a_pooled_cell_counts_at_most_its_share_of_the_batch() -> None:
    # two rounds of the first cell hold four informative groups, of which the batch can take two
    table = [flags("x.xxx."), flags(".....x")]
    got = collect(replace(PLAIN, quota=3, pooled=True, max_extra_rounds=2), Cells(table), groups_per_step=4, cells=2)
    assert (got.extra_rounds, got.informative) == (2, 3)


def test_proceeding_trains_on_tied_filler_and_reports_what_is_missing() -> None:
    rules = replace(PLAIN, quota=3, max_extra_rounds=2, proceed_when_exhausted=True)
    got = collect(rules, Cells([flags(".x.......")]), groups_per_step=3)
    assert [name_of(g) for g in got.groups] == ["0/0", "0/1", "0/2"]
    assert got.shortfall == 2
    assert got.metrics(dynamic=True) == {
        "train/informative_groups": Sum(1),
        "train/zero_spread_frac": Mean(2, 3),
        "train/grpo_dynamic_sampling_extra_rollouts": Sum(2),
        "train/grpo_dynamic_sampling_refill_dispatches": Sum(2),
        "train/grpo_dynamic_sampling_dropped_groups": Sum(6),
        "train/grpo_dynamic_sampling_shortfall": Sum(2),
    }


def test_rounds_and_calls_are_counted_apart() -> None:
    rules = replace(PLAIN, quota=2, max_extra_rounds=3, whole_budget=True)
    got = collect(rules, Cells([flags("..xxxxxx")]), groups_per_step=2)
    metrics = got.metrics(dynamic=True)
    assert metrics["train/grpo_dynamic_sampling_extra_rollouts"].value == 3
    assert metrics["train/grpo_dynamic_sampling_refill_dispatches"].value == 1
    assert metrics["train/grpo_dynamic_sampling_dropped_groups"].value == 6


def test_without_a_quota_one_draw_is_the_batch_tied_or_not() -> None:
    cells = Cells([flags("....xx")])
    got = collect(PLAIN, cells, groups_per_step=4)
    assert cells.calls == [{0: 4}] and [name_of(g) for g in got.groups] == ["0/0", "0/1", "0/2", "0/3"]
    assert set(got.metrics(dynamic=False)) == {"train/informative_groups", "train/zero_spread_frac"}


def test_a_cell_that_returns_another_number_of_groups_is_refused() -> None:
    with pytest.raises(TrainingError, match="data cell 0 returned 3 groups for 4 prompts"):
        collect(PLAIN, Cells([flags("xxx")]), groups_per_step=4)


def test_the_remedies_are_named_when_the_budget_is_exhausted() -> None:
    with pytest.raises(TrainingError) as caught:
        collect(replace(PLAIN, quota=1), Cells([flags("....." * 5)]), groups_per_step=5)
    for key in ("rl.dynamic_sampling_max_extra_rollouts", "rl.group_size", "rl.dynamic_sampling_on_budget_exhausted=proceed"):
        assert key in str(caught.value)
    assert "after 4 extra round(s)" in str(caught.value)


# ------------------------------------------------------------------------------------------------------------------ quotas


@given(cells=st.integers(1, 64), quota=st.integers(0, 1000))
def test_the_split_of_the_quota_is_exact_and_even(cells: int, quota: int) -> None:
    split = informative_quota_per_cell(quota, cells)
    assert len(split) == cells and sum(split) == quota
    assert max(split) - min(split) <= 1 and list(split) == sorted(split, reverse=True)


@given(cells=st.integers(1, 16), share=st.integers(1, 16))
def test_a_cell_never_owes_more_than_its_share_of_the_batch(cells: int, share: int) -> None:
    for quota in range(cells * share + 1):
        assert max(informative_quota_per_cell(quota, cells)) <= share


@pytest.mark.parametrize(("groups", "cells"), [(5, 2), (4, 3), (4, 0), (2, 4)])
def test_cells_that_do_not_share_the_step_evenly_are_refused(groups: int, cells: int) -> None:
    with pytest.raises(ValueError, match=f"{groups} groups per step do not split evenly over {cells} data cells"):
        prompts_per_data_cell(groups, cells)


def quota_of(frac: float | None, *, groups: int, literal: int = 0) -> int:
    rl = GRPOConfig(
        objective_builder="unused",
        batch_per_replica=2 * groups,
        group_size=2,
        min_informative_groups=literal,
        min_informative_groups_frac=frac,
    )
    return rl.effective_min_informative_groups


def test_the_fraction_of_the_contract() -> None:
    assert 0.14 * 50 > 7  # what a ceil of the float product would see
    assert quota_of(0.14, groups=50) == 7


def test_a_share_that_names_a_whole_number_of_groups_is_exactly_that_number() -> None:
    for groups in range(1, 65):
        for count in range(1, groups + 1):
            assert quota_of(count / groups, groups=groups) == count


@given(frac=st.floats(1e-9, 1.0), groups=st.integers(1, 512))
def test_the_fraction_is_rounded_up_and_never_zero(frac: float, groups: int) -> None:
    quota = quota_of(frac, groups=groups)
    assert 1 <= quota <= groups
    # exact, but for the rounding of the fraction itself to a denominator of a million
    assert abs(quota - max(1, math.ceil(Fraction(frac) * groups))) <= 1
    assert quota >= frac * groups - groups * 1e-6 and quota < frac * groups + 1 + groups * 1e-6


def test_all_groups_and_the_literal_count() -> None:
    assert [quota_of(1.0, groups=groups) for groups in (1, 7, 64)] == [1, 7, 64]
    assert [quota_of(None, groups=8, literal=literal) for literal in (0, 3, 8)] == [0, 3, 8]


@pytest.mark.parametrize(("spread", "informative"), [(0.0, False), (1e-12, False), (1e-9, False), (2e-9, True), (1.0, True)])
def test_rewards_that_differ_by_rounding_are_not_informative(spread: float, informative: bool) -> None:
    rollout = RolloutGroup(Prompt("a", "", "", (1,)), (Completion((1,), (-1.0,), "stop", 0, ""),) * 2)
    assert ScoredGroup(rollout, (Score(spread), Score(0.0)), spread).informative is informative


@pytest.mark.parametrize(("short", "pooled", "whole", "proceed"), COMBINATIONS)
def test_the_rules_of_a_configuration(short: bool, pooled: bool, whole: bool, proceed: bool) -> None:
    rl = GRPOConfig(
        objective_builder="unused",
        batch_per_replica=32,
        group_size=4,
        min_informative_groups_frac=0.5,
        dynamic_sampling_max_extra_rollouts=3,
        dynamic_sampling_refill_mode="short_cells" if short else "all",
        dynamic_sampling_quota_scope="pooled" if pooled else "cell",
        dynamic_sampling_refill_dispatch="whole_budget" if whole else "per_round",
        dynamic_sampling_on_budget_exhausted="proceed" if proceed else "raise",
    )
    assert DynamicSampling.of(rl) == DynamicSampling(4, 3, short, pooled, whole, proceed)
