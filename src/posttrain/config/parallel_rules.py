"""Rules of several ranks: the mesh must be the ranks, and nothing about it may be left unread."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.base import default_of
from posttrain.config.grpo import GRPOConfig
from posttrain.config.model import HFModelConfig, NativePolicyBuildSpec
from posttrain.config.rollout import VLLMRolloutConfig
from posttrain.config.root import RootConfig
from posttrain.errors import Violation


def parallel_violations(root: RootConfig) -> Iterator[Violation]:
    """What `grid.ranks` and `model.parallelism` demand of each other, and of the rest."""
    ranks, model = root.grid.ranks, root.model
    if not isinstance(model, HFModelConfig | NativePolicyBuildSpec):
        return
    mesh = model.parallelism
    if min(ranks, mesh.dp_replicate, mesh.dp_shard) < 1:
        return  # the fields say so themselves
    if mesh.dp_replicate * mesh.dp_shard != ranks:
        yield Violation(
            "grid.ranks",
            ranks,
            f"must equal model.parallelism.dp_replicate={mesh.dp_replicate} x model.parallelism.dp_shard={mesh.dp_shard}",
            f"set grid.ranks={mesh.dp_replicate * mesh.dp_shard}, or model.parallelism.dp_shard={ranks} model.parallelism.dp_replicate=1",
        )
        return
    if ranks == 1:
        if isinstance(model, HFModelConfig):
            spec = HFModelConfig.__dataclass_fields__["fsdp_reduce_dtype"]
            if model.fsdp_reduce_dtype != default_of(spec):
                yield Violation(
                    "model.fsdp_reduce_dtype", model.fsdp_reduce_dtype, "is never read: one rank reduces no gradients", "drop it"
                )
        return
    if isinstance(root.rollout, VLLMRolloutConfig) and root.rollout.process != "separate":
        yield Violation(
            "rollout.process",
            root.rollout.process,
            f"shares its process group with the trainer's grid.ranks={ranks}, which vLLM cannot",
            "set rollout.process=separate",
        )
    rl = root.rl
    if isinstance(rl, GRPOConfig) and rl.grpo_surrogate == "legacy_pg" and rl.micro_batch % ranks:
        yield Violation(
            "rl.micro_batch_per_replica",
            rl.micro_batch_per_replica,
            f"leaves micro-batches of {rl.micro_batch} completions, which legacy_pg's plain mean must split evenly over grid.ranks={ranks}",
            f"make it a multiple of {ranks}",
        )


def parallel_cautions(root: RootConfig) -> Iterator[str]:
    """Ranks that would only wait."""
    rl, ranks = root.rl, root.grid.ranks
    if isinstance(rl, GRPOConfig) and not rl.micro_batch_tokens and rl.micro_batch < ranks:
        yield (
            f"grid.ranks={ranks} share micro-batches of {rl.micro_batch} completions: {ranks - rl.micro_batch} rank(s) only keep step; "
            f"set rl.micro_batch_per_replica to {ranks} or more"
        )
