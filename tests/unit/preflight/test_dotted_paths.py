"""Dotted paths are judged from source text: the module they name is never run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrain.preflight.dotted import dotted_violations

SOURCE = """\
raise RuntimeError("imported")
import json as renamed
from os import path
CONSTANT: int = 3
first, second = 1, 2
short = lambda row: row
if CONSTANT:
    def conditional(row): ...
try:
    def guarded(a, b=1, *, c): ...
except ImportError:
    fallback = None
class Maker:
    @staticmethod
    def make(): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "judged_package"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text('raise RuntimeError("imported")\n')
    (root / "inner" / "__init__.py").write_text("")
    (root / "inner" / "code.py").write_text(SOURCE)
    (root / "star.py").write_text("from os.path import *\n")
    (root / "broken.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "judged_package"


def rules(path: str, *, arguments: int | None = None) -> list[str]:
    return [violation.rule for violation in dotted_violations("k", path, max_required_arguments=arguments)]


@pytest.mark.parametrize(
    "name", ["renamed", "path", "CONSTANT", "first", "second", "conditional", "guarded", "fallback", "Maker", "Maker.make"]
)
def test_names_of_a_module_are_accepted(package: str, name: str) -> None:
    assert rules(f"{package}.inner.code.{name}") == []
    assert package not in sys.modules


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("judged_package.inner.code.missing", "defines no 'missing'"),
        ("judged_package.inner.code.short", "is a lambda"),
        ("judged_package.inner.code", "is a module"),
        ("judged_package.other.code.x", "has no module and no object 'other'"),
        ("judged_package.broken.x", "is not valid Python (line 1"),
        ("no_such_module.x", "'no_such_module' was not found"),
        ("plain", "must be a dotted path"),
        ("a..b", "must be a dotted path"),
        ("a.<lambda>", "names a lambda"),
        ("a.f.<locals>.g", "names a lambda or a function inside another one"),
    ],
)
def test_refused(package: str, path: str, rule: str) -> None:
    assert len(rules(path)) == 1
    assert rule in rules(path)[0]


def test_star_imports_leave_the_question_open(package: str) -> None:
    assert rules(f"{package}.star.join") == []


def test_a_function_that_demands_more_than_it_gets_is_refused(package: str) -> None:
    assert rules(f"{package}.inner.code.guarded", arguments=1) == []
    assert rules(f"{package}.inner.code.guarded", arguments=0) == ["is called with 0 positional arguments and demands 1"]


def test_the_shipped_paths_are_good() -> None:
    assert rules("posttrain.algorithm.grpo.build_objective", arguments=2) == []
    assert rules("posttrain.model.native.tiny.build", arguments=1) == []
    assert rules("posttrain.data.maps.gsm8k", arguments=1) == []
