from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


class CharTokenizer:
    """One token per character, 1 in front when special tokens are asked for; `<role>text` per turn as the template."""

    chat_template: Any = "yes"

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any:
        assert isinstance(conversation, list) and not tokenize
        if conversation[0]["role"] == "system":
            raise ValueError("system turns are not supported")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(char) for char in text]


class ListCorpus:
    """Raw-text rows `r0`, `r1`, ... with the given prompts."""

    columns = frozenset({"prompt"})

    def __init__(self, prompts: Sequence[Any]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int):
        from posttrain.data.source import Row

        return Row(key=f"r{index}", prompt=self._prompts[index], reference=None, representations={})


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def list_corpus() -> type[ListCorpus]:
    return ListCorpus
