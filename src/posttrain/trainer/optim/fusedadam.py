"""`rl.optimizer.name=fusedadam`: AdamW on float32 master weights of its own, by Transformer Engine."""

from __future__ import annotations

import torch

from posttrain.config.run import OptimizerConfig
from posttrain.errors import ConfigError, Violation

INSTALL = 'pip install --no-build-isolation "transformer-engine[pytorch]" beside a CUDA build of torch, or set rl.optimizer.name=adamw'
"""What to do on a machine that lacks it; shared with the checks before a start."""


def build_fused_adam(config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Parameters stored in bfloat16 get float32 master weights, of which they are the rounded copy after every step, so that
    updates below their resolution are not lost. Moments are float32 whatever `master_dtype` is.

    Raises:
        ConfigError: no GPU, or Transformer Engine cannot be imported.
    """
    if not torch.cuda.is_available():
        raise ConfigError([_refusal("needs a GPU, and this process sees none")])
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:  # its empty meta package raises RuntimeError
        raise ConfigError([_refusal(f"needs Transformer Engine, which cannot be imported: {error}")]) from error
    beta1, beta2 = config.betas
    return FusedAdam(
        parameters,
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        master_weights=True,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
    )


def _refusal(rule: str) -> Violation:
    return Violation("rl.optimizer.name", "fusedadam", rule, INSTALL)
