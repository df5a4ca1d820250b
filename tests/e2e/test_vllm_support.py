"""Tiny random models with a byte-level tokenizer, an independent computation of what vLLM should return, and an engine whose
weight update can be broken on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.rollout import VLLMRolloutConfig
from posttrain.records import Prompt, RolloutRequest, SamplingParams
from posttrain.rollout.vllm_engine import VLLMEngine

vllm_marks = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Not ours: vLLM and torch's distributed start-up.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:vllm.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

VOCABULARY = 258
END = 257


def save_tokenizer(directory: Path) -> None:
    """256 bytes, a padding and an end token: every id below 256 is one character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<pad>": 256, "<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(directory)


def tiny_model(kind: str, *, tied: bool, seed: int = 0) -> Any:
    """A random model in fp32 whose distributions are peaked enough to tell weights apart."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "eos_token_id": END,
        "pad_token_id": 256,
        "bos_token_id": None,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common)).eval()
    config = Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
    return Qwen3MoeForCausalLM(config).eval()


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def perturb(model: Any, *, seed: int, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 and parameter.std() > 0 else torch.tensor(0.3)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * spread)


def log_softmax(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V] natural-log next-token probabilities of plain transformers."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].float(), -1)


def prompt_logprobs(model: Any, token_ids: Sequence[int]) -> list[float]:
    table = log_softmax(model, token_ids)[:-1]
    return table.gather(-1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0].tolist()


def request(
    token_ids: Sequence[int], *, group_size: int = 1, seed: int = 0, max_tokens: int = 12, temperature: float = 1.0, **sampling: Any
) -> RolloutRequest:
    prompt = Prompt(id=f"p{hash(tuple(token_ids)) % 1000}", content="", text="", token_ids=tuple(token_ids))
    return RolloutRequest(prompt, group_size, SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling), seed)


class BreakableEngine(VLLMEngine):
    """Leaves out chosen parts of a weight update."""

    skip: frozenset[str] = frozenset()
    drop: str | None = None
    """Name of a tensor that gets lost on the way."""
    flip: str | None = None
    """Name of a tensor of which one bit flips on the way."""

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return [] if method in self.skip else super()._rpc(method, *args)

    def _drop_caches(self) -> None:
        if "drop_caches" not in self.skip:
            super()._drop_caches()

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        sent = []
        for name, tensor in bucket:
            if name == self.drop:
                continue
            if name == self.flip:
                tensor = tensor.clone()
                tensor.view(torch.uint8).view(-1)[2] ^= 0x40
            sent.append((name, tensor))
        super().receive(sent)


def engine(directory: Path, **settings: Any) -> BreakableEngine:
    config = VLLMRolloutConfig(max_tokens=32, **({"kv_cache_memory_bytes": 32 * 2**20, "max_num_seqs": 16} | settings))
    return BreakableEngine(
        config, model_dir=directory, dtype="float32", trust_remote_code=False, seed=0, max_prompt_tokens_hint=64, max_sequences=16
    )
