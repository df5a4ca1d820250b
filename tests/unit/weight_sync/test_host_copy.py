"""HostCopySync against a receiver written by hand: what is sent, how it is cut, what is proven, what happens on failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.records import Max, Mean, Sum
from posttrain.weight_sync.digest import tensor_digest
from posttrain.weight_sync.host import HostCopySync
from posttrain.weight_sync.inventory import Inventory, summarize
from posttrain.weight_sync.probe import probe_tolerance
from posttrain.weight_sync.protocol import Manifest, TensorSpec

PROBE = (3, 1, 2)


class FakeReceiver:
    """An engine that is a dictionary; its "log-probabilities" are sums of its tensors."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.buckets: list[list[str]] = []
        self.held: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.hidden: set[str] = set()
        """Names it cannot show."""
        self.on_receive: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: tensor

    def begin(self, version: int, manifest: Manifest) -> None:
        self.events.append(f"begin {version}")
        self.version = None
        self.inventory = Inventory(manifest)
        self.manifest = manifest

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.buckets.append([name for name, _ in bucket])
        for name, tensor in bucket:
            arrived = self.on_receive(name, tensor)
            if arrived is not None and self.inventory.accept(
                name, TensorSpec(tuple(arrived.shape), str(arrived.dtype).removeprefix("torch."))
            ):
                self.held[name] = arrived.clone()

    def install(self) -> None:
        self.events.append("install")
        if problems := self.inventory.problems():
            raise WeightSyncError(summarize(problems))

    def digests(self) -> dict[str, str]:
        self.events.append("digests")
        return {name: tensor_digest(tensor) for name, tensor in self.held.items() if name not in self.hidden}

    def score(self, token_ids: Sequence[int]) -> list[float]:
        self.events.append("score")
        return score_with(self.held, token_ids)

    def commit(self, version: int) -> None:
        self.events.append(f"commit {version}")
        self.version = version


def score_with(tensors: dict[str, torch.Tensor], token_ids: Sequence[int]) -> list[float]:
    total = float(sum(tensor.double().sum() for tensor in tensors.values()))
    return [-total * token for token in token_ids[1:]]


WEIGHTS = {"a": torch.ones(4), "b": torch.full((2, 3), 2.0), "big": torch.zeros(100), "c": torch.full((1,), 0.1), "n": torch.arange(2)}


def sync_of(receiver: FakeReceiver, **settings: object) -> HostCopySync:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS.items()

    arguments: dict[str, object] = {"dtype": "float32", "probe": lambda ids: score_with(WEIGHTS, ids), "bucket_bytes": 40}
    return HostCopySync(weights, receiver, probe_ids=PROBE, **(arguments | settings))  # type: ignore[arg-type]


def test_buckets_are_filled_in_order_and_a_large_tensor_travels_alone() -> None:
    receiver = FakeReceiver()
    publication = sync_of(receiver).publish(0, verify=False)
    # 16 + 24 bytes fill the 40 exactly; 400 bytes go alone; 4 + 16 follow.
    assert receiver.buckets == [["a", "b"], ["big"], ["c", "n"]]
    assert publication.metrics["sync/buckets"] == Sum(3)
    assert publication.metrics["sync/gib"] == Sum((16 + 24 + 400 + 4 + 16) / 2**30)
    assert receiver.events == ["begin 0", "install", "commit 0"]
    assert (publication.version, receiver.version) == (0, 0)


def test_the_manifest_names_every_tensor_as_it_is_on_the_wire() -> None:
    receiver = FakeReceiver()
    sync_of(receiver, dtype="bfloat16").publish(0, verify=False)
    assert receiver.manifest["b"] == TensorSpec((2, 3), "bfloat16")
    assert receiver.manifest["n"] == TensorSpec((2,), "int64")
    assert receiver.held["c"].dtype == torch.bfloat16 and receiver.held["n"].dtype == torch.int64


def test_verification_comes_before_the_commit_and_reports_the_share_that_was_proven() -> None:
    receiver = FakeReceiver()
    receiver.hidden = {"big"}
    metrics = sync_of(receiver).publish(7, verify=True).metrics
    assert receiver.events == ["begin 7", "install", "digests", "score", "commit 7"]
    assert metrics["sync/verified_tensors"] == Sum(4)
    assert metrics["sync/verified_gib_frac"] == Mean(60, 460)
    assert metrics["sync/probe_gap"] == Max(0.0)


def test_a_changed_tensor_is_found_by_its_digest() -> None:
    receiver = FakeReceiver()
    receiver.on_receive = lambda name, tensor: tensor + 1e-7 if name == "c" else tensor
    with pytest.raises(WeightSyncError, match=r"holds other bytes.*c \(sent [0-9a-f]{12}, holds [0-9a-f]{12}\)"):
        sync_of(receiver).publish(1, verify=True)
    assert receiver.version is None and "commit 1" not in receiver.events


def test_a_changed_tensor_that_cannot_be_shown_is_found_by_the_probe() -> None:
    receiver = FakeReceiver()
    receiver.hidden = set(WEIGHTS)
    receiver.on_receive = lambda name, tensor: tensor + 0.01 if name == "c" else tensor
    with pytest.raises(WeightSyncError) as caught:
        sync_of(receiver).publish(1, verify=True)
    # Sums: 4 + 12 + 0.1 + 1 = 17.1 in the trainer, 17.11 in the engine; the worst token is the last one, id 2.
    assert "token 2 of the probe (id 2) has log-probability -34.200000 in the trainer and -34.220000 in the engine" in str(caught.value)
    assert receiver.version is None


def test_a_probe_that_is_not_a_number_is_a_mismatch() -> None:
    receiver = FakeReceiver()
    with pytest.raises(WeightSyncError, match="a gap of inf"):
        sync_of(receiver, probe=lambda ids: [float("nan")] * 2).publish(1, verify=True)
    assert receiver.version is None


def test_a_probe_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="the trainer gave 1 and the engine 2"):
        sync_of(FakeReceiver(), probe=lambda ids: [0.0]).publish(1, verify=True)


@pytest.mark.parametrize("verify", [False, True])
def test_a_lost_tensor_is_named_even_without_verification(verify: bool) -> None:
    receiver = FakeReceiver()
    sync = sync_of(receiver)
    sync.publish(0, verify=verify)
    receiver.on_receive = lambda name, tensor: None if name == "big" else tensor
    with pytest.raises(WeightSyncError, match=r"missing big \[100\]"):
        sync.publish(1, verify=verify)
    assert receiver.version is None
    receiver.on_receive = lambda name, tensor: tensor
    sync.publish(2, verify=verify)
    assert receiver.version == 2


def test_a_receiver_that_breaks_leaves_nothing_committed() -> None:
    receiver = FakeReceiver()

    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise WeightSyncError("cable unplugged")

    receiver.on_receive = broken
    with pytest.raises(WeightSyncError, match="cable unplugged"):
        sync_of(receiver).publish(0, verify=False)
    assert receiver.version is None


def test_inventory_tells_missing_unexpected_repeated_and_misshapen_apart() -> None:
    inventory = Inventory({"a": TensorSpec((1,), "float32"), "b": TensorSpec((2, 2), "float32"), "c": TensorSpec((3,), "float32")})
    assert inventory.accept("a", TensorSpec((1,), "float32"))
    assert not inventory.accept("a", TensorSpec((1,), "float32"))
    assert not inventory.accept("x", TensorSpec((1,), "float32"))
    assert not inventory.accept("b", TensorSpec((4,), "bfloat16"))
    assert inventory.problems() == ["a came twice", "unexpected x [1]", "b is bfloat16[4] instead of float32[2, 2]", "missing c [3]"]


def test_summary_counts_what_it_leaves_out() -> None:
    assert summarize([str(i) for i in range(14)], limit=12).endswith("11; and 2 more")


def test_digest_reads_dtype_shape_and_bytes_but_not_the_sign_of_zero() -> None:
    base = torch.tensor([[0.0, 1.5], [2.0, -3.0]])
    assert tensor_digest(base) == tensor_digest(base.t().contiguous().t())
    assert tensor_digest(base) == tensor_digest(torch.tensor([[-0.0, 1.5], [2.0, -3.0]]))
    assert len({tensor_digest(t) for t in (base, base.reshape(4), base.bfloat16(), base + 1e-6)}) == 4


def test_tolerances_follow_the_least_precise_dtype() -> None:
    assert probe_tolerance("float32", "float32").worst == 1e-3
    assert (probe_tolerance("float32", "bfloat16").worst, probe_tolerance("float32", "bfloat16").mean) == (0.5, 0.1)
