"""What the checks read from model directories, and that they count tokens as training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import HFModelConfig, NativePolicyBuildSpec
from posttrain.model.native.byte_tokenizer import CHAT_TEMPLATE, byte_level_tokenizer
from posttrain.preflight.hub_cache import cached_snapshot
from posttrain.preflight.model import inspect_model
from posttrain.preflight.prompt_tokens import PromptTokens, load_prompt_tokens, most_tokens, render

CHAT = ({"role": "system", "content": "Añada"}, {"role": "user", "content": "What is 1 + 2?"})


def directory(
    path: Path, *, config: dict[str, Any] | str, template: str | None = None, files: tuple[str, ...] = ("model.safetensors",)
) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, **({"chat_template": template} if template else {})})
    )
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    for name in files:
        (path / name).write_bytes(b"")
    return path


def inspected(name: Path | str) -> tuple[list[str], Any]:
    found, facts = inspect_model(HFModelConfig(name_or_path=str(name)), installed=lambda _: False)
    return [violation.rule for violation in found], facts


@pytest.mark.parametrize(
    ("config", "context"),
    [({"max_position_embeddings": 64}, 64), ({"text_config": {"max_position_embeddings": 128}}, 128), ({"model_type": "rwkv"}, None)],
)
def test_context_is_read_from_the_config(tmp_path: Path, config: dict[str, Any], context: int | None) -> None:
    rules, facts = inspected(directory(tmp_path / "m", config=config, template="x"))
    assert (rules, facts.context, facts.has_chat_template) == ([], context, True)


def test_template_file_counts_as_chat_template(tmp_path: Path) -> None:
    model = directory(tmp_path / "m", config={})
    assert inspected(model)[1].has_chat_template is False
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert inspected(model)[1].has_chat_template is True


@pytest.mark.parametrize(
    ("config", "files", "rule"),
    [({}, (), "without weights"), ("[]", ("model.safetensors",), "no JSON object"), ("{", ("model.safetensors",), "no JSON object")],
)
def test_insufficient_directory_is_refused(tmp_path: Path, config: Any, files: tuple[str, ...], rule: str) -> None:
    rules, _ = inspected(directory(tmp_path / "m", config=config, files=files))
    assert len(rules) == 1
    assert rule in rules[0]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("./missing", "is no directory"),
        ("~/missing", "is no directory"),
        ("a/b/c", "neither a directory on this machine nor a hub id"),
        ("pack age", "neither a directory on this machine nor a hub id"),
        ("package:llm", "must read package:MODULE/FILE"),
        ("package:json/none.gguf", "carries no file 'none.gguf'"),
    ],
)
def test_name_that_leads_nowhere_is_refused(name: str, rule: str) -> None:
    rules, _ = inspected(name)
    assert len(rules) == 1
    assert rule in rules[0]


def test_relative_name_below_an_existing_directory_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert inspected("models/mine")[0] == ["is no directory on this machine, though models/ is one"]


def test_hub_model_offline_is_refused_unless_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is not in the hub cache" in inspected("owner/name")[0][0]
    repository = tmp_path / "models--owner--name"
    directory(repository / "snapshots" / "abc", config={"max_position_embeddings": 77})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert cached_snapshot("owner/name") == repository / "snapshots" / "abc"
    rules, facts = inspected("owner/name")
    assert (rules, facts.context) == ([], 77)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert inspected("owner/other") == ([], inspected("owner/third")[1])


def test_package_that_must_be_converted_needs_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carrier_package").mkdir()
    (tmp_path / "carrier_package" / "__init__.py").write_text("")
    (tmp_path / "carrier_package" / "w.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    assert inspected("package:carrier_package/w.gguf")[0] == ["must be converted once, which needs gguf and accelerate"]


def test_tiny_model_tells_its_context_from_its_settings() -> None:
    spec = NativePolicyBuildSpec(builder="posttrain.model.native.tiny.build", model_id="tiny", model_config={"max_position_embeddings": 96})
    found, facts = inspect_model(spec, installed=lambda _: True)
    assert (found, facts.context, facts.has_chat_template) == ([], 96, True)


def test_other_builders_are_left_to_themselves() -> None:
    found, facts = inspect_model(NativePolicyBuildSpec(builder="mine.build", model_id="m"), installed=lambda _: True)
    assert (found, facts.context, facts.has_chat_template, facts.tokens) == ([], None, None, None)


def test_byte_tokens_by_hand() -> None:
    tokens = PromptTokens(byte_level_tokenizer, CHAT_TEMPLATE)
    assert tokens.count("abc") == 3
    # <|system|> + 6 bytes of "Añada" + <|end|> + <|user|> + 14 bytes + <|end|> + <|assistant|>
    assert tokens.count(CHAT) == 1 + 6 + 1 + 1 + 14 + 1 + 1
    assert most_tokens(CHAT) >= 25


def test_count_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{%- for message in messages %}\n    {%- if loop.first and message.role != 'system' %}\nsys{% endif %}\n"
        "[{{ message.role | upper }}] {{ message.content | trim }}\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    model = directory(tmp_path / "m", config={"model_type": "llama"}, template=template)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>", chat_template=template
    )
    tokens = load_prompt_tokens(model)
    assert tokens is not None
    for chat in (CHAT, CHAT[1:]):
        text = reference.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
        assert render(template, chat, special_tokens={"bos_token": "<s>"}) == text
        # "<s>" is not in this file's vocabulary: the reference adds it as one token, the file spells it in three
        assert tokens.count(chat) == len(reference.encode(text, add_special_tokens=False)) + 2


def test_template_that_refuses_leaves_the_question_open() -> None:
    assert render("{{ raise_exception('no system turns') }}", CHAT, special_tokens={}) is None
    assert PromptTokens(byte_level_tokenizer, None).count(CHAT) is None
