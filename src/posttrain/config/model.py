"""`model.*`: what is trained and where its weights come from. The type of the node decides who builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from posttrain.config.base import bounded, choice

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class ParallelismConfig:
    """How one policy instance shards over its ranks."""

    dp_replicate: int = bounded(1, ge=1)
    """Replicas of the sharded model (HSDP); 1 is pure sharding."""
    dp_shard: int = bounded(1, ge=1)
    """Ranks that share one copy of the parameters (FSDP)."""


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685): only they train, save and travel. Engines of their own get the merged weights."""

    rank: int = bounded(0, ge=0)
    """Adapter rank; 0 trains the full weights."""
    alpha: float = bounded(16.0, gt=0.0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: float = bounded(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input while training; the sampler never drops."""
    target_modules: list[str] = field(default_factory=list[str])
    """Last parts of the names of the linear layers to adapt, e.g. [q_proj, v_proj]; empty adapts every linear layer but the head.
    Embeddings, heads and stacked experts take no adapter."""


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
    fsdp_reduce_dtype: str = choice(*DTYPES)
    """Gradient all-reduce dtype unless `rl.reduce_dtype` says otherwise."""
    attn_implementation: str = choice("sdpa", "eager", "flash_attention_2")
    """transformers' attention kernel."""
    trust_remote_code: bool = False
    """Allow a checkpoint to bring its own Python code; applies to model, tokenizer and engine alike."""
    gradient_checkpointing: bool = False
    """Keep only every layer's input and recompute the rest in the backward pass: less memory, about a third more work."""
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
