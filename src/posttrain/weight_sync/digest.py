"""The fingerprint both sides of a publication compute."""

from __future__ import annotations

import hashlib

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes, with -0.0 read as +0.0.

    The sign of zero is dropped because an engine that packed a matrix can only show it by multiplying it with the identity,
    and a sum of zeros is +0.0.
    """
    plain = tensor.detach().cpu().contiguous()
    if plain.is_floating_point():
        plain = plain + torch.zeros((), dtype=plain.dtype)
    digest = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32: the spelling of the configuration and of a manifest."""
    return str(dtype).removeprefix("torch.")
