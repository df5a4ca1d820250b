"""Low-rank adapters by peft, inside the policy's own module: what they are called, how they begin, and what they merge to."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from posttrain.config.model import HFModelConfig, LoraConfig, ModelConfig
from posttrain.errors import ConfigError, ModelError, Violation

ADAPTER = "default"
"""peft's name of the one adapter."""
INSTALL = "pip install 'posttrain[lora]', or set model.lora.rank=0"

_ADAPTER_PART = re.compile(r"\.lora_[AB]\.")
_BASE_PART = ".base_layer."


def is_adapter(name: str) -> bool:
    """Whether a parameter name is an adapter's."""
    return _ADAPTER_PART.search(name) is not None


def base_name(name: str) -> str:
    """The name that a parameter of an adapted layer has in the checkpoint of the base model."""
    return name.replace(_BASE_PART, ".")


def lora_of(model: ModelConfig) -> LoraConfig | None:
    """The adapters a model node asks for; None trains the full weights."""
    return model.lora if isinstance(model, HFModelConfig) and model.lora.rank else None


def add_adapters(module: Any, config: LoraConfig) -> int:
    """Put an adapter beside the linear layers of a built model, in place and before it is sharded. It begins as the identity: B is
    zero, A is drawn from torch's global generator.

    Returns:
        Parameters of all adapters.

    Raises:
        ConfigError: peft is missing, or a target is no linear layer of the model.
        ModelError: the module has adapters already.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError([Violation("model.lora.rank", config.rank, f"needs peft, which cannot be imported: {error}", INSTALL)]) from error
    if holds_adapters(name for name, _ in module.named_parameters()):
        raise ModelError("the model has adapters already; a second set would be trained on top of the first")
    targets = _targets(module, list(config.target_modules))
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=targets)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sets it right for each layer
        peft.inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    module.eval()
    return sum(parameter.numel() for name, parameter in module.named_parameters() if is_adapter(name))


def _targets(module: Any, wanted: list[str]) -> list[str]:
    """Full names of the layers to adapt."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    layers = {name: child for name, child in module.named_modules() if isinstance(child, torch.nn.Linear | Conv1D) and child is not head}
    if not wanted:
        return sorted(layers)
    chosen = {target: [name for name in layers if f".{name}".endswith(f".{target}")] for target in wanted}
    unknown = [target for target, names in chosen.items() if not names]
    if unknown:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        rule = "is the end of no linear layer's name, the head left out"
        raise ConfigError([Violation("model.lora.target_modules", target, rule, f"this model has {known}") for target in unknown])
    return sorted({name for names in chosen.values() for name in names})


def holds_adapters(names: Iterable[str]) -> bool:
    """Whether any of these parameters is an adapter's."""
    return any(is_adapter(name) for name in names)


def base_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own tensors without its adapters, by base name; not copies."""
    return {base_name(name): value for name, value in module.state_dict().items() if not is_adapter(name)}


def saved_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a module's state a checkpoint holds: the adapters where there are some, else everything."""
    return {name: value for name, value in state.items() if is_adapter(name)} or dict(state)


def merged_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (base name, tensor) as a model without adapters would: W + alpha / rank * B A for every adapted layer, made when it is
    asked for, in float32 and rounded once. The module's own weights stay as they are.

    Tied parameters are yielded under each of their names.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    layers = {name.partition(".lora_A.")[0] for name, _ in named if ".lora_A." in name}
    for name, parameter in named:
        if is_adapter(name):
            continue
        layer, _, _ = name.partition(_BASE_PART)
        tensor = parameter.detach()
        if layer in layers and name == f"{layer}{_BASE_PART}weight":
            owner: Any = module.get_submodule(layer)
            exact = torch.promote_types(tensor.dtype, torch.float32)
            with torch.no_grad():
                tensor = (tensor.to(exact) + owner.get_delta_weight(ADAPTER).to(exact)).to(tensor.dtype)
        yield base_name(name), tensor
