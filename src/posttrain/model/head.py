"""Log-probabilities and entropies of given tokens under a language-model head, without the [N, V] logits.

The loss needs two numbers per token, yet the head produces V logits for each: at N = 4096 and V = 151,936 that is 2.3 GiB in
float32, and a plain log-softmax with its backward holds it two or three times over. Here both passes walk over tiles of
`chunk_tokens` rows by `chunk_vocab` columns, and the backward computes each tile again from the hidden states. The vocabulary
is the outer loop, so a tile of the weight is cast once and its gradient is finished, in at least float32, before the next one
starts.

Owns: the arithmetic from hidden states to token scores. Does not own: which positions are scored, or how a model is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from posttrain.errors import ModelError

DEFAULT_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Rows of a tile per device type."""
DEFAULT_CHUNK_VOCAB = {"cpu": 8192, "cuda": 8192}
"""Columns of a tile per device type. Independent of N, so that the order of summation over the vocabulary is too.

On an idle CPU 512 columns are as fast as 16,384; on a busy one every operation waits for its slowest thread, so few large
operations win: two tiles of 512 x 8192 are 32 MiB in float32."""


def chunked_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int = 0,
    chunk_vocab: int = 0,
    compute_dtype: torch.dtype | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score `labels` under softmax(z / temperature) with z = cap(logit_scale * (hidden @ weight.T + bias)).

        cap(x)     = softcap * tanh(x / softcap), or x without a softcap
        logprob_ik = z_i[label_ik] / temperature - logsumexp_v(z_i[v] / temperature)
        entropy_i  = logsumexp_i - sum_v p_i[v] * z_i[v] / temperature

    Differentiable once, in hidden, weight and bias, through the log-probabilities. Rows whose incoming gradient is exactly
    zero (masked tokens, groups without an advantage) cost nothing in the backward.

    Args:
        hidden: [N, H] floating; N may be 0.
        weight: [V, H] floating, e.g. a tied embedding. Skipped in the backward when it does not require a gradient.
        labels: int64 [N], or [N, K] for K tokens at every position; each in [0, V).
        bias: [V] floating.
        temperature: divides the logits; > 0.
        dtype: of the log-softmax and the returned log-probabilities. Sums run in at least float32.
        chunk_tokens: rows per tile; 0 takes the device's default. Two tiles of chunk_tokens x chunk_vocab are the working memory.
        chunk_vocab: columns per tile; 0 takes the device's default.
        compute_dtype: what the operands of the matrix products are rounded to; None takes autocast's dtype where autocast is
            on and the operands' common dtype elsewhere. Products of 16-bit operands are accumulated and kept in float32, so
            logits are never rounded to 16 bits.

    Returns:
        logprobs: the shape of labels, in `dtype`, nats, connected to the graph.
        entropy: float32 [N], nats, detached.
    """
    rows, width = _check_shapes(hidden, weight, labels, bias)
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ModelError(f"{name}={value!r} must be > 0")
    if labels.device.type == "cpu" and rows and (int(labels.min()) < 0 or int(labels.max()) >= width):
        # Elsewhere the check would wait for the device: a label outside the vocabulary scores NaN there.
        raise ModelError(f"labels must be in [0, {width}), the rows of the head; got {int(labels.min())}..{int(labels.max())}")
    device = hidden.device.type
    if compute_dtype is None:
        autocast = torch.is_autocast_enabled(device)
        compute_dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(hidden.dtype, weight.dtype)
    head = _Head(
        scale=logit_scale,
        temperature=temperature,
        softcap=softcap,
        compute=compute_dtype,
        # The 16-bit products of a CPU without matrix units are six times slower than its float32 ones, and round the result.
        operand=torch.promote_types(compute_dtype, torch.float32) if device == "cpu" else compute_dtype,
        accumulate=torch.promote_types(dtype, torch.float32),
        tokens=chunk_tokens or DEFAULT_CHUNK_TOKENS.get(device, DEFAULT_CHUNK_TOKENS["cuda"]),
        vocab=chunk_vocab or DEFAULT_CHUNK_VOCAB.get(device, DEFAULT_CHUNK_VOCAB["cuda"]),
    )
    columns = labels if labels.ndim == 2 else labels[:, None]
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, columns, head)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs.reshape(labels.shape).to(dtype), entropy


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    """(N, V) of operands that fit together; ModelError otherwise."""
    good = (
        hidden.ndim == 2
        and weight.ndim == 2
        and hidden.shape[1] == weight.shape[1]
        and labels.ndim in (1, 2)
        and labels.shape[:1] == hidden.shape[:1]
    )
    good = good and (bias is None or bias.shape == weight.shape[:1])
    if not good:
        shapes = {"hidden": hidden, "weight": weight, "labels": labels} | ({} if bias is None else {"bias": bias})
        got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shapes.items())
        raise ModelError(f"the head takes hidden [N, H], weight [V, H], labels [N] or [N, K] and bias [V]; got {got}")
    return hidden.shape[0], weight.shape[0]


@dataclass(frozen=True, slots=True)
class _Head:
    """What turns hidden states into logits, and the tiling."""

    scale: float
    temperature: float
    softcap: float | None
    compute: torch.dtype
    """Operands of the products are rounded to this."""
    operand: torch.dtype
    """Operands of the products are held in this."""
    accumulate: torch.dtype
    """Of the log-softmax: float32 or float64."""
    tokens: int
    vocab: int

    @property
    def product(self) -> torch.dtype:
        """What products come out in: float32 or float64."""
        return torch.promote_types(self.operand, torch.float32)

    @property
    def slope(self) -> float:
        """d z / d (hidden @ weight.T), the softcap's own slope left out."""
        return self.scale / self.temperature

    def cast(self, operand: torch.Tensor) -> torch.Tensor:
        return operand.to(self.compute).to(self.operand)

    def row_chunks(self, rows: int) -> Iterator[slice]:
        return (slice(start, min(start + self.tokens, rows)) for start in range(0, rows, self.tokens))

    def vocab_chunks(self, width: int) -> Iterator[slice]:
        return (slice(start, min(start + self.vocab, width)) for start in range(0, width, self.vocab))

    def buffer(self, like: torch.Tensor, width: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory for one tile."""
        return like.new_empty(min(self.tokens, like.shape[0]) * min(self.vocab, width), dtype=dtype)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, product: torch.Tensor) -> torch.Tensor:
        """One tile of scaled logits before a softcap's scale: [rows, columns] in `accumulate`, or in `product`'s memory.

        Without a softcap this is z / temperature; with one it is tanh(x / softcap), from which both z and its slope follow.
        """
        alpha = self.slope if self.softcap is None else self.scale / self.softcap
        if hidden.dtype == product.dtype:
            tile = product[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], weight.shape[0])
            base = tile if bias is None else bias
            torch.addmm(base, hidden, weight.t(), beta=0.0 if bias is None else alpha, alpha=alpha, out=tile)
        else:
            tile = torch.mm(hidden, weight.t(), out_dtype=product.dtype)
            if bias is not None:
                tile.add_(bias)
            if alpha != 1.0:
                tile.mul_(alpha)
        if self.softcap is not None:
            tile.tanh_()
        return tile.to(self.accumulate)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """total (+)= left @ right, in place and in total's dtype; `first` overwrites, so that total may be uninitialized."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0.0 if first else 1.0, out=total)
    else:
        part = torch.mm(left, right, out_dtype=total.dtype)
        total.copy_(part) if first else total.add_(part)


class _TokenLogprobs(torch.autograd.Function):
    """(hidden, weight, bias, labels [N, K], head) -> (logprobs [N, K] in `head.accumulate`, entropy float32 [N])."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            picked, lse, entropy = _forward(hidden, weight, bias, labels, head=head)
        ctx.save_for_backward(hidden, weight, bias, labels, lse)  # pyright: ignore[reportArgumentType]  (None is allowed)
        ctx.head = head  # pyright: ignore[reportAttributeAccessIssue]
        ctx.mark_non_differentiable(entropy)
        return picked.sub_(lse.unsqueeze(1)), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, labels, lse = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[:3])
        used = grad.any(0)
        if not bool(used[1:].any()):
            grad, labels = grad[:, :1], labels[:, :1]  # further tokens without a gradient change nothing, not even the rounding
        with torch.autocast(hidden.device.type, enabled=False):
            return *_backward(grad, hidden, weight, bias, labels, lse, head=ctx.head, needs=needs), None, None


def _forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, *, head: _Head
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(z / temperature of the labels [N, K], logsumexp [N], entropy [N]) by one online pass over the vocabulary.

    With running maximum m, s = sum exp(z - m) and u = sum exp(z - m) (z - m): lse = m + log s, entropy = log s - u / s.
    """
    rows, width = hidden.shape[0], weight.shape[0]
    states = head.cast(hidden)
    peak, mass, tilt = (hidden.new_full((rows,), start, dtype=head.accumulate) for start in (-torch.inf, 0.0, 0.0))
    picked = hidden.new_full(labels.shape, torch.nan, dtype=head.accumulate)
    product = head.buffer(hidden, width, dtype=head.product)
    scratch = head.buffer(hidden, width, dtype=head.accumulate)
    for columns in head.vocab_chunks(width):
        tile_weight = head.cast(weight[columns])
        tile_bias = None if bias is None else bias[columns].to(head.product)
        for chunk in head.row_chunks(rows):
            z = head.logits(states[chunk], tile_weight, tile_bias, product=product)
            if head.softcap is not None:
                z.mul_(head.softcap / head.temperature)
            index = labels[chunk] - columns.start
            inside = (index >= 0) & (index < z.shape[1])
            here = z.gather(1, index.clamp_(0, z.shape[1] - 1))
            picked[chunk] = torch.where(inside, here, picked[chunk])
            top = torch.maximum(peak[chunk], z.amax(1))
            shift = peak[chunk] - top
            shrink = shift.exp()
            # exp(-inf) * -inf before the first tile: there is nothing to shift yet.
            moved = torch.where(mass[chunk] > 0, shift * mass[chunk], 0.0)
            tilt[chunk] = (tilt[chunk] + moved) * shrink
            mass[chunk] *= shrink
            peak[chunk] = top
            e = torch.exp(z.sub_(top.unsqueeze(1)), out=scratch[: z.numel()].view_as(z))
            mass[chunk] += e.sum(1)
            tilt[chunk] += z.mul_(e).sum(1)
    log_mass = mass.log()
    return picked, peak + log_mass, (log_mass - tilt / mass).float()


def _backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    *,
    head: _Head,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of sum_ik grad_ik logprob_ik in hidden, weight and bias.

    With d = (softmax - onehot) * cap'(x) and f_i = -grad_i * scale / temperature:
        hidden: f_i (d @ weight)_i        weight: d.T @ (f hidden)        bias: d.T @ f
    so that the tile d itself is never scaled by the row's gradient. With several labels a row that is not possible:
    d = ((sum_k grad_ik) softmax - sum_k grad_ik onehot_ik) * cap'(x) and f_i = -scale / temperature.
    """
    to_hidden, to_weight, to_bias = needs
    width = weight.shape[0]
    active = grad.any(1).nonzero().squeeze(1)
    some = active.numel() < grad.shape[0]
    if some:
        grad, states, labels, lse = grad[active], hidden[active], labels[active], lse[active]
    else:
        states = hidden
    rows = states.shape[0]
    if rows == 0:
        targets = (hidden, weight, bias)
        zeros = tuple(torch.zeros_like(t) if need and t is not None else None for t, need in zip(targets, needs, strict=True))
        return zeros[0], zeros[1], zeros[2]
    single = grad.shape[1] == 1
    factor = (grad if single else torch.ones_like(grad[:, :1])).mul(-head.slope).to(head.product)
    states = head.cast(states)
    weighted = head.cast(states * factor) if to_weight else states
    grad_states = states.new_empty(states.shape, dtype=head.product) if to_hidden else None
    grad_weight = torch.empty_like(weight) if to_weight else None
    grad_bias = torch.empty_like(bias) if to_bias and bias is not None else None
    direct = weight.dtype == head.product
    product = head.buffer(states, width, dtype=head.product)
    scratch = head.buffer(states, width, dtype=head.accumulate) if head.softcap is not None else None
    for columns in head.vocab_chunks(width):
        tile_weight = head.cast(weight[columns])
        tile_bias = None if bias is None else bias[columns].to(head.product)
        weight_sum = None
        if grad_weight is not None:
            weight_sum = grad_weight[columns] if direct else weight.new_empty(tile_weight.shape, dtype=head.product)
        bias_sum = None if grad_bias is None else factor.new_zeros(tile_weight.shape[0])
        for chunk in head.row_chunks(rows):
            z = head.logits(states[chunk], tile_weight, tile_bias, product=product)
            shares = None if single else grad[chunk].to(head.accumulate)
            index = labels[chunk] - columns.start
            d = _softmax_minus_onehot(z, index, lse[chunk].unsqueeze(1), head=head, scratch=scratch, shares=shares)
            if bias_sum is not None:
                bias_sum.addmv_(d.t().to(head.product), factor[chunk].squeeze(1))
            d = d.to(head.operand)
            if weight_sum is not None:
                _add_product(weight_sum, d.t(), weighted[chunk], first=chunk.start == 0)
            if grad_states is not None:
                _add_product(grad_states[chunk], d, tile_weight, first=columns.start == 0)
        if grad_weight is not None and weight_sum is not None and not direct:
            grad_weight[columns] = weight_sum
        if grad_bias is not None and bias_sum is not None:
            grad_bias[columns] = bias_sum
    grad_hidden = None
    if grad_states is not None:
        grad_hidden = grad_states.mul_(factor).to(hidden.dtype)
        if some:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, active, grad_hidden)
    return grad_hidden, grad_weight, grad_bias


def _softmax_minus_onehot(
    z: torch.Tensor,
    index: torch.Tensor,
    lse: torch.Tensor,
    *,
    head: _Head,
    scratch: torch.Tensor | None,
    shares: torch.Tensor | None,
) -> torch.Tensor:
    """(softmax - onehot) * cap'(x) of one tile of `_Head.logits`, in z's memory.

    Args:
        index: int64 [rows, K] label columns relative to the tile.
        shares: [rows, K] weights of the labels, whose sum weighs the softmax; None is a single label of weight one.
    """
    slope = None
    if head.softcap is not None and scratch is not None:
        slope = torch.mul(z, z, out=scratch[: z.numel()].view_as(z)).neg_().add_(1.0)
        z.mul_(head.softcap / head.temperature)
    d = z.sub_(lse).exp_()
    inside = (index >= 0) & (index < d.shape[1])
    picks = inside.to(d.dtype)
    if shares is not None:
        d.mul_(shares.sum(1, keepdim=True))
        picks = picks * shares
    d.scatter_add_(1, index.clamp(0, d.shape[1] - 1), -picks)
    return d if slope is None else d.mul_(slope)
