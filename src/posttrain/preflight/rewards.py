"""Whether every reward exists, has its library, and finds the columns it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from posttrain.config import GRPOConfig
from posttrain.errors import ConfigError, RewardError, Violation
from posttrain.preflight.facts import SourceFacts
from posttrain.preflight.installed import Installed
from posttrain.reward.catalog import BUILTINS, RewardDescription, describe

CATALOG = "rl.reward_provider_catalog"


def reward_violations(rl: GRPOConfig, sources: Mapping[str, SourceFacts], *, installed: Installed) -> Iterator[Violation]:
    """Check the rewards of training and held-out validation against their prompt sources.

    A custom provider is built and closed again, for only it knows its columns; everything else is read from declarations.
    """
    uses = [("rl.reward", rl.reward, "rl.data")]
    if rl.validation.num_prompts > 0:
        own = rl.validation.reward
        uses.append(("rl.validation.reward" if own else "rl.reward", own or rl.reward, "rl.validation.data"))
    seen: set[tuple[str, str]] = set()
    for key, name, path in uses:
        described = _describe(key, name, rl.reward_provider_catalog)
        found = [described] if isinstance(described, Violation) else [*_judged(key, described, path, sources.get(path), installed)]
        for violation in found:
            if (violation.key, violation.rule) not in seen:
                seen.add((violation.key, violation.rule))
                yield violation


def _describe(key: str, name: str, catalog: str) -> RewardDescription | Violation:
    try:
        return describe(name, catalog_path=catalog)
    except ConfigError as error:
        if error.violations:
            first = error.violations[0]
            return Violation(key if first.key == "rl.reward" else first.key, first.value, first.rule, first.remedy)
        return Violation(CATALOG, catalog, str(error), "correct the catalog")
    except RewardError as error:
        rule, _, remedy = str(error).partition("; ")
        return Violation(CATALOG, catalog, rule, remedy or "correct the catalog")


def _judged(key: str, reward: RewardDescription, path: str, source: SourceFacts | None, installed: Installed) -> Iterator[Violation]:
    builtin = BUILTINS.get(reward.name)
    if builtin is not None and builtin.module is not None and not installed(builtin.module):
        rule = f"needs the {builtin.module} library, which is not installed"
        yield Violation(key, reward.name, rule, f"pip install 'posttrain[{builtin.extra}]'")
    if source is None:
        return
    certain = reward.needs - source.columns
    missing = certain if source.complete else certain & {"reference"}
    if missing:
        names = ", ".join(repr(name) for name in sorted(missing))
        offered = ", ".join(sorted(source.columns))
        rule = f"reads column {names}, which the source {path} does not have (it has {offered})"
        remedy = f"set {path}.response_column" if missing == {"reference"} else "choose another reward or source"
        yield Violation(key, reward.name, rule, remedy)
