"""The built-in rewards: arithmetic, exact, math and reasoning_gym. All are pointwise and none can hang the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version

from posttrain.reward.pointwise import CandidateFailure, PointwiseProvider
from posttrain.reward.provider import CandidateInput
from posttrain.reward.worker import BoundedWorker, WorkerFailure

_INTEGER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-−])?"  # a minus directly after an operand subtracts: "5-3" holds 5 and 3
    r"(?P<digits>(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d])|\d+)"
    r"(?P<fraction>\.\d+)?",
    re.ASCII,
)

NEEDS: Mapping[str, frozenset[str]] = {
    "arithmetic": frozenset({"reference"}),
    "exact": frozenset({"reference"}),
    "math": frozenset({"reference"}),
    "reasoning_gym": frozenset({"dataset", "dataset_config", "entry"}),
}
"""Columns each built-in reward reads; stated apart from the builders, which need the scoring libraries."""


def last_integer(text: str) -> str | None:
    """The last integer of a text in canonical decimal form, or None. Numbers with a fraction are not integers.

    A string, because a model can write more digits than Python converts.
    """
    last = None
    for match in _INTEGER.finditer(text):
        if match["fraction"] is None:
            digits = match["digits"].replace(",", "").lstrip("0") or "0"
            last = f"-{digits}" if match["sign"] and digits != "0" else digits
    return last


def score_arithmetic(candidate: CandidateInput) -> float:
    """1.0 when the last integer of the completion is the reference."""
    return float(last_integer(candidate.completion) == _canonical(candidate.reference))


def score_exact(candidate: CandidateInput) -> float:
    """1.0 when completion and reference are the same text up to surrounding white space."""
    if candidate.reference is None:
        raise CandidateFailure("the prompt has no reference")
    return float(candidate.completion.strip() == str(candidate.reference).strip())


def extracted_answer(completion: str) -> str:
    """What stands in the last <answer>...</answer>, or the whole completion."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return (completion if start < 0 else completion[start + len("<answer>") : end]).strip()


def build_arithmetic(timeout_s: float) -> PointwiseProvider:
    return PointwiseProvider(
        score_arithmetic, name="arithmetic", needs=NEEDS["arithmetic"], identity={"reward": "arithmetic", "revision": 1}, trusted=True
    )


def build_exact(timeout_s: float) -> PointwiseProvider:
    return PointwiseProvider(score_exact, name="exact", needs=NEEDS["exact"], identity={"reward": "exact", "revision": 1}, trusted=True)


def build_math(timeout_s: float, *, worker: BoundedWorker | None = None) -> PointwiseProvider:
    """Equality of mathematical expressions, by the math-verify library."""
    bounded = worker or BoundedWorker("math", timeout_s=timeout_s)

    def score(candidate: CandidateInput) -> float:
        if candidate.reference is None:
            raise CandidateFailure("the prompt has no reference")
        return _ask(bounded, {"completion": candidate.completion, "reference": str(candidate.reference)})

    identity = {"reward": "math", "revision": 1, "math-verify": version("math-verify")}
    return PointwiseProvider(score, name="math", needs=NEEDS["math"], identity=identity, trusted=True, worker=bounded)


def build_reasoning_gym(timeout_s: float, *, worker: BoundedWorker | None = None) -> PointwiseProvider:
    """The score a reasoning-gym data set gives an answer to one of its own tasks."""
    bounded = worker or BoundedWorker("reasoning_gym", timeout_s=timeout_s)

    def score(candidate: CandidateInput) -> float:
        row = candidate.representations
        request = {name: row[name] for name in NEEDS["reasoning_gym"]}
        return _ask(bounded, {**request, "answer": extracted_answer(candidate.completion)})

    identity = {"reward": "reasoning_gym", "revision": 1, "reasoning-gym": version("reasoning-gym")}
    return PointwiseProvider(score, name="reasoning_gym", needs=NEEDS["reasoning_gym"], identity=identity, trusted=True, worker=bounded)


def _ask(worker: BoundedWorker, request: object) -> float:
    try:
        return worker.call(request)
    except WorkerFailure as error:
        raise CandidateFailure(str(error)) from None


def _canonical(reference: object) -> str:
    if isinstance(reference, int) and not isinstance(reference, bool):
        return str(reference)
    if isinstance(reference, float) and reference.is_integer():
        return str(int(reference))
    if isinstance(reference, str):
        text = reference.strip()
        match = _INTEGER.fullmatch(text)
        found = last_integer(text) if match else None
        if found is not None:
            return found
    raise CandidateFailure(f"the reference {reference!r} is not an integer")
