"""`model.*`: what is trained and where its weights come from. The type of the node decides who builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from posttrain.config.base import choice, pending

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class ParallelismConfig:
    """How one policy instance shards over its ranks."""

    dp_replicate: int = pending(1)
    """Replicas of the sharded model (HSDP); 1 is pure sharding."""
    dp_shard: int = pending(1)
    """Ranks that share one copy of the parameters (FSDP)."""


@dataclass
class LoraConfig:
    """Low-rank adapters: only they train, save and travel."""

    rank: int = pending(0)
    """Adapter rank; 0 trains the full weights."""
    alpha: float = pending(16.0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: float = pending(0.0)
    """Dropout on the adapter's input."""
    target_modules: list[str] = pending(list)
    """Module names to adapt; empty adapts every linear layer but the head."""


@dataclass
class ModelConfig:
    """Base of every model node."""


@dataclass
class HFModelConfig(ModelConfig):
    """A text model through transformers' auto classes."""

    name_or_path: str = MISSING
    """A local directory, a hub id, or `package:MODULE/FILE.gguf` for weights that an installed Python package carries
    (dequantized once into the cache)."""
    dtype: str = choice(*DTYPES)
    """Parameter dtype unless the precision block of `rl` says otherwise."""
    fsdp_reduce_dtype: str = choice(*DTYPES, pending=True)
    """Gradient all-reduce dtype unless `rl.reduce_dtype` says otherwise."""
    attn_implementation: str = choice("sdpa", "eager", "flash_attention_2")
    """transformers' attention kernel."""
    trust_remote_code: bool = False
    """Allow a checkpoint to bring its own Python code; applies to model, tokenizer and engine alike."""
    gradient_checkpointing: bool = pending(False)
    """Recompute activations in the backward pass."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class NativePolicyBuildSpec(ModelConfig):
    """A policy from a builder function of one's own."""

    builder: str = MISSING
    """Dotted path of a module-level function `(model_config: dict, *, dtype: str) -> BuiltModel`."""
    model_id: str = MISSING
    """The identity shared by trainer, rollout and tokenizer."""
    model_config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Opaque to everyone but the builder; any key is allowed."""
    dtype: str = choice(*DTYPES)
    """Parameter dtype unless the precision block of `rl` says otherwise."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
