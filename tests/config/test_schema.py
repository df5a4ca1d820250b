"""The schemas hold the contract of the specification: names, defaults, derived sizes, documentation."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from posttrain.config import GRPOConfig, HFRolloutConfig, RolloutConfig, VLLMRolloutConfig, resolve_data_seed, resolve_precision
from posttrain.config.base import default_of, field_violations
from posttrain.config.data import PromptEnvConfig
from posttrain.config.grpo import DataPoolConfig, GRPORefConfig, ScoreCenteringConfig
from posttrain.config.run import HFRunConfig, RunConfig
from posttrain.config.tracker import AlarmConfig

GRPO_DEFAULTS: dict[str, Any] = {
    "grpo_surrogate": "clipped",
    "temperature": 1.0,
    "loss_type": "token-mean",
    "logprob_dtype": "float32",
    "param_dtype": "",
    "master_dtype": "",
    "reduce_dtype": "",
    "transfer_dtype": "",
    "mixed_precision_mode": "",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": 3.0,
    "importance_sampling_level": "token",
    "kl_beta": 0.0,
    "kl_coeff_clamp": None,
    "advantage_estimator": "",
    "micro_batch_tokens": 0,
    "ref.build_ref": False,
    "ref.update_every": 0,
    "ref.model_dir": None,
    "unbiased_advantage": False,
    "use_rollout_logprobs_for_loss": False,
    "min_filter_prefix_tokens": None,
    "mask_truncated_completions": False,
    "recipe_guard_severity": "warn",
    "score_centering.enabled": False,
    "score_centering.top_k": 128,
    "score_centering.compose": "none",
    "score_centering.tis_clip": 2.0,
    "score_centering.mis_low": 0.5,
    "score_centering.mis_high": 5.0,
    "mu_iterations": 1,
    "certified_deterministic_forward": False,
    "routing_replay": "off",
    "max_steps": 1000,
    "batch_per_replica": 32,
    "group_size": 8,
    "mini_batch_per_replica": 0,
    "micro_batch_per_replica": 0,
    "min_informative_groups": 0,
    "min_informative_groups_frac": None,
    "dynamic_sampling_max_extra_rollouts": 4,
    "dynamic_sampling_refill_mode": "all",
    "dynamic_sampling_quota_scope": "cell",
    "dynamic_sampling_refill_dispatch": "per_round",
    "dynamic_sampling_on_budget_exhausted": "raise",
    "grad_accum": 1,
    "data.name": "",
    "data.subset": "",
    "data.split": "train",
    "data.path": "",
    "data.prompt_column": "",
    "data.response_column": "",
    "data.items_fn": "",
    "data.shuffle": False,
    "seed": 0,
    "data_seed_follows_rollout_seed": False,
    "reward": "arithmetic",
    "reward_provider_catalog": "",
    "weight_sync_transport": None,
    "weight_sync_r2r_broadcast": False,
    "weight_sync_bucket_bytes": None,
    "weight_sync_probe_bytes": 268435456,
    "weight_sync_min_gbps": 20.0,
    "colocated_offload": True,
    "data_pool.data_plane": "bulk_store",
    "data_pool.page_bytes": 33554432,
    "data_pool.cuda_capacity_bytes": 1073741824,
    "data_pool.cpu_capacity_bytes": 536870912,
    "data_pool.cuda_cache_bytes": 536870912,
    "data_pool.cpu_cache_bytes": 536870912,
    "data_pool.cpu_min_bytes": 33554432,
    "optimizer.eps": 1e-8,
    "keep_optim_last": None,
}
"""Typed from the GRPO table of the specification; `advantage_estimator` and `micro_batch_tokens` are additions that default to off."""

VLLM_DEFAULTS: dict[str, Any] = {
    "limit_mm_per_prompt": None,
    "compilation_config": {},
    "async_scheduling": None,
    "max_num_seqs": None,
    "kv_cache_memory_bytes": None,
    "load_format": "auto",
    "custom_all_reduce": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "seed": None,
}
"""Typed from the rollout table and the on-policy rules of the specification."""


def at(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = default_of(type(node).__dataclass_fields__[part])
    return node


@pytest.mark.parametrize(("path", "expected"), GRPO_DEFAULTS.items())
def test_grpo_default_is_the_specified_one(path: str, expected: Any) -> None:
    actual = at(GRPOConfig(objective_builder="x"), path)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(("path", "expected"), VLLM_DEFAULTS.items())
def test_rollout_default_is_the_specified_one(path: str, expected: Any) -> None:
    actual = at(VLLMRolloutConfig(), path)
    assert actual == expected
    assert type(actual) is type(expected)


def test_objective_builder_has_no_default() -> None:
    assert GRPOConfig.__dataclass_fields__["objective_builder"].default == "???"


@pytest.mark.parametrize("name", ["objective", "objective_mode", "prompts_per_step", "max_response_length"])
def test_retired_selectors_are_no_fields(name: str) -> None:
    assert name not in {spec.name for spec in fields(GRPOConfig)}


DOCUMENTED = [
    RunConfig,
    HFRunConfig,
    GRPOConfig,
    RolloutConfig,
    HFRolloutConfig,
    VLLMRolloutConfig,
    PromptEnvConfig,
    GRPORefConfig,
    ScoreCenteringConfig,
    DataPoolConfig,
    AlarmConfig,
]


@pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)
def test_every_usable_field_is_documented(cls: type) -> None:
    """A sentence under the field; sections have their own class docstring, and pending fields cannot be used yet."""
    own = {spec.name: spec for spec in fields(cls) if spec.name in cls.__annotations__}
    missing = [
        name
        for name, spec in own.items()
        if name not in documented_fields(cls) and not spec.metadata.get("pending") and not is_dataclass(default_of(spec))
    ]
    assert missing == []
    assert cls.__doc__


def documented_fields(cls: type) -> set[str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    names = set()
    for statement, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            names.add(statement.target.id)
    return names


@pytest.mark.parametrize(
    ("batch", "group", "mini", "micro", "prompts", "n_mini", "n_micro", "mini_size", "micro_size"),
    [
        (32, 8, 0, 0, 4, 1, 1, 32, 32),
        (64, 8, 0, 8, 8, 1, 8, 64, 8),
        (128, 8, 32, 8, 16, 4, 4, 32, 8),
        (256, 4, 64, 0, 64, 4, 1, 64, 64),
        (8, 8, 2, 1, 1, 4, 2, 2, 1),
    ],
)
def test_derived_sizes(
    batch: int, group: int, mini: int, micro: int, prompts: int, n_mini: int, n_micro: int, mini_size: int, micro_size: int
) -> None:
    rl = GRPOConfig(batch_per_replica=batch, group_size=group, mini_batch_per_replica=mini, micro_batch_per_replica=micro)
    assert (rl.prompts_per_data_replica, rl.groups_per_step) == (prompts, prompts)
    assert (rl.n_mini, rl.n_micro, rl.mini_batch, rl.micro_batch) == (n_mini, n_micro, mini_size, micro_size)
    assert rl.effective_min_informative_groups == 0


@pytest.mark.parametrize(("batch", "group", "mini", "micro"), [(0, 8, 0, 0), (-8, 8, 0, 0), (32, 0, -4, -1), (4, 8, 8, 8)])
def test_sizes_that_are_refused_still_derive(batch: int, group: int, mini: int, micro: int) -> None:
    """All rules must be judged at once, those that read derived sizes too."""
    rl = GRPOConfig(batch_per_replica=batch, group_size=group, mini_batch_per_replica=mini, micro_batch_per_replica=micro)
    assert all(isinstance(size, int) for size in (rl.groups_per_step, rl.prompts_per_data_replica, rl.n_mini, rl.n_micro))
    assert [*field_violations("rl", rl), *rl.violations("rl")]


@pytest.mark.parametrize(
    ("model", "param", "master", "transfer", "expected"),
    [
        ("float32", "", "", "", ("float32", "float32", "float32")),
        ("bfloat16", "", "", "", ("bfloat16", "bfloat16", "bfloat16")),
        ("float32", "bfloat16", "", "", ("bfloat16", "bfloat16", "bfloat16")),
        ("float32", "bfloat16", "float32", "", ("bfloat16", "float32", "float32")),
        ("float32", "bfloat16", "float32", "bfloat16", ("bfloat16", "float32", "bfloat16")),
    ],
)
def test_precision_inherits_model_then_param_then_master(
    model: str, param: str, master: str, transfer: str, expected: tuple[str, str, str]
) -> None:
    rl = GRPOConfig(param_dtype=param, master_dtype=master, transfer_dtype=transfer, mixed_precision_mode="autocast")
    precision = resolve_precision(rl, model)
    assert (precision.param, precision.master, precision.transfer, precision.autocast) == (*expected, True)


@pytest.mark.parametrize(("follows", "rollout_seed", "expected"), [(False, 7, 3), (True, 7, 7), (True, None, 3), (True, 0, 0)])
def test_data_seed_is_resolved_once(follows: bool, rollout_seed: int | None, expected: int) -> None:
    assert resolve_data_seed(GRPOConfig(seed=3, data_seed_follows_rollout_seed=follows), rollout_seed) == expected
