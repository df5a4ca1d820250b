"""Which Python packages are there, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

Installed = Callable[[str], bool]
"""Whether a top-level package can be imported; tests pass their own."""


def is_installed(package: str) -> bool:
    """True when the import system finds the package; nothing of it runs."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
