"""Which parameters train, which optimizer moves them, and at which rate."""

from __future__ import annotations

import torch

from posttrain.config.run import OptimizerConfig
from posttrain.trainer.optim.adamw import build_adamw
from posttrain.trainer.optim.schedule import Schedule
from posttrain.trainer.optim.select import select_trainable

__all__ = ["Schedule", "build_optimizer", "select_trainable"]


def build_optimizer(config: OptimizerConfig, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a module's trainable parameters, which have been cast, adapted and sharded.

    Raises:
        ConfigError: this machine or this model cannot have it.
    """
    if config.name == "muon":
        from posttrain.trainer.optim.muon import build_muon

        return build_muon(config, module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if config.name == "fusedadam":
        from posttrain.trainer.optim.fusedadam import build_fused_adam

        return build_fused_adam(config, trained)
    return build_adamw(config, trained)
