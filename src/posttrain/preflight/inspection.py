"""All checks in reading order."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config import GRPOConfig, RootConfig
from posttrain.config.compose import compose_checked
from posttrain.config.resolve import attempt
from posttrain.errors import Violation
from posttrain.preflight.context import context_violations, template_violations
from posttrain.preflight.data import inspect_sources
from posttrain.preflight.engine import engine_violations, store_violations, tracker_violations
from posttrain.preflight.installed import Installed, is_installed
from posttrain.preflight.machine import machine_violations
from posttrain.preflight.model import inspect_model
from posttrain.preflight.objective import code_violations
from posttrain.preflight.output import output_violations
from posttrain.preflight.rewards import CATALOG, reward_violations


def inspect(root: RootConfig, *, installed: Installed = is_installed) -> list[Violation]:
    """Everything that would stop this run later, found in seconds; an empty list when it may start.

    Args:
        root: a tree from `resolve`, or from `attempt` when its own rules are broken too.
        installed: says whether a top-level package is there.
    """
    found, model = inspect_model(root.model, installed=installed)
    data_found, sources = inspect_sources(root.rl, installed=installed)
    code = list(code_violations(root))
    found += [*code, *data_found]
    if isinstance(root.rl, GRPOConfig) and all(violation.key != CATALOG for violation in code):
        found += reward_violations(root.rl, sources, installed=installed)
    found += template_violations(root, model, sources)
    found += context_violations(root, model, sources)
    found += engine_violations(root.rollout, installed=installed)
    found += tracker_violations(root.tracker, installed=installed)
    found += store_violations(root.rl, installed=installed)
    found += machine_violations(root, installed=installed)
    found += output_violations(root.job)
    return found


def inspect_overrides(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config", installed: Installed = is_installed
) -> tuple[RootConfig | None, list[Violation]]:
    """Compose, resolve and inspect in one go, so that a person sees every violation at once.

    Returns:
        The tree when nothing is wrong, else None; and everything that is wrong.
    """
    composed, found = compose_checked(overrides, config_dir=config_dir, config_name=config_name)
    root = None if composed is None else attempt(composed)
    if root is None:
        return None, found
    refused = {violation.key for violation in found}
    found += [violation for violation in inspect(root, installed=installed) if violation.key not in refused]
    return (None if found else root), found
