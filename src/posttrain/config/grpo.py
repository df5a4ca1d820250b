"""`rl.*` of the GRPO family: every field of the contract and its derived sizes. Rules within the node: `grpo_rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from posttrain.config.base import bounded, choice, pending
from posttrain.config.run import HFRunConfig, RefConfig
from posttrain.errors import Violation


@dataclass
class GRPORefConfig(RefConfig):
    """The KL anchor of GRPO."""

    model_dir: str | None = None
    """Build the frozen reference from this directory instead of the policy's own checkpoint, e.g. to keep the original anchor
    when the policy starts from a later save."""


@dataclass
class ScoreCenteringConfig:
    """Centering of the policy gradient under the sampler's distribution."""

    enabled: bool = False
    """Subtract what sampler and trainer disagree about at every position; the sampler then reports the head it drew from."""
    top_k: int = bounded(128, ge=1)
    """Head tokens the sampler reports at every position; the tail is taken proportional to the trainer's."""
    compose: str = choice("none", "tis", "mis")
    """Importance weight f of p/q: `none` is 1, `tis` truncates at `tis_clip`, `mis` masks outside [mis_low, mis_high]."""
    tis_clip: float = bounded(2.0, ge=1.0)
    """Largest weight under `compose=tis`."""
    mis_low: float = bounded(0.5, gt=0.0, le=1.0)
    """Smallest ratio that `compose=mis` keeps."""
    mis_high: float = bounded(5.0, ge=1.0)
    """Largest ratio that `compose=mis` keeps."""


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
    importance_sampling_level: str = choice("token", "sequence")
    """One ratio per token, or one per response: exp of its mean token log-ratio (GSPO, arXiv 2507.18071)."""
    kl_beta: float = bounded(0.0, ge=0.0)
    """Weight of the k3 penalty that pulls every trained token towards the frozen reference; needs `ref.build_ref`."""
    kl_coeff_clamp: float | None = bounded(None, gt=0.0, lt=20.0)
    """Nats at which the penalty's gradient coefficient stops growing; the value stays exact. Null keeps the exact gradient, which
    one token can dominate; 5.0 is a good bound."""
    ref: GRPORefConfig = field(default_factory=GRPORefConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    unbiased_advantage: bool = False
    """False divides by the group's standard deviation; true only subtracts the mean."""
    advantage_estimator: str = ""
    """Dotted path of a module-level `(group: ScoredGroup) -> sequence of advantages`; empty takes the group-relative estimate."""
    use_rollout_logprobs_for_loss: bool = False
    """Take the sampler's log-probabilities for the old policy's instead of computing them again with the trainer."""
    min_filter_prefix_tokens: int | None = bounded(None, ge=1)
    """Leave out of the loss a prefix of at least this many tokens that members of one group share although their rewards
    differ."""
    mask_truncated_completions: bool = False
    """Leave completions cut at the token budget out of the loss (DAPO's overlong filtering); their rewards still count in the
    group's statistics."""
    recipe_guard_severity: str = choice("warn", "error")
    """Whether pairings of settings that are honoured but rarely meant are warned about or refused."""
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
    micro_batch_tokens: int = bounded(0, ge=0)
    """Instead of a count: at most this many prompt and completion tokens per forward, balanced over the micro-batches. 0 is off."""
    min_informative_groups: int = bounded(0, ge=0)
    """Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): keep drawing until this many groups of the step have rewards that
    differ. 0 is off."""
    min_informative_groups_frac: float | None = bounded(None, gt=0.0, le=1.0)
    """The same quota as a share of the groups of a step, which survives a change of batch layout; 1.0 is full DAPO."""
    dynamic_sampling_max_extra_rollouts: int = bounded(4, ge=1)
    """Extra rounds of drawing per step."""
    dynamic_sampling_refill_mode: str = choice("all", "short_cells")
    """Whether every data cell refills in a round, or only those short of informative groups."""
    dynamic_sampling_quota_scope: str = choice("cell", "pooled")
    """Whether every data cell must fill its share of the quota, or the assembled batch the whole of it."""
    dynamic_sampling_refill_dispatch: str = choice("per_round", "whole_budget")
    """One round per generation call, or all remaining rounds in one."""
    dynamic_sampling_on_budget_exhausted: str = choice("raise", "proceed")
    """End the run when the rounds are spent and the quota is short, or train on tied groups as filler."""
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
        return self.groups_per_step

    @property
    def groups_per_step(self) -> int:
        """Group capacity of one step. Sizes that are refused divide by one, here and below, so that all rules can be judged."""
        return self.batch_per_replica // max(1, self.group_size)

    @property
    def mini_batch(self) -> int:
        """Completions per optimizer step, with 0 resolved."""
        return self.mini_batch_per_replica if self.mini_batch_per_replica > 0 else self.batch_per_replica

    @property
    def micro_batch(self) -> int:
        """Completions per forward, with 0 resolved."""
        return self.micro_batch_per_replica if self.micro_batch_per_replica > 0 else self.mini_batch

    @property
    def n_mini(self) -> int:
        """Optimizer steps per collected batch."""
        return self.batch_per_replica // max(1, self.mini_batch)

    @property
    def n_micro(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.mini_batch // max(1, self.micro_batch)

    @property
    def effective_min_informative_groups(self) -> int:
        """The quota of informative groups that collection enforces; 0 is off.

        The share is read as the nearest rational with a denominator up to 10^6 before it is rounded up, so that 0.14 of 50
        groups is 7 although the product of the floats is a little more.
        """
        if self.min_informative_groups_frac is None:
            return self.min_informative_groups
        share = Fraction(self.min_informative_groups_frac).limit_denominator(10**6)
        return max(1, ceil(share * self.groups_per_step))

    def violations(self, path: str) -> Iterator[Violation]:
        from posttrain.config.grpo_rules import violations

        return violations(self, path)

    def cautions(self, path: str) -> Iterator[str]:
        """Settings that are honoured as written and deserve a word."""
        from posttrain.config.grpo_rules import cautions

        return cautions(self, path)


def resolve_data_seed(rl: GRPOConfig, rollout_seed: int | None) -> int:
    """The seed that orders prompts, resolved once for preflight and the data role alike."""
    return rollout_seed if rl.data_seed_follows_rollout_seed and rollout_seed is not None else rl.seed
