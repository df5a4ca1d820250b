"""`rollout.*`: who samples the completions and how. The type of the node decides the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from posttrain.config.base import bounded, choice, pending
from posttrain.errors import Violation

MODALITIES = ("image", "video", "audio")


@dataclass
class RolloutConfig:
    """Sampling, common to every engine."""

    temperature: float = bounded(1.0, ge=0.0)
    """Divides the logits before sampling; grouped rollout needs at least 0.01 (an engine would silently rewrite less)."""
    top_p: float = bounded(1.0, gt=0.0, le=1.0)
    """Nucleus mass; 1 keeps everything. On-policy training needs 1."""
    top_k: int = bounded(0, ge=0)
    """Keep only the k most likely tokens; 0 keeps everything. On-policy training needs 0."""
    repetition_penalty: float = bounded(1.0, gt=0.0)
    """Divides (multiplies, when negative) logits of tokens already present; 1 is off. On-policy training needs 1."""
    max_tokens: int = bounded(256, ge=1)
    """Completion budget in tokens; also the one owner of the fixed divisor of `seq-mean-token-sum-fixed`."""
    ignore_eos: bool = False
    """Sample on past the end-of-sequence token up to `max_tokens`: equal work for benchmarks. Held-out evaluation never does."""
    seed: int | None = None
    """Seeds the sampled completions; null derives it from `rl.seed`."""


@dataclass
class HFRolloutConfig(RolloutConfig):
    """Sampling with transformers on the policy's own parameters: no copy of the weights exists."""

    max_batch: int = bounded(0, ge=0)
    """Sequences decoded at once; 0 decodes all requests of a step together."""


@dataclass
class VLLMRolloutConfig(RolloutConfig):
    """A vLLM engine, in this process or in its own."""

    process: str = choice("in_process", "separate")
    """Where the engine core lives: `in_process` starts faster and copies less, `separate` has its own interpreter."""
    dtype: str = choice("", "float32", "bfloat16", "float16")
    """Engine weights and compute; empty inherits the resolved `rl.transfer_dtype`."""
    load_format: str = choice("auto", "dummy")
    """`auto` loads the checkpoint; `dummy` starts from random weights and generates nothing before a publication commits."""
    enforce_eager: bool = True
    """Skip torch.compile and CUDA graphs: starts in seconds, decodes somewhat slower."""
    max_model_len: int | None = bounded(None, ge=1)
    """Longest prompt plus completion in tokens; null takes the model's own limit."""
    gpu_memory_utilization: float = bounded(0.5, gt=0.0, le=1.0)
    """Share of one GPU's memory the engine may take (ignored by the engine on a machine without GPU)."""
    max_num_seqs: int | None = bounded(None, ge=1)
    """Sequences one engine runs at once; null leaves vLLM's default."""
    kv_cache_memory_bytes: int | None = bounded(None, ge=1)
    """Fixed KV-cache size in bytes; null lets vLLM derive it (on the CPU: 1 GiB)."""
    block_size: int | None = bounded(None, ge=1)
    """Tokens per KV block; null takes 32 on the CPU (so that short shared prompts hit the prefix cache), else vLLM's own."""
    async_scheduling: bool | None = None
    """Overlap scheduling of the next engine step with the current one; null leaves vLLM's default."""
    compilation_config: dict[str, Any] = field(default_factory=dict[str, Any])
    """vLLM's CompilationConfig as a mapping; needs `enforce_eager=false`. Empty is unset."""
    limit_mm_per_prompt: Any = None
    """Items per request by modality, e.g. {image: 4}; null leaves the engine's default, 0 disables a modality. (Declared as
    Any because OmegaConf cannot merge a mapping into a typed null; `violations` checks the type.)"""
    custom_all_reduce: bool = pending(False)
    """vLLM's own all-reduce kernel for full-node tensor-parallel engines."""

    def violations(self, path: str) -> Iterator[Violation]:
        if self.compilation_config and self.enforce_eager:
            yield Violation(
                f"{path}.compilation_config",
                self.compilation_config,
                "configures torch.compile and CUDA graphs, which enforce_eager=true switches off",
                f"set {path}.enforce_eager=false or drop it",
            )
        yield from self._modality_violations(f"{path}.limit_mm_per_prompt")

    def _modality_violations(self, key: str) -> Iterator[Violation]:
        limits = cast("dict[Any, Any] | None", self.limit_mm_per_prompt)
        if limits is None:
            return
        if not limits or not isinstance(self.limit_mm_per_prompt, dict):
            rule = "must be a mapping that names at least one modality"
            yield Violation(key, str(limits), rule, "e.g. {image: 4}, or null to leave the engine's default")
            return
        for name, count in limits.items():
            if name not in MODALITIES:
                yield Violation(key, name, f"modalities are {', '.join(MODALITIES)}", "use the bare lower-case name")
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                yield Violation(key, count, f"items per prompt of {name!r} must be an integer >= 0", "0 disables the modality")
