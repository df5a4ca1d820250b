"""The converter: its names and tensors rebuild the model exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.model.converter import hf_named_weights

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def build(kind: str) -> Any:
    import transformers as T

    torch.manual_seed(1)
    if kind.startswith("llama"):
        return T.LlamaForCausalLM(T.LlamaConfig(**COMMON, tie_word_embeddings=kind == "llama-tied")).eval()
    if kind == "qwen3-moe":
        return T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)).eval()
    return T.MixtralForCausalLM(T.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)).eval()


def outputs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize("kind", ["llama-tied", "llama-untied", "qwen3-moe", "mixtral"])
def test_what_is_yielded_loads_into_a_fresh_model_with_equal_outputs(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = build(kind)
    named = list(hf_named_weights(model))
    assert len({name for name, _ in named}) == len(named)
    save_file({name: tensor.clone() for name, tensor in named}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()), outputs(model))


@pytest.mark.parametrize("kind", ["llama-untied", "qwen3-moe", "mixtral"])
def test_names_and_bytes_are_those_of_a_saved_checkpoint(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = dict(hf_named_weights(model))
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name], saved[name]) for name in saved)


def test_a_tied_head_has_both_names_over_one_storage() -> None:
    model = build("llama-tied")
    named = dict(hf_named_weights(model))
    assert named["lm_head.weight"].data_ptr() == named["model.embed_tokens.weight"].data_ptr()


def test_dense_weights_are_not_copied() -> None:
    model = build("llama-untied")
    parameters = dict(model.named_parameters())
    named = dict(hf_named_weights(model))
    assert {name: tensor.data_ptr() for name, tensor in named.items()} == {name: p.data_ptr() for name, p in parameters.items()}
    assert not any(tensor.requires_grad for tensor in named.values())


def test_a_plain_module_keeps_its_names() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    assert [name for name, _ in hf_named_weights(module)] == ["0.weight", "0.bias"]
