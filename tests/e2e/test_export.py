"""An exported checkpoint is a plain Hugging Face directory that others load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.checkpoint.export import export
from posttrain.checkpoint.initial import load_weights
from posttrain.checkpoint.layout import ARTIFACTS, CHECKPOINTS, MODEL
from posttrain.config import resolve
from posttrain.config.compose import compose
from posttrain.config.model import HFModelConfig
from posttrain.errors import CheckpointError
from posttrain.model.native import tiny
from tests.saves import flip_byte, name

TEXT = "What is 12 + 30?"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "posttrain", "experiment=tiny", "rl.save_every=1", "rl.max_steps=3", "rl.optimizer.lr=0.01"]
    done = subprocess.run([*command, "tracker.report=false"], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return cwd / "outputs/posttrain/tiny"


def saved_model(run_dir: Path, step: int) -> torch.nn.Module:
    built = tiny.build({}, dtype="float32")
    load_weights(built.module, run_dir / CHECKPOINTS / name(step), skip=[])
    return built.module.eval()


@pytest.mark.parametrize("step", [None, 1])
def test_transformers_loads_it_with_the_same_logits_and_tokenizer(step: int | None, run_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = export(run_dir, step=step, output=tmp_path / "out")
    assert target == tmp_path / "out" and not list(tmp_path.glob("*.partial"))
    module = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])
    assert ids[0].tolist() == tiny.byte_tokenizer().encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        logits = module(ids).logits
        assert torch.equal(logits, saved_model(run_dir, step or 3)(ids).logits)
        assert not torch.equal(logits, tiny.build({}, dtype="float32").module.eval()(ids).logits)
    assert tokenizer.chat_template == tiny.byte_tokenizer().chat_template


def test_what_cannot_be_exported_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists: name another directory with --output"):
        export(run_dir, output=tmp_path / "there")
    with pytest.raises(CheckpointError, match="has no checkpoint of model step 9; it has 1, 2, 3"):
        export(run_dir, step=9, output=tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is no run directory: it has no config_resolved.yaml"):
        export(tmp_path)
    tensors = next((run_dir / CHECKPOINTS / name(2) / MODEL).glob("*.distcp"))
    flip_byte(tensors)
    with pytest.raises(CheckpointError, match="has another content than was saved"):
        export(run_dir, step=2, output=tmp_path / "out")
    flip_byte(tensors)
    assert not (tmp_path / "out").exists()
    assert not (run_dir / ARTIFACTS).exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: no adapters can be trained")
def test_adapters_are_merged(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from posttrain.model.lora import add_adapters

    base = tiny.build({}, dtype="float32")
    base.module.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    command = [sys.executable, "-m", "posttrain", "experiment=tiny", "model=hf", "model.name_or_path=base", "model.dtype=float32"]
    knobs = ["model.lora.rank=4", "rl.save_every=1", "rl.max_steps=2", "rl.optimizer.lr=0.05", "rl.validation.num_prompts=0"]
    done = subprocess.run([*command, *knobs], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run_dir = tmp_path / "outputs/posttrain/tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        target = export(run_dir)
    assert target == run_dir / "export" / name(2)
    module = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    adapted = tiny.build({}, dtype="float32")
    config = resolve(compose([], config_dir=str(run_dir), config_name="config_resolved")).model
    assert isinstance(config, HFModelConfig)
    add_adapters(adapted.module, config.lora)
    load_weights(adapted.module, run_dir / CHECKPOINTS / name(2), skip=[])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = module(ids).logits
        assert (logits - adapted.module.eval()(ids).logits).abs().max() < 1e-4  # merged once, in another order of sums
        assert (logits - base.module.eval()(ids).logits).abs().max() > 1e-2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: it cannot load an export")
def test_vllm_loads_it_and_completes_greedily_as_transformers_does(run_dir: Path, tmp_path: Path) -> None:
    target = export(run_dir, output=tmp_path / "out")
    module = saved_model(run_dir, 3)
    ids = tiny.byte_tokenizer().encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        expected = module.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist()
    script = (
        "import sys, json\nfrom vllm import LLM, SamplingParams, TokensPrompt\n"
        "if __name__ == '__main__':\n"
        f"    engine = LLM({str(target)!r}, dtype='float32', max_model_len=128, enforce_eager=True, kv_cache_memory_bytes=2**26)\n"
        "    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)\n"
        f"    out = engine.generate([TokensPrompt(prompt_token_ids={ids})], greedy)\n"
        "    print('TOKENS', json.dumps(list(out[0].outputs[0].token_ids)))\n"
    )
    (tmp_path / "serve.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    tokens = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    assert tokens == f"TOKENS {expected}"
