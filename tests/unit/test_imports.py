"""Imports go one way, and heavy packages are never imported at module top."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "posttrain"

RANKS = {
    "errors": 0, "records": 0, "runtime": 1,
    "config": 2,
    "algorithm": 3, "track": 3,
    "data": 4, "model": 4, "checkpoint": 4,
    "reward": 5, "weight_sync": 5, "trainer": 5,
    "rollout": 6,
    "loop": 7, "preflight": 7,
    "app": 8, "doctor": 8, "help": 8, "__main__": 9, "__init__": 0,
}  # fmt: skip
"""A module may import modules of a lower rank, and its own folder."""

SAME_RANK = {("data", "model"), ("model", "data"), ("checkpoint", "model")}
"""Pairs within one rank that may see each other's records."""

HEAVY = {"vllm", "ray", "transformers", "diffusers", "wandb", "nixl", "boto3", "datasets", "reasoning_gym", "math_verify", "gguf"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def area(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def top_level_imports(path: Path, *, inside_functions: bool) -> list[str]:
    """Imported modules; `TYPE_CHECKING` blocks are left out, function bodies are included on request."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append(node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_to_lower_ranks(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in top_level_imports(path, inside_functions=False):
        if module.split(".")[0] != "posttrain":
            continue
        other = area(module)
        allowed = other == own or RANKS[other] < RANKS[own] or (own, other) in SAME_RANK
        assert allowed, f"{path.name} ({own}, rank {RANKS[own]}) imports {module} (rank {RANKS[other]})"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_heavy_packages_are_imported_late(path: Path) -> None:
    heavy = {module.split(".")[0] for module in top_level_imports(path, inside_functions=False)} & HEAVY
    assert not heavy, f"{path.name} imports {sorted(heavy)} at module top"


@pytest.mark.parametrize("area", ["config", "preflight", "records", "errors", "track", "app", "help"])
def test_light_parts_import_no_torch(area: str) -> None:
    code = f"import sys, posttrain.{area}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_only_the_ray_backend_says_ray() -> None:
    for path in MODULES:
        assert not any(module.split(".")[0] == "ray" for module in top_level_imports(path, inside_functions=True)), path
