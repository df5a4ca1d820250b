"""Which differences an exact resume refuses, warns of, and ignores."""

from __future__ import annotations

import re

import pytest

from posttrain.checkpoint.exactness import compare, exact_values, flatten
from posttrain.errors import CheckpointError

CONFIG = {
    "job": {"name": "a"},
    "tracker": {"console": "auto"},
    "grid": {"num_replicas": 1},
    "rl": {"seed": 0, "max_steps": 8, "save_every": 2, "upload": {"url": ""}, "optimizer": {"lr": 1e-3, "lr_schedule": "constant"}},
    "rollout": {"max_batch": 0, "temperature": 1.0},
}


def changed(**values: object) -> dict[str, object]:
    tree = {key: {**value} for key, value in CONFIG.items()}
    for path, value in values.items():
        node: dict[str, object] = tree
        *parents, last = path.split("__")
        for parent in parents:
            node[parent] = {**node[parent]}  # type: ignore[dict-item]
            node = node[parent]  # type: ignore[assignment]
        node[last] = value
    return exact_values(tree, {"data_seed": 0})


def test_values_are_flat_and_leave_out_what_no_number_depends_on() -> None:
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": {}}) == {"a.b": 1, "a.c": [1, 2]}
    assert changed() == {
        "grid.num_replicas": 1,
        "rl.seed": 0,
        "rl.optimizer.lr": 1e-3,
        "rl.optimizer.lr_schedule": "constant",
        "rollout.max_batch": 0,
        "rollout.temperature": 1.0,
        "data_seed": 0,
    }


@pytest.mark.parametrize("change", [{"job__name": "b"}, {"rl__max_steps": 9}, {"rl__save_every": 1}, {"rl__upload__url": "s3://bucket"}])
def test_free_keys_may_change(change: dict[str, object]) -> None:
    assert compare(changed(), changed(**change)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [({"grid__num_replicas": 2}, "grid.num_replicas was 1 and is 2"), ({"rollout__max_batch": 4}, "rollout.max_batch was 0 and is 4")],
)
def test_keys_that_move_rounding_are_told(change: dict[str, object], text: str) -> None:
    assert compare(changed(), changed(**change)) == [text]


def test_everything_else_is_refused_in_one_message_with_both_values() -> None:
    with pytest.raises(CheckpointError) as caught:
        compare(changed(), changed(rl__seed=1, rollout__temperature=0.9, grid__num_replicas=2))
    text = str(caught.value)
    assert "rl.seed was 0 and is 1" in text and "rollout.temperature was 1.0 and is 0.9" in text and "grid" not in text
    assert re.search(r"another job.name and rl.init_from", text)
    with pytest.raises(CheckpointError, match="data_seed was None and is 0"):
        compare({key: value for key, value in changed().items() if key != "data_seed"}, changed())


def test_the_length_counts_where_a_schedule_depends_on_it() -> None:
    cosine = {"rl__optimizer__lr_schedule": "cosine"}
    assert changed(**cosine)["rl.max_steps"] == 8
    with pytest.raises(CheckpointError, match=r"rl\.max_steps was 8 and is 9"):
        compare(changed(**cosine), changed(**cosine, rl__max_steps=9))
