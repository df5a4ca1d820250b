"""Every field of `rl.*` is refused or changes something that a run reads: none is recorded and ignored."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from posttrain.algorithm.grpo import build_objective
from posttrain.algorithm.primitives.objective import ModelContext, Objective
from posttrain.config import GRPOConfig, RootConfig, resolve_precision
from posttrain.config.base import default_of
from posttrain.config.rules import cautions
from posttrain.errors import PosttrainError
from posttrain.loop import launch
from posttrain.loop.batching import DynamicSampling
from posttrain.preflight import plan
from posttrain.records import Score, ScoredGroup
from posttrain.trainer.assemble import objective_of, reference_of
from posttrain.trainer.core import Batching, Trainer
from tests.builders import tiny_policy
from tests.trees import refusals, root_of

BASE = ("algorithm=grpo", "rl.batch_per_replica=32", "rl.validation.num_prompts=4")
MINI = ("rl.mini_batch_per_replica=16", "rl.certified_deterministic_forward=true")
KL = ("rl.kl_beta=0.1", "rl.ref.build_ref=true")
CENTERED = ("rl.score_centering.enabled=true",)
QUOTA = ("rl.min_informative_groups_frac=0.5",)
MUON = ("rl.optimizer.name=muon",)
HERE = "test_no_field_is_ignored"
JSONL = ("data=jsonl", "rl.data.path={tmp}/a.jsonl", "rl.data.prompt_column=question", "rl.validation.num_prompts=0")
HELD_OUT_JSONL = (
    *JSONL,
    "rl.validation.num_prompts=3",
    "rl.validation.data.path={tmp}/a.jsonl",
    "rl.validation.data.prompt_column=question",
)
PARQUET = (
    "rl.reward=exact",
    "rl.validation.num_prompts=0",
    *(f"rl.data.{text}" for text in ("name={tmp}/parquet", "prompt_column=question", "response_column=answer")),
)
HELD_OUT_PARQUET = (
    *PARQUET,
    "rl.validation.num_prompts=2",
    *(f"rl.validation.data.{text}" for text in ("name={tmp}/parquet", "prompt_column=question", "response_column=answer", "split=train")),
)
GYM = ("data=reasoning_gym", "rl.data.reasoning_gym.size=20", "rl.validation.data.reasoning_gym.size=20")


# What the dotted paths of the table name.
def named_objective(rl: GRPOConfig, context: ModelContext) -> Objective:
    made = build_objective(rl, context)
    return Objective(made.fn, made.reduction, made.metric_adapter, identity={"objective": "named"})


def named_advantages(group: ScoredGroup) -> list[float]:
    return [0.0 for _ in group.scores]


def shouted(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "question": str(row["question"]).upper()}


class NamedReward:
    name, identity, needs = "named", "named/1", frozenset[str]()

    def score(self, group: object) -> Sequence[Score]:
        return []

    def close(self) -> None:
        return None


def named_catalog() -> Mapping[str, object]:
    return {"named": NamedReward}


@dataclass(frozen=True)
class Change:
    """A legal non-default value of one field."""

    value: str
    """As on a command line."""
    companions: tuple[str, ...] = ()
    """Overrides that make the value legal; part of what it is compared with."""
    together: tuple[str, ...] = ()
    """Overrides that must come with the value because they are illegal without it."""
    refused: str = ""
    """Part of the rule where no value but the default is legal."""


CHANGES: dict[str, Change] = {
    "objective_builder": Change(f"{HERE}.named_objective"),
    "max_steps": Change("7"),
    "seed": Change("5"),
    "grad_accum": Change("2", refused="use rl.micro_batch_per_replica"),
    "param_dtype": Change("bfloat16", ("rl.mixed_precision_mode=autocast", "rl.master_dtype=float32")),
    "master_dtype": Change("bfloat16", ("rl.mixed_precision_mode=autocast",)),
    "transfer_dtype": Change("bfloat16", ("rollout=vllm",)),
    "reduce_dtype": Change("bfloat16", refused="reduces no gradients"),
    "mixed_precision_mode": Change("autocast"),
    "grpo_surrogate": Change("legacy_pg"),
    "temperature": Change("0.7", together=("rollout.temperature=0.7",)),
    "loss_type": Change("seq-mean-token-sum"),
    "logprob_dtype": Change("float64"),
    "epsilon_low": Change("0.1"),
    "epsilon_high": Change("0.28"),
    "lower_bound_ratio": Change("0"),
    "importance_sampling_level": Change("sequence", ("rl.lower_bound_ratio=0", "rl.epsilon_low=3e-4", "rl.epsilon_high=4e-4", *MINI)),
    "kl_beta": Change("0.2", KL),
    "kl_coeff_clamp": Change("5", KL),
    "ref.build_ref": Change("true", together=("rl.kl_beta=0.1",)),
    "ref.update_every": Change("3", refused="must be 0"),
    "ref.model_dir": Change("{tmp}/anchor", KL),
    "unbiased_advantage": Change("true"),
    "advantage_estimator": Change(f"{HERE}.named_advantages"),
    "use_rollout_logprobs_for_loss": Change("true"),
    "min_filter_prefix_tokens": Change("3"),
    "mask_truncated_completions": Change("true"),
    "recipe_guard_severity": Change("error", together=("rl.min_informative_groups=1",), refused="is less than half of groups_per_step"),
    "score_centering.enabled": Change("true"),
    "score_centering.top_k": Change("16", CENTERED),
    "score_centering.compose": Change("tis", CENTERED),
    "score_centering.tis_clip": Change("3", (*CENTERED, "rl.score_centering.compose=tis")),
    "score_centering.mis_low": Change("0.4", (*CENTERED, "rl.score_centering.compose=mis")),
    "score_centering.mis_high": Change("4", (*CENTERED, "rl.score_centering.compose=mis")),
    "mu_iterations": Change("2", refused="use rl.mini_batch_per_replica"),
    "certified_deterministic_forward": Change("true", together=("rl.mini_batch_per_replica=16",)),
    "batch_per_replica": Change("64"),
    "group_size": Change("4"),
    "mini_batch_per_replica": Change("16", together=("rl.certified_deterministic_forward=true",)),
    "micro_batch_per_replica": Change("8"),
    "micro_batch_tokens": Change("600", ("rl.data.max_prompt_tokens=100",)),
    "min_informative_groups": Change("2"),
    "min_informative_groups_frac": Change("0.75"),
    "dynamic_sampling_max_extra_rollouts": Change("2", QUOTA),
    "dynamic_sampling_refill_mode": Change("short_cells", QUOTA, refused="a single one"),
    "dynamic_sampling_quota_scope": Change("pooled", QUOTA, refused="a single one"),
    "dynamic_sampling_refill_dispatch": Change("whole_budget", QUOTA),
    "dynamic_sampling_on_budget_exhausted": Change("proceed", QUOTA),
    "data_seed_follows_rollout_seed": Change("true", ("rollout.seed=9",)),
    "reward": Change("exact"),
    "reward_provider_catalog": Change(f"{HERE}.named_catalog", ("rl.reward=named",)),
    "reward_timeout_s": Change("3"),
    "weight_sync_bucket_bytes": Change("4096", ("rollout=vllm",)),
    "optimizer.lr": Change("1e-4"),
    "optimizer.betas": Change("[0.8,0.9]"),
    "optimizer.eps": Change("1e-6"),
    "optimizer.weight_decay": Change("0.1"),
    "optimizer.grad_clip_norm": Change("1.0"),
    "optimizer.force_finite_grads": Change("false"),
    "optimizer.train_keys": Change("[embed]"),
    "optimizer.name": Change("muon"),
    "optimizer.lr_schedule": Change("cosine"),
    "optimizer.warmup_steps": Change("3"),
    "optimizer.muon_momentum": Change("0.9", MUON),
    "optimizer.muon_ns_steps": Change("6", MUON),
    "optimizer.muon_rms_match": Change("0.1", MUON),
    "validation.every": Change("2"),
    "validation.at_start": Change("false"),
    "validation.at_end": Change("false"),
    "validation.num_prompts": Change("3"),
    "validation.samples_per_prompt": Change("2", ("rl.validation.temperature=0.5",)),
    "validation.temperature": Change("0.5"),
    "validation.top_p": Change("0.9", ("rl.validation.temperature=0.5",)),
    "validation.top_k": Change("5", ("rl.validation.temperature=0.5",)),
    "validation.repetition_penalty": Change("1.2"),
    "validation.max_tokens": Change("7"),
    "validation.seed": Change("3"),
    "validation.reward": Change("exact"),
}


SAVES = "what a run leaves on disk and continues from; the checkpoint tests run it"
ELSEWHERE = dict.fromkeys(
    (
        "save_every",
        "resume",
        "run_ts",
        "checkpoint_format",
        "checkpoint_components",
        "save_async",
        "save_before_s",
        "keep_optim_last",
        "keep_model_last",
        "checkpoint_store.kind",
        "checkpoint_store.url",
        "checkpoint_store.endpoint_url",
        "upload.url",
        "upload.endpoint_url",
        "init_from",
        "init_keys_to_skip_loading",
        "validation.save_checkpoint",
        "validation.checkpoint_components",
    ),
    SAVES,
) | {"deterministic": "switches of the whole process; tests/unit/runtime/test_determinism.py reads them"}
"""Field -> why no component built here can show it. Irrelevant while the field is pending."""


def data_changes(path: str, jsonl: tuple[str, ...], parquet: tuple[str, ...]) -> dict[str, Change]:
    """The table of one prompt source; training and held-out sources share their fields."""
    base, training = f"rl.{path}", path == "data"
    quiet = ("rl.validation.num_prompts=0",) if training else ()
    columns = (f"{base}.prompt_column=question", f"{base}.response_column=answer", "rl.reward=exact")
    return {
        f"{path}.name": Change("{tmp}/parquet", quiet, together=(*columns, f"{base}.split=train")),
        f"{path}.subset": Change("main", parquet),
        f"{path}.split": Change("test", parquet),
        f"{path}.path": Change("{tmp}/a.jsonl", quiet, together=columns),
        f"{path}.prompt_column": Change("other", jsonl),
        f"{path}.response_column": Change("other", jsonl),
        f"{path}.items_fn": Change(f"{HERE}.shouted", parquet),
        f"{path}.shuffle": Change("true", jsonl),
        f"{path}.max_prompt_tokens": Change("9", jsonl),
        f"{path}.arithmetic.low": Change("2"),
        f"{path}.arithmetic.high": Change("9"),
        f"{path}.arithmetic.operators": Change("['-']"),
        f"{path}.arithmetic.template": Change("'{a} {op} {b}?'"),
        f"{path}.arithmetic.chat": Change("false"),
        f"{path}.arithmetic.held_out_fraction": Change(
            "0.5", quiet, refused="" if training else "must equal rl.data.arithmetic.held_out_fraction"
        ),
        f"{path}.reasoning_gym.dataset": Change("basic_arithmetic", GYM),
        f"{path}.reasoning_gym.size": Change("10", GYM),
        f"{path}.reasoning_gym.config": Change("{max_terms: 3}", GYM),
        f"{path}.reasoning_gym.instruction": Change("Think.", GYM),
    }


CHANGES |= data_changes("data", JSONL, PARQUET) | data_changes("validation.data", HELD_OUT_JSONL, HELD_OUT_PARQUET)


def leaves(cls: type, path: str = "") -> Iterator[tuple[str, Any]]:
    for spec in fields(cls):
        full, inner = f"{path}.{spec.name}" if path else spec.name, default_of(spec)
        if is_dataclass(inner):
            yield from leaves(type(inner), full)
        else:
            yield full, spec


LEAVES = dict(leaves(GRPOConfig))
PENDING = {path for path, spec in LEAVES.items() if spec.metadata.get("pending")}


def test_every_field_is_in_a_table() -> None:
    """A new field needs a line in CHANGES that shows what it does, must be declared pending, or says in ELSEWHERE who shows it."""
    assert not set(CHANGES) & set(ELSEWHERE)
    assert set(LEAVES) - PENDING == (set(CHANGES) | set(ELSEWHERE)) - PENDING
    assert set(CHANGES) <= set(LEAVES) - PENDING


def unlike_its_default(spec: Any) -> str:
    """Some other value of the field's type, as on a command line."""
    default = default_of(spec)
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, int | float):
        return str(default + 1)
    if isinstance(default, list):
        return "[model]" if default else "[x]"
    if default is None and "int" in str(spec.type):
        return "3"
    choices = spec.metadata.get("choices")
    return next(choice for choice in choices if choice != default) if choices and len(choices) > 1 else "x"


@pytest.mark.parametrize("path", sorted(PENDING))
def test_a_pending_field_is_refused(path: str) -> None:
    found = refusals("algorithm=grpo", f"rl.{path}={unlike_its_default(LEAVES[path])}")
    assert [(violation.key, violation.rule) for violation in found] == [(f"rl.{path}", "is not available yet")]


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_is_refused_or_does_something(path: str, world: World) -> None:
    change = CHANGES[path]
    before, plain, after = (
        tuple(text.replace("{tmp}", str(world.tmp)) for text in (*BASE, *change.companions, *more))
        for more in ((), change.together, (*change.together, f"rl.{path}={change.value}"))
    )
    if change.refused:
        assert any(violation.rule and change.refused in f"{violation.rule}; {violation.remedy}" for violation in refusals(*after))
        return
    changed = root_of(*after)
    node: Any = changed.rl
    for part in path.split("."):
        node = getattr(node, part)
    assert node != default_of(LEAVES[path]), "the value of the table is the default"
    seen = world.observe(changed)
    assert world.reference(before) != seen
    if change.together and not refusals(*plain):
        assert world.reference(plain) != seen, "the companions alone make the difference"


@dataclass
class World:
    """What the components of a run make of a configuration."""

    tmp: Path
    policy: Any
    _references: dict[tuple[str, ...], dict[str, object]] = field(default_factory=dict)

    def reference(self, overrides: tuple[str, ...]) -> dict[str, object]:
        """What is compared with; most fields share one."""
        if overrides not in self._references:
            self._references[overrides] = self.observe(root_of(*overrides))
        return self._references[overrides]

    def observe(self, root: RootConfig) -> dict[str, object]:
        rl = cast("GRPOConfig", root.rl)
        seen: dict[str, object] = {"plan": tuple(plan(root)), "cautions": tuple(cautions(root))}
        seen["objective"] = self.objective(root, rl)
        seen["batching"] = (Batching.of(rl), DynamicSampling.of(rl), rl.n_mini, rl.groups_per_step)
        seen["sampling"] = (launch._sampling(root), launch._rollout_seed(root))
        seen["precision"] = resolve_precision(rl, "float32")
        seen["optimizer"] = self.optimizer(rl)
        seen["parts"] = self.parts(root, rl)
        seen["engine"] = self.engine(root, rl)
        return seen

    def objective(self, root: RootConfig, rl: GRPOConfig) -> object:
        made = objective_of(rl, root, reference_of(rl))
        return repr(made.fn), made.old_logp_cache, made.reference_scorer is not None, tuple(made.identity.items())

    def optimizer(self, rl: GRPOConfig) -> object:
        objective = Objective(lambda *_: (None, {}), build_objective(GRPOConfig(), ModelContext("m", 1)).reduction, None)  # type: ignore[arg-type]
        trainer = Trainer(
            rl.optimizer, policy=self.policy, objective=objective, batching=Batching.of(rl), total_steps=rl.max_steps * rl.n_mini
        )
        groups = [{**group, "params": len(group["params"])} for group in trainer.optimizer.param_groups]
        return type(trainer.optimizer).__name__, groups, [trainer.schedule.rate(applied) for applied in range(4)]

    def parts(self, root: RootConfig, rl: GRPOConfig) -> object:
        """Prompts, held-out requests, rewards, alarms and the annotator, as `launch` wires them."""
        silent = cast(Any, SimpleNamespace(tokenizer=self.policy.tokenizer, callback=lambda close: close))
        try:
            components = {name: silent for name in signature(launch._parts).parameters if name not in ("root", "rl")}
            parts = launch._parts(root, rl, **components)
        except PosttrainError as error:
            if rl.reward != "named":
                raise
            return str(error)  # a reward that only a catalog of one's own knows
        held_out = parts.held_out
        rewards = [parts.rewards] if held_out is None else [parts.rewards, held_out._rewards]
        return (
            parts.source.draw(4),
            None if held_out is None else held_out._requests,
            [(type(service._provider).__name__, getattr(service._provider, "name", ""), service._timeout_s) for service in rewards],
            repr(parts.annotate),
        )

    def engine(self, root: RootConfig, rl: GRPOConfig) -> object:
        """What the vLLM engine and its transport would be built with."""
        if not type(root.rollout).__name__.startswith("VLLM"):
            return None
        precision = resolve_precision(rl, "float32")
        built = cast(Any, SimpleNamespace(directory=self.tmp))
        side = cast(Any, SimpleNamespace(parts=SimpleNamespace(policy=self.policy, built=built, probe=[1]), weights=None))
        engine, sync = launch._engine(root, rl, side=side, precision=precision)
        return cast(Any, engine).arguments, {name: value for name, value in cast(Any, sync).arguments.items() if not callable(value)}


class Recorder:
    """Stands for a component that is too heavy to build; keeps what it was given."""

    def __init__(self, *_: object, **arguments: Any) -> None:
        self.arguments = arguments


@pytest.fixture(scope="module")
def module_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("reasoning_gym")
    tmp = tmp_path_factory.mktemp("world")
    rows = [{"question": f"add {n}+{n}" + "?" * n, "answer": str(2 * n), "other": f"other {n}"} for n in range(6)]
    (tmp / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (tmp / "parquet").mkdir()
    datasets.disable_progress_bars()
    (tmp / "parquet/main").mkdir()
    for name, split in (("train", rows), ("test", rows[::-1]), ("main/train", rows[2:])):
        datasets.Dataset.from_list(split).to_parquet(tmp / f"parquet/{name}.parquet")
    (tmp / "anchor").mkdir()
    (tmp / "anchor/model.safetensors").write_bytes(b"other weights")
    return World(tmp, tiny_policy())


@pytest.fixture
def world(module_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    monkeypatch.setattr("posttrain.rollout.vllm_engine.VLLMEngine", Recorder)
    monkeypatch.setattr("posttrain.weight_sync.host.HostCopySync", Recorder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", module_world.tmp / "cache")
    return module_world
