"""An engine in this process must not touch the trainer's random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's (CPU) generators afterwards: vLLM seeds them all at its start."""
    before_python, before_numpy, before_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before_python)
        np.random.set_state(before_numpy)
        torch.set_rng_state(before_torch)
