"""Configuration trees for tests: a base is composed once, values are set on a copy."""

from __future__ import annotations

from functools import cache

from omegaconf import DictConfig, OmegaConf

from posttrain.config import GRPOConfig, RootConfig, resolve
from posttrain.config.compose import compose_checked
from posttrain.config.resolve import violations
from posttrain.errors import Violation


@cache
def _base(choices: tuple[str, ...]) -> DictConfig:
    composed, found = compose_checked(choices)
    assert composed is not None, found
    return composed


def tree(*overrides: str) -> DictConfig:
    """The composed tree of `GROUP=OPTION` and `KEY=VALUE`; much faster than composing every time. Keys must exist."""
    choices = tuple(text for text in overrides if "." not in text.partition("=")[0])
    composed = _base(choices).copy()
    for text in overrides:
        key, _, value = text.partition("=")
        if "." in key:
            OmegaConf.update(composed, key, OmegaConf.from_dotlist([f"value={value}"]).value, merge=False)
    return composed


def refusals(*overrides: str) -> list[Violation]:
    """Everything that the rules of the tree refuse."""
    return violations(tree(*overrides))


def root_of(*overrides: str) -> RootConfig:
    """The typed tree of a configuration that breaks no rule."""
    return resolve(tree(*overrides))


def grpo_of(*overrides: str) -> GRPOConfig:
    """Its `rl` node."""
    rl = root_of(*overrides).rl
    assert isinstance(rl, GRPOConfig)
    return rl
