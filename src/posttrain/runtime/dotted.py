"""Importing what a configuration names by a dotted path: row maps, reward catalogs, and other user code.

Owns the rule for what may be named: something another process finds again under the same path. A lambda or a function made
inside a function has no such path, and a run that used one could not be reproduced from its recorded configuration.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from posttrain.errors import ConfigError


def import_dotted(path: str) -> object:
    """The object at `package.module.attribute` (an attribute of an attribute is allowed).

    Raises ConfigError when the path is malformed, when the module or the attribute does not exist, when importing the module
    fails, and when the object is a lambda or a nested function.
    """
    parts = path.split(".")
    if "<" in path:
        raise ConfigError(_unreachable(path))
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{path!r} is not a dotted path: it must read package.module.attribute; e.g. my_package.rewards.catalog")
    module, depth = _longest_module(path, parts)
    if depth == len(parts):
        raise ConfigError(f"{path!r} is a module: the path must name something inside it; append .<attribute>")
    found: object = module
    for position in range(depth, len(parts)):
        try:
            found = getattr(found, parts[position])
        except AttributeError:
            owner = ".".join(parts[:position])
            raise ConfigError(f"{path!r}: {owner!r} has no attribute {parts[position]!r}; check the spelling or define it there") from None
    qualified_name = getattr(found, "__qualname__", "")
    if isinstance(qualified_name, str) and "<" in qualified_name:
        raise ConfigError(_unreachable(path))
    return found


def _unreachable(path: str) -> str:
    return f"{path!r} names a lambda or a nested function: only module-level definitions can be found by path; write `def` at module level"


def _longest_module(path: str, parts: list[str]) -> tuple[ModuleType, int]:
    """The deepest importable module of the path and how many parts it takes."""
    module, depth = None, 0
    for position in range(1, len(parts) + 1):
        name = ".".join(parts[:position])
        try:
            module, depth = importlib.import_module(name), position
        except ModuleNotFoundError as error:
            if error.name == name:
                break
            # Some other module is missing: the one named exists but cannot be imported, which is not a wrong path.
            raise ConfigError(f"{path!r}: importing {name!r} failed: {error}; install what it needs") from error
        except Exception as error:
            raise ConfigError(f"{path!r}: importing {name!r} failed: {type(error).__name__}: {error}; fix the module") from error
    if module is None:
        raise ConfigError(f"{path!r}: there is no module {parts[0]!r}; install it or put its folder on PYTHONPATH")
    return module, depth
