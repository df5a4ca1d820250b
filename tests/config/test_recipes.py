"""The recipes of the GRPO family: exactly the knobs of their papers, and each trains a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext
from posttrain.config import RootConfig
from posttrain.config.locate import conf_dir
from posttrain.config.rules import cautions
from posttrain.loop.launch import launch
from posttrain.records import RolloutGroup, Score
from tests.trees import grpo_of, refusals, root_of

KNOBS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "legacy_pg": {"grpo_surrogate": "legacy_pg"},
    "dr_grpo": {"unbiased_advantage": True, "loss_type": "seq-mean-token-sum-fixed", "recipe_guard_severity": "error"},
    "gspo": {
        "importance_sampling_level": "sequence",
        "lower_bound_ratio": 0.0,
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
        "loss_type": "seq-mean-token-mean",
        "batch_per_replica": 128,
        "mini_batch_per_replica": 32,
        "certified_deterministic_forward": True,
    },
    "dapo": {"epsilon_high": 0.28, "min_informative_groups_frac": 1.0, "mask_truncated_completions": True},
}
"""What each algorithm file changes about the clipped default, and nothing else."""

EXPERIMENTS = sorted(path.stem for path in conf_dir().glob("experiment/*.yaml"))
QWEN = [name for name in EXPERIMENTS if name.endswith("_qwen2_5_3b_gsm8k")]


def flat(node: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in fields(node):
        value, full = getattr(node, spec.name), f"{path}{spec.name}"
        found |= flat(value, f"{full}.") if is_dataclass(value) else {full: value}
    return found


def test_every_algorithm_file_is_in_the_table() -> None:
    assert {path.stem for path in conf_dir().glob("algorithm/*.yaml")} == set(KNOBS)


@pytest.mark.parametrize("name", KNOBS)
def test_a_recipe_holds_its_own_knobs_and_no_others(name: str) -> None:
    base, recipe = flat(grpo_of("algorithm=grpo")), flat(grpo_of(f"algorithm={name}"))
    assert {key: value for key, value in recipe.items() if value != base[key]} == KNOBS[name]
    assert (recipe["objective_builder"], recipe["reward"]) == ("posttrain.algorithm.grpo.build_objective", "arithmetic")


@pytest.mark.parametrize("name", KNOBS)
def test_a_recipe_is_recorded_under_its_own_name(name: str) -> None:
    root = root_of(f"algorithm={name}")
    assert (root.algorithm.name, root.job.name) == (name, name)


def test_gspo_takes_four_steps_per_batch() -> None:
    rl = grpo_of("algorithm=gspo")
    assert (rl.n_mini, rl.batch_per_replica, rl.mini_batch) == (4, 128, 32)
    objective = build_objective(rl, ModelContext("m", 256))
    assert objective.old_logp_cache
    assert objective.identity["importance_sampling_level"] == "sequence"
    assert (objective.identity["epsilon_low"], objective.identity["epsilon_high"]) == (3e-4, 4e-4)


def test_dr_grpo_divides_by_the_generation_bound() -> None:
    objective = build_objective(grpo_of("algorithm=dr_grpo"), ModelContext("m", 77))
    assert objective.identity["max_response_length"] == 77
    assert objective.identity["unbiased_advantage"] is True
    assert grpo_of("algorithm=dr_grpo").optimizer.eps == 1e-8


@pytest.mark.parametrize(("batch", "group"), [(32, 8), (256, 4), (16, 16)])
def test_dapo_wants_every_group_informative_on_any_layout(batch: int, group: int) -> None:
    rl = grpo_of("algorithm=dapo", f"rl.batch_per_replica={batch}", f"rl.group_size={group}")
    assert rl.effective_min_informative_groups == rl.groups_per_step == batch // group


def test_experiments_have_names_of_their_own() -> None:
    names = [root_of(f"experiment={name}").job.name for name in EXPERIMENTS]
    assert len(set(names)) == len(names)


def test_there_is_one_qwen_experiment_per_paper() -> None:
    assert {name.removesuffix("_qwen2_5_3b_gsm8k") for name in QWEN} == set(KNOBS) - {"legacy_pg"}


@pytest.mark.parametrize("name", QWEN)
def test_a_qwen_experiment_combines_its_algorithm_with_model_and_data(name: str) -> None:
    assert refusals(f"experiment={name}") == []
    root = root_of(f"experiment={name}")
    algorithm = name.removesuffix("_qwen2_5_3b_gsm8k")
    assert list(cautions(root)) == []
    assert (root.algorithm.name, root.job.name) == (algorithm, f"qwen3b_bf16_{algorithm}_seed42")
    assert {key: value for key, value in flat(root.rl).items() if key in KNOBS[algorithm]} == KNOBS[algorithm]
    assert (root.rl.data.name, root.rl.data.shuffle, root.rl.validation.data.split) == ("openai/gsm8k", True, "test")


def test_qwen_experiments_differ_in_the_algorithm_only() -> None:
    shared = flat(grpo_of("experiment=grpo_qwen2_5_3b_gsm8k"))
    for name in QWEN:
        algorithm = name.removesuffix("_qwen2_5_3b_gsm8k")
        changed = {key: value for key, value in flat(grpo_of(f"experiment={name}")).items() if value != shared[key]}
        assert changed == {key: value for key, value in KNOBS[algorithm].items() if value != shared[key]}


class Alternating:
    """Rewards every second completion, so that every group is informative."""

    name, identity, needs = "alternating", "alternating/1", frozenset[str]()

    def score(self, group: RolloutGroup) -> list[Score]:
        return [Score(float(number % 2)) for number in range(len(group.completions))]

    def close(self) -> None:
        return None


def catalog() -> Mapping[str, object]:
    return {"alternating": Alternating}


TINY = (
    "model=tiny",
    "rl.max_steps=2",
    "rl.batch_per_replica=16",
    "rl.group_size=4",
    "rl.optimizer.lr=1e-3",
    f"rl.reward_provider_catalog={__name__}.catalog",
    "rl.reward=alternating",
    "rollout.max_tokens=6",
    "tracker.console=quiet",
    "tracker.report=false",
    "tracker.samples_every=0",
)


def trained(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of two steps of the real loop."""
    root: RootConfig = root_of(*TINY, *overrides)
    plain = OmegaConf.to_container(OmegaConf.structured(root), resolve=True)
    assert isinstance(plain, dict)
    run_dir.mkdir()
    launch(root, run_dir=run_dir, plain_config={str(key): value for key, value in plain.items()})
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return trained(tmp_path_factory.mktemp("plain") / "run", "algorithm=grpo")


def applied(lines: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(line["step"], line["model_step"]) for line in lines]


def test_grpo_trains(plain_run: list[dict[str, float]]) -> None:
    assert applied(plain_run) == [(1, 1), (2, 2)]
    for line in plain_run:
        assert line["optim/grad_norm"] > 0 and line["train/ratio_absdev"] == 0 and line["train/seq_clip_frac"] == 0
        assert not [name for name in line if name.startswith(("train/kl_", "train/sc_", "train/grpo_dynamic"))]


def test_legacy_pg_trains(tmp_path: Path) -> None:
    lines = trained(tmp_path / "run", "algorithm=legacy_pg")
    assert applied(lines) == [(1, 1), (2, 2)]
    assert all("train/clip_frac" not in line and line["optim/grad_norm"] > 0 for line in lines)


def test_dr_grpo_trains_on_smaller_gradients(tmp_path: Path, plain_run: list[dict[str, float]]) -> None:
    lines = trained(tmp_path / "run", "algorithm=dr_grpo")
    assert applied(lines) == [(1, 1), (2, 2)]
    # rewards 0 1 0 1: the group's standard deviation is about 1/2, so the advantages without the division are half as large
    assert 0 < lines[0]["train/advantage_absmean"] < plain_run[0]["train/advantage_absmean"]
    assert lines[0]["train/advantage_absmean"] == pytest.approx(0.5)


def test_gspo_clips_whole_responses(tmp_path: Path) -> None:
    lines = trained(tmp_path / "run", "algorithm=gspo", "rl.batch_per_replica=16", "rl.mini_batch_per_replica=4")
    assert applied(lines) == [(1, 4), (2, 8)]
    for line in lines:
        assert line["train/seq_log_ratio_abs"] > 0
        assert 0 < line["train/seq_clip_frac"] <= 1
        assert line["train/dual_clip_frac"] == 0


def test_dapo_counts_its_draws(tmp_path: Path) -> None:
    lines = trained(tmp_path / "run", "algorithm=dapo")
    assert applied(lines) == [(1, 1), (2, 2)]
    for line in lines:
        assert line["train/informative_groups"] == 4 and line["train/zero_spread_frac"] == 0
        assert {name for name in line if name.startswith("train/grpo_dynamic_sampling_")} == {
            f"train/grpo_dynamic_sampling_{what}" for what in ("extra_rollouts", "refill_dispatches", "dropped_groups", "shortfall")
        }
        assert line["train/grpo_dynamic_sampling_extra_rollouts"] == 0


def test_dapo_proceeds_with_tied_groups_when_told_to(tmp_path: Path) -> None:
    """The arithmetic reward of a random model is 0 for every completion."""
    rounds = ("rl.dynamic_sampling_max_extra_rollouts=2", "rl.dynamic_sampling_refill_dispatch=whole_budget")
    lines = trained(tmp_path / "run", "algorithm=dapo", "rl.reward=arithmetic", "rl.dynamic_sampling_on_budget_exhausted=proceed", *rounds)
    for line in lines:
        assert line["train/grpo_dynamic_sampling_shortfall"] == 4
        assert line["train/grpo_dynamic_sampling_extra_rollouts"] == 2
        assert line["train/grpo_dynamic_sampling_refill_dispatches"] == 1


def test_kl_starts_at_zero_and_grows(tmp_path: Path) -> None:
    lines = trained(tmp_path / "run", "algorithm=grpo", "rl.kl_beta=0.01", "rl.ref.build_ref=true", "rl.kl_coeff_clamp=5")
    assert [line["train/kl_beta"] for line in lines] == [0.01, 0.01]
    assert lines[0]["train/kl_mean"] == pytest.approx(0, abs=1e-6)
    assert 0 < lines[1]["train/kl_mean"] <= lines[1]["train/kl_max"]


def test_score_centering_of_an_identical_sampler_changes_nothing(tmp_path: Path, plain_run: list[dict[str, float]]) -> None:
    lines = trained(tmp_path / "run", "algorithm=grpo", "rl.score_centering.enabled=true", "rl.score_centering.top_k=16")
    names = ("correction_abs", "head_mass", "tail_ratio_absdev", "weight_mean", "reweighted_frac")
    for line, plain in zip(lines, plain_run, strict=True):
        assert {f"train/sc_{name}" for name in names} <= set(line)
        assert line["train/sc_correction_abs"] == pytest.approx(0, abs=1e-4) and 0 < line["train/sc_head_mass"] < 1
        assert line["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"], rel=1e-3)


def test_a_token_budget_changes_no_update(tmp_path: Path, plain_run: list[dict[str, float]]) -> None:
    lines = trained(tmp_path / "run", "algorithm=grpo", "rl.micro_batch_tokens=120", "rl.data.max_prompt_tokens=100")
    for line, plain in zip(lines, plain_run, strict=True):
        for name in ("train/loss", "optim/grad_norm", "train/entropy", "train/valid_token_count", "train/response_len_mean"):
            assert line[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


def test_the_objective_of_a_run_is_recorded(tmp_path: Path) -> None:
    trained(tmp_path / "run", "algorithm=dr_grpo", "rl.max_steps=1")
    recorded = OmegaConf.load(tmp_path / "run/config_resolved.yaml").effective_objective
    assert (recorded.loss_type, recorded.max_response_length, recorded.unbiased_advantage) == ("seq-mean-token-sum-fixed", 6, True)
