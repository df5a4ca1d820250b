"""Process-wide settings that vLLM reads from the environment, and nowhere else."""

from __future__ import annotations

import os

import torch

from posttrain.config.rollout import VLLMRolloutConfig

COMMON = {
    "HF_HUB_OFFLINE": "1",  # the model is a local directory
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_environment(config: VLLMRolloutConfig) -> None:
    """Set what must stand in the environment before vLLM is imported; what the user has set stays.

    The one exception is VLLM_ENABLE_V1_MULTIPROCESSING, which *is* `rollout.process`. Variables of OpenMP reach an engine in
    its own process only: in this one, torch has already started its threads.
    """
    wanted = dict(COMMON)
    if not torch.cuda.is_available():
        # A waiting OpenMP thread spins by default, which starves the other process as soon as trainer and engine share cores.
        wanted |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "GOMP_SPINCOUNT": "0"}
        if config.enforce_eager:
            # Two functions of the sampler would be compiled in the first generate: ten seconds of gcc, and no faster after.
            wanted["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if config.process == "separate" else "0"


def forget_cached_environment() -> None:
    """Let the next engine read the environment again: an engine in this process freezes vLLM's view of it."""
    from vllm import envs

    envs.disable_envs_cache()
