"""Reading Hugging Face tensors back out of a live vLLM model, for proof that they arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

READBACK_FLOP = 5e11
"""Most floating-point operations one reading may spend on packed matrices: a second or two on two cores, and enough for a
model of 135 million parameters. Matrices beyond it are not shown."""

IDENTITY_ROWS = 256
"""Rows of the identity multiplied at once; bounds the memory of a reading."""


def readable_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) for everything that can be shown exactly.

    Fused matrices (qkv, gate and up) are cut into the parts a checkpoint has. Matrices that vLLM's CPU backend packed are read
    through the packed kernel itself, as its product with the identity: exact in every float format, up to the sign of zero.
    Experts, quantized weights and tensor-parallel shards are not shown.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    fused: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", None) or {})
    budget = READBACK_FLOP
    for prefix, module in model.named_modules():
        layer: Any = module  # vLLM's classes, whose attributes torch does not know
        if isinstance(module, VocabParallelEmbedding):
            if layer.tp_size > 1:
                continue
            weight = layer.weight
            # A head computes with its packed copy, so that copy is what must be shown; an embedding only looks rows up.
            if isinstance(module, ParallelLMHead) and _is_packed(layer):
                cost = 2.0 * weight.shape[0] * weight.shape[1] ** 2
                if cost > budget:
                    continue
                budget -= cost
                weight = _through_kernel(layer, columns=weight.shape[1], rows=weight.shape[0], dtype=weight.dtype)
            yield f"{prefix}.weight", weight[: layer.org_vocab_size]
        elif isinstance(module, LinearBase):
            if layer.tp_size > 1:
                continue
            weight = layer.weight
            if weight.numel() == 0:
                rows, columns = int(layer.output_size), int(layer.input_size)
                cost = 2.0 * rows * columns**2
                if not _is_packed(layer) or cost > budget:
                    continue
                budget -= cost
                weight = _through_kernel(layer, columns=columns, rows=rows, dtype=weight.dtype)
            yield from _parts(prefix, "weight", weight, layer, fused)
            if layer.bias is not None:
                yield from _parts(prefix, "bias", layer.bias, layer, fused)
        else:
            for name, parameter in layer.named_parameters(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, parameter


def _is_packed(module: Any) -> bool:
    return "cpu_linear" in vars(module)


def _through_kernel(module: Any, *, columns: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns]: the matrix a packed kernel multiplies with."""
    matrix = torch.empty(rows, columns, dtype=dtype)
    identity = torch.eye(columns, dtype=dtype)
    with torch.inference_mode():
        for start in range(0, columns, IDENTITY_ROWS):
            part = identity[start : start + IDENTITY_ROWS].contiguous()
            matrix[:, start : start + len(part)] = module.cpu_linear(part, module.weight, None).t()
    return matrix


def _parts(prefix: str, kind: str, tensor: torch.Tensor, module: Any, fused: dict[str, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    parent, _, leaf = prefix.rpartition(".")
    names = fused.get(leaf, [])
    if len(names) <= 1:
        yield f"{prefix}.{kind}", tensor
        return
    sizes: Sequence[int] = module.output_sizes
    if len(sizes) != len(names) or sum(sizes) != tensor.shape[0]:
        return
    for name, part in zip(names, tensor.split(list(sizes)), strict=True):
        yield f"{parent}.{name}.{kind}", part
