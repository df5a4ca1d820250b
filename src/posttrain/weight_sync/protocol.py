"""How an engine comes to hold the trainer's weights: begin -> buckets -> install -> (verify) -> commit.

Installing and committing are two steps so that verification happens between them: weights that could not be proven to be the
trainer's are never served under a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from posttrain.records import Metric

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Publication:
    """The outcome of one publication; it exists only when every engine committed."""

    version: int
    metrics: dict[str, Metric]
    """`sync/...`: seconds, bytes and, when verified, what was compared."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver must be given under one name."""

    shape: tuple[int, ...]
    dtype: str
    """On the wire: "float32", "bfloat16", ..."""


Manifest = Mapping[str, TensorSpec]
"""Every tensor of a publication by Hugging Face checkpoint name."""


class WeightSource(Protocol):
    """The trainer's weights under Hugging Face checkpoint names, the same names and shapes in every call."""

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class ProbeScorer(Protocol):
    """The trainer's side of the probe."""

    def __call__(self, token_ids: Sequence[int], /) -> list[float]:
        """log p(token_ids[t] | token_ids[:t]) for t >= 1 at temperature 1, in nats: one number fewer than ids."""
        ...


class WeightSync(Protocol):
    """Publishes the trainer's weights to every engine, or raises WeightSyncError."""

    def publish(self, version: int, *, verify: bool) -> Publication:
        """Send and commit `version`. With `verify`, prove that the engine holds the trainer's weights: equal bytes wherever the
        engine can show them, and log-probabilities of a fixed prompt within tolerance. When it raises, nothing is committed."""
        ...


class VersionedReceiver(Protocol):
    """The engine's side of the protocol; tensors are named as Hugging Face checkpoints name them."""

    def begin(self, version: int, manifest: Manifest) -> None:
        """Un-commit the current weights: nothing may be generated until `commit`. An update left unfinished is abandoned."""
        ...

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """One bucket of (name, tensor) pairs; the tensors must not change before `install` returns."""
        ...

    def install(self) -> None:
        """Make the received weights current and drop every cache computed with the old ones; nothing is served yet.

        Raises WeightSyncError naming every tensor of the manifest that is missing, unexpected or of the wrong shape.
        """
        ...

    def digests(self) -> dict[str, str]:
        """`tensor_digest` of every installed tensor the engine can show, by Hugging Face name. A tensor the engine only holds
        in a form it cannot turn back (packed, quantized, converted) is left out, never guessed."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[t] | token_ids[:t]) for t >= 1 at temperature 1, in nats, under the installed weights."""
        ...

    def commit(self, version: int) -> None:
        """Serve the installed weights as `version`, which must be the one that began."""
        ...
