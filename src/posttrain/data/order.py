"""The order in which one epoch visits the rows of a corpus: the rows as they are, or a permutation of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

Order = Callable[[int], int]
"""Position in the epoch -> row of the corpus."""

MATERIALIZE_LIMIT = 1 << 22
"""Longest permutation held as an array (32 MiB); beyond it positions are mapped one at a time."""

_ROUNDS = 6


def identity(position: int) -> int:
    return position


def permutation(length: int, *, seed: int) -> Order:
    """A permutation of `range(length)` that depends on nothing but its arguments."""
    # Generators take no negative seed; the modulus keeps seed + epoch distinct for every epoch a run can reach.
    generator = np.random.default_rng(seed % (1 << 64))
    if length <= MATERIALIZE_LIMIT:
        order = generator.permutation(length)
        return lambda position: int(order[position])
    return _feistel(length, key=generator.bytes(16))


def _feistel(length: int, *, key: bytes) -> Order:
    """A keyed bijection of `range(length)` in constant memory.

    A Feistel network permutes all numbers of an even count of bits whatever its round function is; walking on while the image
    lies outside `range(length)` restricts that permutation to the range. The domain is below 4 * length, so the walk takes
    under four steps on average.
    """
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1

    def mixed(value: int, turn: int) -> int:
        digest = hashlib.blake2b(value.to_bytes(16, "little") + bytes([turn]), key=key, digest_size=8).digest()
        return int.from_bytes(digest, "little") & mask

    def visit(position: int) -> int:
        value = position
        while True:
            left, right = value >> half, value & mask
            for turn in range(_ROUNDS):
                left, right = right, left ^ mixed(right, turn)
            value = left << half | right
            if value < length:
                return value

    return visit
