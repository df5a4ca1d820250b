"""Order, position, tokenization and the length limit of the prompt source."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.config.data import PromptEnvConfig
from posttrain.data import order
from posttrain.data.build import build_prompt_source
from posttrain.data.prompts import CorpusPromptSource
from posttrain.data.source import Cursor
from posttrain.errors import DataError


def source(corpus, tokenizer, *, seed=3, shuffle=True, limit=None):
    return CorpusPromptSource(corpus, tokenizer=tokenizer, seed=seed, shuffle=shuffle, max_prompt_tokens=limit)


def test_rows_come_in_their_own_order_and_wrap(list_corpus, tokenizer):
    drawn = source(list_corpus(["a", "b", "c"]), tokenizer, shuffle=False).draw(7)
    assert [prompt.id for prompt in drawn] == ["r0@0", "r1@0", "r2@0", "r0@1", "r1@1", "r2@1", "r0@2"]


def test_shuffle_is_the_numpy_permutation_of_seed_plus_epoch(list_corpus, tokenizer):
    drawn = source(list_corpus("abcdefgh"), tokenizer, seed=3).draw(16)
    for epoch in (0, 1):
        expected = [f"r{row}@{epoch}" for row in np.random.default_rng(3 + epoch).permutation(8)]
        assert [prompt.id for prompt in drawn[8 * epoch : 8 * epoch + 8]] == expected
    assert drawn[0].id.split("@")[0] != drawn[8].id.split("@")[0]


def test_negative_seeds_are_seeds_too(list_corpus, tokenizer):
    ids = [prompt.id for prompt in source(list_corpus("abcd"), tokenizer, seed=-1).draw(8)]
    assert sorted(ids[:4]) == ["r0@0", "r1@0", "r2@0", "r3@0"] and sorted(ids[4:]) == ["r0@1", "r1@1", "r2@1", "r3@1"]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("before", range(12))
def test_restored_source_continues_the_straight_run(list_corpus, tokenizer, shuffle, before):
    prompts = ["a", "bbbbbbbb", "c", "dd", "e"]  # the second is too long
    straight = source(list_corpus(prompts), tokenizer, shuffle=shuffle, limit=4).draw(24)
    first = source(list_corpus(prompts), tokenizer, shuffle=shuffle, limit=4)
    head = first.draw(before)
    second = source(list_corpus(prompts), tokenizer, shuffle=shuffle, limit=4)
    second.restore(first.cursor())
    assert [*head, *second.draw(24 - before)] == straight


def test_cursor_counts_consumed_rows_and_rolls_over(list_corpus, tokenizer):
    prompts = source(list_corpus(["a", "long long", "c"]), tokenizer, seed=9, shuffle=False, limit=4)
    assert prompts.cursor() == Cursor(epoch=0, index=0, seed=9)
    prompts.draw(1)
    assert prompts.cursor() == Cursor(epoch=0, index=1, seed=9) and prompts.skipped_too_long == 0
    prompts.draw(1)
    assert prompts.cursor() == Cursor(epoch=1, index=0, seed=9) and prompts.skipped_too_long == 1


def test_restore_refuses_another_seed_and_another_corpus(list_corpus, tokenizer):
    prompts = source(list_corpus("abc"), tokenizer, seed=1)
    with pytest.raises(DataError, match=r"cursor.seed=2: .* another data seed than 1.* set the data seed .* back to 2"):
        prompts.restore(Cursor(epoch=0, index=0, seed=2))
    with pytest.raises(DataError, match="index=3: must lie inside a corpus of 3 rows"):
        prompts.restore(Cursor(epoch=0, index=3, seed=1))


def test_limit_keeps_what_just_fits(list_corpus, tokenizer):
    prompts = source(list_corpus(["123", "1234", "12345"]), tokenizer, shuffle=False, limit=5)  # + 1 special token
    assert [prompt.text for prompt in prompts.draw(4)] == ["123", "1234", "123", "1234"]
    assert prompts.skipped_too_long == 1  # the fourth prompt was reached before the second epoch's long one


def test_epoch_without_a_usable_prompt_is_an_error_and_not_a_loop(list_corpus, tokenizer):
    with pytest.raises(DataError, match=r"max_prompt_tokens=3: all 2 prompts .* has \d tokens.*; raise max_prompt_tokens"):
        source(list_corpus(["1234", "12345"]), tokenizer, limit=3).draw(1)


def test_rows_of_an_earlier_process_are_not_called_unusable(list_corpus, tokenizer):
    corpus = list_corpus(["a", "long long"])
    prompts = source(corpus, tokenizer, shuffle=False, limit=4)
    prompts.restore(Cursor(epoch=0, index=1, seed=3))
    assert prompts.draw(1)[0].id == "r0@1"


def test_text_gets_special_tokens_and_a_conversation_gets_the_template(list_corpus, tokenizer):
    turn = ({"role": "user", "content": "hi"},)
    text, chat = source(list_corpus(["hi", turn]), tokenizer, shuffle=False).draw(2)
    assert (text.content, text.text, text.token_ids) == ("hi", "hi", (1, 104, 105))
    assert (chat.content, chat.text) == (turn, "<user>hi<assistant>")
    assert chat.token_ids == tuple(ord(char) for char in "<user>hi<assistant>")


def test_conversation_needs_a_template(list_corpus, tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"row 'r0': .* no chat template; use an instruction-tuned model, or .*arithmetic.chat=false"):
        source(list_corpus([({"role": "user", "content": "hi"},)]), tokenizer).draw(1)


def test_template_errors_name_the_row(list_corpus, tokenizer):
    with pytest.raises(DataError, match="row 'r0': the chat template refuses the conversation: ValueError: system turns"):
        source(list_corpus([({"role": "system", "content": "hi"},)]), tokenizer).draw(1)


def test_prompt_without_tokens_is_refused(list_corpus, tokenizer):
    tokenizer.encode = lambda text, *, add_special_tokens: []
    with pytest.raises(DataError, match="row 'r0': its prompt '' has no tokens"):
        source(list_corpus([""]), tokenizer).draw(1)


def test_empty_corpus_is_refused(list_corpus, tokenizer):
    with pytest.raises(DataError, match="no rows"):
        source(list_corpus([]), tokenizer)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 1000])
def test_constant_memory_permutation_is_one(length):
    visit = order._feistel(length, key=b"0123456789abcdef")
    images = [visit(position) for position in range(length)]
    assert sorted(images) == list(range(length))
    assert length < 64 or images != list(range(length))


def test_long_permutations_follow_the_seed_and_stay_in_range():
    length = order.MATERIALIZE_LIMIT + 12345
    first, again, other = (order.permutation(length, seed=seed) for seed in (5, 5, 6))
    images = [first(position) for position in range(2000)]
    assert images == [again(position) for position in range(2000)]
    assert images != [other(position) for position in range(2000)]
    assert len(set(images)) == 2000 and all(0 <= image < length for image in images)
    # 2000 draws spread over the whole range: the mean of a uniform sample is within 5 standard errors of the middle.
    assert abs(sum(images) / 2000 / length - 0.5) < 5 * (1 / 12) ** 0.5 / 2000**0.5


def test_arithmetic_is_permuted_without_asking_and_only_there(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{number}"}}\n' for number in range(20)))
    plain = build_prompt_source(PromptEnvConfig(path=str(path), prompt_column="q"), seed=0, tokenizer=tokenizer)
    assert [prompt.text for prompt in plain.draw(20)] == [str(number) for number in range(20)]
    drawn = [build_prompt_source(PromptEnvConfig(), seed=seed, tokenizer=tokenizer).draw(375) for seed in (0, 0, 1)]
    ids = [[prompt.id for prompt in prompts] for prompts in drawn]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0] != sorted(ids[0])
