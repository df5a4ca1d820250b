"""Composes a configuration without running it, and turns Hydra's one-at-a-time complaints into violations.

Hydra stops at the first broken override. Here each override is parsed alone, the groups are composed once, and the values are
applied one after the other, so that one call reports everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from posttrain.config.base import nearest
from posttrain.config.complaints import malformed, not_a_value, refused_value
from posttrain.config.locate import conf_dir
from posttrain.config.resolve import violations
from posttrain.config.store import register
from posttrain.errors import ConfigError, Violation


def compose_checked(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config"
) -> tuple[DictConfig | None, list[Violation]]:
    """The composed tree and everything wrong with it.

    A broken override is recorded and left out, so that one call reports all of them. The tree is None when the defaults list
    itself cannot be composed.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        return None, [Violation("--config-dir", config_dir, "is no directory", "name a directory of groups and presets")]
    found: list[Violation] = []
    parsed = [override for text in overrides if (override := _parsed(text, found)) is not None]
    loader = _loader(config_dir)
    choices, values = _divided(loader, config_name, parsed)
    composed = _composed(loader, config_name, choices, found)
    if composed is None:
        return None, found
    groups = {name for name in loader.list_groups("") if name not in ("schema", "hydra")}
    for override in values:
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], composed)  # pyright: ignore[reportPrivateUsage]
        except Exception as error:  # Hydra and OmegaConf raise a dozen types here
            found.append(refused_value(override, error, composed=composed, groups=groups))
    with open_dict(composed):
        # interpolations of job.* may point at hydra's own node while it is there; the run never reads it
        del composed["hydra"]
    OmegaConf.set_struct(composed, True)
    return composed, [*found, *violations(composed)]


def compose(overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config") -> DictConfig:
    """The composed tree, or a ConfigError with every violation."""
    composed, found = compose_checked(overrides, config_dir=config_dir, config_name=config_name)
    if composed is None or found:
        raise ConfigError(found)
    return composed


def _parsed(text: str, found: list[Violation]) -> Override | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        found.append(malformed(text, str(error)))
        return None
    problem = not_a_value(override)
    if problem is not None:
        found.append(problem)
        return None
    return override


def _loader(config_dir: str | None) -> ConfigLoaderImpl:
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    register()
    search_path = create_config_search_path(str(conf_dir()))
    if config_dir is not None:
        # where Hydra itself puts it: after the shipped directory, before the structured schemas
        search_path.prepend("command-line", f"file://{Path(config_dir).resolve()}", SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(config_search_path=search_path)


def _divided(loader: ConfigLoaderImpl, config_name: str, parsed: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Overrides that choose files (and Hydra's own), and overrides that set values."""
    lines = [str(override.input_line) for override in parsed if override.is_hydra_override()]
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, lines)  # pyright: ignore[reportPrivateUsage]
    choices: list[Override] = []
    values: list[Override] = []
    for override in parsed:
        is_group = repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)
        (choices if is_group or override.is_hydra_override() else values).append(override)
    return choices, values


def _composed(loader: ConfigLoaderImpl, config_name: str, choices: Sequence[Override], found: list[Violation]) -> DictConfig | None:
    """The tree of the chosen files, with broken choices recorded and left out; None when no choice is to blame."""
    remaining = list(choices)
    while True:
        try:
            return _load(loader, config_name, remaining)
        except Exception as error:  # Hydra raises a dozen types here; what cannot be attributed is reported whole
            message = str(error)
        blamed = _blamed(message, remaining, lambda rest: _load(loader, config_name, rest))
        found.append(_refused_choice(message, blamed))
        if blamed is None:
            return None
        remaining.remove(blamed)


def _load(loader: ConfigLoaderImpl, config_name: str, choices: Sequence[Override]) -> DictConfig:
    from hydra.types import RunMode

    return loader.load_configuration(config_name, [str(override.input_line) for override in choices], run_mode=RunMode.RUN)


def _blamed(message: str, choices: Sequence[Override], load: Callable[[list[Override]], object]) -> Override | None:
    """The choice that Hydra names as missing, else the one without which the rest composes."""
    missing = re.search(r"Could not find '([^']+)'", message)
    for override in reversed(choices):
        if missing is not None and f"{override.key_or_group}/{override.value()}" == missing.group(1):
            return override
    for override in reversed(choices):
        try:
            load([other for other in choices if other is not override])
        except Exception:  # still broken without it
            continue
        return override
    return None


def _refused_choice(message: str, override: Override | None) -> Violation:
    key = override.key_or_group if override is not None else "configuration"
    value = override.value() if override is not None else ""
    if override is not None and override.is_delete():
        return Violation(key, "", "is needed by the rest of the configuration", f"drop the ~ and choose with {key}=...")
    if override is not None and message.startswith("Multiple values for"):
        return Violation(key, value, "is chosen by the defaults list already, so + cannot add it", f"write {key}={value}")
    options = re.search(r"Available options in '([^']*)':\n((?:\t.+\n?)+)", message)
    if options is not None:
        known = options.group(2).split()
        if override is None or override.key_or_group != options.group(1):
            key, value = options.group(1), _missing_option(message, options.group(1))
        guess = nearest(str(value), known)
        remedy = guess if guess.startswith("known") else f"{guess} (known: {', '.join(known)})"
        return Violation(key, value, f"is no option of the group {options.group(1)}", remedy)
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(("\tprovider", "Config search path"))]
    return Violation(key, value, " ".join(lines[:2]), "see posttrain --help for groups and options")


def _missing_option(message: str, group: str) -> str:
    missing = re.search(r"Could not find '([^']+)'", message)
    return missing.group(1).removeprefix(f"{group}/") if missing is not None else ""
