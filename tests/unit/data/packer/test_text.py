"""The layout of a batch, by its documented example and its corners."""

from __future__ import annotations

import torch

from posttrain.data.packer import TrainSample, pack
from posttrain.records import Completion, Prompt


def sample(
    prompt: Prompt, index: int, tokens: tuple[int, ...], *, advantage: float = 1.0, mask: tuple[bool, ...] | None = None
) -> TrainSample:
    completion = Completion(tokens, tuple(-0.5 * t for t in tokens), "length" if index else "stop", 3, "")
    return TrainSample(prompt, index, completion, advantage, mask or (True,) * len(tokens))


def test_the_documented_example() -> None:
    prompt = Prompt("a", "", "", (7, 8))
    batch = pack([sample(prompt, 0, (1, 2)), sample(prompt, 1, (3,), advantage=-1.0, mask=(False,))], pad_id=99)
    assert batch.prompts.tolist() == [[7, 8]] and batch.prompt_of.tolist() == [0, 0]
    assert batch.completions.tolist() == [[1, 2], [3, 99]] and batch.lengths.tolist() == [2, 1]
    assert batch.labels.tolist() == [1, 2, 3] and batch.sequence.tolist() == [0, 0, 1]
    assert batch.loss_mask.tolist() == [True, True, False] and batch.advantages.tolist() == [1.0, -1.0]
    assert batch.sampled_logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert batch.keys == (("a", 0), ("a", 1))


def test_prompts_are_left_padded_and_listed_once_per_run_of_samples() -> None:
    a, b = Prompt("a", "", "", (1,)), Prompt("b", "", "", (2, 3, 4))
    batch = pack([sample(a, 0, (5,)), sample(a, 1, ()), sample(b, 0, (6, 7))], pad_id=0)
    assert batch.prompts.tolist() == [[0, 0, 1], [2, 3, 4]] and batch.prompt_lengths.tolist() == [1, 3]
    assert batch.prompt_of.tolist() == [0, 0, 1] and batch.lengths.tolist() == [1, 0, 2]
    assert batch.sequence.tolist() == [0, 2, 2] and batch.num_sequences == 3


def test_a_token_equal_to_the_pad_id_is_a_token() -> None:
    batch = pack([sample(Prompt("a", "", "", (0, 0)), 0, (0, 5, 0))], pad_id=0)
    assert batch.labels.tolist() == [0, 5, 0] and bool(batch.loss_mask.all())
    assert batch.prompt_lengths.tolist() == [2]


def test_moving_and_freezing_keep_everything_else() -> None:
    batch = pack([sample(Prompt("a", "", "", (1, 2)), 0, (3,))], pad_id=0)
    frozen = batch.with_old_logprobs(torch.tensor([-0.1])).to(torch.device("cpu"))
    assert frozen.old_logprobs is not None and frozen.old_logprobs.tolist() == [-0.10000000149011612]
    assert batch.old_logprobs is None and frozen.keys == batch.keys
