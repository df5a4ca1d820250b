"""SharedSync: a version moves only where the storage is the trainer's own."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.records import Mean, Sum
from posttrain.weight_sync.shared import SharedSync


class Engine:
    def __init__(self) -> None:
        self.version: int | None = None

    def commit(self, version: int) -> None:
        self.version = version


def test_the_same_module_is_proven_and_committed() -> None:
    engine, module = Engine(), torch.nn.Linear(3, 2)
    publication = SharedSync(engine, policy=module, sampler=module).publish(4, verify=True)
    assert engine.version == publication.version == 4
    assert publication.metrics["sync/verified_tensors"] == Sum(2)
    assert publication.metrics["sync/verified_gib_frac"] == Mean(32.0, 32.0)
    assert publication.metrics["sync/gib"] == Sum(0.0)


def test_another_module_over_the_same_storage_is_proven() -> None:
    module = torch.nn.Linear(3, 2)
    view = torch.nn.Linear(3, 2)
    view.weight, view.bias = module.weight, module.bias
    engine = Engine()
    SharedSync(engine, policy=module, sampler=view).publish(1, verify=True)
    assert engine.version == 1


def test_a_copy_is_refused_and_not_committed() -> None:
    engine, module = Engine(), torch.nn.Linear(3, 2)
    with pytest.raises(WeightSyncError, match="bias is a copy; weight is a copy"):
        SharedSync(engine, policy=module, sampler=deepcopy(module)).publish(1, verify=True)
    assert engine.version is None


def test_a_missing_tensor_is_refused() -> None:
    module = torch.nn.Linear(3, 2)
    bare = torch.nn.Linear(3, 2, bias=False)
    bare.weight = module.weight
    with pytest.raises(WeightSyncError, match="bias only in the policy"):
        SharedSync(Engine(), policy=module, sampler=bare).publish(1, verify=True)
