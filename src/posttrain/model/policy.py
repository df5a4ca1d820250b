"""A causal policy over a transformers module: scores response tokens, without padding and each shared prompt once where the
module's attention allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.config.run import Precision, resolved_dtype
from posttrain.data.packer import PolicyBatch
from posttrain.errors import ModelError
from posttrain.model.head import chunked_token_logprobs
from posttrain.model.packed import IMPLEMENTATION, PackedLayout, register
from posttrain.model.protocol import BuiltModel, TokenScores, special_ids

_NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""Any mask of four dimensions is handed on as it is; the packed attention reads its layout instead."""


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

    def __init__(self, built: BuiltModel, *, precision: Precision, pack: bool = True) -> None:
        self.module: Any = built.module
        self.tokenizer = built.tokenizer
        self.precision = precision
        head = self.module.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(self.module).__name__} has no output embeddings: posttrain scores causal language models")
        self._head: Any = head
        self._head_spec = HeadSpec.of(self.module.config)
        self._body: Any = self.module.get_decoder()
        self._enter: Callable[..., Any] = _call
        self.sharded = False
        """Whether the parameters are split over ranks: every forward is then a collective."""
        self.packs = pack and self._takes_layouts()
        """Whether batches run as one row without padding."""
        self.eos_ids = _eos_ids(self.module, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(pad) if pad is not None else (self.eos_ids[0] if self.eos_ids else 0)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def compute(self) -> Iterator[None]:
        """The numerical context of every forward: autocast when the precision block asks for it."""
        dtype, enabled = resolved_dtype(self.precision.param), self.precision.autocast
        # a cached cast would outlive the whole parameter that it was made from
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=not self.sharded):
            yield

    def layers(self) -> list[torch.nn.Module]:
        """The decoder's layers, the units in which a sharded model is gathered; empty where it has no list of them."""
        lists = [list(child) for child in self._body.children() if isinstance(child, torch.nn.ModuleList)]
        return max(lists, key=len, default=[])

    def enter_through_wrap(self) -> None:
        """The module has been sharded in place: its root gathers its own parameters around every forward from now on."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        self.module.posttrain_enter = _call_for_wrap
        register_fsdp_forward_method(self.module, "posttrain_enter")
        self._enter, self.sharded = self.module.posttrain_enter, True

    def score(self, batch: PolicyBatch, *, temperature: float, dtype: torch.dtype, top_ids: torch.Tensor | None = None) -> TokenScores:
        """See `PolicyModel.score`."""
        return TokenScores(*self._enter(self._scores, batch, temperature, dtype, top_ids))

    def _scores(
        self, batch: PolicyBatch, temperature: float, dtype: torch.dtype, top_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A tuple: FSDP looks for tensors in what a forward returns."""
        with self.compute():
            hidden = self._packed_hidden(batch) if self.packs else self._row_hidden(batch)
        logprobs, entropy = chunked_token_logprobs(
            hidden,
            self._head.weight,
            batch.labels if top_ids is None else torch.cat([batch.labels[:, None], top_ids], 1),
            bias=self._head.bias if isinstance(self._head, torch.nn.Linear) else None,
            temperature=temperature,
            dtype=dtype,
            compute_dtype=resolved_dtype(self.precision.param) if self.precision.autocast else None,
            logit_scale=self._head_spec.scale,
            softcap=self._head_spec.softcap,
        )
        if top_ids is None:
            return logprobs, entropy, None
        return logprobs[:, 0], entropy, logprobs[:, 1:]

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
        return self._enter(self._prompt_scores, torch.tensor([list(token_ids)], device=self.device))[0].tolist()

    def _prompt_scores(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        logprobs = torch.log_softmax(self.logits(hidden), -1)
        return (logprobs.gather(-1, ids[0, 1:, None])[:, 0],)

    @torch.no_grad()
    def check_packing(self, token_ids: Sequence[int], *, tolerance: float) -> float:
        """Score a ragged probe packed and as padded rows; switch packing off where the two disagree, as they do for a model whose
        layers do not hand the layout on. Returns the largest gap in nats, 0 for a model that does not pack."""
        if not self.packs:
            return 0.0
        batch = _probe_batch(token_ids, self.device)
        packed = self.score(batch, temperature=1.0, dtype=torch.float32).logprobs
        self.packs = False
        padded = self.score(batch, temperature=1.0, dtype=torch.float32).logprobs
        gap = float((packed - padded).abs().max())
        self.packs = gap <= tolerance
        return gap

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

    def _takes_layouts(self) -> bool:
        """Give the module the packed attention, if its layers take their attention function from transformers, were loaded for
        scaled dot-product attention, and attend to everything before them."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        module = self.module
        plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=module.config).layers)
        if not plain or module.config._attn_implementation not in ("sdpa", IMPLEMENTATION) or not module._can_set_attn_implementation():
            return False
        register()
        module.set_attn_implementation(IMPLEMENTATION)
        return True

    def _packed_hidden(self, batch: PolicyBatch) -> torch.Tensor:
        """[N, H] hidden states that predict the response tokens, from one row without padding."""
        layout = PackedLayout.of(batch)
        if not layout.predictors.numel() and not self.sharded:
            return self.module.get_input_embeddings().weight.new_zeros(0, self._head.weight.shape[1])
        out = self._body(
            input_ids=layout.token_ids[None],
            position_ids=layout.positions[None],
            attention_mask=_NO_MASK.to(layout.token_ids.device),
            packed=layout,
            use_cache=False,
        )
        return out.last_hidden_state[0, layout.predictors]

    def _row_hidden(self, batch: PolicyBatch) -> torch.Tensor:
        """[N, H] like `_packed_hidden`, from one padded row of prompt and completion per sequence."""
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


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _call_for_wrap(function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """FSDP hangs its backward on the tensors that come out, which must therefore be no views."""
    return tuple(out.clone() if isinstance(out, torch.Tensor) and out._is_view() else out for out in function(*args))


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


def _probe_batch(token_ids: Sequence[int], device: torch.device) -> PolicyBatch:
    """Two prompts with three completions of different lengths, cut from one text of at least eight tokens."""
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=device)
    third = max(ids.shape[1] // 3, 2)
    prompts = torch.stack([ids[0, :third], ids[0, :third].roll(1)])
    lengths = torch.tensor([third, third // 2, third - 1], device=device)
    completions = torch.stack([ids[0, third : 2 * third], ids[0, -third:], ids[0, third : 2 * third].flip(0)])
    sequence = torch.repeat_interleave(torch.arange(3, device=device), lengths)
    labels = torch.cat([row[:length] for row, length in zip(completions, lengths.tolist(), strict=True)])
    prompt_lengths = torch.tensor([third, third - 1], device=device)
    nothing = torch.zeros(len(labels), device=device)
    return PolicyBatch(
        prompts=prompts,
        prompt_lengths=prompt_lengths,
        prompt_of=torch.tensor([0, 0, 1], device=device),
        completions=completions,
        lengths=lengths,
        labels=labels,
        sequence=sequence,
        loss_mask=nothing == 0,
        advantages=torch.zeros(3, device=device),
        sampled_logprobs=nothing,
        keys=(("probe", 0), ("probe", 1), ("probe", 2)),
    )
