"""What a directory of weights is, by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_READ_BYTES = 2**24


def directory_problem(model_dir: str) -> str | None:
    """Why a directory cannot hold a reference, without reading it; None when it may."""
    folder = Path(model_dir)
    if not folder.is_dir():
        return "is not a directory"
    if not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()):
        return f"holds no weight file ({', '.join(WEIGHT_SUFFIXES)})"
    return None


def artifact_identity(model_dir: str) -> str:
    """SHA-256 over the names and the complete content of every file below a directory, so that the same path filled with other
    weights is another artifact. Reads every byte once."""
    folder = Path(model_dir)
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        own = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                own.update(block)
        digest.update(f"{file.relative_to(folder).as_posix()}\0{own.hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"
