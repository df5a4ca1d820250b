"""The shipped experiments resolve to exactly what is in git: a changed default shows in review."""

from __future__ import annotations

import difflib

import pytest
from update_goldens import GOLDEN, experiments, resolved_text

HOW = "if the change is meant, run: python tests/config/update_goldens.py"


@pytest.mark.parametrize("experiment", experiments())
def test_resolved_experiment_equals_its_golden(experiment: str) -> None:
    file = GOLDEN / f"{experiment}.yaml"
    assert file.is_file(), f"{file} is missing; {HOW}"
    expected, actual = file.read_text(encoding="utf-8"), resolved_text(experiment)
    if expected != actual:
        diff = "\n".join(difflib.unified_diff(expected.splitlines(), actual.splitlines(), "golden", "resolved", lineterm="", n=1))
        pytest.fail(f"experiment={experiment} resolves differently; {HOW}\n{diff}")


def test_every_golden_belongs_to_an_experiment() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.yaml")) == experiments(), HOW
