"""The trained side of a run, built alike on every rank: policy, frozen reference, optimizer, saved state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from posttrain.algorithm.primitives.objective import ModelContext, Objective, ObjectiveBuilder
from posttrain.checkpoint.initial import is_adapter_save, load_initial_weights
from posttrain.config import GRPOConfig, RootConfig, resolve_precision
from posttrain.config.model import HFModelConfig, ModelConfig, NativePolicyBuildSpec
from posttrain.config.optimizer_rules import total_steps
from posttrain.config.run import Precision
from posttrain.errors import ConfigError, ModelError
from posttrain.model.build import build_model, model_identity
from posttrain.model.lora import add_adapters, lora_of
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel
from posttrain.model.reference import FrozenReference, build_reference, refuse_live_dropout
from posttrain.model.sharding import build_without_weights, load_shards, shard
from posttrain.runtime.artifact_identity import artifact_identity
from posttrain.runtime.dotted import import_dotted
from posttrain.trainer.core import Batching, Trainer
from posttrain.trainer.optim import select_trainable
from posttrain.trainer.ranks import ALONE, Ranks
from posttrain.trainer.saved import TrainerState

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42."
"""Scored by trainer and engine alike to prove that they compute the same."""

HEAD_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest gap in nats between two ways of computing the same logits, by compute dtype."""

MakeTrainer = Callable[..., Trainer]
MakeState = Callable[[torch.nn.Module, torch.optim.Optimizer, Ranks], TrainerState]


@dataclass(frozen=True, slots=True)
class Restored:
    """Where training continues."""

    model: Path
    optimizer: Path
    trainer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Assembled:
    """One rank's share."""

    built: BuiltModel
    policy: CausalPolicy
    trainer: Trainer
    tensors: TrainerState
    probe: list[int]
    notes: list[tuple[str, dict[str, Any]]]
    """Events for the tracker: (kind, fields)."""


class _Laps:
    """Where the time of a start-up went."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, Any] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._since = round(now - self._since, 3), now


def precision_of(root: RootConfig, rl: GRPOConfig) -> Precision:
    """The resolved precision block."""
    model = root.model
    if isinstance(model, HFModelConfig):
        return resolve_precision(rl, model.dtype, model.fsdp_reduce_dtype)
    if isinstance(model, NativePolicyBuildSpec):
        return resolve_precision(rl, model.dtype)
    raise ConfigError(f"model is a {type(model).__name__}, which nothing builds")


def reference_of(rl: GRPOConfig) -> FrozenReference | None:
    """The frozen reference that the objective asks, still without its network."""
    return FrozenReference(temperature=rl.temperature, dtype=rl.logprob_dtype) if rl.ref.build_ref else None


def objective_of(rl: GRPOConfig, root: RootConfig, reference: FrozenReference | None) -> Objective:
    """What `rl.objective_builder` makes."""
    builder = cast("ObjectiveBuilder", import_dotted(rl.objective_builder))
    artifact = artifact_identity(rl.ref.model_dir) if reference is not None and rl.ref.model_dir is not None else None
    objective = builder(rl, ModelContext(model_identity(root.model), root.rollout.max_tokens, reference, artifact))
    if not isinstance(objective, Objective):
        raise ConfigError(f"rl.objective_builder={rl.objective_builder!r} returned a {type(objective).__name__}, not an Objective")
    return objective


def assemble(
    root: RootConfig,
    rl: GRPOConfig,
    *,
    objective: Objective,
    reference: FrozenReference | None,
    ranks: Ranks = ALONE,
    restored: Restored | None = None,
    make_trainer: MakeTrainer = Trainer,
    make_state: MakeState = TrainerState,
) -> Assembled:
    """Build, shard, check and restore. Every rank calls this with the same configuration and the same seed."""
    precision = precision_of(root, rl)
    notes: list[tuple[str, dict[str, Any]]] = []
    laps = _Laps()
    built, policy = build_policy(root.model, precision=precision, ranks=ranks, train_keys=list(rl.optimizer.train_keys))
    laps.lap("model_s")
    probe = policy.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    policy.check_head(probe, tolerance=HEAD_TOLERANCE[precision.param])
    gap = policy.check_packing(probe, tolerance=HEAD_TOLERANCE[precision.param])
    if rl.init_from:
        load_initial_weights(policy.module, rl.init_from, skip=rl.init_keys_to_skip_loading)
    if not policy.packs:
        notes.append(("warning", {"message": _padding_reason(policy, gap)}))
    laps.lap("checks_s")
    if reference is not None:
        notes.append(_attach_reference(reference, rl, root, policy=policy, ranks=ranks))
        laps.lap("reference_s")
    trainer = make_trainer(
        rl.optimizer, policy=policy, objective=objective, batching=Batching.of(rl), total_steps=total_steps(rl), ranks=ranks
    )
    tensors = make_state(policy.module, trainer.optimizer, ranks)
    if restored is not None:
        laps.lap("optimizer_s")
        tensors.restore(restored.model, restored.optimizer)
        trainer.restore(restored.trainer)
        laps.lap("restore_s")
    notes.append(("loaded", laps.seconds))
    return Assembled(built, policy, trainer, tensors, probe, notes)


def build_policy(
    config: ModelConfig, *, precision: Precision, ranks: Ranks = ALONE, train_keys: list[str] | None = None
) -> tuple[BuiltModel, CausalPolicy]:
    """The policy of this rank, with adapters where there are any, sharded where there are several ranks."""
    lora = lora_of(config)
    streamed = None
    if not ranks.alone and isinstance(config, HFModelConfig) and lora is None:
        streamed = build_without_weights(config, precision=precision)
    built = build_model(config, precision=precision) if streamed is None else streamed[0]
    if lora is not None:
        add_adapters(built.module, lora)
    policy = CausalPolicy(built, precision=precision)
    if isinstance(config, HFModelConfig) and config.gradient_checkpointing:
        _recompute(policy.module)
    if not ranks.alone:
        select_trainable(policy.module, train_keys or [])  # FSDP fixes at the first forward what needs a gradient
        shard(policy, ranks.mesh, precision=precision)
        if streamed is not None:
            load_shards(policy.module, streamed[1], ranks.mesh)
    return built, policy


def _recompute(module: Any) -> None:
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise ModelError(f"model.gradient_checkpointing=true: {type(module).__name__} cannot recompute its activations; set it to false")
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _attach_reference(
    reference: FrozenReference, rl: GRPOConfig, root: RootConfig, *, policy: CausalPolicy, ranks: Ranks
) -> tuple[str, dict[str, Any]]:
    """Build the frozen twin of the policy, sharded like it; it costs one more copy of the network."""
    refuse_live_dropout(policy.module)
    built = build_reference(root.model, rl.ref.model_dir, precision=policy.precision)
    lora = lora_of(root.model)
    if lora is not None and rl.init_from and rl.ref.model_dir is None and is_adapter_save(rl.init_from):
        add_adapters(built.module, lora)  # the policy starts with these, and so does its anchor
    built.module.requires_grad_(False)
    twin = CausalPolicy(built, precision=policy.precision, pack=policy.packs)
    if not ranks.alone:
        shard(twin, ranks.mesh, precision=policy.precision)
    if rl.init_from and rl.ref.model_dir is None:
        load_initial_weights(twin.module, rl.init_from, skip=rl.init_keys_to_skip_loading)
    reference.attach(twin)
    source = f"{rl.ref.model_dir} (rl.ref.model_dir)" if rl.ref.model_dir else "the policy's own base weights"
    return "reference", {"source": rl.ref.model_dir, "message": f"built frozen KL reference from {source}"}


def _padding_reason(policy: CausalPolicy, gap: float) -> str:
    name = type(policy.module).__name__.removeprefix("FSDP")
    why = f"packed and padded scores differ by {gap:.3g} nats" if gap else "its attention cannot take a packed row"
    return f"{name} trains on padded rows: {why}; training costs more time and memory, the update is the same"
