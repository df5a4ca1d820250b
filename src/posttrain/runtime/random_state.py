"""The states of all random number generators of a process, as plain data."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Start every generator from one seed; unseeded ones would differ from run to run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Python's, numpy's and torch's generators, the GPUs' included."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in np.asarray(keys)], int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Continue every generator where `capture` found it; GPUs that were not there keep their own state."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
