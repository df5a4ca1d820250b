"""Publication through host memory: bucket after bucket from the trainer's parameters to an engine that keeps its own copy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from posttrain.config.run import resolved_dtype
from posttrain.errors import PosttrainError, WeightSyncError
from posttrain.records import Max, Mean, Metric, Sum
from posttrain.weight_sync.digest import dtype_name, tensor_digest
from posttrain.weight_sync.inventory import summarize
from posttrain.weight_sync.probe import ProbeTolerance, check_probe, probe_tolerance
from posttrain.weight_sync.protocol import Manifest, ProbeScorer, Publication, TensorSpec, VersionedReceiver, WeightSource

BUCKET_BYTES = 64 * 2**20


class HostCopySync:
    """Copies every tensor of `weights` to one receiver."""

    def __init__(
        self,
        weights: WeightSource,
        receiver: VersionedReceiver,
        *,
        dtype: str,
        probe: ProbeScorer,
        probe_ids: Sequence[int],
        tolerance: ProbeTolerance | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """
        Args:
            weights: the trainer's tensors under checkpoint names; called once per publication, and once more before the first.
            dtype: of floating-point tensors on the wire, as `rl.transfer_dtype` spells it. Others keep theirs.
            probe: the trainer's log-probabilities of a prompt.
            probe_ids: the prompt, at least two ids; must be shorter than the engine's context.
            tolerance: of the probe; None derives it from `dtype`. Give `probe_tolerance(...)` of all dtypes involved when the
                engine or the trainer computes in another one.
            bucket_bytes: most bytes sent at once; a larger tensor travels alone. None is 64 MiB.
        """
        self._weights = weights
        self._receiver = receiver
        self._dtype = resolved_dtype(dtype)
        self._probe = probe
        self._probe_ids = tuple(probe_ids)
        self._tolerance = tolerance or probe_tolerance(dtype)
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._manifest: Manifest | None = None

    def publish(self, version: int, *, verify: bool) -> Publication:
        """Send and commit `version`; with `verify`, only after digests and probe agree. Raises WeightSyncError."""
        started = time.perf_counter()
        try:
            metrics = self._send(version, digest=verify)
            if verify:
                metrics |= self._verify()
            self._receiver.commit(version)
        except WeightSyncError:
            raise
        except PosttrainError as error:
            raise WeightSyncError(f"publishing version {version} failed: {error}; nothing was committed") from error
        metrics["sync/seconds"] = Sum(time.perf_counter() - started)
        return Publication(version, metrics)

    def _send(self, version: int, *, digest: bool) -> dict[str, Metric]:
        manifest = self._manifest = self._manifest or {name: self._spec(tensor) for name, tensor in self._weights()}
        self._sent_digests: dict[str, str] = {}
        self._sent_bytes: dict[str, int] = {}
        buckets = 0
        self._receiver.begin(version, manifest)
        for bucket in self._buckets():
            for name, tensor in bucket:
                self._sent_bytes[name] = tensor.numel() * tensor.element_size()
                if digest:
                    self._sent_digests[name] = tensor_digest(tensor)
            self._receiver.receive(bucket)
            buckets += 1
        self._receiver.install()
        return {"sync/gib": Sum(sum(self._sent_bytes.values()) / 2**30), "sync/buckets": Sum(buckets)}

    def _verify(self) -> dict[str, Metric]:
        shown = self._receiver.digests()
        sent = self._sent_digests
        different = [
            f"{name} (sent {sent[name][:12]}, holds {digest[:12]})"
            for name, digest in shown.items()
            if name in sent and sent[name] != digest
        ]
        if different:
            raise WeightSyncError(
                f"the engine holds other bytes than the trainer sent: {summarize(different)}; the weights were not committed: look for a "
                "tensor that changed while it was sent, or for an engine that converts it"
            )
        equal = [name for name in shown if name in sent]
        proven, total = sum(self._sent_bytes[name] for name in equal), sum(self._sent_bytes.values())
        ids = self._probe_ids
        gap = check_probe(ids, trainer=self._probe(ids), engine=self._receiver.score(ids), tolerance=self._tolerance)
        return {
            "sync/verified_tensors": Sum(len(equal)),
            "sync/verified_gib_frac": Mean(proven, total),
            "sync/probe_gap": Max(gap),
        }

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), dtype_name(self._wire_dtype(tensor)))

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Tensors in the order of the source, cast for the wire; a bucket is filled up to the limit and never beyond, unless it
        holds a single tensor."""
        bucket: list[tuple[str, torch.Tensor]] = []
        filled = 0
        for name, tensor in self._weights():
            cast = tensor.detach().to(self._wire_dtype(tensor))
            size = cast.numel() * cast.element_size()
            if bucket and filled + size > self._bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append((name, cast))
            filled += size
        if bucket:
            yield bucket
