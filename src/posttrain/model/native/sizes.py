"""What the tiny builder may be told, readable without torch."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
"""Sizes keep head_dim at 32: the smallest that CPU attention kernels of engines accept."""
