"""From a checked configuration to a finished run: builds the components, runs the loop, leaves the run directory complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from posttrain.algorithm.annotators.group import GroupAnnotator
from posttrain.algorithm.primitives.objective import ModelContext, Objective, ObjectiveBuilder
from posttrain.config import GRPOConfig, HFRolloutConfig, RootConfig, VLLMRolloutConfig, resolve_data_seed, resolve_precision
from posttrain.config.model import HFModelConfig, NativePolicyBuildSpec
from posttrain.config.rules import cautions, repeated_prompts
from posttrain.config.run import Precision
from posttrain.data.build import build_prompt_source
from posttrain.errors import ConfigError, ModelError
from posttrain.loop.alarms import Alarms
from posttrain.loop.held_out import HeldOut
from posttrain.loop.online import OnlineLoop, OnlineParts
from posttrain.model.build import build_model, model_identity
from posttrain.model.converter import hf_named_weights
from posttrain.model.policy import CausalPolicy
from posttrain.model.protocol import BuiltModel
from posttrain.model.reference import FrozenReference, build_reference, refuse_live_dropout
from posttrain.records import SamplingParams
from posttrain.reward.catalog import build_provider
from posttrain.reward.service import RewardService
from posttrain.rollout.engine import RolloutEngine
from posttrain.rollout.hf_engine import HFEngine
from posttrain.runtime.artifact_identity import artifact_identity
from posttrain.runtime.dotted import import_dotted
from posttrain.runtime.rundir import describe_objective, write_run_files
from posttrain.track import RunHeader, Tracker
from posttrain.trainer.core import Batching, Trainer
from posttrain.weight_sync.protocol import WeightSync
from posttrain.weight_sync.shared import SharedSync

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42."
"""Scored by trainer and engine alike to prove that they compute the same."""

HEAD_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest gap in nats between two ways of computing the same logits, by compute dtype."""


def launch(root: RootConfig, *, run_dir: Path, plain_config: dict[str, Any]) -> float | None:
    """Run one configuration that has passed `posttrain.preflight`.

    Args:
        run_dir: an existing, empty directory.
        plain_config: the resolved configuration as plain containers, for files and trackers.

    Returns:
        The last held-out score, the objective of hyper-parameter sweeps; None without validation.
    """
    rl = root.rl
    if not isinstance(rl, GRPOConfig):
        raise ConfigError(f"rl is a {type(rl).__name__}, which no loop runs")
    precision = resolve_precision(rl, _model_dtype(root))
    reference = _reference(rl)
    objective = _objective(rl, root, reference)
    write_run_files(run_dir, plain_config=plain_config, objective=objective, root=root)
    with ExitStack() as stack:
        tracker = stack.enter_context(
            Tracker(
                run_dir,
                config=root.tracker,
                group=root.job.group,
                name=root.job.name,
                total_steps=rl.max_steps,
                resolved_config=plain_config,
            )
        )
        tracker.start(_header(root, rl, objective))
        for caution in cautions(root):
            tracker.event("warning", message=caution)
        torch.manual_seed(rl.seed)
        with tracker.phase("load"):
            built = build_model(root.model, precision=precision)
            policy = CausalPolicy(built, precision=precision)
            probe = policy.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
            policy.check_head(probe, tolerance=HEAD_TOLERANCE[precision.param])
            gap = policy.check_packing(probe, tolerance=HEAD_TOLERANCE[precision.param])
            if not policy.packs:
                tracker.event("warning", message=_padding_reason(policy, gap))
            if reference is not None:
                _attach_reference(reference, rl, root, policy=policy, tracker=tracker)
            trainer = Trainer(rl.optimizer, policy=policy, objective=objective, batching=Batching.of(rl))
            engine, sync = _engine(root, rl, built=built, policy=policy, precision=precision, probe=probe)
            stack.callback(engine.close)
        parts = _parts(root, rl, policy=policy, engine=engine, sync=sync, trainer=trainer, tracker=tracker, stack=stack)
        loop = OnlineLoop(rl, parts=parts, sampling=_sampling(root), rollout_seed=_rollout_seed(root))
        return loop.run()


def _parts(
    root: RootConfig,
    rl: GRPOConfig,
    *,
    policy: CausalPolicy,
    engine: RolloutEngine,
    sync: WeightSync,
    trainer: Trainer,
    tracker: Tracker,
    stack: ExitStack,
) -> OnlineParts:
    token_texts = _token_texts(policy.tokenizer)
    rewards = _rewards(rl, rl.reward, stack)
    held_out = None
    if rl.validation.num_prompts:
        validation = rl.validation
        source = build_prompt_source(validation.data, seed=validation.seed, tokenizer=policy.tokenizer)
        sampling = SamplingParams(
            max_tokens=validation.max_tokens or root.rollout.max_tokens,
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            repetition_penalty=validation.repetition_penalty,
        )
        scorer = _rewards(rl, validation.reward, stack) if validation.reward and validation.reward != rl.reward else rewards
        prompts = source.draw(validation.num_prompts)
        distinct = len({prompt.id.rpartition("@")[0] for prompt in prompts})
        if distinct < validation.num_prompts:
            raise ConfigError(list(repeated_prompts(validation.num_prompts, available=distinct)))
        held_out = HeldOut(
            validation,
            prompts=prompts,
            sampling=sampling,
            engine=engine,
            rewards=scorer,
            tracker=tracker,
            token_texts=token_texts,
        )
    source = build_prompt_source(rl.data, seed=resolve_data_seed(rl, root.rollout.seed), tokenizer=policy.tokenizer)
    alarms = Alarms(root.tracker.alarms, single_step=rl.n_mini == 1)
    return OnlineParts(source, engine, rewards, trainer, sync, tracker, held_out, alarms, GroupAnnotator.of(rl), token_texts)


def _engine(
    root: RootConfig, rl: GRPOConfig, *, built: BuiltModel, policy: CausalPolicy, precision: Precision, probe: list[int]
) -> tuple[RolloutEngine, WeightSync]:
    """The engine that `rollout`'s type selects, with the transport that feeds it."""
    config = root.rollout
    if isinstance(config, HFRolloutConfig):
        engine = HFEngine(config, policy=policy)
        return engine, SharedSync(engine, policy=policy.module, sampler=engine.policy.module)
    if isinstance(config, VLLMRolloutConfig):
        from posttrain.rollout.vllm_engine import VLLMEngine
        from posttrain.weight_sync.host import HostCopySync, probe_tolerance

        if built.directory is None:
            raise ModelError("rollout=vllm loads its configuration and tokenizer from a directory, and this model has none")
        dtype = config.dtype or precision.transfer
        vllm = VLLMEngine(
            config,
            model_dir=built.directory,
            dtype=dtype,
            trust_remote_code=isinstance(root.model, HFModelConfig) and root.model.trust_remote_code,
            seed=_rollout_seed(root),
            max_prompt_tokens_hint=rl.data.max_prompt_tokens,
            max_sequences=rl.batch_per_replica,
            max_top_tokens=rl.score_centering.top_k if rl.score_centering.enabled else 0,
        )
        sync = HostCopySync(
            lambda: hf_named_weights(policy.module),
            vllm,
            dtype=dtype,
            bucket_bytes=rl.weight_sync_bucket_bytes,
            probe=policy.score_prompt,
            probe_ids=probe,
            tolerance=probe_tolerance(dtype, precision.param),
        )
        return vllm, sync
    raise ConfigError(f"rollout is a {type(config).__name__}, which no engine serves")


def _objective(rl: GRPOConfig, root: RootConfig, reference: FrozenReference | None) -> Objective:
    builder = cast("ObjectiveBuilder", import_dotted(rl.objective_builder))
    artifact = artifact_identity(rl.ref.model_dir) if reference is not None and rl.ref.model_dir is not None else None
    objective = builder(rl, ModelContext(model_identity(root.model), root.rollout.max_tokens, reference, artifact))
    if not isinstance(objective, Objective):
        raise ConfigError(f"rl.objective_builder={rl.objective_builder!r} returned a {type(objective).__name__}, not an Objective")
    return objective


def _attach_reference(reference: FrozenReference, rl: GRPOConfig, root: RootConfig, *, policy: CausalPolicy, tracker: Tracker) -> None:
    """Build the frozen twin of the policy; it costs one more copy of the network."""
    refuse_live_dropout(policy.module)
    built = build_reference(root.model, rl.ref.model_dir, precision=policy.precision)
    twin = CausalPolicy(built, precision=policy.precision, pack=policy.packs)
    reference.attach(twin)
    source = f"{rl.ref.model_dir} (rl.ref.model_dir)" if rl.ref.model_dir else "the policy's own base weights"
    tracker.event("reference", source=rl.ref.model_dir, message=f"built frozen KL reference from {source}")


def _padding_reason(policy: CausalPolicy, gap: float) -> str:
    name = type(policy.module).__name__
    why = f"packed and padded scores differ by {gap:.3g} nats" if gap else "its attention cannot take a packed row"
    return f"{name} trains on padded rows: {why}; training costs more time and memory, the update is the same"


def _rewards(rl: GRPOConfig, name: str, stack: ExitStack) -> RewardService:
    provider = build_provider(name, catalog_path=rl.reward_provider_catalog, timeout_s=rl.reward_timeout_s)
    service = RewardService(provider, timeout_s=rl.reward_timeout_s)
    stack.callback(service.close)
    return service


def _sampling(root: RootConfig) -> SamplingParams:
    rollout, rl = root.rollout, root.rl
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=rollout.repetition_penalty,
        ignore_eos=rollout.ignore_eos,
        top_tokens=rl.score_centering.top_k if isinstance(rl, GRPOConfig) and rl.score_centering.enabled else 0,
    )


def _rollout_seed(root: RootConfig) -> int:
    return root.rl.seed if root.rollout.seed is None else root.rollout.seed


def _model_dtype(root: RootConfig) -> str:
    if isinstance(root.model, HFModelConfig | NativePolicyBuildSpec):
        return root.model.dtype
    raise ConfigError(f"model is a {type(root.model).__name__}, which nothing builds")


def _token_texts(tokenizer: Any) -> Callable[[tuple[int, ...]], list[str]]:
    """Each token's own text, as it reads alone."""
    return lambda ids: [tokenizer.decode([token]) for token in ids]


def _header(root: RootConfig, rl: GRPOConfig, objective: Objective) -> RunHeader:
    micro = f"micro-batches of up to {rl.micro_batch_tokens} tokens" if rl.micro_batch_tokens else f"{rl.n_micro} micro-batch(es)"
    batch = f"{rl.groups_per_step} prompts x {rl.group_size} completions, {rl.n_mini} optimizer step(s) of {micro}"
    details = {"objective": describe_objective(objective), "batch": batch}
    if rl.effective_min_informative_groups:
        details["dynamic sampling"] = _dynamic_sampling_line(rl)
    return RunHeader(
        algorithm=root.algorithm.name,
        model=model_identity(root.model),
        seed=rl.seed,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        details=details,
    )


def _dynamic_sampling_line(rl: GRPOConfig) -> str:
    """The resolved quota, the knobs behind it, and the widest generation call it can lead to."""
    rounds = rl.dynamic_sampling_max_extra_rollouts if rl.dynamic_sampling_refill_dispatch == "whole_budget" else 1
    widest = rounds * rl.prompts_per_data_replica * rl.group_size
    return (
        f"quota {rl.effective_min_informative_groups} of {rl.groups_per_step} groups (min_informative_groups={rl.min_informative_groups}, "
        f"min_informative_groups_frac={rl.min_informative_groups_frac}), up to {rl.dynamic_sampling_max_extra_rollouts} extra rounds, "
        f"{rl.dynamic_sampling_refill_dispatch}: at most {widest} sequences a generation call"
    )


def _reference(rl: GRPOConfig) -> FrozenReference | None:
    return FrozenReference(temperature=rl.temperature, dtype=rl.logprob_dtype) if rl.ref.build_ref else None
