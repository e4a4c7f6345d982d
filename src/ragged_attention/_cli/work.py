"""How much an operation has to compute and to move at the least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..reference import visible_keys


@dataclass(frozen=True)
class Work:
    flops: int  # of the two matrix products, over what is visible or listed
    bytes: int  # every operand that is needed, once


def visible_pairs(lengths: Sequence[int], mask_str: str, window: int = -1) -> int:
    """(query, key) pairs that the mask lets through, over all sequences."""
    pairs = 0
    for n, times in Counter(lengths).items():
        intervals = (visible_keys(mask_str, window, i, n) for i in range(n))
        pairs += times * sum(hi - lo for lo, hi in intervals)
    return pairs


def ragged_work(
    lengths: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    mask_str: str,
    window: int = -1,
) -> Work:
    elements = sum(lengths) * 2 * (num_q_heads + num_kv_heads) * head_dim
    pairs = visible_pairs(lengths, mask_str, window)
    return Work(flops=4 * pairs * head_dim * num_q_heads, bytes=elements * itemsize)


def qsa_work(
    rows: int,
    listed: int,
    distinct: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> Work:
    """`listed` entries in all lists, naming `distinct` tokens: what neighbours share is moved once."""
    elements = 2 * (rows * num_q_heads + distinct * num_kv_heads) * head_dim
    return Work(flops=4 * listed * head_dim * num_q_heads, bytes=elements * itemsize + 4 * listed)
