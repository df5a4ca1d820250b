"""From a checked configuration to a finished run: builds the components, runs the loop, leaves the run directory complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posttrain.algorithm.annotators.group import GroupAnnotator
from posttrain.algorithm.primitives.objective import Objective
from posttrain.checkpoint.exactness import compare, exact_values
from posttrain.checkpoint.lifecycle import CheckpointManager, ResumePoint
from posttrain.checkpoint.store import archive_store, primary_store
from posttrain.config import GRPOConfig, HFRolloutConfig, RootConfig, VLLMRolloutConfig, resolve_data_seed
from posttrain.config.model import HFModelConfig, LoraConfig, NativePolicyBuildSpec
from posttrain.config.rules import cautions, repeated_prompts
from posttrain.config.run import Precision
from posttrain.data.build import build_prompt_source
from posttrain.errors import ConfigError, EmergencyStop, ModelError
from posttrain.loop.alarms import Alarms
from posttrain.loop.held_out import HeldOut
from posttrain.loop.online import OnlineLoop, OnlineParts
from posttrain.loop.saver import RunSaver
from posttrain.model.build import model_identity
from posttrain.model.converter import hf_named_weights
from posttrain.model.lora import lora_of
from posttrain.model.policy import CausalPolicy
from posttrain.model.reference import FrozenReference
from posttrain.model.sources import materialize
from posttrain.records import SamplingParams
from posttrain.reward.catalog import build_provider
from posttrain.reward.service import RewardService
from posttrain.rollout.engine import RolloutEngine
from posttrain.rollout.hf_engine import HFEngine
from posttrain.runtime import random_state
from posttrain.runtime.determinism import make_deterministic
from posttrain.runtime.provenance import data_digests
from posttrain.runtime.rundir import describe_objective, write_run_files
from posttrain.runtime.stop import StopRequest
from posttrain.track import RunHeader, Tracker
from posttrain.trainer.assemble import Assembled, Restored, assemble, build_policy, objective_of, precision_of, reference_of
from posttrain.trainer.core import Trainer
from posttrain.trainer.group import Followers, GroupWeights, LeadState, LeadTrainer
from posttrain.weight_sync.protocol import WeightSync
from posttrain.weight_sync.shared import SharedSync


def launch(root: RootConfig, *, run_dir: Path, plain_config: dict[str, Any], resume: ResumePoint | None = None) -> float | None:
    """Run one configuration that has passed `posttrain.preflight`.

    Args:
        run_dir: an existing, empty directory.
        plain_config: the resolved configuration as plain containers, for files and trackers.
        resume: where to continue; None starts from the beginning.

    Returns:
        The last held-out score, the objective of hyper-parameter sweeps; None without validation.
    """
    rl = root.rl
    if not isinstance(rl, GRPOConfig):
        raise ConfigError(f"rl is a {type(rl).__name__}, which no loop runs")
    if rl.deterministic:
        make_deterministic()  # first of all: the provenance record already asks the GPU for its name
    precision = precision_of(root, rl)
    reference = reference_of(rl)
    objective = objective_of(rl, root, reference)
    exact = exact_values(plain_config, _facts(root, rl, objective))
    moved_bits = compare(resume.training_state["exact"], exact) if resume is not None else []
    provenance = write_run_files(run_dir, plain_config=plain_config, objective=objective, root=root)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(rl.save_before_s))
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
        if resume is not None:
            tracker.resume(resume.manifest.step, resume.training_state["tracker"])
        tracker.start(_header(root, rl, objective))
        for caution in cautions(root):
            tracker.event("warning", message=caution)
        if moved_bits:
            tracker.event("warning", message=f"the resumed run will differ in its last bits: {'; '.join(moved_bits)}")
        random_state.seed_all(rl.seed)
        with tracker.phase("load"):
            restored = None
            if resume is not None:
                restored = Restored(resume.model, resume.optimizer, resume.training_state["trainer"])
            side = _trained_side(root, rl, objective=objective, reference=reference, restored=restored, stack=stack)
            policy, trainer = side.parts.policy, side.parts.trainer
            for kind, fields in side.parts.notes:
                tracker.event(kind, **fields)
        with tracker.phase("engine"):
            engine, sync = _engine(root, rl, side=side, precision=precision)
            stack.callback(engine.close)
        manager = CheckpointManager(
            rl,
            run_dir,
            state=side.parts.tensors,
            provenance=provenance.name,
            event=tracker.event,
            announce=tracker.announce,
            store=primary_store(root, run_dir),
            archive=archive_store(root, run_dir),
        )
        stack.enter_context(manager)
        saver = RunSaver(manager, trainer=trainer, stop=stop, exact=exact, resume=rl.resume)
        parts = _parts(root, rl, policy=policy, engine=engine, sync=sync, trainer=trainer, tracker=tracker, saver=saver, stack=stack)
        loop = OnlineLoop(rl, parts=parts, sampling=_sampling(root), rollout_seed=_rollout_seed(root))
        if resume is not None:
            loop.restore(resume.training_state)
            random_state.restore(resume.training_state["random"])
            tracker.event("verified", checkpoint=resume.folder.name, seconds=resume.verified_s)
            tracker.announce(f"resumed from {resume.folder.name} after step {resume.manifest.step} of {rl.max_steps}")
        try:
            return loop.run()
        except EmergencyStop as stopped:
            tracker.finish("stopped", summary={"reason": str(stopped)})
            raise


def _parts(
    root: RootConfig,
    rl: GRPOConfig,
    *,
    policy: CausalPolicy,
    engine: RolloutEngine,
    sync: WeightSync,
    trainer: Trainer,
    tracker: Tracker,
    saver: RunSaver,
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
    return OnlineParts(source, engine, rewards, trainer, sync, tracker, held_out, alarms, GroupAnnotator.of(rl), saver, token_texts)


@dataclass(frozen=True, slots=True)
class _TrainedSide:
    """Rank 0's share of the trained policy, and the way to its whole weights."""

    parts: Assembled
    weights: GroupWeights | None
    """None where this process has all of them anyway."""


def _trained_side(
    root: RootConfig,
    rl: GRPOConfig,
    *,
    objective: Objective,
    reference: FrozenReference | None,
    restored: Restored | None,
    stack: ExitStack,
) -> _TrainedSide:
    """Build it in this process, or in `grid.ranks` processes of which this one is rank 0."""
    model = root.model
    if root.grid.ranks == 1 or not isinstance(model, HFModelConfig | NativePolicyBuildSpec):
        return _TrainedSide(assemble(root, rl, objective=objective, reference=reference, restored=restored), None)
    if isinstance(model, HFModelConfig):
        materialize(model.name_or_path)  # a conversion is done once, before the others look for its result
    followers = stack.enter_context(Followers(root, parallelism=model.parallelism, restored=restored))
    ranks = followers.join()
    with followers.building():
        parts = assemble(
            root,
            rl,
            objective=objective,
            reference=reference,
            ranks=ranks,
            restored=restored,
            make_trainer=partial(LeadTrainer, followers=followers),
            make_state=partial(LeadState, followers=followers),
        )
    return _TrainedSide(parts, GroupWeights(followers, parts.policy))


def _engine(root: RootConfig, rl: GRPOConfig, *, side: _TrainedSide, precision: Precision) -> tuple[RolloutEngine, WeightSync]:
    """The engine that `rollout`'s type selects, with the transport that feeds it."""
    config, policy, built, probe = root.rollout, side.parts.policy, side.parts.built, side.parts.probe
    if isinstance(config, HFRolloutConfig) and side.weights is not None:
        return _copying_engine(root, rl, config, side=side, weights=side.weights, precision=precision)
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
            side.weights.hf if side.weights is not None else lambda: hf_named_weights(policy.module),
            vllm,
            dtype=dtype,
            bucket_bytes=rl.weight_sync_bucket_bytes,
            probe=side.weights.score_prompt if side.weights is not None else policy.score_prompt,
            probe_ids=probe,
            tolerance=probe_tolerance(dtype, precision.param),
        )
        return vllm, sync
    raise ConfigError(f"rollout is a {type(config).__name__}, which no engine serves")


def _copying_engine(
    root: RootConfig, rl: GRPOConfig, config: HFRolloutConfig, *, side: _TrainedSide, weights: GroupWeights, precision: Precision
) -> tuple[RolloutEngine, WeightSync]:
    """A sharded policy is sampled from a whole copy in this process, which computes in the dtype that travels."""
    from posttrain.rollout.hf_copy import HFCopyEngine
    from posttrain.weight_sync.host import HostCopySync, probe_tolerance

    model = replace(root.model, lora=LoraConfig(), gradient_checkpointing=False) if isinstance(root.model, HFModelConfig) else root.model
    param = precision.param if precision.autocast else precision.transfer
    own = Precision(param, precision.transfer, precision.transfer, precision.autocast)
    _, copy = build_policy(model, precision=own)
    copy.module.requires_grad_(False)
    engine = HFCopyEngine(config, policy=copy)
    sync = HostCopySync(
        weights.plain,
        engine,
        dtype=precision.transfer,
        bucket_bytes=rl.weight_sync_bucket_bytes,
        probe=weights.score_prompt,
        probe_ids=side.parts.probe,
        tolerance=probe_tolerance(precision.transfer, precision.param),
    )
    return engine, sync


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


def _token_texts(tokenizer: Any) -> Callable[[tuple[int, ...]], list[str]]:
    """Each token's own text, as it reads alone."""
    return lambda ids: [tokenizer.decode([token]) for token in ids]


def _header(root: RootConfig, rl: GRPOConfig, objective: Objective) -> RunHeader:
    micro = f"micro-batches of up to {rl.micro_batch_tokens} tokens" if rl.micro_batch_tokens else f"{rl.n_micro} micro-batch(es)"
    batch = f"{rl.groups_per_step} prompts x {rl.group_size} completions, {rl.n_mini} optimizer step(s) of {micro}"
    details = {"objective": describe_objective(objective), "batch": batch}
    lora = lora_of(root.model)
    if lora is not None:
        details["adapters"] = f"LoRA rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.target_modules) or 'every linear layer'}"
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


def _facts(root: RootConfig, rl: GRPOConfig, objective: Objective) -> dict[str, Any]:
    """What an exact resume compares beyond the configuration."""
    return {
        "objective": {"reduction": objective.reduction.value, **dict(objective.identity)},
        "data_seed": resolve_data_seed(rl, root.rollout.seed),
        "data_sha256": data_digests(root),
        # adapters alone are saved: what they adapt must be the same again
        **({"lora_base_from": rl.init_from} if lora_of(root.model) else {}),
    }
