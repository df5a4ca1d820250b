"""Every random draw is seeded from (run seed, purpose, ids), so no result depends on timing or order of execution."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, purpose: str, *ids: str | int) -> int:
    """A 63-bit seed, equal on every machine and Python."""
    text = "\x1f".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in ids)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
