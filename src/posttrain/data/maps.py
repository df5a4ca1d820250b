"""Row maps for well-known data sets, for `rl.data.items_fn`."""

from __future__ import annotations

from typing import Any

INSTRUCTION = "Solve the problem step by step and give the final answer in \\boxed{}."


def gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    """A GSM8K row (arXiv 2110.14168): the question as a user turn, the number after `####` as the answer."""
    answer = str(row["answer"]).rpartition("####")[2].strip().replace(",", "")
    return {**row, "prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}], "answer": answer}
