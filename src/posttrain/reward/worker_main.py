"""The program of a reward worker: `python -P worker_main.py KIND TIMEOUT_S`. Started by `posttrain.reward.worker` only.

Stands alone on purpose: it imports the standard library and the one scoring library it serves, never posttrain or torch.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_LIMIT_BYTES = 8 << 30
"""Address space of a worker: a computation that explodes in memory ends here and not in the machine's out-of-memory killer."""

Scorer = Callable[[Any], float]


def math_scorer() -> Scorer:
    """Requests are {"completion": str, "reference": str}; 1.0 when math-verify finds the two equal."""
    from math_verify import parse, verify

    # Its own timeouts are off, because they turn a hang into "not equal"; it warns about that on every call.
    logging.disable(logging.WARNING)

    def parsed(text: str) -> Any:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def gold(reference: str) -> Any:
        if any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\[")):
            return parsed(reference)
        # Bare LaTeX is only found inside delimiters: without them `3 \\pi` would be read as 3.
        return parsed(f"\\boxed{{{reference}}}") or parsed(reference)

    def score(request: Any) -> float:
        expected = gold(request["reference"])
        if not expected:
            raise ValueError(f"the reference {request['reference']!r} is not a mathematical expression")
        return float(verify(expected, parsed(request["completion"]), timeout_seconds=None))

    score({"completion": "\\boxed{\\frac{1}{2}}", "reference": "0.5"})  # the grammar is built on first use
    return score


def reasoning_gym_scorer() -> Scorer:
    """Requests are {"dataset", "dataset_config", "entry", "answer"}; the score is the data set's own."""
    import reasoning_gym

    datasets: dict[str, Any] = {}

    def score(request: Any) -> float:
        key = repr((request["dataset"], request["dataset_config"]))
        if key not in datasets:
            datasets[key] = reasoning_gym.create_dataset(request["dataset"], seed=0, size=1, **request["dataset_config"])
        return float(datasets[key].score_answer(request["answer"], request["entry"]))

    return score


SCORERS: dict[str, Callable[[], Scorer]] = {"math": math_scorer, "reasoning_gym": reasoning_gym_scorer}


def serve(scorer: Scorer, *, requests: BinaryIO, answers: BinaryIO, timeout_s: float) -> None:
    """Answer requests until the other side closes the pipe."""

    def reply(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    reply({"ready": True})
    while len(head := requests.read(8)) == 8:
        request = pickle.loads(requests.read(struct.unpack("<Q", head)[0]))
        # The parent kills a late worker. Should the parent be gone, the alarm's default action does, even inside C code.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 5.0)
        try:
            reply({"score": scorer(request)})
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    kind, timeout_s = sys.argv[1], float(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    serve(SCORERS[kind](), requests=sys.stdin.buffer, answers=answers, timeout_s=timeout_s)


if __name__ == "__main__":
    main()
