"""The Hugging Face corpus on local parquet directories; nothing here reaches the network."""

from __future__ import annotations

import sys
import types

import pytest

from posttrain.config.data import PromptEnvConfig
from posttrain.data.build import build_corpus
from posttrain.data.huggingface import HuggingFaceCorpus, parquet_files
from posttrain.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))
    datasets.disable_progress_bars()


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(path)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "gsm"
    rows = [{"question": f"{n}+1?", "answer": f"thoughts #### {n + 1}", "level": n} for n in range(5)]
    parquet(root / "train-00000-of-00002.parquet", rows[:3])
    parquet(root / "train-00001-of-00002.parquet", rows[3:])
    parquet(root / "test.parquet", [{"question": "9+9?", "answer": "#### 18", "level": 99}])
    return root


def final_answer(row):
    return {**row, "answer": row["answer"].split("####")[1].strip(), "hops": 1}


def returns_a_list(row):
    return [row]


def raises(row):
    return row["absent"]


@pytest.fixture(autouse=True)
def _row_maps(monkeypatch):
    module = types.ModuleType("row_maps_under_test")
    module.final_answer, module.returns_a_list, module.raises, module.number = final_answer, returns_a_list, raises, 3
    monkeypatch.setitem(sys.modules, "row_maps_under_test", module)


def config(folder, **changes):
    return PromptEnvConfig(**{"name": str(folder), "prompt_column": "question", "response_column": "answer", **changes})


def test_shards_of_a_split_in_order_with_renamed_columns(folder):
    corpus = build_corpus(config(folder))
    assert [corpus[index].prompt for index in range(len(corpus))] == [f"{n}+1?" for n in range(5)]
    assert (corpus[4].key, corpus[4].reference, corpus[4].representations) == ("train:4", "thoughts #### 5", {"level": 4})
    assert corpus.columns == {"prompt", "reference", "level"}
    held_out = build_corpus(config(folder, split="test"))
    assert (len(held_out), held_out[0].prompt) == (1, "9+9?")


def test_row_map_runs_before_renaming(folder):
    corpus = build_corpus(config(folder, items_fn="row_maps_under_test.final_answer"))
    assert (corpus[2].reference, corpus[2].representations) == ("3", {"level": 2, "hops": 1})
    assert corpus.columns == {"prompt", "reference", "level", "hops"}


def test_conversations_in_parquet(tmp_path):
    parquet(tmp_path / "d" / "data.parquet", [{"messages": [{"role": "user", "content": "hi"}], "answer": "x"}])
    corpus = HuggingFaceCorpus(str(tmp_path / "d"), split="train", prompt_column="messages", response_column="answer")
    assert corpus[0].prompt == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("names", "subset", "split", "chosen"),
    [
        (["data.parquet", "more.parquet"], "", "train", ["data.parquet", "more.parquet"]),
        (["train/0.parquet", "test/0.parquet"], "", "test", ["test/0.parquet"]),
        (["train.parquet", "validation-00000-of-00001.parquet"], "", "validation", ["validation-00000-of-00001.parquet"]),
        (["main/train-0.parquet", "socratic/train-0.parquet"], "main", "train", ["main/train-0.parquet"]),
        (["train_1.parquet", "train_0.parquet", "test_0.parquet"], "", "train", ["train_0.parquet", "train_1.parquet"]),
        (["training.parquet", "odd.parquet"], "", "odd", ["odd.parquet"]),
    ],
)
def test_files_of_a_split(tmp_path, names, subset, split, chosen):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in parquet_files(tmp_path, subset=subset, split=split)] == chosen


def test_split_that_is_not_there(tmp_path):
    (tmp_path / "test.parquet").touch()
    with pytest.raises(DataError, match=r"data.split='train': no file of .* belongs to it; .* files found: test.parquet"):
        parquet_files(tmp_path, split="train")
    (tmp_path / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        parquet_files(tmp_path, split="train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt_column": "problem"},
            "split 'train', row 0: has no prompt column 'problem'; its columns are 'question', 'answer', 'level'",
        ),
        ({"prompt_column": "level"}, "row 0: column 'level' must hold a text or a list of chat turns, got int"),
        ({"items_fn": "row_maps_under_test.returns_a_list"}, "row 0: data.items_fn must return a dict, got list"),
        ({"items_fn": "row_maps_under_test.raises"}, "row 0: data.items_fn raised KeyError: 'absent'"),
        ({"items_fn": "row_maps_under_test.number"}, "must be a function .*, got int"),
    ],
)
def test_errors_name_the_row(folder, changes, message):
    with pytest.raises(DataError, match=message):
        build_corpus(config(folder, **changes))


def test_row_map_that_does_not_exist(folder):
    with pytest.raises(ConfigError, match="'row_maps_under_test' has no attribute 'final_anser'"):
        build_corpus(config(folder, items_fn="row_maps_under_test.final_anser"))


def test_rows_are_checked_when_drawn(tmp_path):
    parquet(tmp_path / "d" / "train.parquet", [{"q": "a", "a": "1"}, {"q": "b", "a": None}])
    corpus = HuggingFaceCorpus(str(tmp_path / "d"), split="train", prompt_column="q", response_column="a")
    with pytest.raises(DataError, match="row 1: column 'a' is null"):
        corpus[1]


def test_data_set_that_cannot_be_loaded(monkeypatch):
    def unreachable(name, subset, *, split):
        assert (name, subset, split) == ("openai/gsm8k", "main", "train")
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match=r"data set 'openai/gsm8k' \(main\), split 'train': cannot be loaded: ConnectionError: no route.*data.subset"
    ):
        HuggingFaceCorpus("openai/gsm8k", subset="main", split="train", prompt_column="question", response_column="answer")
