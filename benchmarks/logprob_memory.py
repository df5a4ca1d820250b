"""Peak memory and time of token log-probabilities, forward and backward: all logits at once against `chunked_token_logprobs`.

    python benchmarks/logprob_memory.py [--json]

Every cell runs in a process of its own: operands are made, a small warm-up loads the libraries, the kernel's high-water mark
of resident memory is reset, and the peak above that baseline is reported. It includes the gradients (V x H and N x H), which
both ways must hold. The plain way is skipped where its three [N, V] float32 tensors (logits, log-softmax, their gradient)
exceed the limit. The chunked time includes the entropies, which the plain way does not compute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

WIDTH = 256
VOCABULARIES = (49_152, 151_936)
TOKENS = (256, 1024, 4096)
LIMIT_GIB = 12.0
WIDE_TILE = 24_576
MIB = 2**20


def resident_mib(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (highest since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure(way: str, tokens: int, vocabulary: int, chunk_vocab: int) -> dict[str, float]:
    """One forward and backward; runs in the child."""
    import torch

    from posttrain.model.head import chunked_token_logprobs

    def step(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
        if way == "naive":
            logprobs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, labels[:, None])[:, 0]
        else:
            logprobs, _ = chunked_token_logprobs(hidden, weight, labels, chunk_vocab=chunk_vocab)
        logprobs.sum().backward()

    def operands(n: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = torch.empty(v, WIDTH).normal_(std=0.05)
        return torch.randn(n, WIDTH, requires_grad=True), weight.requires_grad_(), torch.randint(v, (n,))

    torch.manual_seed(0)
    step(*operands(8, 64))
    inputs = operands(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")
    baseline = resident_mib("VmRSS")
    start = time.perf_counter()
    step(*inputs)
    seconds = time.perf_counter() - start
    return {"peak_mib": resident_mib("VmHWM") - baseline, "seconds": seconds}


def in_child(way: str, tokens: int, vocabulary: int, *, chunk_vocab: int = 0) -> dict[str, float] | None:
    """`measure` in a fresh process; None where the plain way would not fit."""
    if way == "naive" and 3 * tokens * vocabulary * 4 > LIMIT_GIB * 2**30:
        return None
    command = [sys.executable, __file__, "--child", json.dumps([way, tokens, vocabulary, chunk_vocab])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead of a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*json.loads(options.child))))
        return
    cells = []
    for vocabulary in VOCABULARIES:
        for tokens in TOKENS:
            cell = {way: in_child(way, tokens, vocabulary) for way in ("naive", "chunked")}
            cells.append({"V": vocabulary, "N": tokens, **cell})
    wide = in_child("chunked", TOKENS[1], VOCABULARIES[0], chunk_vocab=WIDE_TILE)
    assert wide is not None
    if options.json:
        print(json.dumps({"H": WIDTH, "cells": cells, "wide": {"chunk_vocab": WIDE_TILE, **wide}}, indent=2))
        return
    print(f"H = {WIDTH}, float32")
    print(f"{'V':>8} {'N':>6} | {'naive MiB':>10} {'chunked MiB':>11} {'ratio':>6} | {'naive s':>8} {'chunked s':>9} {'ratio':>6}")
    for cell in cells:
        naive, chunked = cell["naive"], cell["chunked"]
        plain = [f"{naive[key]:.{digits}f}" if naive else "skipped" for key, digits in (("peak_mib", 0), ("seconds", 2))]
        ratios = [f"{naive[key] / chunked[key]:.1f}x" if naive else "-" for key in ("peak_mib", "seconds")]
        print(
            f"{cell['V']:>8} {cell['N']:>6} | {plain[0]:>10} {chunked['peak_mib']:>11.0f} {ratios[0]:>6}"
            f" | {plain[1]:>8} {chunked['seconds']:>9.2f} {ratios[1]:>6}"
        )
    small, large = (cell["chunked"]["peak_mib"] for cell in cells if cell["V"] == VOCABULARIES[0] and cell["N"] in TOKENS[1:])
    logits = (TOKENS[2] - TOKENS[1]) * VOCABULARIES[0] * 4 / MIB
    print(
        f"chunked at V = {VOCABULARIES[0]}: N {TOKENS[1]} -> {TOKENS[2]} adds {large - small:.0f} MiB (one [N, V] would add {logits:.0f}); "
        f"tiles {WIDE_TILE} wide instead of the default add {wide['peak_mib'] - small:.0f} MiB"
    )


if __name__ == "__main__":
    main()
