"""`grid.ranks` and `model.parallelism` against each other and the rest."""

from __future__ import annotations

import pytest

from posttrain.config.rules import cautions
from tests.trees import refusals, root_of

TWO = ("grid.ranks=2", "model.parallelism.dp_shard=2")


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (("grid.ranks=2",), "grid.ranks", "must equal model.parallelism.dp_replicate=1 x model.parallelism.dp_shard=1"),
        ((*TWO, "model.parallelism.dp_replicate=2"), "grid.ranks", "set grid.ranks=4"),
        (("grid.ranks=0",), "grid.ranks", "must be >= 1"),
        (("rl.reduce_dtype=bfloat16",), "rl.reduce_dtype", "one rank reduces no gradients"),
        (("model=smollm2_135m", "model.fsdp_reduce_dtype=bfloat16"), "model.fsdp_reduce_dtype", "one rank reduces no gradients"),
        ((*TWO, "rollout=vllm"), "rollout.process", "set rollout.process=separate"),
        ((*TWO, "algorithm=legacy_pg", "rl.batch_per_replica=30", "rl.group_size=2", "rl.micro_batch_per_replica=5"), "rl.micro", "evenly"),
        (("rl.param_dtype=bfloat16", "rl.master_dtype=float32"), "rl.master_dtype", "FSDP wrap"),
    ],
)
def test_refusals(overrides: tuple[str, ...], key: str, says: str) -> None:
    found = refusals("algorithm=grpo", *overrides) if not any(o.startswith("algorithm=") for o in overrides) else refusals(*overrides)
    assert any(violation.key.startswith(key) and says in str(violation) for violation in found), found


def test_two_ranks_may_cast_reduce_and_transfer_as_they_like() -> None:
    precision = ("rl.param_dtype=bfloat16", "rl.master_dtype=float32", "rl.reduce_dtype=bfloat16", "rl.transfer_dtype=bfloat16")
    assert refusals("algorithm=grpo", *TWO, *precision) == []


def test_ranks_that_would_only_wait_are_mentioned() -> None:
    root = root_of("algorithm=grpo", *TWO, "rl.micro_batch_per_replica=1")
    assert any("1 rank(s) only keep step" in caution for caution in cautions(root))
