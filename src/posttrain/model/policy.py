"""A causal policy over a transformers module: scores response tokens, and computes a prompt shared by several completions
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.config.run import Precision, resolved_dtype
from posttrain.data.packer import PolicyBatch
from posttrain.errors import ModelError
from posttrain.model.head import chunked_token_logprobs
from posttrain.model.protocol import BuiltModel, TokenScores, special_ids


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a checkpoint's logits come from its last hidden state: softcap(scale * (h W^T + b))."""

    scale: float
    softcap: float | None

    @classmethod
    def of(cls, config: Any) -> HeadSpec:
        """Read from a transformers config: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma 2
        caps by `final_logit_softcapping`. `CausalPolicy.check_head` proves the result, so an unknown fourth way is refused."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        return cls(scale / float(getattr(text, "logits_scaling", None) or 1.0), getattr(text, "final_logit_softcapping", None))


class CausalPolicy:
    """Implements `PolicyModel`; the rollout engine may sample from the same parameters."""

    def __init__(self, built: BuiltModel, *, precision: Precision, share_prompts: bool = True) -> None:
        self.module: Any = built.module
        self.tokenizer = built.tokenizer
        self.precision = precision
        head = self.module.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(self.module).__name__} has no output embeddings: posttrain scores causal language models")
        self._head: Any = head
        self._head_spec = HeadSpec.of(self.module.config)
        self._body: Any = self.module.get_decoder()
        self.shares_prompts = share_prompts and self._has_plain_cache()
        self.eos_ids = _eos_ids(self.module, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(pad) if pad is not None else (self.eos_ids[0] if self.eos_ids else 0)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def compute(self) -> Iterator[None]:
        """The numerical context of every forward: autocast when the precision block asks for it."""
        with torch.autocast(self.device.type, dtype=resolved_dtype(self.precision.param), enabled=self.precision.autocast):
            yield

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype) -> TokenScores:
        """See `PolicyModel.score`."""
        with self.compute():
            hidden = self._shared_hidden(batch) if self.shares_prompts else self._row_hidden(batch)
        logprobs, entropy = chunked_token_logprobs(
            hidden,
            self._head.weight,
            batch.labels,
            bias=self._head.bias if isinstance(self._head, torch.nn.Linear) else None,
            temperature=temperature,
            dtype=dtype,
            compute_dtype=resolved_dtype(self.precision.param) if self.precision.autocast else None,
            logit_scale=self._head_spec.scale,
            softcap=self._head_spec.softcap,
        )
        return TokenScores(logprobs, entropy)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, H] -> float32 [B, V] next-token logits at temperature 1, for sampling."""
        with self.compute():
            logits = self._head(hidden).float() * self._head_spec.scale
        cap = self._head_spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def body(self, **inputs: Any) -> Any:
        """The decoder without its head; a transformers output with `last_hidden_state` and `past_key_values`."""
        with self.compute():
            return self._body(**inputs)

    @torch.no_grad()
    def score_prompt(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[t] | token_ids[:t]) for t >= 1 at temperature 1, in nats."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        logprobs = torch.log_softmax(self.logits(hidden), -1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def check_head(self, token_ids: list[int], *, tolerance: float) -> float:
        """Compare this class's log-probabilities with the module's own forward on a probe; returns the largest gap in nats.

        Raises:
            ModelError: the checkpoint computes its logits in a way `HeadSpec` does not know.
        """
        ids = torch.tensor([token_ids], device=self.device)
        with self.compute():
            own = torch.log_softmax(self.module(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        expected = own.gather(-1, ids[0, 1:, None])[:, 0]
        gap = float((torch.tensor(self.score_prompt(token_ids), device=self.device) - expected).abs().max())
        if not gap <= tolerance:
            raise ModelError(
                f"log-probabilities of {type(self.module).__name__} computed from its hidden states differ from its own forward by "
                f"{gap:.3g} nats (tolerance {tolerance:g}): its logits are transformed in a way posttrain does not know"
            )
        return gap

    def _has_plain_cache(self) -> bool:
        """Whether every layer caches plain keys and values, so that a prompt's cache can be shared by its completions."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        layers = DynamicCache(config=self.module.config).layers
        return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)

    def _shared_hidden(self, batch: PolicyBatch) -> torch.Tensor:
        """[N, H] hidden states that predict the response tokens. Prompts run once; their cache, with its graph, is handed to
        every completion that belongs to them."""
        mask, positions = _left_padded(batch)
        longest = int(batch.completions.shape[1])
        # one lookup for both forwards: each lookup's backward writes a gradient of the size of the whole embedding
        fed = batch.completions[:, :-1]
        embedded = self.module.get_input_embeddings()(torch.cat([batch.prompts.flatten(), fed.flatten()]))
        prompts, completions = embedded.split([batch.prompts.numel(), fed.numel()])
        out = self._body(
            inputs_embeds=prompts.unflatten(0, batch.prompts.shape), attention_mask=mask, position_ids=positions, use_cache=longest > 1
        )
        hidden = out.last_hidden_state[:, -1][batch.prompt_of][:, None]
        if longest > 1:
            cache = out.past_key_values
            cache.batch_select_indices(batch.prompt_of)
            steps = torch.arange(longest - 1, device=mask.device)
            rest = self._body(
                inputs_embeds=completions.unflatten(0, fed.shape),
                attention_mask=torch.cat([mask[batch.prompt_of], (steps < batch.lengths[:, None]).to(mask.dtype)], 1),
                position_ids=batch.prompt_lengths[batch.prompt_of][:, None] + steps,
                past_key_values=cache,
                use_cache=True,
            )
            hidden = torch.cat([hidden, rest.last_hidden_state], 1)
        return hidden[:, :longest][torch.arange(longest, device=mask.device) < batch.lengths[:, None]]

    def _row_hidden(self, batch: PolicyBatch) -> torch.Tensor:
        """[N, H] like `_shared_hidden`, from one row of prompt and completion per sequence."""
        mask, _ = _left_padded(batch)
        longest = int(batch.completions.shape[1])
        steps = torch.arange(longest, device=mask.device)
        mask = torch.cat([mask[batch.prompt_of], (steps < batch.lengths[:, None]).to(mask.dtype)], 1)
        out = self._body(
            input_ids=torch.cat([batch.prompts[batch.prompt_of], batch.completions], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )
        hidden = out.last_hidden_state[:, batch.prompts.shape[1] - 1 : -1 if longest else None]
        return hidden[:, :longest][steps < batch.lengths[:, None]]


def _left_padded(batch: PolicyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [P, L] attention mask and position ids of the prompt rows."""
    width = int(batch.prompts.shape[1])
    columns = torch.arange(width, device=batch.prompts.device)
    offset = (width - batch.prompt_lengths)[:, None]
    return (columns >= offset).to(torch.int64), (columns - offset).clamp(min=0)


def _eos_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's and those of the checkpoint's generation config."""
    own = module.generation_config.eos_token_id if module.generation_config is not None else None
    more = [own] if isinstance(own, int) else list(own or [])
    return tuple(dict.fromkeys([*special_ids(tokenizer), *more]))
