"""From `rl.data` (or `rl.validation.data`) to a corpus and a prompt source; nothing is read before these are called."""

from __future__ import annotations

import importlib.util
from typing import cast

from posttrain.config.data import PromptEnvConfig
from posttrain.data import arithmetic, reasoning_gym_source
from posttrain.data.huggingface import HuggingFaceCorpus, RowMap
from posttrain.data.jsonl import JsonlCorpus
from posttrain.data.prompts import CorpusPromptSource
from posttrain.data.source import Corpus, Tokenizer
from posttrain.errors import DataError
from posttrain.runtime.dotted import import_dotted

_LIBRARIES = {"huggingface": ("datasets", "datasets"), "reasoning_gym": ("reasoning_gym", "reasoning")}
"""Source kind -> (module, extra of posttrain that installs it)."""

_ALWAYS_SHUFFLED = ("arithmetic", "reasoning_gym")
"""Generated corpora stand in a systematic order (0+0, 0+1, ...), which nobody wants to train on or evaluate a prefix of."""


def build_prompt_source(config: PromptEnvConfig, *, seed: int, tokenizer: Tokenizer) -> CorpusPromptSource:
    """The source of training or validation prompts. `seed` is the resolved data seed; generated sources are always ordered by it."""
    return CorpusPromptSource(
        build_corpus(config),
        tokenizer=tokenizer,
        seed=seed,
        shuffle=config.shuffle or config.kind in _ALWAYS_SHUFFLED,
        max_prompt_tokens=config.max_prompt_tokens,
    )


def build_corpus(config: PromptEnvConfig) -> Corpus:
    """The rows the configuration names, in their own order."""
    if config.kind == "jsonl":
        return JsonlCorpus(config.path, prompt_column=config.prompt_column, response_column=config.response_column)
    if config.kind == "huggingface":
        return HuggingFaceCorpus(
            config.name,
            subset=config.subset,
            split=config.split,
            prompt_column=config.prompt_column,
            response_column=config.response_column,
            items_fn=_row_map(config.items_fn),
        )
    if config.kind == "reasoning_gym":
        return reasoning_gym_source.ReasoningGymCorpus(config.reasoning_gym, split=config.split)
    return arithmetic.ArithmeticCorpus(config.arithmetic, split=config.split)


def declared_columns(config: PromptEnvConfig) -> frozenset[str]:
    """The columns a source promises without being opened; JSONL and Hugging Face rows usually have more."""
    if config.kind == "arithmetic":
        return arithmetic.COLUMNS
    if config.kind == "reasoning_gym":
        return reasoning_gym_source.COLUMNS
    return frozenset({"prompt", "reference"}) if config.response_column else frozenset({"prompt"})


def missing_extra(config: PromptEnvConfig) -> str | None:
    """The extra of posttrain whose library this source needs and that is not installed; imports nothing."""
    if config.kind not in _LIBRARIES:
        return None
    module, extra = _LIBRARIES[config.kind]
    return extra if importlib.util.find_spec(module) is None else None


def _row_map(path: str) -> RowMap | None:
    if not path:
        return None
    found = import_dotted(path)
    if not callable(found):
        raise DataError(f"data.items_fn={path!r}: must be a function (row: dict) -> dict, got {type(found).__name__}; name a function")
    return cast(RowMap, found)
