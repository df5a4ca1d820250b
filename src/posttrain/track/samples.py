"""The shape of one line of `samples/*.jsonl`: a prompt with all its completions, rewards, advantages and token probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from posttrain.records import Completion, Score, ScoredGroup, TrainGroup

TokenTexts = Callable[[tuple[int, ...]], list[str]]
"""Token ids -> the text of each token."""

_DECIMALS = 6
"""Of log-probabilities: far below what a page can show, and it keeps the files small."""


def train_group_record(
    group: TrainGroup,
    *,
    step: int,
    token_texts: TokenTexts,
    token_logprobs: Mapping[tuple[str, int], tuple[float, ...]],
) -> dict[str, object]:
    """A trained group. `token_logprobs` is keyed by (prompt id, sample index); a sample without an entry gets null."""
    prompt_id = group.scored.rollout.prompt.id
    completions: list[dict[str, object]] = []
    for index, (completion, score) in enumerate(zip(group.scored.rollout.completions, group.scored.scores, strict=True)):
        trained = token_logprobs.get((prompt_id, index))
        completions.append(
            _completion_record(completion, score, token_texts=token_texts)
            | {
                "advantage": group.advantages[index],
                "trained_logprobs": None if trained is None else _rounded(trained),
                "loss_mask": [int(flag) for flag in group.loss_masks[index]],
            }
        )
    return _group_record(group.scored) | {"step": step, "completions": completions}


def held_out_group_record(group: ScoredGroup, *, model_step: int, token_texts: TokenTexts | None) -> dict[str, object]:
    """A held-out group: nothing was trained, so there are no advantages, masks or trained probabilities."""
    completions = [
        _completion_record(completion, score, token_texts=token_texts)
        for completion, score in zip(group.rollout.completions, group.scores, strict=True)
    ]
    return _group_record(group) | {"model_step": model_step, "completions": completions}


def _group_record(group: ScoredGroup) -> dict[str, object]:
    prompt = group.rollout.prompt
    totals = [score.total for score in group.scores]
    return {
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "reference": prompt.reference,
        "reward_mean": sum(totals) / len(totals),
        "spread": group.spread,
    }


def _completion_record(completion: Completion, score: Score, *, token_texts: TokenTexts | None) -> dict[str, object]:
    return {
        "text": completion.text,
        "reward": score.total,
        "parts": dict(score.parts),
        "failure": score.failure,
        "finish_reason": completion.finish_reason,
        "weight_version": completion.weight_version,
        "num_tokens": len(completion.token_ids),
        "tokens": None if token_texts is None else token_texts(completion.token_ids),
        "logprobs": _rounded(completion.logprobs),
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, _DECIMALS) for value in values]
