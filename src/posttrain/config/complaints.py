"""What is wrong with one command-line override, in words about the configuration instead of Hydra's machinery."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from posttrain.config.base import nearest
from posttrain.config.root import RootConfig
from posttrain.config.store import SCHEMAS
from posttrain.errors import Violation

_WORDS: dict[object, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "booleans"),
    str: ("a text", "texts"),
    Any: ("a value", "values"),
}


def malformed(text: str, message: str) -> Violation:
    """An argument that is no override at all."""
    key, equals, value = text.partition("=")
    key = key.lstrip("+~")
    if not equals:
        return Violation(key, "", "must read KEY=VALUE", f"write {key}=..." if re.fullmatch(r"[\w.@/]+", key) else "see posttrain --help")
    for opening, closing, name in (("[", "]", "bracket"), ("{", "}", "brace"), ("(", ")", "parenthesis")):
        if value.count(opening) != value.count(closing):
            return Violation(key, value, f"has an unbalanced {name}", f"close it, or quote the whole value: \"{key}='...'\"")
    if value.count("'") % 2 or value.count('"') % 2:
        return Violation(key, value, "has an unbalanced quote", "close it (your shell removes one level of quotes)")
    first = message.splitlines()[1 if message.startswith("Error parsing override") else 0]
    reason = re.sub(r"^Lexer\w+: ", "unexpected character in ", first)
    rule = f"cannot be parsed: {reason}"
    return Violation(key, value, rule, f"quote the value twice: '{key}=\"...\"'")


def not_a_value(override: Override) -> Violation | None:
    """A sweep where one run was asked for, or an override without key; else None."""
    text = str(override.input_line).partition("=")[2]
    if not override.key_or_group:
        return Violation("", text, "names no key", "write KEY=VALUE")
    if override.is_sweep_override():
        remedy = f"add -m to run one after the other, or write {override.key_or_group}=[{text}] for a list"
        return Violation(override.key_or_group, text, "is a sweep over several values, and this is one run", remedy)
    return None


def refused_value(override: Override, error: Exception, *, composed: DictConfig, groups: Iterable[str]) -> Violation:
    """The violation behind the error that applying one value raised."""
    key, value = override.key_or_group, override.value()
    cause = error.__cause__ or error
    if override.package is not None or ("/" in key and not override.is_delete()):
        return Violation(key, value, "is no group", nearest(key, sorted(groups)))
    if override.is_delete():
        if "does not exist" in str(error):
            return _unknown(key, value, composed=composed, groups=groups)
        return Violation(key, value, "cannot be deleted: every key of the tree exists", "drop the ~ and set a value")
    if str(error).startswith("Could not append"):
        return Violation(key, value, "exists already, so + cannot add it", f"write {str(override.input_line).lstrip('+')}")
    full_key = re.sub(r"\[\d+\]", "", str(cause.full_key or key)) if isinstance(cause, OmegaConfBaseException) else key
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and "not in" in str(cause):
        return _unknown(full_key, _leaf(value, full_key.removeprefix(key)), composed=composed, groups=groups)
    expected = _expected(composed, full_key)
    if expected is None:
        return Violation(full_key, value, str(cause).splitlines()[0], "see posttrain --cfg job")
    shown = _leaf(value, full_key.removeprefix(key))
    if is_dataclass(expected):
        example = f"{full_key}.{fields(expected)[0].name}=..."
        return Violation(full_key, shown, f"is a section ({_name(expected)}), not one value", f"set its keys, e.g. {example}")
    return Violation(full_key, shown, f"must be {_describe(expected)}", _repair(value, expected, full_key))


def _unknown(key: str, value: object, *, composed: DictConfig, groups: Iterable[str]) -> Violation:
    parent, _, name = key.rpartition(".")
    owner: Any = RootConfig
    while parent:
        node = OmegaConf.select(composed, parent, throw_on_resolution_failure=False)
        owner = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if owner is not None:
            break
        parent, _, name = parent.rpartition(".")
    if not parent:
        known = sorted({spec.name for spec in fields(RootConfig)} | set(groups))
        return Violation(key, value, "is neither a key nor a group", nearest(name, known))
    if not is_dataclass(owner):
        return Violation(key, value, "is not there yet", f"add it: +{key}={value}")
    known = [spec.name for spec in fields(owner)]
    elsewhere = _other_option(parent, name)
    return Violation(key, value, f"is not a key of {_name(owner)}", elsewhere or nearest(name, known))


def _other_option(parent: str, name: str) -> str | None:
    """The remedy when another option of the same group has the key."""
    for path, schema in SCHEMAS.items():
        option = path.removeprefix(f"schema/{parent}/")
        cls: Any = schema if isinstance(schema, type) else OmegaConf.get_type(schema)  # type: ignore[arg-type]
        if option != path and name in {spec.name for spec in fields(cls)}:
            # every schema of a group has an option; only native models are chosen by their own files, such as model=tiny
            return f"it belongs to {cls.__name__}: set {parent}={'tiny' if option == 'native' else option}"
    return None


def _expected(composed: DictConfig, key: str) -> Any:
    """The declared type of a key, or None where nothing is declared."""
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(composed, parent, throw_on_resolution_failure=False) if parent else composed
    owner = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    if owner is None and parent:
        return _expected(composed, parent)
    return typing.get_type_hints(owner).get(name) if owner is not None and is_dataclass(owner) else None


def _describe(expected: Any) -> str:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if part is type(None) else _describe(part) for part in arguments)
    if origin is list:
        return f"a list of {_WORDS.get(arguments[0], ('', 'values'))[1]}"
    if origin is dict:
        return f"a mapping from text to {_WORDS.get(arguments[1], ('', 'values'))[1]}"
    return _WORDS.get(expected, (f"a {_name(expected)}", ""))[0]


def _repair(value: object, expected: Any, key: str) -> str:
    if expected is int and isinstance(value, float) and value.is_integer():
        return f"write {key}={int(value)}"
    text = _describe(expected)
    if "list" in text:
        return f"e.g. '{key}=[{'0.9, 0.95' if 'numbers' in text else 'a, b'}]'"
    if "mapping" in text:
        return f"e.g. '{key}={{name: 1}}'"
    return f"give {text}"


def _leaf(value: object, rest: str) -> object:
    """The part of a mapping override that a full key points at."""
    found = value
    for part in rest.strip(".").split("."):
        if not isinstance(found, dict) or part not in found:
            break
        found = cast("dict[str, object]", found)[part]
    return cast("object", found)


def _name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls)
