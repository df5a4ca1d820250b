"""A small net with every kind of parameter, and two processes that train it sharded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from posttrain.config import OptimizerConfig


class Experts(torch.nn.Module):
    """Declares its stacks as transformers' expert modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.is_concatenated, self.is_transposed = True, True, False
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 2 * 6, 8))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 8, 6))


class Net(torch.nn.Module):
    """Never run: its gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(12, 8)
            self.first = torch.nn.Linear(8, 18)
            self.second = torch.nn.Linear(18, 8, bias=False)
            self.norm = torch.nn.LayerNorm(8)
            self.gate = torch.nn.Linear(8, 4, bias=False)
            self.experts = Experts()


def gradients(net: torch.nn.Module, step: int) -> None:
    """The same gradient on every rank and for every layout."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for number, parameter in enumerate(net.parameters()):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * step + number))
        sharded = isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements) if sharded else whole


def run_ranks(folder: Path, config: OptimizerConfig, *, steps: int) -> dict[str, Any]:
    """What rank 0 of two saw after the steps: whole parameters, names of the optimizer state, and matrices gathered."""
    import torch.multiprocessing as mp

    mp.spawn(_rank, args=(2, str(folder), asdict(config), steps), nprocs=2)
    return torch.load(folder / "shown.pt", weights_only=False)


def _rank(rank: int, world: int, folder: str, config: dict[str, Any], steps: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from posttrain.checkpoint.tensors import optimizer_state
    from posttrain.trainer.optim.muon import build_muon

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = build_muon(OptimizerConfig(**config), net)
    gathered = 0
    whole_of = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
        nonlocal gathered
        gathered += 1
        return whole_of(tensor, **options)

    for step in range(steps):
        gradients(net, step)
        DTensor.full_tensor = counted  # type: ignore[method-assign]
        optimizer.step()
        DTensor.full_tensor = whole_of  # type: ignore[method-assign]
    whole = {name: parameter.full_tensor().detach() for name, parameter in net.named_parameters()}  # type: ignore[operator]
    if rank == 0:
        state = sorted(optimizer_state(net, optimizer))
        torch.save({"parameters": whole, "gathered": gathered, "state": state}, f"{folder}/shown.pt")
    else:
        optimizer_state(net, optimizer)
    dist.barrier()
    dist.destroy_process_group()
