"""The built-in arithmetic corpus: every problem `a op b` of a range, divided into disjoint train and held-out splits.

Membership in a split is a property of the problem alone, so no seed, range or template can move a held-out problem into
training: a SHAKE-256 hash of (a mod 512, op, b mod 512) decides. Taking residues first keeps the split countable in closed
form: at most 512 * 512 residue pairs per operator are decided, and the i-th problem of a split is found by bisection over the
sizes of their classes, so a range of a billion operands costs what one of 512 does. Up to 512 operands every problem is
decided on its own; beyond, problems that agree modulo 512 share their fate.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray

from posttrain.config.data import ArithmeticConfig
from posttrain.data.source import Row
from posttrain.errors import DataError

MODULUS = 512
COLUMNS = frozenset({"prompt", "reference", "a", "op", "b"})


def held_out_residues(a: int, op: str, *, fraction: float) -> NDArray[np.bool_]:
    """[512] for each residue of b modulo 512, whether `a op b` belongs to the held-out split; about `fraction` of all do."""
    draws = np.frombuffer(hashlib.shake_256(f"{a % MODULUS} {op}".encode()).digest(8 * MODULUS), dtype="<u8")
    return draws < np.uint64(int(fraction * 2.0**64))


def is_held_out(a: int, op: str, b: int, *, fraction: float) -> bool:
    """Whether the problem belongs to the held-out split, whatever the range it is asked in."""
    return bool(held_out_residues(a, op, fraction=fraction)[b % MODULUS])


def answer(a: int, op: str, b: int) -> int:
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    raise DataError(f"arithmetic.operators: {op!r} is not an operator, must be one of + - *; remove it")


class ArithmeticCorpus:
    """Random access to the problems of one split; their number is exact and nothing is enumerated."""

    def __init__(self, config: ArithmeticConfig, *, split: str = "train") -> None:
        if split not in ("train", "held_out"):
            raise DataError(f"split={split!r}: the arithmetic source has train and held_out; set split=train")
        if config.low > config.high:
            raise DataError(f"arithmetic.low={config.low}: must be <= arithmetic.high={config.high}; lower it or raise high")
        self.columns = COLUMNS
        self._config = config
        self._operators = list(dict.fromkeys(config.operators))
        self._count = config.high - config.low + 1
        if not self._operators:
            raise DataError("arithmetic.operators=[]: must name at least one of + - *; e.g. ['+']")
        for op in self._operators:
            answer(0, op, 0)
        if len(self._operators) * self._count**2 > sys.maxsize:
            raise DataError(f"arithmetic.high={config.high}: the range has more than 2**63 problems; narrow low..high")
        # Parallel: a residue class (operator, shift of a, shift of b; as one flat index) and the problems up to its end.
        self._classes, self._ends = self._index(split == "held_out")
        if not len(self._ends):
            raise DataError(
                f"split={split!r}: no problem of {config.low}..{config.high} with {' '.join(self._operators)} falls into it "
                f"(held_out_fraction={config.held_out_fraction}), it must have one; widen low..high or change held_out_fraction"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        cell = int(np.searchsorted(self._ends, index, side="right"))
        inside = index - (int(self._ends[cell - 1]) if cell else 0)
        span = min(self._count, MODULUS)
        rest, shift_b = divmod(int(self._classes[cell]), span)
        which, shift_a = divmod(rest, span)
        turn_a, turn_b = divmod(inside, self._members(shift_b))
        a = self._config.low + shift_a + turn_a * MODULUS
        b = self._config.low + shift_b + turn_b * MODULUS
        return self._row(a, self._operators[which], b)

    def _index(self, held_out: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        span, low, fraction = min(self._count, MODULUS), self._config.low, self._config.held_out_fraction
        residues = (low % MODULUS + np.arange(span)) % MODULUS
        chosen = np.array(
            [[held_out_residues(low + a, op, fraction=fraction)[residues] == held_out for a in range(span)] for op in self._operators]
        )
        members = np.array([self._members(shift) for shift in range(span)], dtype=np.int64)
        classes = np.flatnonzero(chosen)
        sizes = np.broadcast_to(np.outer(members, members), chosen.shape).ravel()[classes]
        return classes, np.cumsum(sizes)

    def _members(self, shift: int) -> int:
        """Operands congruent to low + shift."""
        return (self._count - shift + MODULUS - 1) // MODULUS

    def _row(self, a: int, op: str, b: int) -> Row:
        text = self._config.template
        # Not str.format: a template may well ask for \boxed{}.
        for name, value in (("{a}", str(a)), ("{op}", op), ("{b}", str(b))):
            text = text.replace(name, value)
        return Row(
            key=f"{a}{op}{b}",
            prompt=({"role": "user", "content": text},) if self._config.chat else text,
            reference=answer(a, op, b),
            representations={"a": a, "op": op, "b": b},
        )
