"""Sampling with transformers on a copy of the policy: for a policy whose parameters are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.config.rollout import HFRolloutConfig
from posttrain.errors import WeightSyncError
from posttrain.model.policy import CausalPolicy
from posttrain.rollout.hf_engine import HFEngine
from posttrain.weight_sync.digest import dtype_name, tensor_digest
from posttrain.weight_sync.inventory import Inventory, summarize
from posttrain.weight_sync.protocol import Manifest, TensorSpec


class HFCopyEngine(HFEngine):
    """Implements `VersionedReceiver` beside `RolloutEngine`; tensors are named as the module names them."""

    def __init__(self, config: HFRolloutConfig, *, policy: CausalPolicy) -> None:
        """
        Args:
            policy: a module of its own, whose parameters this engine overwrites.
        """
        super().__init__(config, policy=policy)
        self._parameters = dict(policy.module.named_parameters(remove_duplicate=False))
        self._inventory: Inventory | None = None
        self._pending = -1

    def begin(self, version: int, manifest: Manifest) -> None:
        """See `VersionedReceiver.begin`."""
        self._version, self._pending = None, version
        self._inventory = Inventory(manifest)
        unknown = sorted(manifest.keys() ^ self._parameters.keys())
        if unknown:
            raise WeightSyncError(f"policy and sampling copy have different tensors: {summarize(unknown)}")

    @torch.no_grad()
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See `VersionedReceiver.receive`; the tensors are copied at once."""
        assert self._inventory is not None
        for name, tensor in bucket:
            if self._inventory.accept(name, TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))):
                self._parameters[name].copy_(tensor)

    def install(self) -> None:
        """See `VersionedReceiver.install`."""
        problems = [] if self._inventory is None else self._inventory.problems()
        if problems:
            raise WeightSyncError(f"the sampling copy did not get its weights: {summarize(problems)}")

    def digests(self) -> dict[str, str]:
        """See `VersionedReceiver.digests`."""
        return {name: tensor_digest(parameter.detach()) for name, parameter in self._parameters.items()}

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `VersionedReceiver.score`."""
        return self._policy.score_prompt(token_ids)

    def commit(self, version: int) -> None:
        """See `VersionedReceiver.commit`."""
        if version != self._pending:
            raise WeightSyncError(f"version {version} was committed while version {self._pending} was sent")
        super().commit(version)
