"""The run's reward catalog: the built-in providers and those of `rl.reward_provider_catalog`.

`describe` answers preflight's questions about a reward without importing any scoring library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from posttrain.config.base import nearest
from posttrain.errors import ConfigError, RewardError, Violation
from posttrain.reward import builtin
from posttrain.reward.provider import RewardProvider
from posttrain.runtime.dotted import import_dotted

_MEMBERS = ("name", "needs", "identity", "score", "close")


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """What is known of a reward before it is built."""

    name: str
    needs: frozenset[str]
    """Columns the prompt source must have."""
    missing_extra: str | None = None
    """Extra of posttrain that installs the library it needs; None when nothing is missing."""


@dataclass(frozen=True, slots=True)
class _Builtin:
    build: Callable[[float], RewardProvider]
    module: str | None = None
    extra: str | None = None


BUILTINS: Mapping[str, _Builtin] = {
    "arithmetic": _Builtin(builtin.build_arithmetic),
    "exact": _Builtin(builtin.build_exact),
    "math": _Builtin(builtin.build_math, module="math_verify", extra="math"),
    "reasoning_gym": _Builtin(builtin.build_reasoning_gym, module="reasoning_gym", extra="reasoning"),
}


def known_rewards(*, catalog_path: str = "") -> tuple[str, ...]:
    """Every name `rl.reward` may have."""
    return (*BUILTINS, *_custom(catalog_path))


def describe(name: str, *, catalog_path: str = "") -> RewardDescription:
    """What the reward needs. A custom provider is built and closed again: nothing else knows its needs."""
    custom = _custom(catalog_path)
    _known(name, custom)
    if name not in BUILTINS:
        provider = _built(name, custom[name])
        try:
            return RewardDescription(name, frozenset(provider.needs))
        finally:
            provider.close()
    return RewardDescription(name, builtin.NEEDS[name], _missing_extra(BUILTINS[name]))


def build_provider(name: str, *, catalog_path: str = "", timeout_s: float) -> RewardProvider:
    """The provider of that name; `timeout_s` bounds the scoring of one completion."""
    custom = _custom(catalog_path)
    _known(name, custom)
    if name not in BUILTINS:
        return _built(name, custom[name])
    missing = _missing_extra(BUILTINS[name])
    if missing is not None:
        raise RewardError(f"rl.reward={name!r}: needs the {BUILTINS[name].module} library; pip install 'posttrain[{missing}]'")
    return BUILTINS[name].build(timeout_s)


def _missing_extra(entry: _Builtin) -> str | None:
    return entry.extra if entry.module is not None and importlib.util.find_spec(entry.module) is None else None


def _known(name: str, custom: Mapping[str, object]) -> None:
    known = [*BUILTINS, *custom]
    if name not in known:
        guess = nearest(name, known)
        raise ConfigError([Violation("rl.reward", name, f"is not in the reward catalog (known: {', '.join(sorted(known))})", guess)])


def _custom(catalog_path: str) -> Mapping[str, object]:
    """The entries of the custom catalog; empty without one."""
    if not catalog_path:
        return {}
    key = "rl.reward_provider_catalog"
    factory = import_dotted(catalog_path)
    if not callable(factory):
        rule = f"must name a function without arguments, got {type(factory).__name__}"
        raise ConfigError([Violation(key, catalog_path, rule, "name a function that returns the catalog")])
    try:
        entries = factory()
    except Exception as error:
        raise RewardError(f"{key}={catalog_path!r}: the factory raised {type(error).__name__}: {error}; fix it") from error
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) and name for name in entries):
        rule = "must return a mapping from reward name to provider"
        raise ConfigError([Violation(key, catalog_path, rule, "return e.g. {'my_reward': map_candidates(...)}")])
    overridden = sorted(BUILTINS.keys() & entries.keys())
    if overridden:
        rule = f"cannot override the built-in {', '.join(repr(name) for name in overridden)}"
        raise ConfigError([Violation(key, catalog_path, rule, "give it another name")])
    return entries


def _built(name: str, entry: object) -> RewardProvider:
    """A provider from a catalog entry: the provider itself, or a zero-argument factory (a class included)."""
    # A class has `score` too, but as a function that lacks its object.
    is_factory = callable(entry) and (isinstance(entry, type) or not hasattr(entry, "score"))
    provider: object = entry
    if is_factory:
        try:
            provider = cast("Callable[[], object]", entry)()
        except Exception as error:
            raise RewardError(f"reward {name!r}: its factory raised {type(error).__name__}: {error}; fix it") from error
    missing = [member for member in _MEMBERS if not hasattr(provider, member)]
    if missing:
        raise RewardError(
            f"reward {name!r}: {type(provider).__name__} is not a provider, it lacks {', '.join(missing)}; implement RewardProvider or "
            "lift a scorer with map_candidates"
        )
    built = cast(RewardProvider, provider)
    if built.name != name:
        raise RewardError(f"reward {name!r}: the provider calls itself {built.name!r}, the names must agree; rename one")
    return built
