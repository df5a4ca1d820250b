"""Translation between posttrain's records and vLLM's: requests in, completions out."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from posttrain.errors import RolloutError
from posttrain.records import Completion, FinishReason, SamplingParams, TopTokens

MIN_TEMPERATURE = 0.01
"""vLLM replaces any smaller positive temperature by this one."""


def sample_seed(seed: int, index: int) -> int:
    """The seed of one completion of a group.

    Hashed rather than added: `seed + index`, vLLM's own rule for n > 1, hands neighbouring requests the same random numbers.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1


def vllm_sampling_params(sampling: SamplingParams, *, seed: int) -> Any:
    """vLLM's parameters for exactly one completion; raises RolloutError for what vLLM would silently rewrite."""
    from vllm import SamplingParams as VLLMSamplingParams

    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"temperature={sampling.temperature}: vLLM rewrites positive temperatures below {MIN_TEMPERATURE}; "
            f"use 0 for greedy or at least {MIN_TEMPERATURE}"
        )
    return VLLMSamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=sampling.ignore_eos,
        seed=seed,
        logprobs=sampling.top_tokens,  # 0 is the sampled token alone
        # The text is decoded once, from the complete ids, as the other engines do; vLLM's incremental decoder would work per token.
        detokenize=False,
    )


def completion_from(output: Any, *, tokenizer: Any, weight_version: int, prompt_id: str, top_tokens: int) -> Completion:
    """One of vLLM's outputs as a record; raises RolloutError when it is not a finished completion."""
    ids = tuple(int(token) for token in output.token_ids)
    reasons: dict[object, FinishReason] = {"stop": "stop", "length": "length"}
    reason = reasons.get(output.finish_reason)
    if reason is None:
        raise RolloutError(
            f"prompt {prompt_id!r}: the engine ended a completion after {len(ids)} tokens with finish_reason={output.finish_reason!r}; "
            "only 'stop' and 'length' yield a completion to train on: see the engine's log"
        )
    if output.logprobs is None or len(output.logprobs) != len(ids):
        raise RolloutError(f"prompt {prompt_id!r}: the engine returned {len(ids)} tokens without one log-probability each")
    logprobs = tuple(float(position[token].logprob) for position, token in zip(output.logprobs, ids, strict=True))
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    top = _top_tokens(output.logprobs, top_tokens) if top_tokens else None
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=weight_version, text=text, top=top)


def _top_tokens(positions: Any, count: int) -> TopTokens:
    """vLLM returns the `count` most likely tokens of every position and, beside them, the sampled one when it is not among
    them; being the least likely, it is left out."""
    ids = np.empty((len(positions), count), dtype=np.int32)
    logprobs = np.empty((len(positions), count), dtype=np.float32)
    for row, position in enumerate(positions):
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)[:count]
        if len(ranked) < count:
            raise RolloutError(f"the engine reported {len(ranked)} of {count} requested top tokens; rl.score_centering.top_k is too large")
        ids[row] = [token for token, _ in ranked]
        logprobs[row] = [entry.logprob for _, entry in ranked]
    return TopTokens(ids, logprobs)
