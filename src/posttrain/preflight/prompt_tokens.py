"""Counts the tokens of a prompt as training will: through the model's own chat template and tokenizer file, without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

_TEMPLATE_OVERHEAD = 4096
"""Bytes a template may add around one conversation; only a screen, before the exact count."""
_SPECIAL_OVERHEAD = 16
"""Likewise what a tokenizer may add around a raw text."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A tokenizer file and a chat template, both loaded on first use."""

    tokenizer: Path | Callable[[], Any]
    """tokenizer.json, or a function that makes what one would contain."""
    template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, ...: the names a template may use."""
    _loaded: list[Any] = field(default_factory=list, repr=False, compare=False)

    def count(self, content: str | tuple[Mapping[str, object], ...]) -> int | None:
        """Tokens of a raw text or a conversation; None where the template cannot render it here."""
        if isinstance(content, str):
            return len(self._encoder().encode(content, add_special_tokens=True).ids)
        if self.template is None:
            return None
        text = render(self.template, content, special_tokens=self.special_tokens)
        return None if text is None else len(self._encoder().encode(text, add_special_tokens=False).ids)

    def _encoder(self) -> Any:
        if not self._loaded:
            from tokenizers import Tokenizer

            source = self.tokenizer
            self._loaded.append(Tokenizer.from_file(str(source)) if isinstance(source, Path) else source())
        return self._loaded[0]


def most_tokens(content: str | tuple[Mapping[str, object], ...]) -> int:
    """An upper bound without a tokenizer: no token covers less than one byte of UTF-8."""
    is_text = isinstance(content, str)
    text = content if is_text else json.dumps([dict(turn) for turn in content], ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "surrogatepass")) + (_SPECIAL_OVERHEAD if is_text else _TEMPLATE_OVERHEAD)


def load_prompt_tokens(directory: Path) -> PromptTokens | None:
    """From a Hugging Face directory; None when it has no tokenizer.json."""
    path = directory / "tokenizer.json"
    return PromptTokens(path, chat_template(directory), _special_tokens(directory)) if path.is_file() else None


def has_chat_template(directory: Path) -> bool | None:
    """Whether the tokenizer of a directory renders conversations; None when the directory has no tokenizer at all."""
    if not any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")):
        return None
    return chat_template(directory) is not None


def chat_template(directory: Path) -> str | None:
    """The default chat template of a tokenizer directory."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def _special_tokens(directory: Path) -> dict[str, str]:
    merged = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in merged.items() if name.endswith("_token")}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def render(template: str, conversation: tuple[Mapping[str, object], ...], *, special_tokens: Mapping[str, str]) -> str | None:
    """The prompt text of a conversation, in the dialect of Jinja that chat templates are written in; None when that fails."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    # `generation` blocks mark assistant turns for training masks and add no text.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        return environment.from_string(plain).render(
            messages=[dict(turn) for turn in conversation], tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )
    except Exception:  # a template is a foreign program; training will meet it with the full environment
        return None
