"""Every refusal and every warning of the GRPO section: the full key, and the part of the message that tells why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from posttrain.config import GRPOConfig
from posttrain.config.compose import compose_checked
from posttrain.config.grpo_rules import CLIPPED_ONLY, DYNAMIC_SAMPLING
from posttrain.config.rules import cautions
from posttrain.errors import ConfigError
from posttrain.preflight import plan
from tests.trees import refusals, root_of

SEQUENCE = "rl.importance_sampling_level=sequence rl.lower_bound_ratio=0 rl.epsilon_low=3e-4 rl.epsilon_high=4e-4"
MINI = "rl.mini_batch_per_replica=16"
CERTIFIED = f"{MINI} rl.certified_deterministic_forward=true"
KL = "rl.kl_beta=0.01 rl.ref.build_ref=true rl.kl_coeff_clamp=5"
CENTERED = "rl.score_centering.enabled=true"
QUOTA = "rl.min_informative_groups_frac=1.0"
LEGACY = "algorithm=legacy_pg"


def arguments(text: str) -> list[str]:
    words = text.split()
    return words if any(word.startswith("algorithm=") for word in words) else ["algorithm=grpo", *words]


REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    # sizing
    "batch_no_multiple": ("rl.batch_per_replica=30", {"rl.batch_per_replica": "must be a positive multiple of rl.group_size=8"}),
    "batch_below_group": ("rl.batch_per_replica=4", {"rl.batch_per_replica": "must be a positive multiple of rl.group_size=8"}),
    "batch_zero": ("rl.batch_per_replica=0", {"rl.batch_per_replica": "must be a positive multiple of rl.group_size=8"}),
    "batch_negative": ("rl.batch_per_replica=-8", {"rl.batch_per_replica": "must be a positive multiple of rl.group_size=8"}),
    "group_of_one": ("rl.group_size=1", {"rl.group_size": "must be >= 2"}),
    "group_zero": (f"rl.group_size=0 {QUOTA}", {"rl.group_size": "must be >= 2"}),
    "group_zero_guarded": ("rl.group_size=0 rl.recipe_guard_severity=error", {"rl.group_size": "must be >= 2"}),
    "ragged_mini": (
        "rl.mini_batch_per_replica=12 rl.certified_deterministic_forward=true",
        {"rl.mini_batch_per_replica": "must divide rl.batch_per_replica=32"},
    ),
    "mini_above_batch": (
        "rl.mini_batch_per_replica=64 rl.certified_deterministic_forward=true",
        {"rl.mini_batch_per_replica": "must divide rl.batch_per_replica=32"},
    ),
    "mini_negative": ("rl.mini_batch_per_replica=-4", {"rl.mini_batch_per_replica": "must be >= 0"}),
    "micro_ragged": ("rl.micro_batch_per_replica=12", {"rl.micro_batch_per_replica": "must divide the mini-batch of 32 completions"}),
    "micro_above_mini": (
        f"{CERTIFIED} rl.micro_batch_per_replica=32",
        {"rl.micro_batch_per_replica": "must divide the mini-batch of 16 completions"},
    ),
    "micro_twice": (
        "rl.micro_batch_per_replica=8 rl.micro_batch_tokens=600 rl.data.max_prompt_tokens=100",
        {"rl.micro_batch_per_replica": "cannot be combined with rl.micro_batch_tokens=600"},
    ),
    "micro_tokens_unbounded_prompt": ("rl.micro_batch_tokens=600", {"rl.micro_batch_tokens": "needs rl.data.max_prompt_tokens"}),
    "micro_tokens_below_one_sample": (
        "rl.micro_batch_tokens=355 rl.data.max_prompt_tokens=100",
        {"rl.micro_batch_tokens": "must hold one sample: rl.data.max_prompt_tokens=100 + rollout.max_tokens=256"},
    ),
    "grad_accum": ("rl.grad_accum=2", {"rl.grad_accum": "must be 1: GRPO draws one batch per step"}),
    "grad_accum_zero": ("rl.grad_accum=0", {"rl.grad_accum": "must be 1"}),
    "mu_iterations": ("rl.mu_iterations=2", {"rl.mu_iterations": "must be 1: reuse of a batch is expressed by mini-batches"}),
    # choices and bounds
    "unknown_surrogate": ("rl.grpo_surrogate=degenerate", {"rl.grpo_surrogate": "must be one of 'clipped', 'legacy_pg'"}),
    "unknown_loss_type": ("rl.loss_type=mean", {"rl.loss_type": "must be one of 'token-mean'"}),
    "unknown_level": ("rl.importance_sampling_level=response", {"rl.importance_sampling_level": "must be one of 'token', 'sequence'"}),
    "unknown_severity": ("rl.recipe_guard_severity=off", {"rl.recipe_guard_severity": "must be one of 'warn', 'error'"}),
    "unknown_compose": (
        f"{CENTERED} rl.score_centering.compose=clip",
        {"rl.score_centering.compose": "must be one of 'none', 'tis', 'mis'"},
    ),
    "negative_kl": ("rl.kl_beta=-0.1", {"rl.kl_beta": "must be >= 0"}),
    "routing_replay": ("rl.routing_replay=rollout", {"rl.routing_replay": "is not available yet"}),
    # old policy
    "uncertified": (MINI, {"rl.certified_deterministic_forward": "must be true when a frozen old policy is cached over n_mini=2"}),
    "certified_single_step": (
        "rl.certified_deterministic_forward=true",
        {"rl.certified_deterministic_forward": "is read only with n_mini > 1"},
    ),
    "certified_without_cache": (
        f"{CERTIFIED} rl.use_rollout_logprobs_for_loss=true",
        {"rl.certified_deterministic_forward": "is never read with rl.use_rollout_logprobs_for_loss=true"},
    ),
    # clip
    "dual_clip_of_sequence": (
        f"{CERTIFIED} {SEQUENCE} rl.lower_bound_ratio=3.0",
        {"rl.lower_bound_ratio": "must be 0 with rl.importance_sampling_level=sequence"},
    ),
    "dual_clip_inside_ratio_one": ("rl.lower_bound_ratio=0.5", {"rl.lower_bound_ratio": "must be > 1, or 0 for off"}),
    "epsilon_low_one": ("rl.epsilon_low=1.0", {"rl.epsilon_low": "must be < 1"}),
    # reference
    "kl_without_reference": ("rl.kl_beta=0.1", {"rl.kl_beta": "needs a frozen reference: rl.ref.build_ref is false"}),
    "reference_without_kl": ("rl.ref.build_ref=true", {"rl.ref.build_ref": "costs a copy of the network that rl.kl_beta=0 never reads"}),
    "clamp_zero": (f"{KL} rl.kl_coeff_clamp=0", {"rl.kl_coeff_clamp": "must be > 0"}),
    "clamp_negative": (f"{KL} rl.kl_coeff_clamp=-1", {"rl.kl_coeff_clamp": "must be > 0"}),
    "clamp_twenty": (f"{KL} rl.kl_coeff_clamp=20", {"rl.kl_coeff_clamp": "must be < 20"}),
    "clamp_without_kl": ("rl.kl_coeff_clamp=5", {"rl.kl_coeff_clamp": "is read only with rl.kl_beta > 0"}),
    "moving_reference": (f"{KL} rl.ref.update_every=10", {"rl.ref.update_every": "must be 0: the reference"}),
    "anchor_without_reference": ("rl.ref.model_dir=/models/base", {"rl.ref.model_dir": "is read only with rl.ref.build_ref=true"}),
    # score centering
    "centering_of_sequence": (
        f"{CENTERED} {SEQUENCE}",
        {"rl.score_centering.enabled": "needs rl.importance_sampling_level=token"},
    ),
    "centering_of_legacy": (f"{LEGACY} {CENTERED}", {"rl.score_centering.enabled": "needs rl.grpo_surrogate=clipped"}),
    "centering_over_mini_batches": (
        f"{CENTERED} {CERTIFIED}",
        {"rl.score_centering.enabled": "needs one optimizer step per batch (n_mini is 2)"},
    ),
    "centering_with_rollout_logprobs": (
        f"{CENTERED} rl.use_rollout_logprobs_for_loss=true",
        {"rl.score_centering.enabled": "needs rl.use_rollout_logprobs_for_loss=false"},
    ),
    "centering_top_k_zero": (f"{CENTERED} rl.score_centering.top_k=0", {"rl.score_centering.top_k": "must be >= 1"}),
    "centering_off_top_k": (
        "rl.score_centering.top_k=64",
        {"rl.score_centering.top_k": "is read only with rl.score_centering.enabled=true"},
    ),
    "centering_off_compose": (
        "rl.score_centering.compose=tis",
        {"rl.score_centering.compose": "is read only with rl.score_centering.enabled=true"},
    ),
    "centering_off_tis": ("rl.score_centering.tis_clip=3", {"rl.score_centering.tis_clip": "is read only with rl.score_centering.enabled"}),
    "centering_off_mis_low": ("rl.score_centering.mis_low=0.4", {"rl.score_centering.mis_low": "is read only with"}),
    "centering_off_mis_high": ("rl.score_centering.mis_high=4", {"rl.score_centering.mis_high": "is read only with"}),
    "plain_centering_tis": (
        f"{CENTERED} rl.score_centering.tis_clip=3",
        {"rl.score_centering.tis_clip": "is never read with rl.score_centering.compose=none"},
    ),
    "masked_centering_tis": (
        f"{CENTERED} rl.score_centering.compose=mis rl.score_centering.tis_clip=3",
        {"rl.score_centering.tis_clip": "is never read with rl.score_centering.compose=mis"},
    ),
    "truncated_centering_mis": (
        f"{CENTERED} rl.score_centering.compose=tis rl.score_centering.mis_low=0.4 rl.score_centering.mis_high=4",
        {
            "rl.score_centering.mis_low": "is never read with rl.score_centering.compose=tis",
            "rl.score_centering.mis_high": "is never read with rl.score_centering.compose=tis",
        },
    ),
    # dynamic sampling
    "two_quotas": (
        "rl.min_informative_groups=4 rl.min_informative_groups_frac=0.5",
        {"rl.min_informative_groups": "cannot be combined with rl.min_informative_groups_frac=0.5"},
    ),
    "quota_above_batch": (
        "rl.min_informative_groups=5",
        {"rl.min_informative_groups": "times rl.group_size=8 exceeds rl.batch_per_replica=32"},
    ),
    "negative_quota": ("rl.min_informative_groups=-1", {"rl.min_informative_groups": "must be >= 0"}),
    "share_zero": ("rl.min_informative_groups_frac=0", {"rl.min_informative_groups_frac": "must be > 0"}),
    "share_above_one": ("rl.min_informative_groups_frac=1.5", {"rl.min_informative_groups_frac": "must be <= 1"}),
    "share_not_finite": ("rl.min_informative_groups_frac=.nan", {"rl.min_informative_groups_frac": "must be a finite number"}),
    "rounds_zero": (f"{QUOTA} rl.dynamic_sampling_max_extra_rollouts=0", {"rl.dynamic_sampling_max_extra_rollouts": "must be >= 1"}),
    "rounds_without_quota": (
        "rl.dynamic_sampling_max_extra_rollouts=2",
        {"rl.dynamic_sampling_max_extra_rollouts": "is read only while a quota of informative groups is set"},
    ),
    "refill_mode_without_quota": (
        "rl.dynamic_sampling_refill_mode=short_cells",
        {"rl.dynamic_sampling_refill_mode": "is read only while a quota of informative groups is set"},
    ),
    "quota_scope_without_quota": (
        "rl.dynamic_sampling_quota_scope=pooled",
        {"rl.dynamic_sampling_quota_scope": "is read only while a quota of informative groups is set"},
    ),
    "dispatch_without_quota": (
        "rl.dynamic_sampling_refill_dispatch=whole_budget",
        {"rl.dynamic_sampling_refill_dispatch": "is read only while a quota of informative groups is set"},
    ),
    "exhaustion_without_quota": (
        "rl.dynamic_sampling_on_budget_exhausted=proceed",
        {"rl.dynamic_sampling_on_budget_exhausted": "is read only while a quota of informative groups is set"},
    ),
    "refill_mode_of_one_cell": (
        f"{QUOTA} rl.dynamic_sampling_refill_mode=short_cells",
        {"rl.dynamic_sampling_refill_mode": "grid.num_replicas=1 has a single one"},
    ),
    "quota_scope_of_one_cell": (
        "rl.min_informative_groups=4 rl.dynamic_sampling_quota_scope=pooled",
        {"rl.dynamic_sampling_quota_scope": "grid.num_replicas=1 has a single one"},
    ),
    # advantages
    "estimator_and_unbiased": (
        "rl.advantage_estimator=mine.estimate rl.unbiased_advantage=true",
        {"rl.unbiased_advantage": "is never read while rl.advantage_estimator='mine.estimate' computes the advantages"},
    ),
    "prefix_zero": ("rl.min_filter_prefix_tokens=0", {"rl.min_filter_prefix_tokens": "must be >= 1"}),
    # recipe guards
    "few_groups": (
        "rl.min_informative_groups=1 rl.recipe_guard_severity=error",
        {"rl.min_informative_groups": "is less than half of groups_per_step=4"},
    ),
    "wide_epsilon": (
        "rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-6 rl.recipe_guard_severity=error",
        {"rl.optimizer.eps": "so rl.optimizer.lr is not the step size"},
    ),
    "wide_epsilon_of_dr_grpo": ("algorithm=dr_grpo rl.optimizer.eps=1e-6", {"rl.optimizer.eps": "rl.recipe_guard_severity=error"}),
    "both_guards": (
        "rl.min_informative_groups=1 rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-6 rl.recipe_guard_severity=error",
        {
            "rl.min_informative_groups": "refused because rl.recipe_guard_severity=error",
            "rl.optimizer.eps": "refused because rl.recipe_guard_severity=error",
        },
    ),
    # sampling
    "greedy": ("rollout.temperature=0", {"rollout.temperature": "is greedy"}),
    "rewritten_temperature": ("rl.temperature=0.005 rollout.temperature=0.005", {"rollout.temperature": "is below 0.01"}),
    "temperatures_differ": ("rollout.temperature=0.7", {"rollout.temperature": "must equal rl.temperature=1.0"}),
    "scored_temperature_differs": ("rl.temperature=0.7", {"rollout.temperature": "must equal rl.temperature=0.7"}),
    "temperature_of_legacy": (f"{LEGACY} rollout.temperature=0.7", {"rollout.temperature": "must be 1.0 with grpo_surrogate=legacy_pg"}),
    "greedy_legacy": (f"{LEGACY} rollout.temperature=0", {"rollout.temperature": "is greedy"}),
    "raw_logprobs_tempered": (
        "rl.use_rollout_logprobs_for_loss=true rl.temperature=0.7 rollout.temperature=0.7",
        {"rl.use_rollout_logprobs_for_loss": "needs rollout.temperature=rl.temperature=1.0"},
    ),
    "top_p": ("rollout.top_p=0.9", {"rollout.top_p": "must be 1.0: on-policy training"}),
    "top_k": ("rollout.top_k=50", {"rollout.top_k": "must be 0: on-policy training"}),
    "repetition_penalty": ("rollout.repetition_penalty=1.1", {"rollout.repetition_penalty": "must be 1.0: on-policy training"}),
    "data_seed_without_seed": (
        "rl.data_seed_follows_rollout_seed=true",
        {"rl.data_seed_follows_rollout_seed": "needs an integer rollout.seed"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, expected = REFUSED[name]
    found = refusals(*arguments(text))
    assert {violation.key for violation in found} == set(expected)
    for key, rule in expected.items():
        assert any(violation.key == key and rule in violation.rule for violation in found), found
    assert all(violation.remedy for violation in found)


LEGACY_REFUSED = {
    "temperature": "rl.temperature=0.7",
    "loss_type": "rl.loss_type=seq-mean-token-sum",
    "logprob_dtype": "rl.logprob_dtype=float64",
    "epsilon_low": "rl.epsilon_low=0.1",
    "epsilon_high": "rl.epsilon_high=0.28",
    "lower_bound_ratio": "rl.lower_bound_ratio=0",
    "importance_sampling_level": "rl.importance_sampling_level=sequence",
    "kl_beta": "rl.kl_beta=0.1 rl.ref.build_ref=true",
    "kl_coeff_clamp": "rl.kl_coeff_clamp=5",
    "use_rollout_logprobs_for_loss": "rl.use_rollout_logprobs_for_loss=true",
    "mask_truncated_completions": "rl.mask_truncated_completions=true",
    "certified_deterministic_forward": "rl.certified_deterministic_forward=true",
    "micro_batch_tokens": "rl.micro_batch_tokens=600 rl.data.max_prompt_tokens=100",
}


def test_the_table_of_clipped_settings_is_complete() -> None:
    assert set(LEGACY_REFUSED) == set(CLIPPED_ONLY)


@pytest.mark.parametrize("name", LEGACY_REFUSED)
def test_legacy_pg_refuses_what_its_loss_never_reads(name: str) -> None:
    found = refusals(LEGACY, *LEGACY_REFUSED[name].split())
    assert {violation.key for violation in found} == {f"rl.{name}"}
    assert "is never read by grpo_surrogate=legacy_pg" in {violation.rule for violation in found}


def test_legacy_pg_takes_one_step_per_batch() -> None:
    found = refusals(LEGACY, MINI)
    assert [(violation.key, violation.rule.partition(",")[0]) for violation in found] == [
        ("rl.mini_batch_per_replica", "legacy_pg has no importance ratio")
    ]


def test_the_table_of_dynamic_sampling_is_complete() -> None:
    refused = {key.removeprefix("rl.") for text, expected in REFUSED.values() if "min_informative" not in text for key in expected}
    assert set(DYNAMIC_SAMPLING) <= refused


@pytest.mark.parametrize("key", ["objective", "objective_mode"])
def test_retired_selectors_are_unknown_keys(key: str) -> None:
    _, found = compose_checked(["algorithm=grpo", f"rl.{key}=clipped"])
    assert [(violation.key, violation.rule) for violation in found] == [(f"rl.{key}", "is not a key of GRPOConfig")]


def test_both_guards_are_listed_in_one_error() -> None:
    text, _ = REFUSED["both_guards"]
    message = str(ConfigError(refusals(*arguments(text))))
    assert "rl.min_informative_groups=1" in message and "rl.optimizer.eps=1e-06" in message
    assert "recipe_guard_severity=warn" in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        CERTIFIED,
        f"{CERTIFIED} {SEQUENCE}",
        f"{MINI} rl.use_rollout_logprobs_for_loss=true",
        f"{SEQUENCE} rl.use_rollout_logprobs_for_loss=true",
        KL,
        f"{KL} rl.kl_coeff_clamp=19.9",
        f"{KL} rl.ref.model_dir=/models/base",
        CENTERED,
        f"{CENTERED} rl.score_centering.compose=tis rl.score_centering.tis_clip=1.5 rl.score_centering.top_k=16",
        f"{CENTERED} rl.score_centering.compose=mis rl.score_centering.mis_low=0.9 rl.score_centering.mis_high=1.1",
        f"{CENTERED} {KL}",
        f"{QUOTA} rl.dynamic_sampling_refill_dispatch=whole_budget rl.dynamic_sampling_on_budget_exhausted=proceed",
        "rl.min_informative_groups=2 rl.recipe_guard_severity=error",
        "rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-7 rl.recipe_guard_severity=error",
        "rl.epsilon_low=-1 rl.epsilon_high=-1",
        "rl.micro_batch_tokens=356 rl.data.max_prompt_tokens=100",
        "rl.advantage_estimator=mine.estimate",
        "rl.min_filter_prefix_tokens=1 rl.mask_truncated_completions=true",
        "rl.data_seed_follows_rollout_seed=true rollout.seed=0",
        "rl.temperature=0.7 rollout.temperature=0.7",
        f"{LEGACY} rl.unbiased_advantage=true rl.min_filter_prefix_tokens=4 rl.micro_batch_per_replica=8 {QUOTA}",
        "algorithm=dr_grpo",
        "algorithm=gspo",
        "algorithm=dapo",
    ],
)
def test_honoured_without_a_word(text: str) -> None:
    assert list(cautions(root_of(*arguments(text)))) == []


WARNED: dict[str, tuple[str, str, str]] = {
    "few_groups": (
        "rl.min_informative_groups=1",
        "rl.min_informative_groups=1",
        "is less than half of groups_per_step=4: the count does not grow with the batch, so most groups may still tie; use "
        "rl.min_informative_groups_frac",
    ),
    "wide_epsilon": (
        "rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-6",
        "rl.optimizer.eps=1e-06",
        "rl.loss_type=seq-mean-token-sum-fixed leaves, so rl.optimizer.lr is not the step size",
    ),
    "sequence_epsilon_low": (f"{CERTIFIED} {SEQUENCE} rl.epsilon_low=0.2", "rl.importance_sampling_level=sequence", "rl.epsilon_low=0.2"),
    "sequence_epsilon_high": (
        f"{CERTIFIED} {SEQUENCE} rl.epsilon_high=0.051",
        "rl.importance_sampling_level=sequence",
        "rl.epsilon_high=0.051",
    ),
    "sequence_dtype": (
        f"{CERTIFIED} {SEQUENCE} rl.logprob_dtype=bfloat16",
        "rl.importance_sampling_level=sequence",
        "rl.logprob_dtype=bfloat16",
    ),
    "sequence_single_step": (SEQUENCE, "rl.importance_sampling_level=sequence", "trains as token-level GRPO"),
    "exact_kl": ("rl.kl_beta=0.01 rl.ref.build_ref=true", "rl.kl_beta=0.01", "without rl.kl_coeff_clamp"),
    "wide_refill": (
        f"rollout=vllm rollout.max_num_seqs=127 {QUOTA} rl.dynamic_sampling_refill_dispatch=whole_budget",
        "rl.dynamic_sampling_refill_dispatch=whole_budget",
        "128 sequences in one call, more than rollout.max_num_seqs=127",
    ),
    "seeds": ("rollout.seed=7 rl.data.shuffle=true", "rollout.seed=7", "all arms share one prompt order"),
    "gradients": (
        "rl.optimizer.force_finite_grads=false",
        "rl.optimizer.force_finite_grads=false",
        "a gradient that is not finite will be applied",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warned(name: str) -> None:
    text, start, telling = WARNED[name]
    root = root_of(*arguments(text))
    found = list(cautions(root))
    assert len(found) == 1, found
    assert found[0].startswith(start) and telling in found[0]
    assert f"note: {found[0]}" in plan(root)


@pytest.mark.parametrize(
    "text",
    [
        f"{CERTIFIED} {SEQUENCE} rl.epsilon_low=0.05 rl.epsilon_high=-1",
        f"{CERTIFIED} rl.logprob_dtype=bfloat16",
        f"rollout=vllm rollout.max_num_seqs=128 {QUOTA} rl.dynamic_sampling_refill_dispatch=whole_budget",
        f"rollout=vllm rollout.max_num_seqs=16 {QUOTA}",
        "rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-7",
        "rl.optimizer.eps=1e-6",
        "rl.min_informative_groups=2",
        "rl.min_informative_groups_frac=0.1",
        "rollout.seed=7",
        "rollout.seed=0 rl.data.shuffle=true",
        "rollout.seed=7 rl.data.shuffle=true rl.seed=3",
        "rollout.seed=7 rl.data.shuffle=true rl.data_seed_follows_rollout_seed=true",
    ],
)
def test_the_other_side_of_a_warning(text: str) -> None:
    assert list(cautions(root_of(*arguments(text)))) == []


def test_several_warnings_are_all_given() -> None:
    found = list(cautions(root_of("algorithm=grpo", "rl.importance_sampling_level=sequence", "rl.lower_bound_ratio=0")))
    assert len(found) == 2 and "never clips" in found[0] and "token-level GRPO" in found[1]


def test_guards_say_the_same_in_both_modes() -> None:
    text = "rl.min_informative_groups=1 rl.loss_type=seq-mean-token-sum-fixed rl.optimizer.eps=1e-6"
    said = list(cautions(root_of(*arguments(text))))
    refused = refusals(*arguments(f"{text} rl.recipe_guard_severity=error"))
    assert len(said) == len(refused) == 2
    for sentence, violation in zip(said, refused, strict=True):
        assert violation.rule.partition(" (refused")[0] in sentence


def test_one_override_turns_a_warning_into_a_refusal_of_check() -> None:
    command = [sys.executable, "-m", "posttrain", "check", "algorithm=grpo", "rl.min_informative_groups=1"]
    warned = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert warned.returncode == 0 and "note: rl.min_informative_groups=1: is less than half" in warned.stdout, warned.stderr
    refused = subprocess.run([*command, "rl.recipe_guard_severity=error"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "rl.min_informative_groups=1: is less than half" in refused.stderr


SHARES = [(0.14, 50, 7), (1.0, 64, 64), (0.5, 4, 2), (0.5, 5, 3), (0.01, 4, 1), (1 / 3, 9, 3), (0.7, 10, 7), (0.29, 100, 29)]


@pytest.mark.parametrize(("share", "groups", "quota"), SHARES, ids=json.dumps)
def test_a_share_of_the_groups_becomes_a_quota(share: float, groups: int, quota: int) -> None:
    rl = GRPOConfig(batch_per_replica=groups * 2, group_size=2, min_informative_groups_frac=share)
    assert rl.effective_min_informative_groups == quota
    assert GRPOConfig(min_informative_groups=3).effective_min_informative_groups == 3
