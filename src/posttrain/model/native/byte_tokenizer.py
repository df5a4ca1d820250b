"""The tiny model's tokenizer as the `tokenizers` library sees it, readable without torch or transformers."""

from __future__ import annotations

from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_level_tokenizer() -> Any:
    """A `tokenizers.Tokenizer`: one token a byte, five special tokens, ids padded to a multiple of 32."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    filler = [f"<|unused{i}|>" for i in range(-(256 + len(SPECIAL_TOKENS)) % 32)]
    raw.add_special_tokens([*SPECIAL_TOKENS, *filler])
    return raw
