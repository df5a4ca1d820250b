"""What the optimizer, its schedule and the adapters are refused or warned for."""

from __future__ import annotations

import pytest

from posttrain.config.rules import cautions
from posttrain.preflight.machine import machine_violations
from tests.trees import refusals, root_of

BASE = ("algorithm=grpo",)
HF = (*BASE, "model=hf", "model.name_or_path=x/y")


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (("rl.optimizer.muon_momentum=0.9",), "rl.optimizer.muon_momentum", "is never read with rl.optimizer.name=adamw"),
        (("rl.optimizer.muon_ns_steps=6", "rl.optimizer.name=fusedadam"), "rl.optimizer.muon_ns_steps", "rl.optimizer.name=fusedadam"),
        (("rl.optimizer.muon_rms_match=0.1",), "rl.optimizer.muon_rms_match", "is never read"),
        (("rl.optimizer.name=muon", "rl.optimizer.muon_momentum=1.0"), "rl.optimizer.muon_momentum", "must be < 1.0"),
        (("rl.optimizer.name=muon", "rl.optimizer.muon_ns_steps=0"), "rl.optimizer.muon_ns_steps", "must be >= 1"),
        (("rl.optimizer.name=muon", "rl.optimizer.muon_rms_match=0"), "rl.optimizer.muon_rms_match", "must be > 0"),
        (("rl.optimizer.name=muon", "rl.optimizer.muon_rms_match=.inf"), "rl.optimizer.muon_rms_match", "must be a finite number"),
        (("rl.optimizer.name=muon", "model.dtype=bfloat16"), "rl.optimizer.name", "the resolved rl.master_dtype is bfloat16"),
        (("rl.optimizer.name=lion",), "rl.optimizer.name", "must be one of"),
        (("rl.optimizer.lr_schedule=linear", "rl.optimizer.warmup_steps=1000"), "rl.optimizer.warmup_steps", "of the 1000 optimizer steps"),
        (("rl.optimizer.warmup_steps=-1",), "rl.optimizer.warmup_steps", "must be >= 0"),
    ],
)
def test_optimizer_refusals(overrides: tuple[str, ...], key: str, rule: str) -> None:
    found = refusals(*BASE, "rl.max_steps=1000", *overrides)
    assert [violation.key for violation in found] == [key] and rule in found[0].rule


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        (("model.lora.alpha=8",), "model.lora.alpha", "is never read while model.lora.rank=0"),
        (("model.lora.target_modules=[q_proj]",), "model.lora.target_modules", "is never read"),
        (("model.lora.rank=-1",), "model.lora.rank", "must be >= 0"),
        (("model.lora.rank=2", "model.lora.dropout=1.0"), "model.lora.dropout", "must be < 1.0"),
        (("model.lora.rank=2", "model.lora.alpha=0"), "model.lora.alpha", "must be > 0"),
    ],
)
def test_adapter_refusals(overrides: tuple[str, ...], key: str, rule: str) -> None:
    found = refusals(*HF, *overrides)
    assert [violation.key for violation in found] == [key] and rule in found[0].rule


def test_the_length_of_a_schedule_counts_optimizer_steps() -> None:
    four = ("rl.mini_batch_per_replica=8", "rl.certified_deterministic_forward=true", "rl.max_steps=10")
    root_of(*BASE, *four, "rl.optimizer.lr_schedule=cosine", "rl.optimizer.warmup_steps=39")
    found = refusals(*BASE, *four, "rl.optimizer.lr_schedule=cosine", "rl.optimizer.warmup_steps=40")
    assert [violation.key for violation in found] == ["rl.optimizer.warmup_steps"]
    shown = list(cautions(root_of(*BASE, *four, "rl.optimizer.warmup_steps=41")))
    assert any("before the rate reaches rl.optimizer.lr" in text for text in shown)


@pytest.mark.parametrize(
    ("gpu", "engine", "rule"),
    [
        (False, False, "needs a GPU and Transformer Engine"),
        (True, False, "needs Transformer Engine"),
        (False, True, "needs a GPU,"),
        (True, True, ""),
    ],
)
def test_fusedadam_says_what_is_missing(gpu: bool, engine: bool, rule: str) -> None:
    root = root_of(*BASE, "rl.optimizer.name=fusedadam")
    found = list(machine_violations(root, installed=lambda package: engine or package != "transformer_engine", gpu=gpu, environ={}))
    assert [violation.key for violation in found] == ["rl.optimizer.name"] * bool(rule)
    assert all(rule in violation.rule and "pip install" in violation.remedy for violation in found)


def test_adapters_need_peft() -> None:
    root = root_of(*HF, "model.lora.rank=4")
    assert list(machine_violations(root, installed=lambda _: True, gpu=False, environ={})) == []
    found = list(machine_violations(root, installed=lambda _: False, gpu=False, environ={}))
    assert [(violation.key, violation.rule) for violation in found] == [("model.lora.rank", "needs peft, which is not installed")]


def test_determinism_needs_its_variables_on_a_gpu_only() -> None:
    root = root_of(*BASE, "rl.deterministic=true")
    assert list(machine_violations(root, installed=lambda _: True, gpu=False, environ={})) == []
    found = list(machine_violations(root, installed=lambda _: True, gpu=True, environ={}))
    assert {violation.key for violation in found} == {"rl.deterministic"} and len(found) == 2
