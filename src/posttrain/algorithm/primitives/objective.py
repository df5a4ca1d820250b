"""The contract between an algorithm's loss and the trainer, which knows no algorithm.

A trainer window works like this: for every micro-batch it calls `objective.fn(model, batch)`, turns the returned loss back
into a numerator with the reported weight (TOKEN_SUM) or scales it by the number of micro-batches (MEAN), accumulates
gradients of numerators, and divides by the global weight once, just before the optimizer step. No split of the same batch
into micro-batches, ranks or packs can therefore change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from posttrain.errors import TrainingError
from posttrain.records import Metric

if TYPE_CHECKING:
    import torch

OBJECTIVE_WEIGHT_SUM = "objective_weight_sum"
"""Control metric (a `Sum`): the weight, in the unit of the loss, that a TOKEN_SUM objective divided its numerator by."""


class Reduction(Enum):
    """How losses of the micro-batches of one window combine."""

    MEAN = "mean"
    """The loss is a mean over the micro-batch's samples; micro-batches hold equally many."""
    TOKEN_SUM = "token_sum"
    """The loss is numerator / weight with the weight reported as OBJECTIVE_WEIGHT_SUM (tokens, sequences, any unit)."""


@dataclass(frozen=True, slots=True)
class MetricAdapter:
    """Maps an objective's local metric names to public ones; a name it does not know is an error."""

    names: Mapping[str, str]
    """local name -> public `area/name`."""
    ignored: frozenset[str] = frozenset()
    """Local names that are deliberately not public."""

    def __call__(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        public: dict[str, Metric] = {}
        for name, metric in metrics.items():
            if name in self.names:
                public[self.names[name]] = metric
            elif name not in self.ignored:
                raise TrainingError(
                    f"the objective reported metric {name!r}, which its metric adapter neither maps nor ignores; "
                    f"mapped: {', '.join(sorted(self.names))}"
                )
        return public


ObjectiveFn = Callable[[Any, Any], "tuple[torch.Tensor, dict[str, Metric]]"]
"""`fn(model, batch) -> (scalar loss, local metrics)`. The model scores tokens (`posttrain.model.protocol.PolicyModel`), the
batch is a `posttrain.data.packer.PolicyBatch`."""


ReferenceScorer = Callable[[Any], "torch.Tensor"]
"""batch -> float [N] log-probabilities of its labels under a frozen reference, without a graph."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A trainer-facing definition of a loss. It launches nothing, moves nothing and reads no file."""

    fn: ObjectiveFn
    reduction: Reduction
    metric_adapter: MetricAdapter
    old_logp_cache: bool = False
    """True: over several optimizer steps of one batch the old policy is frozen, so the trainer computes its
    log-probabilities once, ahead of the first step."""
    reference_scorer: ReferenceScorer | None = None
    """Asks the trainer to attach `reference_logprobs` to every batch it differentiates; the objective reads them there. The
    network behind the scorer belongs to the trainer."""
    identity: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Values that define the loss, for provenance and exact resume."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What an objective builder may know beyond `rl`."""

    model_id: str
    """Effective policy and tokenizer identity."""
    max_response_length: int
    """`rollout.max_tokens`: the fixed divisor of `seq-mean-token-sum-fixed`."""
    reference_scorer: ReferenceScorer | None = None
    """Scores the frozen reference that `rl.ref.build_ref` asks for; None without one."""
    reference_artifact: str | None = None
    """Content identity of `rl.ref.model_dir`; None when the reference is the policy's own checkpoint."""


ObjectiveBuilder = Callable[[Any, ModelContext], Objective]
"""Module-level, so that worker processes can import it."""
