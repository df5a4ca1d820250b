"""What every metric key means: unit, meaning, and which direction is good. The report's tooltips and the docs read it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Better = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One entry of the metric reference."""

    unit: str
    """Empty for a plain ratio or reward."""
    meaning: str
    better: Better = "none"
    """The direction that is good, all else equal; `none` where the value is only read in context."""


METRICS: dict[str, MetricDoc] = {
    "reward/mean": MetricDoc("reward", "Mean total reward of the completions collected in this step.", "up"),
    "reward/std": MetricDoc("reward", "Standard deviation of the total rewards over all completions of the step."),
    "reward/failed": MetricDoc(
        "completions", "Completions the reward provider could not score; they carry its declared failure value.", "down"
    ),
    "reward/time_s": MetricDoc("s", "Time spent scoring the completions of the step.", "down"),
    "reward/slowest_s": MetricDoc("s", "The slowest single score of the step; compare it with rl.reward_timeout_s.", "down"),
    "reward/zero_spread_frac": MetricDoc(
        "fraction", "Groups whose completions all earned the same reward: they have no advantage and teach nothing.", "down"
    ),
    "reward/part/*": MetricDoc("reward", "Mean of one named component of the reward.", "up"),
    "train/loss": MetricDoc("", "The objective's value. At a ratio of one it is near zero by construction; it does not measure progress."),
    "train/clip_frac": MetricDoc(
        "fraction", "Trained tokens whose probability ratio left the clip range, so their gradient is cut.", "down"
    ),
    "train/ratio_absdev": MetricDoc(
        "ratio", "Mean |ratio - 1| of trained tokens, the ratio being new over old probability: how far the policy moved within the step."
    ),
    "train/ratio_max": MetricDoc("ratio", "Largest probability ratio of any trained token in the step.", "down"),
    "train/dual_clip_frac": MetricDoc(
        "fraction", "Trained tokens with a negative advantage whose ratio passed rl.lower_bound_ratio (dual clip).", "down"
    ),
    "train/entropy": MetricDoc(
        "nats", "Mean entropy of the policy's next-token distribution; a fast fall towards zero means exploration is ending."
    ),
    "train/logprob_gap_mean": MetricDoc(
        "nats",
        "Mean |trainer - sampler| log-probability of the sampled tokens under the same weights: rounding noise if the two agree.",
        "down",
    ),
    "train/logprob_gap_max": MetricDoc(
        "nats", "Largest |trainer - sampler| log-probability difference of one token; a jump points at stale or wrong weights.", "down"
    ),
    "train/logprob_gap_kl": MetricDoc(
        "nats", "Estimate of KL(sampler || trainer) from the sampled tokens; zero when rollout and training see one policy.", "down"
    ),
    "train/response_len_mean": MetricDoc("tokens", "Mean completion length in the step."),
    "train/response_len_max": MetricDoc("tokens", "Longest completion in the step; rollout.max_tokens is its ceiling."),
    "train/rollout_truncated_frac": MetricDoc("fraction", "Completions cut at the token budget instead of ending by themselves.", "down"),
    "train/valid_token_count": MetricDoc("tokens", "Tokens that entered the loss (the mask is on)."),
    "train/valid_sequence_count": MetricDoc("sequences", "Completions with at least one token in the loss."),
    "train/advantage_absmean": MetricDoc("", "Mean |advantage| over trained completions; zero means the batch carried no signal."),
    "optim/grad_norm": MetricDoc("", "Global gradient norm before clipping."),
    "optim/lr": MetricDoc("", "Learning rate of the last applied optimizer step."),
    "optim/applied_steps": MetricDoc("steps", "Optimizer steps applied for this batch; fewer than planned means a window was rejected."),
    "optim/finite_gradient_check_enabled": MetricDoc("0/1", "1 when windows with a non-finite gradient are rejected."),
    "rollout/tokens_per_s": MetricDoc("tokens/s", "Completion tokens generated per second of the generate phase.", "up"),
    "rollout/tokens": MetricDoc("tokens", "Completion tokens generated in the step."),
    "sync/*": MetricDoc("", "Publication of the trained weights to the rollout engine (bytes, seconds, version)."),
    "time/step_s": MetricDoc("s", "Wall time since the end of the previous step, everything included.", "down"),
    "time/*": MetricDoc("s", "Wall time of one phase within the step; phases never overlap.", "down"),
    "data/skipped_too_long": MetricDoc("prompts", "Prompts passed over because they exceed the prompt budget.", "down"),
    "data/epoch": MetricDoc("epochs", "Passes over the prompt source so far."),
    "val/accuracy": MetricDoc("reward", "Mean reward on held-out prompts with the validation sampler; the number that matters.", "up"),
    "val/response_len_mean": MetricDoc("tokens", "Mean completion length on held-out prompts."),
    "val/truncated_frac": MetricDoc("fraction", "Held-out completions cut at the token budget.", "down"),
    "memory/rss_gib": MetricDoc("GiB", "Resident memory of the process at the end of the step.", "down"),
}
"""Key, or pattern with `*`, to its documentation."""


def describe(key: str) -> MetricDoc | None:
    """The documentation of a metric key: its exact entry first, then the longest matching pattern; None if undocumented."""
    exact = METRICS.get(key)
    if exact is not None:
        return exact
    patterns = sorted((name for name in METRICS if "*" in name and fnmatchcase(key, name)), key=len, reverse=True)
    return METRICS[patterns[0]] if patterns else None
