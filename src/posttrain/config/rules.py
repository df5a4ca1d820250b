"""Rules between nodes of the tree: each yields violations with the key to change."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.base import default_of
from posttrain.config.checkpoint import checkpoint_violations
from posttrain.config.data import PromptEnvConfig
from posttrain.config.grpo import GRPOConfig
from posttrain.config.model import HFModelConfig, NativePolicyBuildSpec
from posttrain.config.optimizer_rules import optimizer_cautions, optimizer_violations
from posttrain.config.parallel_rules import parallel_cautions, parallel_violations
from posttrain.config.rollout import RolloutConfig, VLLMRolloutConfig
from posttrain.config.root import RootConfig
from posttrain.config.run import precision_violations, resolve_precision
from posttrain.errors import Violation


def cross_violations(root: RootConfig) -> Iterator[Violation]:
    """Everything that needs more than one node to be judged."""
    if not isinstance(root.rl, GRPOConfig):
        return
    if isinstance(root.model, HFModelConfig | NativePolicyBuildSpec):
        yield from precision_violations(root.rl, root.model.dtype, sharded=root.grid.ranks > 1)
        yield from _engine_violations(root, root.model)
    yield from checkpoint_violations("rl", root.rl)
    yield from optimizer_violations(root)
    yield from parallel_violations(root)
    yield from _sampling_violations(root.rl, root.rollout)
    yield from _collection_violations(root)
    yield from _data_violations("rl.data", root.rl.data)
    yield from _validation_violations(root.rl)
    if root.rl.data_seed_follows_rollout_seed and root.rollout.seed is None:
        yield Violation("rl.data_seed_follows_rollout_seed", True, "needs an integer rollout.seed", "set rollout.seed")


def cautions(root: RootConfig) -> Iterator[str]:
    """Settings that are honoured and deserve a word at the start."""
    rl = root.rl
    if isinstance(rl, GRPOConfig):
        yield from rl.cautions("rl")
        yield from _width_cautions(root, rl)
    yield from optimizer_cautions(root)
    yield from parallel_cautions(root)
    if not rl.optimizer.force_finite_grads:
        yield "rl.optimizer.force_finite_grads=false: a gradient that is not finite will be applied (a non-finite loss is still refused)"
    if isinstance(rl, GRPOConfig) and rl.data.shuffle and rl.seed == 0 and root.rollout.seed and not rl.data_seed_follows_rollout_seed:
        yield (
            f"rollout.seed={root.rollout.seed} with rl.seed=0 and rl.data.shuffle: all arms share one prompt order; set rl.seed per arm "
            "or rl.data_seed_follows_rollout_seed=true"
        )


def _sampling_violations(rl: GRPOConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    temperature = rollout.temperature
    if temperature < 0.01:
        what = (
            "is greedy: all completions of a group would be equal" if temperature == 0 else "is below 0.01, which engines rewrite silently"
        )
        yield Violation("rollout.temperature", temperature, f"{what}; grouped rollout needs >= 0.01", "set rollout.temperature=1.0")
    elif rl.grpo_surrogate == "clipped" and temperature != rl.temperature:
        yield Violation(
            "rollout.temperature",
            temperature,
            f"must equal rl.temperature={rl.temperature}: the loss scores the distribution that was sampled",
            f"set both, e.g. rl.temperature={temperature} rollout.temperature={temperature}",
        )
    elif rl.grpo_surrogate == "legacy_pg" and temperature != 1.0:
        yield Violation(
            "rollout.temperature", temperature, "must be 1.0 with grpo_surrogate=legacy_pg, which scores untempered logits", "set it to 1.0"
        )
    elif rl.use_rollout_logprobs_for_loss and temperature != 1.0:
        yield Violation(
            "rl.use_rollout_logprobs_for_loss",
            True,
            f"needs rollout.temperature=rl.temperature=1.0 (they are {temperature}): the sampler's log-probabilities are taken as the "
            "old policy's as they are",
            "set both temperatures to 1.0",
        )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)):
        if getattr(rollout, name) != off:
            yield Violation(
                f"rollout.{name}",
                getattr(rollout, name),
                f"must be {off}: on-policy training scores the full softmax, not a warped one",
                f"set rollout.{name}={off}",
            )


def _collection_violations(root: RootConfig) -> Iterator[Violation]:
    rl = root.rl
    if not isinstance(rl, GRPOConfig):
        return
    cells = root.grid.num_replicas
    has_quota = rl.min_informative_groups > 0 or rl.min_informative_groups_frac is not None
    for name, off in (("dynamic_sampling_refill_mode", "all"), ("dynamic_sampling_quota_scope", "cell")):
        if cells == 1 and has_quota and getattr(rl, name) != off:
            yield Violation(
                f"rl.{name}",
                getattr(rl, name),
                "distinguishes between data cells, and grid.num_replicas=1 has a single one",
                f"leave it at {off!r}",
            )
    if rl.micro_batch_tokens:
        longest = rl.data.max_prompt_tokens
        if longest is None:
            yield Violation(
                "rl.micro_batch_tokens",
                rl.micro_batch_tokens,
                "needs rl.data.max_prompt_tokens, so that the longest sample is known before the start",
                "set rl.data.max_prompt_tokens",
            )
        elif longest + root.rollout.max_tokens > rl.micro_batch_tokens:
            yield Violation(
                "rl.micro_batch_tokens",
                rl.micro_batch_tokens,
                f"must hold one sample: rl.data.max_prompt_tokens={longest} + rollout.max_tokens={root.rollout.max_tokens}",
                f"set rl.micro_batch_tokens={longest + root.rollout.max_tokens} or more",
            )


def _width_cautions(root: RootConfig, rl: GRPOConfig) -> Iterator[str]:
    """A widened generation call queues behind the engine's own limit."""
    rollout = root.rollout
    if not (rl.effective_min_informative_groups and rl.dynamic_sampling_refill_dispatch == "whole_budget"):
        return
    width = rl.dynamic_sampling_max_extra_rollouts * rl.prompts_per_data_replica * rl.group_size
    if isinstance(rollout, VLLMRolloutConfig) and rollout.max_num_seqs is not None and width > rollout.max_num_seqs:
        yield (
            f"rl.dynamic_sampling_refill_dispatch=whole_budget asks for up to {width} sequences in one call, more than "
            f"rollout.max_num_seqs={rollout.max_num_seqs}: vLLM queues the rest"
        )


def _engine_violations(root: RootConfig, model: HFModelConfig | NativePolicyBuildSpec) -> Iterator[Violation]:
    rl, rollout = root.rl, root.rollout
    if not isinstance(rl, GRPOConfig):
        return
    precision = resolve_precision(rl, model.dtype)
    if isinstance(rollout, VLLMRolloutConfig):
        if rollout.dtype and rl.transfer_dtype and rollout.dtype != rl.transfer_dtype:
            yield Violation(
                "rollout.dtype", rollout.dtype, f"must equal rl.transfer_dtype={rl.transfer_dtype}", "leave it empty to inherit that dtype"
            )
    elif root.grid.ranks == 1:
        for key, value in (("rl.transfer_dtype", rl.transfer_dtype), ("rl.weight_sync_bucket_bytes", rl.weight_sync_bucket_bytes)):
            if value and value != precision.master:
                yield Violation(
                    key, value, "is never read by rollout=hf, which samples from the policy's own parameters", "drop it or set rollout=vllm"
                )


def _data_violations(path: str, data: PromptEnvConfig) -> Iterator[Violation]:
    defaults = PromptEnvConfig()
    for name, kind in (("arithmetic", "arithmetic"), ("reasoning_gym", "reasoning_gym")):
        if data.kind != kind and getattr(data, name) != getattr(defaults, name):
            if name == "reasoning_gym" and data.reasoning_gym.dataset:
                continue  # two sources at once: reported by the node itself
            yield Violation(
                f"{path}.{name}",
                "(changed)",
                f"is read only by the {kind} source, and this source is {data.kind}",
                f"drop the {path}.{name}.* overrides, or the experiment that sets them",
            )
    if data.kind == "arithmetic" and data.split == "held_out" and data.arithmetic.held_out_fraction == 0:
        yield Violation(f"{path}.arithmetic.held_out_fraction", 0.0, "leaves split=held_out without problems", "set it above 0, e.g. 0.15")


def _validation_violations(rl: GRPOConfig) -> Iterator[Violation]:
    validation, path = rl.validation, "rl.validation"
    if validation.num_prompts == 0:
        # max_prompt_tokens and the like may differ: only the cadence claims that something will be measured
        if validation.every:
            yield Violation(f"{path}.every", validation.every, f"is never read while {path}.num_prompts=0", f"set {path}.num_prompts")
        return
    yield from _data_violations(f"{path}.data", validation.data)
    yield from _leak_violations(rl)
    if 0 < validation.temperature < 0.01:
        yield Violation(f"{path}.temperature", validation.temperature, "must be 0 (greedy) or at least 0.01", "set it to 0")
    if validation.temperature == 0:
        for name in ("samples_per_prompt", "top_p", "top_k"):
            spec = next(s for s in validation.__dataclass_fields__.values() if s.name == name)
            if getattr(validation, name) != default_of(spec):
                yield Violation(
                    f"{path}.{name}", getattr(validation, name), "changes nothing under greedy decoding", f"set {path}.temperature > 0"
                )
    if not (validation.at_start or validation.at_end or validation.every):
        yield Violation(
            f"{path}.num_prompts",
            validation.num_prompts,
            "asks for held-out prompts that at_start=false, at_end=false and every=0 never use",
            f"set {path}.num_prompts=0 or a cadence",
        )


def _leak_violations(rl: GRPOConfig) -> Iterator[Violation]:
    """Held-out prompts must come from the user's own task, and training must not see them."""
    train, held_out, path = rl.data, rl.validation.data, "rl.validation.data"
    if held_out.kind == "arithmetic" and train.kind != "arithmetic":
        yield Violation(
            f"{path}.path",
            "",
            f"names no source while rl.data is {train.kind}",
            f"set {path}.* like rl.data.*, or rl.validation.num_prompts=0",
        )
    if held_out.kind == train.kind == "arithmetic":
        fraction, trained = held_out.arithmetic.held_out_fraction, train.arithmetic.held_out_fraction
        if train.split == held_out.split:
            yield Violation(f"{path}.split", held_out.split, "is the split that training reads", f"set {path}.split=held_out")
        elif trained != fraction:
            yield Violation(
                f"{path}.arithmetic.held_out_fraction",
                fraction,
                f"must equal rl.data.arithmetic.held_out_fraction={trained}, or training sees held-out problems",
                "set both alike",
            )


def repeated_prompts(num_prompts: int, *, available: int) -> Iterator[Violation]:
    """A held-out set larger than its source would count some prompts twice."""
    if num_prompts > available:
        yield Violation(
            "rl.validation.num_prompts",
            num_prompts,
            f"exceeds the {available} prompts of rl.validation.data, so some would count twice",
            f"set it to at most {available}",
        )
