"""What every kind of prompt source promises, whatever its data.

A new kind joins by adding a configuration to `SOURCES`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.base import field_violations
from posttrain.config.data import ArithmeticConfig, PromptEnvConfig, ReasoningGymConfig
from posttrain.data.build import build_corpus, build_prompt_source, declared_columns, missing_extra
from posttrain.data.source import Cursor
from posttrain.errors import DataError

ROWS = [{"question": f"{n} + {n}?" + "!" * (n % 4), "answer": str(2 * n), "level": n} for n in range(7)]


class CharTokenizer:
    chat_template: Any = "yes"

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(char) for char in text]


def arithmetic(folder: Path) -> PromptEnvConfig:
    return PromptEnvConfig(arithmetic=ArithmeticConfig(low=0, high=2, operators=["+", "-"]))


def jsonl(folder: Path) -> PromptEnvConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return PromptEnvConfig(path=str(path), prompt_column="question", response_column="answer", shuffle=True)


def huggingface(folder: Path) -> PromptEnvConfig:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (folder / "parquet").mkdir(exist_ok=True)
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "parquet" / "train.parquet")
    return PromptEnvConfig(name=str(folder / "parquet"), prompt_column="question", response_column="answer", shuffle=True)


def reasoning_gym(folder: Path) -> PromptEnvConfig:
    pytest.importorskip("reasoning_gym")
    return PromptEnvConfig(reasoning_gym=ReasoningGymConfig(dataset="leg_counting", size=6))


SOURCES = {"arithmetic": arithmetic, "jsonl": jsonl, "huggingface": huggingface, "reasoning_gym": reasoning_gym}


@pytest.fixture(params=list(SOURCES))
def config(request, tmp_path, monkeypatch) -> PromptEnvConfig:
    if request.param == "huggingface":
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = SOURCES[request.param](tmp_path)
    assert made.kind == request.param
    assert not [*made.violations("rl.data"), *field_violations("rl.data", made)]
    return made


def source(config, *, seed=4):
    return build_prompt_source(config, seed=seed, tokenizer=CharTokenizer())


def test_rows_have_unique_keys_and_every_promised_column(config):
    corpus = build_corpus(config)
    rows = [corpus[index] for index in range(len(corpus))]
    assert len({row.key for row in rows}) == len(rows) >= 6
    assert declared_columns(config) <= corpus.columns
    for row in rows:
        assert corpus.columns - {"prompt", "reference"} <= row.representations.keys()
        assert not {"prompt", "reference"} & row.representations.keys()
        assert row.reference is not None
    assert rows == [build_corpus(config)[index] for index in range(len(corpus))]
    assert missing_extra(config) is None


def test_an_epoch_draws_every_row_once_and_ids_never_repeat(config):
    corpus, prompts = build_corpus(config), source(config)
    assert prompts.columns == corpus.columns
    size, keys = len(corpus), {corpus[index].key for index in range(len(corpus))}
    drawn = prompts.draw(3 * size)
    assert len({prompt.id for prompt in drawn}) == 3 * size
    for epoch in range(3):
        assert {prompt.id for prompt in drawn[epoch * size : (epoch + 1) * size]} == {f"{key}@{epoch}" for key in keys}
    orders = [[prompt.id.split("@")[0] for prompt in drawn[epoch * size : (epoch + 1) * size]] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) > 1  # these configurations all shuffle


def test_prompts_are_complete(config):
    for prompt in source(config).draw(3):
        assert prompt.token_ids and prompt.text and prompt.reference is not None
        tokens = [ord(char) for char in prompt.text]
        assert list(prompt.token_ids) == ([1, *tokens] if isinstance(prompt.content, str) else tokens)
        assert isinstance(prompt.content, str) or prompt.content[-1]["content"] in prompt.text


def test_same_seed_same_stream_other_seed_other_stream(config):
    size = len(build_corpus(config))
    first, again, other = ([prompt.id for prompt in source(config, seed=seed).draw(2 * size)] for seed in (4, 4, 11))
    assert first == again and first != other


def test_drawing_in_pieces_is_drawing_at_once(config):
    whole, pieces = source(config), source(config)
    assert whole.draw(17) == [*pieces.draw(1), *pieces.draw(0), *pieces.draw(9), *pieces.draw(7)]
    assert whole.cursor() == pieces.cursor()


def test_restored_source_equals_the_straight_run_at_every_position(config):
    straight = source(config)
    expected = straight.draw(26)
    walker = source(config)
    for position in range(16):
        restored = source(config)
        restored.restore(walker.cursor())
        assert restored.cursor() == walker.cursor()
        assert list(restored.draw(10)) == list(expected[position : position + 10])
        walker.draw(1)


def test_restored_source_equals_the_straight_run_with_a_length_limit(config):
    lengths = sorted(len(prompt.token_ids) for prompt in source(config).draw(len(build_corpus(config))))
    config.max_prompt_tokens = lengths[len(lengths) // 2]
    straight, first, second = source(config), source(config), source(config)
    expected = straight.draw(14)
    head = first.draw(5)
    second.restore(first.cursor())
    assert [*head, *second.draw(9)] == list(expected)
    assert all(len(prompt.token_ids) <= config.max_prompt_tokens for prompt in expected)
    # What the two halves skipped is what the straight run skipped.
    assert first.skipped_too_long + second.skipped_too_long == straight.skipped_too_long


def test_cursor_of_another_seed_is_refused(config):
    with pytest.raises(DataError, match="saved under another data seed"):
        source(config, seed=4).restore(Cursor(epoch=0, index=0, seed=5))


def test_limit_that_no_prompt_meets_is_an_error(config):
    config.max_prompt_tokens = 2
    with pytest.raises(DataError, match="max_prompt_tokens=2: all"):
        source(config).draw(1)
