"""Field helpers shared by every schema, and the checks that a field can state about itself.

OmegaConf has no `Literal`, and its enums fail one at a time while Hydra composes; a `str` field with declared choices is
checked at resolve time, together with everything else.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

from posttrain.errors import Violation


def choice(*values: str, default: str | None = None, pending: bool = False) -> Any:
    """A string with a closed set of values; the first one is the default unless `default` names another."""
    return field(default=values[0] if default is None else default, metadata={"choices": values, "pending": pending})


def bounded(default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None) -> Any:
    """A number with bounds; None passes when the field is optional."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le, "lt": lt})


def pending(default: Any, **bounds: Any) -> Any:
    """A field of the contract whose behaviour has not landed: any other value than its default is refused."""
    if callable(default):
        return field(default_factory=default, metadata={"pending": True, **bounds})
    return field(default=default, metadata={"pending": True, **bounds})


def default_of(spec: Field[Any]) -> Any:
    """The declared default of a dataclass field (a fresh object for factories)."""
    if spec.default is not NO_DEFAULT:
        return spec.default
    if spec.default_factory is not NO_DEFAULT:
        return spec.default_factory()
    return None


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass in a resolved tree with its dotted path, parents first."""
    if not is_dataclass(node) or isinstance(node, type):
        return
    yield path, node
    for spec in fields(node):
        yield from walk(getattr(node, spec.name), join(path, spec.name))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_LISTABLE = 12
"""More names than this help nobody in one line."""


def nearest(name: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the one that was probably meant, else all of them, else where to look."""
    match = difflib.get_close_matches(name, known, 1)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(sorted(known))}" if len(known) <= _LISTABLE else "see posttrain --cfg job for all keys"


_COMPARE = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def field_violations(path: str, node: Any) -> Iterator[Violation]:
    """What the declared choices, bounds and availability of one dataclass node say about its values."""
    for spec in fields(node):
        value, key = getattr(node, spec.name), join(path, spec.name)
        if spec.metadata.get("pending") and value != default_of(spec):
            yield Violation(key, value, "is not available yet", f"leave it at its default {default_of(spec)!r}")
            continue
        choices = spec.metadata.get("choices")
        if choices and value not in choices:
            yield Violation(key, value, f"must be one of {', '.join(repr(c) for c in choices)}", nearest(str(value), list(choices)))
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            yield Violation(key, value, "must be a finite number", f"the default is {default_of(spec)!r}")
            continue
        for name, (holds, sign) in _COMPARE.items():
            bound = spec.metadata.get(name)
            if bound is not None and not holds(value, bound):
                yield Violation(key, value, f"must be {sign} {bound}", f"the default is {default_of(spec)!r}")
