"""From a model node to a built model: the type of the node decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from posttrain.config.model import HFModelConfig, ModelConfig, NativePolicyBuildSpec
from posttrain.config.run import Precision, resolved_dtype
from posttrain.errors import ModelError
from posttrain.model.protocol import BuiltModel
from posttrain.model.sources import materialize
from posttrain.runtime.dotted import import_dotted


def model_identity(config: ModelConfig) -> str:
    """The one name under which trainer, rollout and tokenizer know the policy."""
    if isinstance(config, HFModelConfig):
        return config.name_or_path
    if isinstance(config, NativePolicyBuildSpec):
        return config.model_id
    raise ModelError(f"model is a {type(config).__name__}, which has no identity")


def build_model(config: ModelConfig, *, precision: Precision) -> BuiltModel:
    """Build the policy in its master dtype, in evaluation mode (dropout off, as sampling needs).

    Raises:
        ModelError: files missing, or no causal language model with an output head.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # they would be drawn through the run's own panel
    if isinstance(config, HFModelConfig):
        built = _build_hf(config, precision=precision)
    elif isinstance(config, NativePolicyBuildSpec):
        builder = cast("Callable[..., BuiltModel]", import_dotted(config.builder))
        built = builder(dict(config.model_config), dtype=precision.master)
    else:
        raise ModelError(f"model is a {type(config).__name__}, which nothing builds")
    built.module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()
    return built


def _build_hf(config: HFModelConfig, *, precision: Precision) -> BuiltModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = materialize(config.name_or_path)
    common: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
        module = AutoModelForCausalLM.from_pretrained(
            source, dtype=resolved_dtype(precision.master), attn_implementation=config.attn_implementation, **common
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model.name_or_path={config.name_or_path!r} cannot be loaded: {error}") from error
    return BuiltModel(module, tokenizer, Path(source) if Path(source).is_dir() else None)
