"""Publication to an engine that samples on the trainer's own parameters: nothing moves but the version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from posttrain.errors import WeightSyncError
from posttrain.records import Mean, Metric, Sum
from posttrain.weight_sync.inventory import summarize
from posttrain.weight_sync.protocol import Publication


class SharingEngine(Protocol):
    """An engine without weights of its own."""

    def commit(self, version: int) -> None:
        """Sample under `version` from now on."""
        ...


class SharedSync:
    """Moves the version of an engine that samples with the policy's module or a view of it."""

    def __init__(self, engine: SharingEngine, *, policy: torch.nn.Module, sampler: torch.nn.Module) -> None:
        """
        Args:
            policy: the module the optimizer updates.
            sampler: the module the engine runs.
        """
        self._engine = engine
        self._policy = policy
        self._sampler = sampler

    def publish(self, version: int, *, verify: bool) -> Publication:
        """Commit `version`; with `verify`, only after every tensor proved to be the policy's own storage."""
        started = time.perf_counter()
        metrics: dict[str, Metric] = {"sync/gib": Sum(0.0), "sync/buckets": Sum(0)}
        if verify:
            metrics |= self._verify()
        self._engine.commit(version)
        metrics["sync/seconds"] = Sum(time.perf_counter() - started)
        return Publication(version, metrics)

    def _verify(self) -> dict[str, Metric]:
        policy, sampler = dict(_tensors(self._policy)), dict(_tensors(self._sampler))
        problems = [f"{name} only in the policy" for name in policy.keys() - sampler.keys()]
        problems += [f"{name} only in the engine" for name in sampler.keys() - policy.keys()]
        problems += [f"{name} is a copy" for name in policy.keys() & sampler.keys() if not _same_storage(policy[name], sampler[name])]
        if problems:
            raise WeightSyncError(
                f"the engine does not sample with the trainer's parameters: {summarize(sorted(problems))}; version not committed: "
                "build the engine on the policy's module after wrapping and casting it, or publish through host memory"
            )
        size = float(sum(tensor.numel() * tensor.element_size() for tensor in policy.values()))
        return {"sync/verified_tensors": Sum(len(policy)), "sync/verified_gib_frac": Mean(size, size)}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
