"""`rl.*` of the GRPO family: every field of the contract, its derived sizes and the rules within the node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from posttrain.config.base import bounded, choice, default_of, pending
from posttrain.config.run import HFRunConfig, RefConfig
from posttrain.errors import Violation

CLIPPED_ONLY = (
    "temperature",
    "loss_type",
    "logprob_dtype",
    "epsilon_low",
    "epsilon_high",
    "lower_bound_ratio",
    "certified_deterministic_forward",
)
"""Settings the `legacy_pg` loss never reads."""


@dataclass
class GRPORefConfig(RefConfig):
    """The KL anchor of GRPO."""

    model_dir: str | None = pending(None)
    """Build the frozen reference from this directory instead of the policy's own checkpoint."""


@dataclass
class ScoreCenteringConfig:
    """Centering of the policy gradient under the sampler's distribution."""

    enabled: bool = pending(False)
    top_k: int = pending(128)
    compose: str = choice("none", "tis", "mis", pending=True)
    tis_clip: float = pending(2.0)
    mis_low: float = pending(0.5)
    mis_high: float = pending(5.0)


@dataclass
class DataPoolConfig:
    """How bulk tensors travel between roles."""

    data_plane: str = choice("bulk_store", "ray_nixl_pool", pending=True)
    page_bytes: int = pending(33554432)
    cuda_capacity_bytes: int = pending(1073741824)
    cpu_capacity_bytes: int = pending(536870912)
    cuda_cache_bytes: int = pending(536870912)
    cpu_cache_bytes: int = pending(536870912)
    cpu_min_bytes: int = pending(33554432)


@dataclass
class GRPOConfig(HFRunConfig):
    """Group Relative Policy Optimization (arXiv 2402.03300) and its family."""

    grpo_surrogate: str = choice("clipped", "legacy_pg")
    """`clipped` is the production surrogate with importance ratios against a frozen old policy; `legacy_pg` the plain policy
    gradient for toys and parity tests."""
    temperature: float = bounded(1.0, gt=0.0)
    """Divides policy logits when completions are scored; must equal `rollout.temperature`."""
    loss_type: str = choice("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-fixed")
    """Normalization of the clipped loss; the fixed form divides by `rollout.max_tokens` (Dr-GRPO, arXiv 2503.20783)."""
    logprob_dtype: str = choice("float32", "bfloat16", "float16", "float64")
    """Dtype of the log-softmax, whatever the model computes in."""
    epsilon_low: float = 0.2
    """Lower clip bound 1 - epsilon_low of the ratio; negative disables that side."""
    epsilon_high: float = 0.2
    """Upper clip bound 1 + epsilon_high of the ratio; negative disables that side."""
    lower_bound_ratio: float = bounded(3.0, ge=0.0)
    """Dual clip (arXiv 1912.09729): bound on the ratio where the advantage is negative; 0 disables it."""
    importance_sampling_level: str = choice("token", "sequence", pending=True)
    """One ratio per token, or one per response (GSPO, arXiv 2507.18071)."""
    kl_beta: float = pending(0.0)
    """Weight of the KL penalty against the frozen reference."""
    kl_coeff_clamp: float | None = pending(None)
    ref: GRPORefConfig = field(default_factory=GRPORefConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    unbiased_advantage: bool = False
    """False divides by the group's standard deviation; true only subtracts the mean."""
    use_rollout_logprobs_for_loss: bool = pending(False)
    min_filter_prefix_tokens: int | None = pending(None)
    mask_truncated_completions: bool = pending(False)
    recipe_guard_severity: str = choice("warn", "error", pending=True)
    score_centering: ScoreCenteringConfig = field(default_factory=ScoreCenteringConfig)
    mu_iterations: int = 1
    """Must be 1: reuse of a batch is expressed by `mini_batch_per_replica`."""
    certified_deterministic_forward: bool = False
    """Attests that forwards of the same weights agree; required when a frozen old policy is cached over several optimizer
    steps. A probe still measures it on the first batch."""
    routing_replay: str = choice("off", "rollout", pending=True)
    batch_per_replica: int = bounded(32, ge=1)
    """Completions trained on per step: the primary size, a positive multiple of `group_size`."""
    group_size: int = bounded(8, ge=2)
    """Completions sampled per prompt."""
    mini_batch_per_replica: int = bounded(0, ge=0)
    """Completions per optimizer step; divides the batch. 0 takes the whole batch."""
    micro_batch_per_replica: int = bounded(0, ge=0)
    """Completions per forward and backward; divides the mini-batch. 0 takes one chunk. Changes memory, never the update."""
    min_informative_groups: int = pending(0)
    min_informative_groups_frac: float | None = pending(None)
    dynamic_sampling_max_extra_rollouts: int = pending(4)
    dynamic_sampling_refill_mode: str = choice("all", "short_cells", pending=True)
    dynamic_sampling_quota_scope: str = choice("cell", "pooled", pending=True)
    dynamic_sampling_refill_dispatch: str = choice("per_round", "whole_budget", pending=True)
    dynamic_sampling_on_budget_exhausted: str = choice("raise", "proceed", pending=True)
    data_seed_follows_rollout_seed: bool = False
    """Order prompts with `rollout.seed` instead of `rl.seed`."""
    reward: str = "arithmetic"
    """Provider key in the run's reward catalog."""
    reward_provider_catalog: str = ""
    """Dotted path of a zero-argument factory returning more providers; it cannot override built-ins."""
    reward_timeout_s: float = bounded(10.0, gt=0.0)
    """Deadline for scoring one completion; past it the completion counts as failed."""
    weight_sync_transport: str | None = pending(None)
    weight_sync_r2r_broadcast: bool = pending(False)
    weight_sync_bucket_bytes: int | None = bounded(None, ge=1)
    """Largest bucket of a weight publication in bytes; null sends 64 MiB at a time."""
    weight_sync_probe_bytes: int = pending(268435456)
    weight_sync_min_gbps: float = pending(20.0)
    colocated_offload: bool = pending(True)
    data_pool: DataPoolConfig = field(default_factory=DataPoolConfig)

    @property
    def prompts_per_data_replica(self) -> int:
        """Prompts drawn per step when one data replica serves them all."""
        return self.batch_per_replica // self.group_size

    @property
    def groups_per_step(self) -> int:
        """Group capacity of one step."""
        return self.batch_per_replica // self.group_size

    @property
    def mini_batch(self) -> int:
        """Completions per optimizer step, with 0 resolved."""
        return self.mini_batch_per_replica or self.batch_per_replica

    @property
    def micro_batch(self) -> int:
        """Completions per forward, with 0 resolved."""
        return self.micro_batch_per_replica or self.mini_batch

    @property
    def n_mini(self) -> int:
        """Optimizer steps per collected batch."""
        return self.batch_per_replica // self.mini_batch

    @property
    def n_micro(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.mini_batch // self.micro_batch

    @property
    def effective_min_informative_groups(self) -> int:
        """The quota of informative groups that collection enforces; 0 is off."""
        return self.min_informative_groups

    def violations(self, path: str) -> Iterator[Violation]:
        yield from self._sizing_violations(path)
        for name, why, use in (
            ("grad_accum", "GRPO draws one batch per step", f"use {path}.micro_batch_per_replica"),
            ("mu_iterations", "reuse of a batch is expressed by mini-batches", f"use {path}.mini_batch_per_replica"),
        ):
            if getattr(self, name) != 1:
                yield Violation(f"{path}.{name}", getattr(self, name), f"must be 1: {why}", use)
        if self.grpo_surrogate == "legacy_pg":
            yield from self._legacy_violations(path)
        elif self.n_mini > 1 and not self.certified_deterministic_forward:
            yield Violation(
                f"{path}.certified_deterministic_forward",
                False,
                f"must be true when a frozen old policy is cached over n_mini={self.n_mini} optimizer steps",
                f"set it, or leave {path}.mini_batch_per_replica at the whole batch",
            )
        elif self.n_mini == 1 and self.certified_deterministic_forward:
            yield Violation(
                f"{path}.certified_deterministic_forward", True, "is read only with n_mini > 1", f"set {path}.mini_batch_per_replica"
            )
        if self.lower_bound_ratio != 0 and self.lower_bound_ratio <= 1:
            yield Violation(f"{path}.lower_bound_ratio", self.lower_bound_ratio, "must be > 1, or 0 for off", "the paper uses 3.0")
        if self.epsilon_low >= 1:
            yield Violation(
                f"{path}.epsilon_low", self.epsilon_low, "must be < 1: the ratio is positive", "use a negative value to disable"
            )

    def _sizing_violations(self, path: str) -> Iterator[Violation]:
        batch, group, mini, micro = self.batch_per_replica, self.group_size, self.mini_batch_per_replica, self.micro_batch_per_replica
        if group >= 1 and (batch < 1 or batch % group):
            near = max(group, batch // group * group)
            yield Violation(
                f"{path}.batch_per_replica",
                batch,
                f"must be a positive multiple of {path}.group_size={group}",
                f"set {path}.batch_per_replica={near}",
            )
        if mini > 0 and batch % mini:
            yield Violation(
                f"{path}.mini_batch_per_replica", mini, f"must divide {path}.batch_per_replica={batch}", "0 takes the whole batch"
            )
        span = mini or batch
        if micro > 0 and span % micro:
            yield Violation(
                f"{path}.micro_batch_per_replica", micro, f"must divide the mini-batch of {span} completions", "0 takes one chunk"
            )

    def _legacy_violations(self, path: str) -> Iterator[Violation]:
        for spec in fields(self):
            if spec.name in CLIPPED_ONLY and getattr(self, spec.name) != default_of(spec):
                yield Violation(
                    f"{path}.{spec.name}",
                    getattr(self, spec.name),
                    "is never read by grpo_surrogate=legacy_pg",
                    f"leave it at {default_of(spec)!r} or set {path}.grpo_surrogate=clipped",
                )
        if self.n_mini > 1:
            yield Violation(
                f"{path}.mini_batch_per_replica",
                self.mini_batch_per_replica,
                "legacy_pg has no importance ratio, so it takes one optimizer step per batch",
                "set it to 0",
            )


def resolve_data_seed(rl: GRPOConfig, rollout_seed: int | None) -> int:
    """The seed that orders prompts, resolved once for preflight and the data role alike."""
    return rollout_seed if rl.data_seed_follows_rollout_seed and rollout_seed is not None else rl.seed
