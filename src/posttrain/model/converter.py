"""From a trainer's parameters to the names of a Hugging Face checkpoint: the only place that knows both."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from posttrain.model.lora import merged_parameters

_LAYER = re.compile(r"^.*?\.layers\.\d+\.")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of one that is sharded: every rank takes part."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def plain_named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) under the names of a module without adapters, for a copy of that very module."""
    return ((name, whole(tensor)) for name, tensor in merged_parameters(module))


def hf_named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) for a transformers causal language model, in the order of its parameters.

    Dense tensors are the parameters themselves, detached. Modules that transformers fuses on loading (the experts of a mixture)
    are taken apart again, one layer at a time, so that at most one layer exists twice. A tied head is yielded under its own
    name too: an engine may keep the head in a form of its own, and would not see a change of the embedding. Adapters are merged
    into the tensors they adapt.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(module, PreTrainedModel):
        yield from ((name, whole(parameter.detach())) for name, parameter in module.named_parameters())
        return
    group: dict[str, torch.Tensor] = {}
    key = ""
    for name, parameter in merged_parameters(module):
        match = _LAYER.match(name)
        layer = match.group() if match else name
        if group and layer != key:
            yield from revert_weight_conversion(module, group).items()
            group = {}
        key = layer
        group[name] = whole(parameter)
    if group:
        yield from revert_weight_conversion(module, group).items()
