"""`rl.deterministic`: kernels that give the same bits every time, and the conditions under which a process can still have them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from posttrain.errors import ConfigError, Violation

KEY = "rl.deterministic"
WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG under which cuBLAS is deterministic."""


def environment_violations(environ: Mapping[str, str]) -> Iterator[Violation]:
    """What the launch environment of a process with a GPU lacks. cuBLAS reads its variable when it makes its handle, Python its own
    before the first line runs, and worker processes inherit what the launch gave: setting them from here would be silently late."""
    workspace, hash_seed = environ.get("CUBLAS_WORKSPACE_CONFIG"), environ.get("PYTHONHASHSEED", "")
    if workspace not in WORKSPACES:
        rule = f"needs CUBLAS_WORKSPACE_CONFIG to be {' or '.join(WORKSPACES)} in the launch environment; it is {workspace!r}"
        yield Violation(KEY, True, rule, f"start with CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]} posttrain ...")
    if not hash_seed.isdigit():
        rule = f"needs PYTHONHASHSEED to be a number in the launch environment; it is {hash_seed!r}"
        yield Violation(KEY, True, rule, "start with PYTHONHASHSEED=42 posttrain ...")


def make_deterministic() -> None:
    """Switch this process to deterministic kernels, before it touches a GPU; operations that have none warn. Calling it again is
    harmless.

    Raises:
        ConfigError: CUDA is already in use, or the launch environment lacks a variable.
    """
    import torch

    if torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic:
        return
    if torch.cuda.is_initialized():
        rule = "came too late: CUDA is already initialised in this process, with kernels chosen for speed"
        raise ConfigError([Violation(KEY, True, rule, "start the run in a process of its own")])
    if torch.cuda.is_available():
        missing = list(environment_violations(os.environ))
        if missing:
            raise ConfigError(missing)
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
