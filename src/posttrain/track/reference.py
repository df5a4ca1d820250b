"""What every metric key means: unit, meaning, and which direction is good. The report's tooltips and the docs read it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
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
    "reward/mean": MetricDoc(
        "reward", "Mean total reward of the completions scored in this step, those of groups that dynamic sampling dropped included.", "up"
    ),
    "reward/std": MetricDoc(
        "reward", "Standard deviation of the total rewards inside a group, averaged over the groups scored in the step."
    ),
    "reward/spread": MetricDoc(
        "reward", "Largest minus smallest total reward inside a group, averaged over the groups scored in the step."
    ),
    "reward/zero_spread_frac": MetricDoc(
        "fraction",
        "Of all groups scored in the step, those whose completions all earned the same reward: they have no advantage and teach nothing.",
        "down",
    ),
    "reward/part/*": MetricDoc("reward", "Mean of one named component of the reward, over the completions that could be scored.", "up"),
    "reward/failed": MetricDoc(
        "completions", "Completions the reward provider could not score; they count with a total of 0, and events.jsonl says why.", "down"
    ),
    "reward/time_s": MetricDoc("s", "Time spent scoring the completions of the step.", "down"),
    "reward/slowest_s": MetricDoc("s", "The slowest single score of the step; compare it with rl.reward_timeout_s.", "down"),
    "train/informative_groups": MetricDoc("groups", "Groups of the trained batch whose rewards differ.", "up"),
    "train/zero_spread_frac": MetricDoc(
        "fraction",
        "Of the groups of the trained batch, those whose rewards tie. Without dynamic sampling it is reward/zero_spread_frac.",
        "down",
    ),
    "train/grpo_dynamic_sampling_extra_rollouts": MetricDoc(
        "rounds", "Extra rounds of drawing in the step. Only with a quota of informative groups, as the three keys below.", "down"
    ),
    "train/grpo_dynamic_sampling_refill_dispatches": MetricDoc(
        "calls", "Generation calls behind the extra rounds; one for all of them with rl.dynamic_sampling_refill_dispatch=whole_budget."
    ),
    "train/grpo_dynamic_sampling_dropped_groups": MetricDoc(
        "groups",
        "Groups drawn and scored in the step that are not in the trained batch: tied ones, and informative ones beyond its size.",
        "down",
    ),
    "train/grpo_dynamic_sampling_shortfall": MetricDoc(
        "groups", "Informative groups the quota still lacked when the rounds were spent; tied groups took their places.", "down"
    ),
    "train/loss": MetricDoc(
        "", "The objective's value, penalties included. At a ratio of one it is near zero by construction; it does not measure progress."
    ),
    "train/clip_frac": MetricDoc(
        "fraction",
        "Trained tokens whose loss the clip range changed: they give no gradient. 0 with one optimizer step per batch. With a ratio per "
        "response, the tokens of the clipped responses.",
        "down",
    ),
    "train/seq_clip_frac": MetricDoc(
        "fraction",
        "Responses with at least one token whose loss the clip range changed, over responses with at least one trained token. Large values "
        "are normal with a ratio per response.",
    ),
    "train/seq_log_ratio_abs": MetricDoc(
        "nats",
        "|mean log-ratio over the trained tokens of a response|, averaged over responses with at least one: what the clip of a ratio per "
        "response compares with ln(1 - epsilon_low) and ln(1 + epsilon_high).",
    ),
    "train/ratio_absdev": MetricDoc(
        "ratio",
        "Mean |ratio - 1| over trained tokens, the ratio being new over old probability: how far the policy moved within the step. With a "
        "ratio per response every token counts its response's.",
    ),
    "train/ratio_max": MetricDoc(
        "ratio", "Largest probability ratio of any trained token in the step; absent when no token was trained.", "down"
    ),
    "train/first_ratio_absdev": MetricDoc(
        "ratio",
        "Mean |ratio - 1| over the trained tokens of the run's first optimizer step, before anything has moved: 0 up to rounding. Only on "
        "the line of step 1, and only when an old policy is cached.",
        "down",
    ),
    "train/dual_clip_frac": MetricDoc(
        "fraction", "Trained tokens with a negative advantage whose ratio passed rl.lower_bound_ratio (dual clip).", "down"
    ),
    "train/kl_mean": MetricDoc(
        "nats",
        "Estimate of KL(policy || reference): k3, not scaled by rl.kl_beta, averaged over trained tokens. Only with rl.kl_beta > 0.",
    ),
    "train/kl_max": MetricDoc("nats", "Largest k3 of any trained token in the step. Only with rl.kl_beta > 0.", "down"),
    "train/kl_beta": MetricDoc("", "rl.kl_beta, the weight of the KL penalty. Only where it is above 0."),
    "train/sc_correction_abs": MetricDoc(
        "",
        "Size of score centering's correction: sum over the head of |its coefficient|, averaged over trained tokens; 0 when sampler and "
        "trainer agree. Only with rl.score_centering.enabled, as the other sc_ keys.",
        "down",
    ),
    "train/sc_head_mass": MetricDoc(
        "fraction", "Probability mass of the sampler's rl.score_centering.top_k likeliest tokens, averaged over trained tokens.", "up"
    ),
    "train/sc_tail_ratio_absdev": MetricDoc(
        "ratio", "Mean |ratio - 1| over trained tokens, the ratio being the sampler's mass outside the head over the trainer's.", "down"
    ),
    "train/sc_weight_mean": MetricDoc(
        "", "Importance weight of the sampled tokens, averaged over trained tokens; 1 with rl.score_centering.compose=none."
    ),
    "train/sc_reweighted_frac": MetricDoc("fraction", "Trained tokens whose importance weight is not exactly 1."),
    "train/entropy": MetricDoc(
        "nats",
        "Entropy of the policy's next-token distribution, averaged over trained tokens; a fast fall towards 0: exploration ends.",
    ),
    "train/logprob_gap_mean": MetricDoc(
        "nats",
        "Mean |trainer - sampler| log-probability of the tokens of the batch's first optimizer step, under the same weights: rounding "
        "noise if the two agree.",
        "down",
    ),
    "train/logprob_gap_max": MetricDoc(
        "nats",
        "Largest |trainer - sampler| log-probability difference of a token of the batch's first optimizer step; a jump points at stale "
        "or wrong weights.",
        "down",
    ),
    "train/logprob_gap_kl": MetricDoc(
        "nats",
        "Estimate of KL(sampler || trainer) from the tokens of the batch's first optimizer step; zero when rollout and training see one "
        "policy.",
        "down",
    ),
    "train/advantage_absmean": MetricDoc(
        "",
        "Mean |advantage| over all completions of the batch, tied and masked ones included; zero means the batch carried no signal. A "
        "completion with an advantage per token counts with their mean.",
    ),
    "train/skipped_backward_frac": MetricDoc(
        "fraction", "Micro-batches without any gradient (all their groups tied), whose backward pass was skipped. The update is the same."
    ),
    "train/valid_token_count": MetricDoc("tokens", "Tokens that entered the loss (the mask is on): the trained tokens of the other keys."),
    "train/valid_sequence_count": MetricDoc("sequences", "Completions with at least one token in the loss."),
    "train/response_len_mean": MetricDoc("tokens", "Mean completion length over everything sampled in the step, dropped groups included."),
    "train/response_len_max": MetricDoc("tokens", "Longest completion sampled in the step; rollout.max_tokens is its ceiling."),
    "train/rollout_truncated_frac": MetricDoc(
        "fraction", "Completions sampled in the step that were cut at the token budget instead of ending by themselves.", "down"
    ),
    "optim/grad_norm": MetricDoc("", "Global gradient norm before clipping, averaged over the optimizer steps of the batch."),
    "optim/lr": MetricDoc("", "Learning rate of the optimizer steps of this batch."),
    "optim/applied_steps": MetricDoc("steps", "Optimizer steps applied for this batch; fewer than planned means a window was rejected."),
    "optim/finite_gradient_check_enabled": MetricDoc("0/1", "1 when windows with a non-finite gradient are rejected."),
    "rollout/tokens": MetricDoc("tokens", "Completion tokens generated in the step, dropped groups included."),
    "rollout/tokens_per_s": MetricDoc("tokens/s", "Completion tokens generated per second of the generate phase.", "up"),
    "sync/seconds": MetricDoc("s", "Time to publish the step's weights to the rollout engine, verification included.", "down"),
    "sync/gib": MetricDoc("GiB", "Weights sent by the publication; 0 when the engine samples from the trainer's own parameters."),
    "sync/buckets": MetricDoc("buckets", "Transfers the publication was cut into (rl.weight_sync_bucket_bytes); 0 when nothing is sent."),
    "sync/verified_tensors": MetricDoc(
        "tensors", "Tensors proven to be the trainer's: equal digests in an engine's copy, or the same storage. Verified publications only."
    ),
    "sync/verified_gib_frac": MetricDoc(
        "fraction",
        "Share of the published bytes that those proofs cover; the probe has to answer for the rest. Verified publications only.",
    ),
    "sync/probe_gap": MetricDoc(
        "nats", "Largest |trainer - engine| log-probability on the fixed probe text. Verified publications to a separate copy only.", "down"
    ),
    "sync/*": MetricDoc("", "Publication of the trained weights to the rollout engine."),
    "data/epoch": MetricDoc("epochs", "Completed passes over the prompt source."),
    "data/skipped_too_long": MetricDoc("prompts", "Prompts passed over so far because they exceed rl.data.max_prompt_tokens.", "down"),
    "val/accuracy": MetricDoc("reward", "Mean reward on held-out prompts with the validation sampler; the number that matters.", "up"),
    "val/failed": MetricDoc(
        "completions", "Held-out completions the reward provider could not score; they count with a total of 0.", "down"
    ),
    "val/response_len_mean": MetricDoc("tokens", "Mean completion length on held-out prompts."),
    "val/truncated_frac": MetricDoc("fraction", "Held-out completions cut at the token budget.", "down"),
    "time/step_s": MetricDoc("s", "Wall time since the end of the previous step, everything included.", "down"),
    "time/*": MetricDoc(
        "s",
        "Wall time of one phase of the step: load and engine (before the first step), data, generate, reward, train, sync, validate; "
        "phases never overlap.",
        "down",
    ),
    "memory/rss_gib": MetricDoc("GiB", "Resident memory of the process at the end of the step (not GPU memory).", "down"),
    "memory/peak_rss_gib": MetricDoc("GiB", "Largest resident memory the process has had so far (not GPU memory).", "down"),
}
"""Key, or pattern with `*`, to its documentation."""


def describe(key: str) -> MetricDoc | None:
    """The documentation of a metric key: its exact entry first, then the longest matching pattern; None if undocumented."""
    exact = METRICS.get(key)
    if exact is not None:
        return exact
    patterns = sorted((name for name in METRICS if "*" in name and fnmatchcase(key, name)), key=len, reverse=True)
    return METRICS[patterns[0]] if patterns else None


_AREAS = {
    "reward": "What the reward provider said about the step's completions.",
    "train": "What the loss saw. *Trained tokens* are those whose mask is on, over all optimizer steps of the batch.",
    "optim": "The optimizer.",
    "rollout": "The sampler.",
    "sync": "Publication of weights to the rollout engine. See [rollout.md](rollout.md#how-weights-reach-the-engine).",
    "data": "The prompt source.",
    "val": "Held-out evaluation; only on the lines of steps after which one was made.",
    "time": "Where the wall time of the step went.",
    "memory": "The process.",
}
_GOOD = {"up": "higher", "down": "lower", "none": ""}


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metric reference",
        "",
        "Look up what a key of `metrics.jsonl` means, in which unit it is, and which direction is good, all else equal (an empty cell:",
        "read it in context). The same text is behind the tooltips of `report.html`. Beside these keys every line carries `step`",
        "(collected batches), `model_step` (committed optimizer steps) and `time_s` (seconds since the start). A `*` stands for any name.",
        "How to read the training diagnostics together: [grpo.md](grpo.md#what-to-watch).",
        "",
        "This page is generated from `posttrain.track.reference`; do not edit it.",
    ]
    for area, keys in groupby(METRICS, lambda key: key.partition("/")[0]):
        lines += ["", f"## {area}", "", _AREAS[area], "", "| key | unit | better | meaning |", "|---|---|---|---|"]
        for key in keys:
            doc = METRICS[key]
            meaning = doc.meaning.replace("|", "\\|")
            lines.append(f"| `{key}` | {doc.unit} | {_GOOD[doc.better]} | {meaning} |")
    return "\n".join(lines) + "\n"
