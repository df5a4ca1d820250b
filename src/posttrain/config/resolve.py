"""From a composed Hydra config to the typed tree, with every violation found on the way in one error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Protocol, runtime_checkable

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config.base import default_of, field_violations, join, nearest, walk
from posttrain.config.root import RootConfig
from posttrain.config.rules import cross_violations
from posttrain.errors import ConfigError, Violation

RECORDED_ONLY = ("provenance", "effective_objective")
"""Top-level keys a run writes into `config_resolved.yaml`; reloading drops them."""


@runtime_checkable
class _Judging(Protocol):
    """A node with rules of its own."""

    def violations(self, path: str) -> Iterator[Violation]: ...


def resolve(composed: DictConfig) -> RootConfig:
    """Typed, checked tree of a composed configuration.

    Raises:
        ConfigError: with every violation: unknown keys (`+` and `++` slip past Hydra's closed schema), missing values,
            interpolations that lead nowhere, field bounds, and the rules between nodes.
    """
    found = violations(composed)
    if found:
        raise ConfigError(found)
    return _to_object(composed)


def violations(composed: DictConfig) -> list[Violation]:
    """Everything `resolve` would refuse, in reading order."""
    unset = list(_unset(composed))
    found = [*_unknown_keys(composed), *unset]
    root = _stand_in(composed, {violation.key for violation in unset})
    if root is None:
        return found
    judged: list[Violation] = []
    for path, node in walk(root):
        judged += field_violations(path, node)
        if isinstance(node, _Judging):
            judged += node.violations(path)
    judged += cross_violations(root)
    reported = {violation.key for violation in unset}
    found += [violation for violation in judged if violation.key not in reported]
    unique = {(violation.key, violation.rule): violation for violation in found}
    return list(unique.values())


def attempt(composed: DictConfig) -> RootConfig | None:
    """The typed tree of a configuration that may break rules; None when values are missing, so that there is no such tree."""
    return None if any(True for _ in _unset(composed)) else _to_object(composed)


def _unset(node: DictConfig, path: str = "") -> Iterator[Violation]:
    """Keys without a value: `???`, or an interpolation that leads nowhere."""
    for name in node:
        key = join(path, str(name))
        if key in RECORDED_ONLY:
            continue
        if OmegaConf.is_missing(node, name):
            yield Violation(key, "???", "has no value", f"set {key}=...")
            continue
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            text = str(OmegaConf.to_container(node, resolve=False)[str(name)])  # type: ignore[index,call-overload]
            yield Violation(key, text, str(error.msg or error).splitlines()[0], "correct the interpolation")
            continue
        if isinstance(value, DictConfig):
            yield from _unset(value, key)


def _stand_in(composed: DictConfig, unset: set[str]) -> RootConfig | None:
    """The typed tree with something harmless in place of unset values, so that all other rules can be judged; None without one."""
    if not unset:
        return _to_object(composed)
    patched = composed.copy()
    for key in unset:
        parent, _, name = key.rpartition(".")
        owner = OmegaConf.get_type(OmegaConf.select(patched, parent)) if parent else None
        if not is_dataclass(owner):
            return None
        spec = next((spec for spec in fields(owner) if spec.name == name), None)
        if spec is None:
            return None
        OmegaConf.update(patched, key, "unset" if spec.type in ("str", str) else default_of(spec))
    return _to_object(patched)


def _to_object(composed: DictConfig) -> RootConfig:
    plain = composed.copy()
    OmegaConf.set_struct(plain, False)
    for key in RECORDED_ONLY:
        if key in plain:
            plain[key] = None
    for key in [key for key in plain if key not in RootConfig.__dataclass_fields__]:
        del plain[key]
    root = OmegaConf.to_object(plain)
    if not isinstance(root, RootConfig):
        raise ConfigError("the composed configuration is not a posttrain config: its defaults list must start with /schema/root@_here_")
    return root


def _unknown_keys(node: DictConfig, path: str = "") -> Iterator[Violation]:
    owner = OmegaConf.get_type(node)
    if owner is None or not is_dataclass(owner):
        return
    known = [spec.name for spec in fields(owner)]
    for key in node:
        name = str(key)
        is_unset = OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)
        if name not in known and name != "hydra":
            value = None if is_unset else str(node[name])
            yield Violation(join(path, name), value, f"is not a key of {owner.__name__}", nearest(name, known))
        elif not is_unset and isinstance(node[name], DictConfig):
            yield from _unknown_keys(node[name], join(path, name))
