"""`rl.deterministic`: what it switches on, and when it is refused instead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from posttrain.runtime.determinism import environment_violations

FLAGS = """\
import os, torch
from posttrain.runtime.determinism import make_deterministic
make_deterministic()
make_deterministic()
print(
    torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, os.environ["FLASH_ATTENTION_DETERMINISTIC"],
)
"""
REFUSED = """\
import torch
from posttrain.errors import ConfigError
from posttrain.runtime.determinism import make_deterministic
torch.cuda.is_initialized = lambda: {initialized}
torch.cuda.is_available = lambda: True
try:
    make_deterministic()
except ConfigError as error:
    print(error)
    print(torch.are_deterministic_algorithms_enabled())
"""


def python(program: str, **environ: str) -> str:
    """In a process of its own: the switches are global."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**kept, **environ})
    return done.stdout


def test_on_a_machine_without_gpu_it_needs_no_variables() -> None:
    assert python(FLAGS, CUDA_VISIBLE_DEVICES="") == "True True True False 1\n"


def test_it_is_refused_when_cuda_is_up_already() -> None:
    shown = python(REFUSED.format(initialized=True), CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONHASHSEED="42")
    assert "rl.deterministic=True: came too late: CUDA is already initialised" in shown and shown.endswith("False\n")


def test_it_is_refused_on_a_gpu_without_its_variables() -> None:
    shown = python(REFUSED.format(initialized=False))
    assert "CUBLAS_WORKSPACE_CONFIG" in shown and "PYTHONHASHSEED" in shown and shown.endswith("False\n")
    assert python(REFUSED.format(initialized=False), CUBLAS_WORKSPACE_CONFIG=":16:8", PYTHONHASHSEED="0") == ""


@pytest.mark.parametrize(
    ("environ", "fragments"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "42"}, []),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, ["PYTHONHASHSEED"]),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0", "PYTHONHASHSEED": "random"}, ["CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED"]),
    ],
)
def test_the_launch_environment(environ: dict[str, str], fragments: list[str]) -> None:
    found = list(environment_violations(environ))
    assert [any(f"needs {name}" in violation.rule for violation in found) for name in fragments] == [True] * len(fragments)
    assert len(found) == len(fragments) and {violation.key for violation in found} <= {"rl.deterministic"}
