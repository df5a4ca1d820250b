"""Rules within `rl.*` of the GRPO family: what is refused, and what is honoured with a word.

The line between the two: a setting that the selected loss never reads is refused; one that is read but does nothing, or rarely
what was meant, is warned about. `recipe_guard_severity=error` turns the two recipe guards into refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from posttrain.config.base import default_of
from posttrain.errors import Violation

if TYPE_CHECKING:
    from posttrain.config.grpo import GRPOConfig

CLIPPED_ONLY = (
    "temperature",
    "loss_type",
    "logprob_dtype",
    "epsilon_low",
    "epsilon_high",
    "lower_bound_ratio",
    "importance_sampling_level",
    "kl_beta",
    "kl_coeff_clamp",
    "use_rollout_logprobs_for_loss",
    "mask_truncated_completions",
    "certified_deterministic_forward",
    "micro_batch_tokens",
)
"""Settings the `legacy_pg` loss never reads."""

DYNAMIC_SAMPLING = (
    "dynamic_sampling_max_extra_rollouts",
    "dynamic_sampling_refill_mode",
    "dynamic_sampling_quota_scope",
    "dynamic_sampling_refill_dispatch",
    "dynamic_sampling_on_budget_exhausted",
)
"""Settings read only while a quota of informative groups is set."""

FIXED_LOSS_EPS = 1e-7
"""Largest optimizer epsilon that does not swallow the gradients of the fixed divisor."""

SEQUENCE_EPSILON = 0.05
"""Largest clip bound that means anything for a mean log-ratio."""


def violations(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    """Everything one `rl` node can be refused for."""
    yield from _sizing(rl, path)
    for name, why, use in (
        ("grad_accum", "GRPO draws one batch per step", f"use {path}.micro_batch_per_replica"),
        ("mu_iterations", "reuse of a batch is expressed by mini-batches", f"use {path}.mini_batch_per_replica"),
    ):
        if getattr(rl, name) != 1:
            yield Violation(f"{path}.{name}", getattr(rl, name), f"must be 1: {why}", use)
    if rl.grpo_surrogate == "legacy_pg":
        yield from _legacy(rl, path)
    else:
        yield from _old_policy(rl, path)
        yield from _clip(rl, path)
    yield from _reference(rl, path)
    yield from _score_centering(rl, path)
    yield from _dynamic_sampling(rl, path)
    if rl.advantage_estimator and rl.unbiased_advantage:
        rule = f"is never read while {path}.advantage_estimator={rl.advantage_estimator!r} computes the advantages"
        yield Violation(f"{path}.unbiased_advantage", True, rule, "set it to false")
    if rl.recipe_guard_severity == "error":
        for guard in _recipe_guards(rl, path):
            rule = f"{guard.text} (refused because {path}.recipe_guard_severity=error)"
            yield Violation(guard.key, guard.value, rule, f"{guard.remedy}, or {path}.recipe_guard_severity=warn")


def cautions(rl: GRPOConfig, path: str) -> Iterator[str]:
    """Settings that are honoured as written and deserve a word."""
    if rl.recipe_guard_severity == "warn":
        for guard in _recipe_guards(rl, path):
            yield f"{guard.key}={guard.value}: {guard.text}; {guard.remedy}"
    if rl.grpo_surrogate == "legacy_pg":
        return
    if rl.importance_sampling_level == "sequence":
        yield from _sequence_cautions(rl, path)
    if rl.kl_beta > 0 and rl.kl_coeff_clamp is None:
        yield (
            f"{path}.kl_beta={rl.kl_beta} without {path}.kl_coeff_clamp: the exact gradient of the KL term is unbounded, and one token on "
            f"which the reference disagrees by a few nats can own the step; set {path}.kl_coeff_clamp=5.0"
        )


def _sequence_cautions(rl: GRPOConfig, path: str) -> Iterator[str]:
    level = f"{path}.importance_sampling_level=sequence"
    widest = max(rl.epsilon_low, rl.epsilon_high)
    if widest > SEQUENCE_EPSILON:
        name = "epsilon_low" if rl.epsilon_low == widest else "epsilon_high"
        yield (
            f"{level} with {path}.{name}={widest}: a response's mean log-ratio sits far below a token's, so this bound never clips; GSPO "
            "uses epsilon_low=3e-4, epsilon_high=4e-4"
        )
    if rl.logprob_dtype != "float32":
        yield f"{level} with {path}.logprob_dtype={rl.logprob_dtype}: rounding is as large as the ratios the clip decides on; use float32"
    if rl.n_mini == 1 and not rl.use_rollout_logprobs_for_loss:
        yield (
            f"{level} with one optimizer step per batch: every response ratio is exactly 1, so the run trains as token-level GRPO; set "
            f"{path}.mini_batch_per_replica below {path}.batch_per_replica"
        )


@dataclass(frozen=True, slots=True)
class _Guard:
    key: str
    value: object
    text: str
    remedy: str


def _recipe_guards(rl: GRPOConfig, path: str) -> Iterator[_Guard]:
    """Pairings that are honoured but rarely meant."""
    literal, groups = rl.min_informative_groups, rl.groups_per_step
    if 0 < literal < groups / 2:
        yield _Guard(
            f"{path}.min_informative_groups",
            literal,
            f"is less than half of groups_per_step={groups}: the count does not grow with the batch, so most groups may still tie",
            f"use {path}.min_informative_groups_frac, a share of the batch",
        )
    if rl.loss_type == "seq-mean-token-sum-fixed" and rl.optimizer.eps > FIXED_LOSS_EPS:
        yield _Guard(
            f"{path}.optimizer.eps",
            rl.optimizer.eps,
            f"exceeds the gradients that {path}.loss_type=seq-mean-token-sum-fixed leaves, so {path}.optimizer.lr is not the step size",
            f"set {path}.optimizer.eps=1e-8",
        )


def _sizing(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    batch, group, mini, micro = rl.batch_per_replica, rl.group_size, rl.mini_batch_per_replica, rl.micro_batch_per_replica
    if group >= 1 and (batch < 1 or batch % group):
        near = max(group, batch // group * group)
        yield Violation(
            f"{path}.batch_per_replica",
            batch,
            f"must be a positive multiple of {path}.group_size={group}",
            f"set {path}.batch_per_replica={near}",
        )
    if mini > 0 and batch % mini:
        yield Violation(f"{path}.mini_batch_per_replica", mini, f"must divide {path}.batch_per_replica={batch}", "0 takes the whole batch")
    span = mini or batch
    if micro > 0 and span % micro:
        yield Violation(f"{path}.micro_batch_per_replica", micro, f"must divide the mini-batch of {span} completions", "0 takes one chunk")
    if micro > 0 and rl.micro_batch_tokens > 0:
        rule = f"cannot be combined with {path}.micro_batch_tokens={rl.micro_batch_tokens}: both size a forward"
        yield Violation(f"{path}.micro_batch_per_replica", micro, rule, "keep one of the two")


def _legacy(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    for spec in fields(rl):
        if spec.name in CLIPPED_ONLY and getattr(rl, spec.name) != default_of(spec):
            yield Violation(
                f"{path}.{spec.name}",
                getattr(rl, spec.name),
                "is never read by grpo_surrogate=legacy_pg",
                f"leave it at {default_of(spec)!r} or set {path}.grpo_surrogate=clipped",
            )
    if rl.n_mini > 1:
        yield Violation(
            f"{path}.mini_batch_per_replica",
            rl.mini_batch_per_replica,
            "legacy_pg has no importance ratio, so it takes one optimizer step per batch",
            "set it to 0",
        )


def _old_policy(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    key, cached = f"{path}.certified_deterministic_forward", rl.n_mini > 1 and not rl.use_rollout_logprobs_for_loss
    if cached and not rl.certified_deterministic_forward:
        yield Violation(
            key,
            False,
            f"must be true when a frozen old policy is cached over n_mini={rl.n_mini} optimizer steps",
            f"set it, or leave {path}.mini_batch_per_replica at the whole batch",
        )
    elif rl.certified_deterministic_forward and rl.n_mini == 1:
        yield Violation(key, True, "is read only with n_mini > 1", f"set {path}.mini_batch_per_replica")
    elif rl.certified_deterministic_forward and rl.use_rollout_logprobs_for_loss:
        rule = f"is never read with {path}.use_rollout_logprobs_for_loss=true, which caches no old policy"
        yield Violation(key, True, rule, "set it to false")


def _clip(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    if rl.importance_sampling_level == "sequence" and rl.lower_bound_ratio != 0:
        yield Violation(
            f"{path}.lower_bound_ratio",
            rl.lower_bound_ratio,
            f"must be 0 with {path}.importance_sampling_level=sequence, which applies no dual clip to a response's ratio",
            f"set {path}.lower_bound_ratio=0",
        )
    elif rl.lower_bound_ratio != 0 and rl.lower_bound_ratio <= 1:
        yield Violation(f"{path}.lower_bound_ratio", rl.lower_bound_ratio, "must be > 1, or 0 for off", "the paper uses 3.0")
    if rl.epsilon_low >= 1:
        yield Violation(f"{path}.epsilon_low", rl.epsilon_low, "must be < 1: the ratio is positive", "use a negative value to disable")


def _reference(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    ref = rl.ref
    if rl.kl_beta > 0 and not ref.build_ref:
        yield Violation(
            f"{path}.kl_beta", rl.kl_beta, f"needs a frozen reference: {path}.ref.build_ref is false", f"set {path}.ref.build_ref=true"
        )
    if ref.build_ref and rl.kl_beta == 0:
        rule = f"costs a copy of the network that {path}.kl_beta=0 never reads"
        yield Violation(f"{path}.ref.build_ref", True, rule, f"set {path}.kl_beta > 0, or {path}.ref.build_ref=false")
    if ref.update_every:
        yield Violation(
            f"{path}.ref.update_every", ref.update_every, "must be 0: the reference of a language-model run is frozen", "set it to 0"
        )
    if ref.model_dir is not None and not ref.build_ref:
        yield Violation(
            f"{path}.ref.model_dir", ref.model_dir, f"is read only with {path}.ref.build_ref=true", f"set {path}.ref.build_ref=true"
        )
    if rl.kl_coeff_clamp is not None and rl.kl_beta == 0:
        yield Violation(f"{path}.kl_coeff_clamp", rl.kl_coeff_clamp, f"is read only with {path}.kl_beta > 0", "set it to null")


def _score_centering(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    node, here = rl.score_centering, f"{path}.score_centering"
    used = {"top_k"} | ({"tis_clip"} if node.compose == "tis" else {"mis_low", "mis_high"} if node.compose == "mis" else set[str]())
    for spec in fields(node):
        name, value = spec.name, getattr(node, spec.name)
        if name == "enabled" or value == default_of(spec):
            continue
        if not node.enabled:
            yield Violation(f"{here}.{name}", value, f"is read only with {here}.enabled=true", f"leave it at {default_of(spec)!r}")
        elif name != "compose" and name not in used:
            rule = f"is never read with {here}.compose={node.compose}"
            yield Violation(f"{here}.{name}", value, rule, f"leave it at {default_of(spec)!r}")
    if not node.enabled:
        return
    for name, needed, why in (
        ("grpo_surrogate", "clipped", "only that surrogate is centred"),
        ("importance_sampling_level", "token", "the correction is per token"),
        ("use_rollout_logprobs_for_loss", False, "the ratio would already correct for the sampler"),
    ):
        if getattr(rl, name) != needed:
            yield Violation(
                f"{here}.enabled", True, f"needs {path}.{name}={str(needed).lower()}: {why}", f"set {path}.{name}={str(needed).lower()}"
            )
    if rl.n_mini > 1:
        rule = f"needs one optimizer step per batch (n_mini is {rl.n_mini}): later steps no longer see the sampled policy"
        yield Violation(f"{here}.enabled", True, rule, f"set {path}.mini_batch_per_replica=0")


def _dynamic_sampling(rl: GRPOConfig, path: str) -> Iterator[Violation]:
    literal, share = rl.min_informative_groups, rl.min_informative_groups_frac
    if literal and share is not None:
        rule = f"cannot be combined with {path}.min_informative_groups_frac={share}: both set the quota"
        yield Violation(f"{path}.min_informative_groups", literal, rule, "leave it at 0")
    if literal > 0 and literal * rl.group_size > rl.batch_per_replica:
        yield Violation(
            f"{path}.min_informative_groups",
            literal,
            f"times {path}.group_size={rl.group_size} exceeds {path}.batch_per_replica={rl.batch_per_replica}",
            f"set it to at most {rl.groups_per_step}",
        )
    if literal == 0 and share is None:
        for spec in fields(rl):
            if spec.name in DYNAMIC_SAMPLING and getattr(rl, spec.name) != default_of(spec):
                yield Violation(
                    f"{path}.{spec.name}",
                    getattr(rl, spec.name),
                    "is read only while a quota of informative groups is set",
                    f"set {path}.min_informative_groups_frac, or leave it at {default_of(spec)!r}",
                )
