"""`rl.optimizer.name=adamw`."""

from __future__ import annotations

import torch

from posttrain.config.run import OptimizerConfig


def build_adamw(config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay; fused, which on the CPU is several times faster than the loop over tensors."""
    beta1, beta2 = config.betas
    return torch.optim.AdamW(parameters, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay, fused=True)
