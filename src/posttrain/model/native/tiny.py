"""A seeded random model with a byte-level tokenizer: everything a run needs, nothing downloaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from posttrain.config.run import resolved_dtype
from posttrain.errors import ModelError
from posttrain.model.native.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_level_tokenizer
from posttrain.model.native.sizes import DEFAULTS
from posttrain.model.protocol import BuiltModel
from posttrain.model.sources import cache_root


def build(model_config: dict[str, Any], *, dtype: str) -> BuiltModel:
    """A `NativePolicyBuildSpec` builder: a small Llama with weights drawn from `seed`.

    Args:
        model_config: any of `DEFAULTS`.

    Raises:
        ModelError: an unknown key.
    """
    unknown = sorted(set(model_config) - set(DEFAULTS))
    if unknown:
        raise ModelError(f"model.model_config.{unknown[0]}: the tiny builder knows {', '.join(sorted(DEFAULTS))}")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**DEFAULTS, **model_config}
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **{key: value for key, value in sizes.items() if key != "seed"},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(sizes["seed"]))
        module = LlamaForCausalLM(config)
    directory = _on_disk(module, tokenizer, sizes)  # in float32, before the cast below changes the module in place
    return BuiltModel(module.to(resolved_dtype(dtype)), tokenizer, directory)


def byte_tokenizer() -> Any:
    """One token a byte, five special tokens, ids padded to a multiple of 32, and a minimal chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE, model_max_length=512
    )


def _on_disk(module: Any, tokenizer: Any, sizes: dict[str, Any]) -> Path:
    """The same model as a directory, for engines that load from disk; keyed by what defines it."""
    key = hashlib.sha256(json.dumps([sizes, CHAT_TEMPLATE, SPECIAL_TOKENS], sort_keys=True).encode()).hexdigest()[:12]
    target = cache_root() / "models" / f"tiny-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tiny-", dir=target.parent))
    try:
        tokenizer.save_pretrained(scratch)
        module.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
