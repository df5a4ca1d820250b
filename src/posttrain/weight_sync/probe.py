"""The probe: one fixed prompt scored by the trainer and by the engine must get the same log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class ProbeTolerance:
    """Largest acceptable difference of log-probabilities, in nats."""

    worst: float
    """At any one position."""
    mean: float
    """Averaged over positions."""


# Measured over 512 tokens of a 135M model, trainer in fp32: an fp32 engine differs by 4e-5 at worst; a bf16 engine by 0.27 at worst
# (up to 0.4 with a bf16 trainer as well) and 0.03 on average. A head left at old weights differs by 0.5 to 6, an unpacked expert
# by 0.1: fp32 sees all of these, 16-bit dtypes only the gross ones, for which the digests have to stand.
_EXACT = ProbeTolerance(worst=1e-3, mean=1e-3)
_ROUNDED = ProbeTolerance(worst=0.5, mean=0.1)


def probe_tolerance(*dtypes: str) -> ProbeTolerance:
    """What to accept between computations in these dtypes ("float32", "bfloat16", ...)."""
    return _EXACT if set(dtypes) <= {"float32", "float64"} else _ROUNDED


def check_probe(token_ids: Sequence[int], *, trainer: Sequence[float], engine: Sequence[float], tolerance: ProbeTolerance) -> float:
    """The largest gap in nats; raises WeightSyncError when it is outside the tolerance, or not a number."""
    if not len(trainer) == len(engine) == len(token_ids) - 1:
        raise WeightSyncError(
            f"a probe of {len(token_ids)} tokens needs {len(token_ids) - 1} log-probabilities; "
            f"the trainer gave {len(trainer)} and the engine {len(engine)}"
        )
    # A gap that is not a number must count as the largest one.
    gaps = [gap if not math.isnan(gap := abs(a - b)) else math.inf for a, b in zip(trainer, engine, strict=True)]
    worst, mean = max(gaps), sum(gaps) / len(gaps)
    if worst <= tolerance.worst and mean <= tolerance.mean:
        return worst
    at = gaps.index(worst)
    raise WeightSyncError(
        f"the engine does not compute what the trainer computes: token {at + 1} of the probe (id {token_ids[at + 1]}) has log-probability "
        f"{trainer[at]:.6f} in the trainer and {engine[at]:.6f} in the engine, a gap of {worst:.6f} nats (mean {mean:.6f}; allowed "
        f"{tolerance.worst:g} and {tolerance.mean:g}); the weights were not committed: check that both sides run the same model "
        "configuration and dtype, and that the engine renewed everything it derives from weights (packed heads, experts, caches)"
    )
