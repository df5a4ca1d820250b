"""Batched sampling with transformers on the policy's own parameters: no second copy of the weights exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.config.rollout import HFRolloutConfig
from posttrain.errors import RolloutError
from posttrain.model.policy import CausalPolicy
from posttrain.records import Completion, FinishReason, RolloutGroup, RolloutRequest, SamplingParams, TopTokens
from posttrain.rollout.sampling import draw, processed_logprobs, uniforms


@dataclass(slots=True)
class _Sequence:
    """One completion while it grows."""

    request: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Any, Any]] = field(default_factory=list)
    """(ids [k], log-probabilities [k]) per token, as numpy rows, where the request asked for them."""
    finish_reason: FinishReason = "length"


class HFEngine:
    """Implements `RolloutEngine`; it becomes usable when a weight version is committed."""

    def __init__(self, config: HFRolloutConfig, *, policy: CausalPolicy) -> None:
        self._config = config
        self._policy = policy
        self._version: int | None = None

    @property
    def weight_version(self) -> int | None:
        return self._version

    @property
    def policy(self) -> CausalPolicy:
        """The policy whose parameters are sampled."""
        return self._policy

    def commit(self, version: int) -> None:
        """Serve the parameters as they are now under `version`."""
        self._version = version

    def close(self) -> None:
        self._version = None

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """See `RolloutEngine.generate`.

        Raises:
            RolloutError: no committed version, or a prompt that does not fit the model's context.
        """
        version = self._version
        if version is None:
            raise RolloutError("rollout=hf was asked to generate before a weight version was committed; publish weights first")
        self._check_context(requests)
        sequences = [_Sequence(r, i) for r, request in enumerate(requests) for i in range(request.group_size)]
        self._policy.module.eval()
        for sampling, chunk in self._chunks(requests, sequences):
            self._decode(requests, chunk, sampling)
        groups: list[list[Completion]] = [[] for _ in requests]
        for sequence in sequences:
            text = self._policy.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            groups[sequence.request].append(
                Completion(tuple(sequence.tokens), tuple(sequence.logprobs), sequence.finish_reason, version, text, _top(sequence))
            )
        return [RolloutGroup(request.prompt, tuple(done)) for request, done in zip(requests, groups, strict=True)]

    def _check_context(self, requests: Sequence[RolloutRequest]) -> None:
        limit = self._policy.module.config.get_text_config().max_position_embeddings
        for request in requests:
            length = len(request.prompt.token_ids)
            if length + request.sampling.max_tokens > limit:
                raise RolloutError(
                    f"prompt {request.prompt.id!r} has {length} tokens; with rollout.max_tokens={request.sampling.max_tokens} it exceeds "
                    f"the model's context of {limit}; set rl.data.max_prompt_tokens={max(limit - request.sampling.max_tokens, 1)}"
                )

    def _chunks(self, requests: Sequence[RolloutRequest], sequences: list[_Sequence]) -> Iterator[tuple[SamplingParams, list[_Sequence]]]:
        """Sequences that may be decoded together: same sampling, at most `max_batch`."""
        by_sampling: dict[SamplingParams, list[_Sequence]] = {}
        for sequence in sequences:
            by_sampling.setdefault(requests[sequence.request].sampling, []).append(sequence)
        for sampling, members in by_sampling.items():
            size = self._config.max_batch or len(members)
            for start in range(0, len(members), size):
                yield sampling, members[start : start + size]

    @torch.no_grad()
    def _decode(self, requests: Sequence[RolloutRequest], sequences: list[_Sequence], sampling: SamplingParams) -> None:
        policy, device = self._policy, self._policy.device
        order = list(dict.fromkeys(sequence.request for sequence in sequences))
        prompts = [requests[r].prompt.token_ids for r in order]
        row_of = torch.tensor([order.index(sequence.request) for sequence in sequences], device=device)
        noise = torch.from_numpy(_noise(requests, sequences, sampling)).to(device)
        # one outer context: under autocast the casts of the weights are made once and kept for the whole decode
        with policy.compute():
            state = _Prefilled.run(policy, prompts).expand(row_of)
            seen = _seen(prompts, row_of, state.hidden.device, policy) if sampling.repetition_penalty != 1.0 else None
            active = torch.arange(len(sequences), device=device)
            for step in range(sampling.max_tokens):
                logprobs = processed_logprobs(policy.logits(state.hidden), sampling, seen=seen)
                tokens = logprobs.argmax(-1) if sampling.temperature == 0 else draw(logprobs, noise[active, step])
                chosen = logprobs.gather(1, tokens[:, None])[:, 0]
                if sampling.top_tokens:
                    _record_top(sequences, active, logprobs, sampling.top_tokens)
                if seen is not None:
                    seen[torch.arange(len(active), device=device), tokens] = True
                keep = self._record(sequences, active, tokens, chosen, ends=() if sampling.ignore_eos else policy.eos_ids)
                if step + 1 == sampling.max_tokens or not keep:
                    break
                if len(keep) < len(active):
                    rows = torch.tensor(keep, device=device)
                    active, tokens = active[rows], tokens[rows]
                    seen = None if seen is None else seen[rows]
                    state.select(rows)
                state.advance(policy, tokens)

    def _record(
        self, sequences: list[_Sequence], active: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor, *, ends: tuple[int, ...]
    ) -> list[int]:
        """Append this step's tokens; the rows that go on."""
        keep: list[int] = []
        for row, (owner, token, logprob) in enumerate(zip(active.tolist(), tokens.tolist(), chosen.tolist(), strict=True)):
            sequence = sequences[owner]
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in ends:
                sequence.finish_reason = "stop"
            else:
                keep.append(row)
        return keep


@dataclass(slots=True)
class _Prefilled:
    """The decoder's state between steps."""

    hidden: torch.Tensor
    """[B, H] of the last position."""
    cache: Any
    mask: torch.Tensor
    """int64 [B, prompt + generated] attention mask."""
    positions: torch.Tensor
    """int64 [B] position of the next token."""

    @classmethod
    def run(cls, policy: CausalPolicy, prompts: Sequence[tuple[int, ...]]) -> _Prefilled:
        """Each distinct prompt once."""
        width = max(len(ids) for ids in prompts)
        ids = torch.full((len(prompts), width), policy.pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ids, mask = ids.to(policy.device), mask.to(policy.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = policy.body(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        return cls(out.last_hidden_state[:, -1], out.past_key_values, mask, mask.sum(1))

    def expand(self, rows: torch.Tensor) -> _Prefilled:
        """Repeat prompt rows for the completions that share them."""
        self.select(rows)
        return self

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        self.hidden, self.mask, self.positions = self.hidden[rows], self.mask[rows], self.positions[rows]
        self.cache.batch_select_indices(rows)

    def advance(self, policy: CausalPolicy, tokens: torch.Tensor) -> None:
        """Feed one token per row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        out = policy.body(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.hidden, self.positions = out.last_hidden_state[:, -1], self.positions + 1


def _noise(requests: Sequence[RolloutRequest], sequences: list[_Sequence], sampling: SamplingParams) -> Any:
    import numpy as np

    count = sampling.max_tokens if sampling.temperature > 0 else 0
    return np.stack([uniforms(requests[s.request].seed, s.index, count) for s in sequences])


def _seen(prompts: Sequence[tuple[int, ...]], row_of: torch.Tensor, device: torch.device, policy: CausalPolicy) -> torch.Tensor:
    """bool [B, V]: tokens of each row's prompt."""
    vocabulary = policy.module.get_output_embeddings().weight.shape[0]
    seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    return seen[row_of]


def _record_top(sequences: list[_Sequence], active: torch.Tensor, logprobs: torch.Tensor, count: int) -> None:
    """Append the most likely tokens of this step's distributions to their sequences."""
    top = logprobs.topk(min(count, logprobs.shape[1]), -1)
    ids, values = top.indices.int().cpu().numpy(), top.values.float().cpu().numpy()
    for row, owner in enumerate(active.tolist()):
        sequences[owner].top.append((ids[row], values[row]))


def _top(sequence: _Sequence) -> TopTokens | None:
    import numpy as np

    if not sequence.top:
        return None
    return TopTokens(np.stack([ids for ids, _ in sequence.top]), np.stack([values for _, values in sequence.top]))
