"""Dotted paths of user code and of the reference's directory: what they name must exist before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config import GRPOConfig, NativePolicyBuildSpec, RootConfig
from posttrain.errors import Violation
from posttrain.preflight.dotted import dotted_violations
from posttrain.runtime.artifact_identity import directory_problem


def code_violations(root: RootConfig) -> Iterator[Violation]:
    """Check every dotted path of user code, the row maps of both prompt sources, and `rl.ref.model_dir`."""
    rl = root.rl
    yield from dotted_violations("rl.objective_builder", rl.objective_builder, max_required_arguments=2)
    if isinstance(root.model, NativePolicyBuildSpec):
        yield from dotted_violations("model.builder", root.model.builder, max_required_arguments=1)
    if isinstance(rl, GRPOConfig) and rl.reward_provider_catalog:
        yield from dotted_violations("rl.reward_provider_catalog", rl.reward_provider_catalog, max_required_arguments=0)
    if isinstance(rl, GRPOConfig) and rl.advantage_estimator:
        yield from dotted_violations("rl.advantage_estimator", rl.advantage_estimator, max_required_arguments=1)
    if isinstance(rl, GRPOConfig) and rl.ref.build_ref and rl.ref.model_dir is not None:
        problem = directory_problem(rl.ref.model_dir)
        if problem:
            yield Violation(
                "rl.ref.model_dir", rl.ref.model_dir, problem, "name a directory with the reference's weights, or set it to null"
            )
    for path, data, used in (("rl.data", rl.data, True), ("rl.validation.data", rl.validation.data, rl.validation.num_prompts > 0)):
        if used and data.items_fn:
            yield from dotted_violations(f"{path}.items_fn", data.items_fn, max_required_arguments=1)
