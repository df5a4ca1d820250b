"""What must be the same for a resumed run to be the run that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.errors import CheckpointError

FREE = (
    "defaults",
    "hydra",
    "provenance",
    "effective_objective",
    "tracker",
    "job",
    "rl.max_steps",
    "rl.validation",
    "rl.save_every",
    "rl.save_before_s",
    "rl.save_async",
    "rl.resume",
    "rl.run_ts",
    "rl.init_from",
    "rl.init_keys_to_skip_loading",
    "rl.keep_optim_last",
    "rl.keep_model_last",
    "rl.upload",
    "rl.checkpoint_components",
    "rl.checkpoint_store",
    "rl.checkpoint_format",
    "rl.reward_timeout_s",
    "rl.recipe_guard_severity",
    "rl.weight_sync_bucket_bytes",
    "rl.weight_sync_probe_bytes",
    "rl.weight_sync_min_gbps",
)
"""Keys, and subtrees, that no number of the training depends on."""

ROUNDING = (
    "grid",
    "model.parallelism",
    "model.gradient_checkpointing",
    "rl.deterministic",
    "rl.micro_batch_per_replica",
    "rl.micro_batch_tokens",
    "rollout.max_batch",
    "rollout.process",
    "rollout.max_num_seqs",
    "rollout.kv_cache_memory_bytes",
    "rollout.gpu_memory_utilization",
    "rollout.block_size",
    "rollout.enforce_eager",
)
"""Keys that change the order of sums: the update is the same, its last bits are not."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted leaves of nested mappings; lists are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves


def exact_values(plain_config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything an exact resume compares.

    Args:
        plain_config: the resolved configuration.
        extra: further facts by name: objective identity, data seed, digests of data files.
    """
    values = {key: value for key, value in flatten(plain_config).items() if not _below(key, FREE)}
    schedule = values.get("rl.optimizer.lr_schedule", "constant")
    if schedule != "constant":
        values["rl.max_steps"] = flatten(plain_config)["rl.max_steps"]  # the schedule's length
    return values | {f"{name}": value for name, value in flatten(extra).items()}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences that only move rounding, as sentences for a warning.

    Raises:
        CheckpointError: any other difference; lists all of them with both values.
    """
    differing = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    texts = {key: f"{key} was {saved.get(key)!r} and is {now.get(key)!r}" for key in differing}
    refused = [texts[key] for key in differing if not _below(key, ROUNDING)]
    if refused:
        raise CheckpointError(
            "this run cannot continue exactly:\n  "
            + "\n  ".join(refused)
            + "\nrestore these values; or start a new run from its weights with another job.name and rl.init_from"
        )
    return [texts[key] for key in differing]


def _below(key: str, roots: tuple[str, ...]) -> bool:
    return any(key == root or key.startswith(f"{root}.") for root in roots)
