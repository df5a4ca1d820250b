"""Decides which parameters train."""

from __future__ import annotations

import torch

from posttrain.errors import ConfigError, Violation
from posttrain.model.lora import is_adapter


def select_trainable(module: torch.nn.Module, train_keys: list[str]) -> list[torch.nn.Parameter]:
    """Freeze every parameter whose name contains none of `train_keys` (empty trains all) and return the others. In a module with
    adapters only these are meant: its base stays frozen.

    Raises:
        ConfigError: a key matches no parameter.
    """
    named = list(module.named_parameters())
    adapters = [(name, parameter) for name, parameter in named if is_adapter(name)]
    candidates = adapters or named
    rule = (
        f"matches none of the adapters' {len(adapters)} parameters" if adapters else f"matches none of the model's {len(named)} parameters"
    )
    unmatched = [key for key in train_keys if not any(key in name for name, _ in candidates)]
    if unmatched:
        raise ConfigError(
            [Violation("rl.optimizer.train_keys", key, rule, f"use a part of a name such as {candidates[0][0]!r}") for key in unmatched]
        )
    chosen = {id(p) for name, p in candidates if not train_keys or any(key in name for key in train_keys)}
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in chosen)
    return [parameter for _, parameter in named if parameter.requires_grad]
