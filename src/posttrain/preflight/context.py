"""Whether prompts and completions fit into the model and into the engine, and whether conversations can be rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain.config import HFModelConfig, RootConfig, VLLMRolloutConfig
from posttrain.errors import Violation
from posttrain.preflight.facts import LongPrompt, ModelFacts, SourceFacts
from posttrain.preflight.prompt_tokens import PromptTokens, most_tokens


@dataclass(frozen=True, slots=True)
class _Limit:
    tokens: int
    meaning: str


def template_violations(root: RootConfig, model: ModelFacts, sources: Mapping[str, SourceFacts]) -> Iterator[Violation]:
    """Refuse conversations for a tokenizer without chat template, once for all sources."""
    if model.has_chat_template is not False:
        return
    reasons = [facts.conversation for facts in sources.values() if facts.conversation is not None]
    if reasons:
        keys = " and ".join(dict.fromkeys(key for key, _ in reasons))
        rule = f"its tokenizer has no chat template, and {reasons[0][1]}"
        remedy = f"use an instruction-tuned model, or raw text prompts ({keys})"
        yield Violation("model.name_or_path", _model_name(root), rule, remedy)


def context_violations(root: RootConfig, model: ModelFacts, sources: Mapping[str, SourceFacts]) -> Iterator[Violation]:
    """Refuse budgets and prompts that exceed the model's positions or the engine's `max_model_len`."""
    limits = [] if model.context is None else [_Limit(model.context, "the model's context")]
    if isinstance(root.rollout, VLLMRolloutConfig) and root.rollout.max_model_len is not None:
        longest = root.rollout.max_model_len
        if limits and longest > limits[0].tokens:
            rule = f"must be <= {limits[0].tokens}, {limits[0].meaning}"
            yield Violation("rollout.max_model_len", longest, rule, "lower it, or leave it null to take the model's own limit")
        else:
            limits = [_Limit(longest, "rollout.max_model_len")]
    if not limits:
        return
    limit, validation = limits[0], root.rl.validation
    uses = {"rl.data": ("rollout.max_tokens", root.rollout.max_tokens, root.rl.data)}
    if validation.num_prompts > 0:
        own = validation.max_tokens
        key, budget = ("rollout.max_tokens", root.rollout.max_tokens) if own is None else ("rl.validation.max_tokens", own)
        uses["rl.validation.data"] = (key, budget, validation.data)
    refused: set[str] = set()
    for path, (key, budget, data) in uses.items():
        room = limit.tokens - budget
        if room < 1:
            if key not in refused:
                rule = f"leaves no room for a prompt in {limit.tokens} tokens, {limit.meaning}"
                yield Violation(key, budget, rule, f"lower {key}")
            refused.add(key)
        elif data.max_prompt_tokens is not None:
            if data.max_prompt_tokens > room:
                rule = f"plus {key}={budget} exceeds {limit.tokens} tokens, {limit.meaning}"
                yield Violation(f"{path}.max_prompt_tokens", data.max_prompt_tokens, rule, f"set {path}.max_prompt_tokens={room} or less")
        elif path in sources and model.tokens is not None:
            yield from _prompt_violation(path, sources[path].longest, model.tokens, budget=(key, budget), limit=limit)


def _prompt_violation(
    path: str, prompts: tuple[LongPrompt, ...], tokens: PromptTokens, *, budget: tuple[str, int], limit: _Limit
) -> Iterator[Violation]:
    """One violation for the first prompt that does not fit beside its completion."""
    key, count = budget
    room = limit.tokens - count
    too_long = [
        (prompt, length)
        for prompt in prompts
        if most_tokens(prompt.content) > room and (length := tokens.count(prompt.content)) is not None and length > room
    ]
    if not too_long:
        return
    prompt, length = too_long[0]
    more = f" ({len(too_long)} or more prompts are too long)" if len(too_long) > 1 else ""
    rule = f"{prompt.where} is a prompt of {length} tokens, which with {key}={count} exceeds {limit.tokens} tokens, {limit.meaning}{more}"
    yield Violation(prompt.key, prompt.value, rule, f"set {path}.max_prompt_tokens={room} to skip such prompts, or lower {key}")


def _model_name(root: RootConfig) -> str:
    return root.model.name_or_path if isinstance(root.model, HFModelConfig) else type(root.model).__name__
