"""From a trainer's parameters to the names of a Hugging Face checkpoint: the only place that knows both."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_LAYER = re.compile(r"^.*?\.layers\.\d+\.")


def hf_named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) for a transformers causal language model, in the order of its parameters.

    Dense tensors are the parameters themselves, detached. Modules that transformers fuses on loading (the experts of a mixture)
    are taken apart again, one layer at a time, so that at most one layer exists twice. A tied head is yielded under its own
    name too: an engine may keep the head in a form of its own, and would not see a change of the embedding.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(module, PreTrainedModel):
        yield from ((name, parameter.detach()) for name, parameter in module.named_parameters())
        return
    group: dict[str, torch.Tensor] = {}
    key = ""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        match = _LAYER.match(name)
        layer = match.group() if match else name
        if group and layer != key:
            yield from revert_weight_conversion(module, group).items()
            group = {}
        key = layer
        group[name] = parameter.detach()
    if group:
        yield from revert_weight_conversion(module, group).items()
