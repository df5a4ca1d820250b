"""One GRPO configuration in TRL, measured: the peer of `grpo_step.py`, which starts it in a process of its own.

TRL gets its best setting on a CPU (micro-batches of one group, fused AdamW, no gradient checkpointing). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def last_number_reward(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 when the last integer of the completion is the answer."""
    rewards: list[float] = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        numbers = re.findall(r"-?\d+", text)
        rewards.append(float(bool(numbers) and int(numbers[-1]) == expected))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "precision", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("prompts", "group", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()

    import datasets
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    with open(options.data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    batch = options.prompts * options.group
    config = GRPOConfig(
        output_dir=options.output,
        use_cpu=True,
        per_device_train_batch_size=options.group,
        gradient_accumulation_steps=batch // options.group,
        num_generations=options.group,
        max_completion_length=options.tokens,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        max_steps=options.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        save_strategy="no",
        report_to="none",
        bf16=options.precision == "bf16",
        fp16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        optim="adamw_torch_fused",
        model_init_kwargs={"dtype": "float32"},
        generation_kwargs={"min_new_tokens": options.tokens},
        disable_tqdm=True,
    )
    seconds: list[float] = []
    cpu_seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.started[0])
            cpu_seconds.append(time.process_time() - self.started[1])

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=last_number_reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("RESULT " + json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": batch * options.tokens, "peak_gib": peak}))


if __name__ == "__main__":
    main()
