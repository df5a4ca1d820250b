"""Judges a dotted path by reading source text: nothing the path names is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from posttrain.config.base import nearest
from posttrain.errors import Violation


def dotted_violations(key: str, path: str, *, max_required_arguments: int | None = None) -> Iterator[Violation]:
    """Refuse a path that names no module-level object.

    Args:
        max_required_arguments: refuse a function that demands more positional arguments than it will be called with.
    """
    parts = path.split(".")
    if "<" in path:
        rule = "names a lambda or a function inside another one, which no other process could import"
        yield Violation(key, path, rule, "move the function to the top level of a module")
        return
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        yield Violation(key, path, "must be a dotted path to a module-level object", f"set {key}=package.module.function")
        return
    spec, depth = _locate(parts)
    module = ".".join(parts[:depth])
    if spec is None:
        rule = f"names no importable module: {parts[0]!r} was not found"
        yield Violation(key, path, rule, "correct the path, or install the package that holds it (PYTHONPATH counts)")
        return
    if depth == len(parts):
        yield Violation(key, path, "is a module, and must name something inside it", f"append .<function> to {path}")
        return
    try:
        names = _module_names(spec)
    except SyntaxError as error:
        yield Violation(key, path, f"{spec.origin} is not valid Python (line {error.lineno}: {error.msg})", "fix the module")
        return
    if names is None:
        return
    name = parts[depth]
    if name not in names.known:
        what = "has no module and no object" if spec.submodule_search_locations is not None else "defines no"
        yield Violation(key, path, f"{module} {what} {name!r}", nearest(name, sorted(names.known)) if names.known else "correct the path")
        return
    if name in names.lambdas:
        yield Violation(key, path, "is a lambda, whose own name no other process could import", f"write `def {name}` at module level")
        return
    required = names.required_arguments.get(name) if depth == len(parts) - 1 else None
    if max_required_arguments is not None and required is not None and required > max_required_arguments:
        rule = f"is called with {max_required_arguments} positional arguments and demands {required}"
        yield Violation(key, path, rule, "give the others defaults")


def _locate(parts: list[str]) -> tuple[ModuleSpec | None, int]:
    """The deepest module on the path and how many parts it takes, found without running any of its parent packages."""
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):  # ValueError: a module such as __main__ that has no spec
        spec = None
    if spec is None:
        return None, 0
    for depth in range(1, len(parts)):
        if spec.submodule_search_locations is None:
            return spec, depth
        inner = PathFinder.find_spec(".".join(parts[: depth + 1]), list(spec.submodule_search_locations))
        if inner is None:
            return spec, depth
        spec = inner
    return spec, len(parts)


@dataclass(frozen=True, slots=True)
class _Names:
    known: frozenset[str]
    required_arguments: dict[str, int]
    lambdas: frozenset[str]


def _module_names(spec: ModuleSpec) -> _Names | None:
    """What a module defines at its top level; None when its text cannot tell (compiled, star imports, module `__getattr__`)."""
    if spec.origin is None and spec.submodule_search_locations is not None:
        return _Names(frozenset(), {}, frozenset())  # a directory without __init__.py
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, ValueError):
        return None
    known: set[str] = set()
    required: dict[str, int] = {}
    lambdas: set[str] = set()
    for statement in _top_level(tree.body):
        match statement:
            case ast.FunctionDef(name=name, args=arguments) | ast.AsyncFunctionDef(name=name, args=arguments):
                known.add(name)
                if not statement.decorator_list:
                    required[name] = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
            case ast.ClassDef(name=name):
                known.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                known.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
            case ast.Assign(value=value) | ast.AnnAssign(value=value):
                stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
                known |= stored
                if isinstance(value, ast.Lambda):
                    lambdas |= stored
            case _:
                pass
    if "*" in known or "__getattr__" in known:
        return None
    return _Names(frozenset(known), required, frozenset(lambdas))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, those inside `if`, `try`, `with`, `for` and `while` included."""
    for statement in body:
        yield statement
        match statement:
            case ast.If() | ast.For() | ast.While():
                yield from _top_level([*statement.body, *statement.orelse])
            case ast.With():
                yield from _top_level(statement.body)
            case ast.Try():
                handlers = [inner for handler in statement.handlers for inner in handler.body]
                yield from _top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
            case _:
                pass
