"""Corpora of the reasoning-gym library."""

from __future__ import annotations

import pytest

from posttrain.config.data import ReasoningGymConfig
from posttrain.data.reasoning_gym_source import ReasoningGymCorpus
from posttrain.errors import DataError

reasoning_gym = pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "spell_backward", "gsm_symbolic", "word_ladder", "number_sorting"])
def test_rows_are_the_librarys_own_entries(name):
    corpus = ReasoningGymCorpus(ReasoningGymConfig(dataset=name, size=4, instruction="Think.\n"))
    entries = list(reasoning_gym.create_dataset(name, seed=0, size=4))
    assert len(corpus) == 4
    for index, entry in enumerate(entries):
        row = corpus[index]
        assert row.key == f"{name}:train:{index}"
        assert row.prompt == ({"role": "user", "content": f"Think.\n\n{entry['question']}"},)
        assert row.reference == entry["answer"]
        assert row.representations == {"dataset": name, "dataset_config": {}, "entry": entry}
    assert corpus.columns == {"prompt", "reference", "dataset", "dataset_config", "entry"}


def test_parameters_reach_the_generator():
    corpus = ReasoningGymCorpus(ReasoningGymConfig(dataset="chain_sum", size=30, config={"min_terms": 5, "max_terms": 5}))
    assert {corpus[index].representations["entry"]["metadata"]["num_terms"] for index in range(30)} == {5}
    assert corpus[0].representations["dataset_config"] == {"min_terms": 5, "max_terms": 5}


def test_splits_are_disjoint_even_where_item_i_is_made_from_seed_plus_i():
    config = ReasoningGymConfig(dataset="chain_sum", size=200, config={"min_digits": 6, "max_digits": 8})
    questions = []
    for split in ("train", "held_out"):
        corpus = ReasoningGymCorpus(config, split=split)
        questions.append({corpus[index].prompt[0]["content"] for index in range(200)})
    assert len(questions[0]) == len(questions[1]) == 200 and not questions[0] & questions[1]


def test_data_sets_scored_without_a_single_answer_have_no_reference():
    corpus = ReasoningGymCorpus(ReasoningGymConfig(dataset="rush_hour", size=2))
    assert corpus[0].reference is None and "reference" not in corpus.columns


def test_composite_of_plain_dictionaries():
    parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "leg_counting", "weight": 1, "config": {}}]
    corpus = ReasoningGymCorpus(ReasoningGymConfig(dataset="composite", size=20, config={"datasets": parts}))
    assert {corpus[index].representations["entry"]["metadata"]["source_dataset"] for index in range(20)} == {"chain_sum", "leg_counting"}


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({"dataset": "chain_sun"}, "train", "no such data set; did you mean 'chain_sum'?"),
        ({"config": {"terms": 3}}, "train", "data set 'chain_sum' refuses it: TypeError: .*terms"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "train", "refuses it: AssertionError"),
        ({"config": {"seed": 3}}, "train", "reasoning_gym.config.seed=3: is not yours to set"),
        ({"size": 0}, "train", "size=0: must lie in 1"),
        ({"size": 2**31}, "train", "size=2147483648: must lie in 1"),
        ({}, "test", "split='test': the reasoning-gym source has train and held_out"),
        ({"dataset": "composite"}, "train", "refuses it: AssertionError: Must specify at least one dataset"),
    ],
)
def test_errors(changes, split, message):
    with pytest.raises(DataError, match=message):
        ReasoningGymCorpus(ReasoningGymConfig(**{"dataset": "chain_sum", "size": 4, **changes}), split=split)
    with pytest.raises(IndexError):
        ReasoningGymCorpus(ReasoningGymConfig(dataset="chain_sum", size=4))[4]
