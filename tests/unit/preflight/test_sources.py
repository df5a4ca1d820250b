"""What the checks find in prompt sources, and what they then know about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import PromptEnvConfig
from posttrain.config.data import ArithmeticConfig, ReasoningGymConfig
from posttrain.preflight.generated import arithmetic_facts, dataset_names, reasoning_gym_facts
from posttrain.preflight.hub import huggingface_facts
from posttrain.preflight.jsonl import jsonl_facts


def written(path: Path, rows: list[Any]) -> PromptEnvConfig:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return PromptEnvConfig(path=str(path), prompt_column="question", response_column="label")


def test_good_file_tells_columns_and_longest_prompts(tmp_path: Path) -> None:
    rows = [{"question": "q" * n, "label": "a", "level": 1, **({"extra": 1} if n == 2 else {})} for n in (1, 40, 2)]
    found, facts = jsonl_facts("rl.data", written(tmp_path / "f.jsonl", rows))
    assert found == []
    assert facts is not None
    assert (facts.columns, facts.complete, facts.conversation) == ({"prompt", "reference", "level"}, True, None)
    assert ("line 2", "q" * 40) in [(prompt.where, prompt.content) for prompt in facts.longest]


def test_conversation_is_recognized_with_its_line(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    _, facts = jsonl_facts("rl.data", written(tmp_path / "f.jsonl", [{"question": "x", "label": 1}, {"question": chat, "label": 1}]))
    assert facts is not None
    assert facts.conversation is not None
    assert facts.conversation[1].startswith("line 2 of ")


def test_first_five_broken_lines_are_named_and_all_are_counted(tmp_path: Path) -> None:
    data = written(tmp_path / "f.jsonl", [{"question": "x", "label": 1}, *["{"] * 7])
    found, facts = jsonl_facts("rl.data", data)
    assert facts is None
    assert [violation.key for violation in found] == ["rl.data.path"]
    for line in range(2, 7):
        assert f"line {line} is not JSON" in found[0].rule
    assert "line 7" not in found[0].rule
    assert found[0].rule.endswith("and 2 more lines (7 in all)")
    assert found[0].remedy == "write one JSON object per line"


def test_missing_columns_are_reported_under_their_keys(tmp_path: Path) -> None:
    found, _ = jsonl_facts("rl.data", written(tmp_path / "f.jsonl", [{"text": "x"}, {"question": "x"}]))
    assert [violation.key for violation in found] == ["rl.data.prompt_column", "rl.data.response_column"]
    assert "its columns are 'text'" in found[0].rule


def test_small_arithmetic_range_without_held_out_problems_is_refused() -> None:
    data = PromptEnvConfig(split="held_out", arithmetic=ArithmeticConfig(low=0, high=0, held_out_fraction=0.01))
    found, facts = arithmetic_facts("rl.validation.data", data)
    assert facts is None
    assert [violation.key for violation in found] == ["rl.validation.data.arithmetic.high"]


def test_arithmetic_stands_on_its_longest_question() -> None:
    data = PromptEnvConfig(arithmetic=ArithmeticConfig(low=-100, high=20, chat=False, template="{a}{op}{b}"))
    found, facts = arithmetic_facts("rl.data", data)
    assert found == []
    assert facts is not None
    assert [prompt.content for prompt in facts.longest] == ["-100+-100"]
    assert facts.conversation is None


def test_reasoning_gym_names_are_those_the_library_registers() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    assert dataset_names() == set(factory.DATASETS)


def test_reasoning_gym_refuses_parameters_that_the_split_owns() -> None:
    data = PromptEnvConfig(reasoning_gym=ReasoningGymConfig(dataset="chain_sum", config={"seed": 1, "max_terms": 3}))
    found, _ = reasoning_gym_facts("rl.data", data, installed=lambda _: True)
    assert [violation.key for violation in found] == ["rl.data.reasoning_gym.config.seed"]


def parquet_directory(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"q": ["x"], "a": ["y"], "level": [1]}), tmp_path / "train.parquet")
    return tmp_path


def test_parquet_directory_tells_its_columns(tmp_path: Path) -> None:
    data = PromptEnvConfig(name=str(parquet_directory(tmp_path)), prompt_column="q", response_column="a")
    found, facts = huggingface_facts("rl.data", data, installed=lambda _: True)
    assert found == []
    assert facts is not None
    assert (facts.columns, facts.complete) == ({"prompt", "reference", "level"}, True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"split": "test"}, "rl.data.split"), ({"prompt_column": "z"}, "rl.data.prompt_column"), ({"name": "/no/where"}, "rl.data.name")],
)
def test_parquet_directory_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, str], key: str) -> None:
    given = {"name": str(parquet_directory(tmp_path)), "prompt_column": "q", "response_column": "a", **changes}
    found, facts = huggingface_facts("rl.data", PromptEnvConfig(**given), installed=lambda _: True)
    assert facts is None
    assert [violation.key for violation in found] == [key]


def test_hub_data_set_is_left_to_the_run() -> None:
    data = PromptEnvConfig(name="openai/gsm8k", subset="main", prompt_column="prompt", response_column="answer")
    found, facts = huggingface_facts("rl.data", data, installed=lambda _: True)
    assert found == []
    assert facts is not None
    assert (facts.columns, facts.complete) == ({"prompt", "reference"}, False)
