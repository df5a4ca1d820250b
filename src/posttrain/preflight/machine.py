"""What an optimizer, the adapters and determinism need of this machine, without asking torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.config import HFModelConfig, RootConfig
from posttrain.errors import Violation
from posttrain.preflight.installed import Installed
from posttrain.runtime.determinism import environment_violations

TRANSFORMER_ENGINE = 'pip install --no-build-isolation "transformer-engine[pytorch]" on a machine with a GPU'


def sees_gpu(environ: Mapping[str, str]) -> bool:
    """Whether the driver shows a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def machine_violations(
    root: RootConfig, *, installed: Installed, gpu: bool | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[Violation]:
    """Refuse what this machine cannot run.

    Args:
        gpu: whether it has a GPU; None looks.
        environ: None is this process's.
    """
    environ = os.environ if environ is None else environ
    gpu = sees_gpu(environ) if gpu is None else gpu
    if root.rl.optimizer.name == "fusedadam":
        missing = [] if gpu else ["a GPU"]
        missing += [] if installed("transformer_engine") else ["Transformer Engine"]
        if missing:
            rule = f"needs {' and '.join(missing)}, which this machine does not have"
            yield Violation("rl.optimizer.name", "fusedadam", rule, f"{TRANSFORMER_ENGINE}, or set rl.optimizer.name=adamw")
    if isinstance(root.model, HFModelConfig) and root.model.lora.rank and not installed("peft"):
        remedy = "pip install 'posttrain[lora]', or set model.lora.rank=0"
        yield Violation("model.lora.rank", root.model.lora.rank, "needs peft, which is not installed", remedy)
    if root.rl.deterministic and gpu:
        yield from environment_violations(environ)
