"""QSA selections as a model makes them, in NumPy: neighbouring rows choose mostly the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 4  # tokens that are selected together
BLOCKS = 512  # most blocks of a row
WIDTH = BLOCKS * BLOCK + BLOCK - 1  # and the causal tail: the row's own block while it is incomplete

_CHUNK = 256  # rows whose scores are held at once


def qsa_selection(
    sequences: Sequence[tuple[int, int]], rng: np.random.Generator, correlation: float = 0.98
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """token_indices and counts of all rows; `sequences` has (cached tokens, new rows) of each.

    Every block has a score that drifts from row to row by `correlation`; a row lists its best complete blocks, best
    first, and then its tail. Entries past the count are -1.
    """
    total = sum(new for _, new in sequences)
    indices = np.full((total, WIDTH), -1, np.int32)
    counts = np.zeros(total, np.int32)
    row = 0
    for cached, new in sequences:
        num_blocks = (cached + new) // BLOCK
        scores = rng.standard_normal(num_blocks, dtype=np.float32)
        for begin in range(0, new, _CHUNK):
            size = min(_CHUNK, new - begin)
            seen = np.arange(cached + begin + 1, cached + begin + size + 1)  # a row sees itself
            history = rng.standard_normal((size, num_blocks), dtype=np.float32)
            history *= np.float32((1 - correlation**2) ** 0.5)
            for step in history:
                step += np.float32(correlation) * scores
                scores = step
            lists = indices[row : row + size]
            counts[row : row + size] = _fill(lists, history, seen)
            row += size
    return indices, counts


def _fill(lists: NDArray[np.int32], scores: NDArray[np.float32], seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Write the lists of some rows that see `seen` tokens each; returns the counts."""
    complete = seen // BLOCK
    most = min(BLOCKS, scores.shape[1])
    chosen = np.minimum(complete, BLOCKS)
    if most:
        hidden = np.arange(scores.shape[1]) >= complete[:, None]
        keys = np.where(hidden, np.inf, -scores)  # smallest first; a block that is not complete yet comes last
        best = np.argpartition(keys, most - 1, axis=1)[:, :most]
        order = np.argsort(np.take_along_axis(keys, best, axis=1), axis=1)
        blocks = np.take_along_axis(best, order, axis=1)
        tokens = (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(len(lists), most * BLOCK)
        lists[:, : most * BLOCK] = np.where(np.arange(most * BLOCK) < chosen[:, None] * BLOCK, tokens, -1)
    for offset in range(BLOCK - 1):
        rows = np.flatnonzero(offset < seen % BLOCK)
        lists[rows, chosen[rows] * BLOCK + offset] = complete[rows] * BLOCK + offset
    return chosen * BLOCK + seen % BLOCK


def distinct_tokens(sequences: Sequence[tuple[int, int]], indices: NDArray[np.int32], counts: NDArray[np.int32]) -> int:
    """How many different tokens the lists name."""
    distinct = row = 0
    listed = np.arange(indices.shape[1]) < counts[:, None]
    for cached, new in sequences:
        named = np.zeros(cached + new, bool)
        named[indices[row : row + new][listed[row : row + new]]] = True
        distinct += int(named.sum())
        row += new
    return distinct
