"""How the groups of one step are collected: a plain draw, or dynamic sampling until enough groups are informative.

A data cell is one data replica with its own cursor and its share of the step. DAPO (arXiv 2503.14476, sec. 3.2) drops groups
whose rewards tie and keeps drawing. Everything here is counting: which cell draws again, when collection ends, and which groups
form the batch. Drawing, generating and scoring happen behind `Draw`, so the rules are the same whoever hosts the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.grpo import GRPOConfig
from posttrain.errors import TrainingError
from posttrain.records import Mean, Metric, ScoredGroup, Sum

Draw = Callable[[Mapping[int, int]], Mapping[int, Sequence[ScoredGroup]]]
"""Scored groups of one generation call: {cell: prompts to draw} -> {cell: its groups, in the order they were drawn}."""


def prompts_per_data_cell(groups_per_step: int, cells: int) -> int:
    """Prompts each cell draws in a round.

    Raises:
        ValueError: the cells do not share the groups of a step evenly.
    """
    if cells < 1 or groups_per_step % cells:
        raise ValueError(f"{groups_per_step} groups per step do not split evenly over {cells} data cells")
    return groups_per_step // cells


def informative_quota_per_cell(quota: int, cells: int) -> tuple[int, ...]:
    """The exact split of a global quota; the first cells take the remainder. Sums to `quota`."""
    return tuple(quota // cells + (cell < quota % cells) for cell in range(cells))


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """The rules of one run."""

    quota: int
    """Informative groups the batch must hold; 0 collects a single draw."""
    max_extra_rounds: int
    refill_short_cells_only: bool
    pooled: bool
    """The assembled batch must hold the quota, rather than every cell its share of it."""
    whole_budget: bool
    """All remaining rounds in one generation call."""
    proceed_when_exhausted: bool

    @classmethod
    def of(cls, rl: GRPOConfig) -> DynamicSampling:
        return cls(
            quota=rl.effective_min_informative_groups,
            max_extra_rounds=rl.dynamic_sampling_max_extra_rollouts,
            refill_short_cells_only=rl.dynamic_sampling_refill_mode == "short_cells",
            pooled=rl.dynamic_sampling_quota_scope == "pooled",
            whole_budget=rl.dynamic_sampling_refill_dispatch == "whole_budget",
            proceed_when_exhausted=rl.dynamic_sampling_on_budget_exhausted == "proceed",
        )


@dataclass(frozen=True, slots=True)
class Collection:
    """The groups of one step and how they were found."""

    groups: tuple[ScoredGroup, ...]
    """Exactly `groups_per_step`: every cell's share, informative groups first where a quota is set, in the order drawn."""
    informative: int
    """Informative groups among them."""
    drawn: int
    """Groups generated and scored for the step."""
    extra_rounds: int
    refill_dispatches: int
    shortfall: int
    """Informative groups the quota still lacked when the rounds were spent."""

    def metrics(self, *, dynamic: bool) -> dict[str, Metric]:
        """The make-up of the batch, and with a quota what dynamic sampling did for it."""
        batch: dict[str, Metric] = {
            "train/informative_groups": Sum(self.informative),
            "train/zero_spread_frac": Mean(len(self.groups) - self.informative, len(self.groups)),
        }
        if not dynamic:
            return batch
        return batch | {
            "train/grpo_dynamic_sampling_extra_rollouts": Sum(self.extra_rounds),
            "train/grpo_dynamic_sampling_refill_dispatches": Sum(self.refill_dispatches),
            "train/grpo_dynamic_sampling_dropped_groups": Sum(self.drawn - len(self.groups)),
            "train/grpo_dynamic_sampling_shortfall": Sum(self.shortfall),
        }


def collect(rules: DynamicSampling, draw: Draw, *, groups_per_step: int, cells: int = 1) -> Collection:
    """Draw until the quota is met or the rounds are spent, and assemble the batch.

    The first draw is full on every cell, so that every cell can fill its share of the batch whatever its quota is. Informative
    groups beyond a cell's share are dropped: kept for the next step they would be off-policy.

    Raises:
        TrainingError: the rounds are spent, the quota is short and the run does not proceed with tied groups.
    """
    share = prompts_per_data_cell(groups_per_step, cells)
    quotas = informative_quota_per_cell(rules.quota, cells)
    buffers: list[list[ScoredGroup]] = [[] for _ in range(cells)]

    def fetch(members: Sequence[int], rounds: int) -> None:
        drawn = draw(dict.fromkeys(members, share * rounds))
        for cell in members:
            got = drawn[cell]
            if len(got) != share * rounds:
                raise TrainingError(f"data cell {cell} returned {len(got)} groups for {share * rounds} prompts")
            buffers[cell] += got

    def short_cells() -> list[int]:
        found = [sum(group.informative for group in buffer) for buffer in buffers]
        if not rules.pooled:
            return [cell for cell in range(cells) if found[cell] < quotas[cell]]
        if sum(min(count, share) for count in found) >= rules.quota:
            return []
        return [cell for cell in range(cells) if found[cell] < share]

    fetch(range(cells), 1)
    rounds = dispatches = 0
    while (short := short_cells()) and rounds < rules.max_extra_rounds:
        step = rules.max_extra_rounds - rounds if rules.whole_budget else 1
        fetch(short if rules.refill_short_cells_only else range(cells), step)
        rounds, dispatches = rounds + step, dispatches + 1
    batch = [group for buffer in buffers for group in _assemble(buffer, share, informative_first=rules.quota > 0)]
    informative = sum(group.informative for group in batch)
    shortfall = max(0, rules.quota - informative) if rules.pooled else _owed(buffers, quotas)
    if shortfall and not rules.proceed_when_exhausted:
        raise TrainingError(
            f"dynamic sampling is {shortfall} informative groups short of its quota of {rules.quota} after {rounds} extra round(s): the "
            "rewards of the other groups tie. Make the task easier or harder, raise rl.dynamic_sampling_max_extra_rollouts or "
            "rl.group_size, or set rl.dynamic_sampling_on_budget_exhausted=proceed"
        )
    return Collection(tuple(batch), informative, sum(map(len, buffers)), rounds, dispatches, shortfall)


def _owed(buffers: Sequence[Sequence[ScoredGroup]], quotas: Sequence[int]) -> int:
    return sum(max(0, quota - sum(group.informative for group in buffer)) for buffer, quota in zip(buffers, quotas, strict=True))


def _assemble(buffer: Sequence[ScoredGroup], share: int, *, informative_first: bool) -> list[ScoredGroup]:
    """The cell's part of the batch: informative groups first, tied ones as filler, in the order drawn."""
    if not informative_first:
        return list(buffer[:share])
    order = sorted(range(len(buffer)), key=lambda i: not buffer[i].informative)[:share]
    return [buffer[i] for i in sorted(order)]
