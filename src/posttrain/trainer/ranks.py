"""The ranks that train one policy together: who they are, and the small agreements between them.

Rank 0 is the process of the run itself. Collectives that a module's own shards need are FSDP's; what is here decides things: a
loss that is not finite on one rank is not finite for all, a backward pass runs on every rank or on none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import ParallelismConfig
from posttrain.errors import ModelError

DEADLINE_S = 120.0
"""Longest wait of one rank for the others inside a collective; a rank that died is noticed at once."""
START_DEADLINE_S = 600.0
"""Longest wait for all ranks to have imported everything and found each other."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among `size`; alone by default."""

    rank: int = 0
    size: int = 1
    mesh: Any = field(default=None, repr=False)
    """DeviceMesh (dp_shard) or (dp_replicate, dp_shard) of the policy; None alone."""
    host_mesh: Any = field(default=None, repr=False)
    """The same mesh over host memory."""
    control: Any = field(default=None, repr=False)
    """Process group of the agreements below."""
    saving: Any = field(default=None, repr=False)
    """Process group of checkpoints, which a background thread may use while training goes on."""

    @property
    def alone(self) -> bool:
        return self.size == 1

    def gather(self, value: float) -> list[float]:
        """Every rank's number, in the order of ranks."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        mine = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.control)
        return [float(part) for part in parts]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object, in the order of ranks."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value, group=self.control)
        return parts


ALONE = Ranks()


def check_devices(size: int) -> None:
    """Raises:
    ModelError: fewer GPUs than ranks.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise ModelError(
            f"grid.ranks={size} needs {size} GPUs and this machine shows {torch.cuda.device_count()}; lower grid.ranks, or hide them with "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def join(rank: int, size: int, *, parallelism: ParallelismConfig, rendezvous: Path) -> Ranks:
    """Meet the other ranks; every one of them calls this.

    Args:
        rendezvous: a path that does not exist yet and that all ranks share.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    check_devices(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(rendezvous), size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
        timeout=deadline,
    )
    replicate, shard = parallelism.dp_replicate, parallelism.dp_shard
    shape, names = ((replicate, shard), ("dp_replicate", "dp_shard")) if replicate > 1 else ((shard,), ("dp_shard",))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    host_mesh = mesh if device == "cpu" else init_device_mesh("cpu", shape, mesh_dim_names=names)
    for group in [*mesh.get_all_groups(), *host_mesh.get_all_groups()]:
        dist.distributed_c10d._set_pg_timeout(deadline, group)
    control = dist.new_group(backend="gloo", timeout=deadline)
    # a rank may wait here for another one that is still writing its shard to a slow disk
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=10 * DEADLINE_S))
    return Ranks(rank, size, mesh, host_mesh, control, saving)


def leave() -> None:
    """Forget the process groups; a later run in this process may start its own."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
