"""What is handed to `vllm.LLM`: each knob of the config exactly when it is set."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from posttrain.config.rollout import VLLMRolloutConfig
from posttrain.errors import RolloutError

WORKER_EXTENSION = "posttrain.rollout.worker_extension.WeightUpdateExtension"
CPU_BLOCK_SIZE = 32
"""Tokens per KV block on the CPU, where vLLM's own 128 keeps prompts shorter than that out of the prefix cache."""
CPU_KV_CACHE_BYTES = 2**30
CPU_KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def engine_arguments(
    config: VLLMRolloutConfig, *, model_dir: Path, dtype: str, trust_remote_code: bool, seed: int, is_cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Raises RolloutError when the environment contradicts the config: vLLM would let the environment win without a word.
    """
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": config.dtype or dtype,
        "trust_remote_code": trust_remote_code,
        "seed": seed,
        "load_format": config.load_format,
        "enforce_eager": config.enforce_eager,
        # -1 is vLLM's "as long as the model allows and the KV cache can hold".
        "max_model_len": -1 if config.max_model_len is None else config.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    optional = {
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "async_scheduling": config.async_scheduling,
        "limit_mm_per_prompt": config.limit_mm_per_prompt,
        "compilation_config": config.compilation_config or None,
    }
    arguments |= {name: deepcopy(value) for name, value in optional.items() if value is not None}
    if not is_cpu:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        return arguments
    arguments.setdefault("block_size", CPU_BLOCK_SIZE)
    in_environment = os.environ.get(CPU_KV_CACHE_VARIABLE, "")
    if in_environment and config.kv_cache_memory_bytes is not None:
        raise RolloutError(
            f"rollout.kv_cache_memory_bytes={config.kv_cache_memory_bytes}: the environment sets {CPU_KV_CACHE_VARIABLE}={in_environment} "
            "(GiB), which vLLM prefers; unset one of the two"
        )
    if not in_environment:
        arguments.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    return arguments
