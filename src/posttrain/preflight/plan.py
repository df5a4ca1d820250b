"""What a checked configuration will do, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from posttrain.config import (
    GRPOConfig,
    HFModelConfig,
    NativePolicyBuildSpec,
    PromptEnvConfig,
    RootConfig,
    RunConfig,
    VLLMRolloutConfig,
    resolve_precision,
)
from posttrain.config.rules import cautions


def plan(root: RootConfig) -> list[str]:
    """The run in a dozen lines: what is trained on what, how much of it, where it goes."""
    rows = [*_rows(root)]
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:<{width}}  {text}" for name, text in rows), *(f"note: {text}" for text in cautions(root))]


def _rows(root: RootConfig) -> Iterator[tuple[str, str]]:
    rl, rollout = root.rl, root.rollout
    yield "run", str(Path(root.job.output_root) / root.job.group / root.job.name)
    if isinstance(rl, GRPOConfig):
        yield "algorithm", _algorithm(root, rl)
    yield "model", _model(root)
    yield (
        "data",
        f"{_source(rl.data)}, in {'shuffled' if rl.data.shuffle or rl.data.kind in ('arithmetic', 'reasoning_gym') else 'file'} order",
    )
    if isinstance(rl, GRPOConfig):
        yield "reward", rl.reward
        yield "batch", _batch(rl)
        completions = rl.max_steps * rl.batch_per_replica
        yield (
            "steps",
            f"{rl.max_steps} x {rl.batch_per_replica} completions = {completions} completions, "
            f"at most {completions * rollout.max_tokens} sampled tokens, {rl.max_steps * rl.n_mini} optimizer steps",
        )
    yield "rollout", _rollout(root)
    yield "optimizer", _optimizer(root)
    if isinstance(rl, GRPOConfig) and isinstance(root.model, HFModelConfig | NativePolicyBuildSpec):
        precision = resolve_precision(rl, root.model.dtype)
        how = ", autocast" if precision.autocast else ""
        yield "precision", f"computes in {precision.param}, keeps {precision.master}, sends {precision.transfer}{how}"
    yield "validation", _validation(root)
    yield "checkpoints", _checkpoints(rl)
    yield "devices", "this process; the policy on the first GPU if there is one" if root.grid.backend == "local" else root.grid.backend


def _algorithm(root: RootConfig, rl: GRPOConfig) -> str:
    reduction = "mean over completions" if rl.grpo_surrogate == "legacy_pg" else rl.loss_type
    scale = "reward - group mean" if rl.unbiased_advantage else "(reward - group mean) / group std"
    level = " per response" if rl.importance_sampling_level == "sequence" else ""
    parts = [f"{root.algorithm.name}: surrogate {rl.grpo_surrogate}{level}", f"reduction {reduction}"]
    parts.append(f"advantage {rl.advantage_estimator or scale}")
    if rl.kl_beta:
        parts.append(f"KL {rl.kl_beta:g} to {rl.ref.model_dir or 'the base weights'}")
    if rl.score_centering.enabled:
        parts.append(f"score centering (top {rl.score_centering.top_k}, {rl.score_centering.compose})")
    if rl.use_rollout_logprobs_for_loss:
        parts.append("old policy from the sampler")
    if rl.effective_min_informative_groups:
        parts.append(f"dynamic sampling until {rl.effective_min_informative_groups} of {rl.groups_per_step} groups are informative")
    if rl.mask_truncated_completions:
        parts.append("truncated completions masked")
    if rl.min_filter_prefix_tokens is not None:
        parts.append(f"shared prefixes of {rl.min_filter_prefix_tokens} or more tokens masked")
    return ", ".join(parts)


def _model(root: RootConfig) -> str:
    model = root.model
    if isinstance(model, HFModelConfig):
        return f"{model.name_or_path} ({model.dtype}, {model.attn_implementation})"
    if isinstance(model, NativePolicyBuildSpec):
        return f"{model.model_id} from {model.builder} ({model.dtype})"
    return type(model).__name__


def _source(data: PromptEnvConfig) -> str:
    if data.kind == "jsonl":
        text = data.path
    elif data.kind == "huggingface":
        text = " ".join(part for part in (data.name, data.subset, data.split) if part)
    elif data.kind == "reasoning_gym":
        text = f"reasoning-gym {data.reasoning_gym.dataset} ({data.split}, {data.reasoning_gym.size} tasks)"
    else:
        node = data.arithmetic
        text = f"arithmetic {node.low}..{node.high} with {' '.join(node.operators)} ({data.split})"
    return text if data.max_prompt_tokens is None else f"{text}, prompts up to {data.max_prompt_tokens} tokens"


def _batch(rl: GRPOConfig) -> str:
    steps = "1 optimizer step" if rl.n_mini == 1 else f"{rl.n_mini} optimizer steps"
    chunks = "1 micro-batch" if rl.n_micro == 1 else f"{rl.n_micro} micro-batches"
    cut = f"micro-batches of up to {rl.micro_batch_tokens} tokens" if rl.micro_batch_tokens else f"{chunks} x {rl.micro_batch}"
    return f"{rl.groups_per_step} prompts x {rl.group_size} completions = {rl.batch_per_replica} per step -> {steps} of {cut}"


def _rollout(root: RootConfig) -> str:
    rollout = root.rollout
    if isinstance(rollout, VLLMRolloutConfig):
        engine = f"vllm ({rollout.process.replace('_', ' ')})"
    else:
        engine = "transformers on the policy itself"
    seed = f"rl.seed={root.rl.seed}" if rollout.seed is None else f"rollout.seed={rollout.seed}"
    return f"{engine}, temperature {rollout.temperature:g}, up to {rollout.max_tokens} tokens, seeded by {seed}"


def _optimizer(root: RootConfig) -> str:
    rl, model = root.rl, root.model
    optimizer = rl.optimizer
    parts = [f"{optimizer.name} lr {optimizer.lr:g}"]
    if optimizer.lr_schedule != "constant":
        parts.append(f"{optimizer.lr_schedule} schedule")
    if optimizer.warmup_steps:
        parts.append(f"{optimizer.warmup_steps} warm-up steps")
    parts.append(_clip(optimizer.grad_clip_norm))
    if isinstance(model, HFModelConfig) and model.lora.rank:
        targets = ", ".join(model.lora.target_modules) or "every linear layer"
        parts.append(f"LoRA rank {model.lora.rank} alpha {model.lora.alpha:g} on {targets}")
    if rl.deterministic:
        parts.append("deterministic kernels")
    return ", ".join(parts)


def _clip(norm: float) -> str:
    return f"gradient norm clipped to {norm:g}" if norm else "gradients not clipped"


def _validation(root: RootConfig) -> str:
    validation = root.rl.validation
    if not validation.num_prompts:
        return "off"
    when = [text for wanted, text in ((validation.at_start, "at the start"), (validation.at_end, "at the end")) if wanted]
    if validation.every:
        when.insert(1 if validation.at_start else 0, f"every {validation.every} optimizer steps")
    how = "greedy" if validation.temperature == 0 else f"temperature {validation.temperature:g}"
    draws = f" x {validation.samples_per_prompt}" if validation.samples_per_prompt > 1 else ""
    source = _source(validation.data)
    return f"{validation.num_prompts} prompts{draws} of {source}, {how}, {', '.join(when)}"


def _checkpoints(rl: RunConfig) -> str:
    if not rl.save_every:
        return "none on the way or at the end (rl.save_every=0); everything when the run is asked to end early"
    keep = 1 if rl.keep_optim_last is None else rl.keep_optim_last
    kept = f"optimizer kept for the newest {keep}" if keep else "all optimizers kept"
    models = f", models for the newest {rl.keep_model_last}" if rl.keep_model_last else ""
    return f"every {rl.save_every} steps and at the end{', in the background' if rl.save_async else ''}; {kept}{models}"
