"""QSA selections as a model makes them: neighbouring rows choose mostly the same blocks.

For the demo and the benchmark, in NumPy alone: the same lists whatever device and framework they go to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 4  # tokens that are selected together
BLOCKS = 512  # most blocks of a row
TAIL = BLOCK - 1  # the row's own block while it is incomplete
WIDTH = BLOCKS * BLOCK + TAIL

_CHUNK = 256  # rows whose scores are held at once

Lists = NDArray[np.int32]


def select(
    sequences: Sequence[tuple[int, int]], correlation: float, rng: np.random.Generator, blocks: int = BLOCKS
) -> tuple[Lists, NDArray[np.int32]]:
    """token_indices [rows, width] and counts [rows]; `sequences` has (cached tokens, new rows) of each.

    Every block has a score that follows an AR(1) process along the rows, `x = rho * x + sqrt(1 - rho^2) * normal`.
    A row lists the `blocks` best of the complete blocks that it sees, best first (unsorted by position, as top-k gives
    them), and then the up to 3 tokens of its own block: the width is `blocks` * BLOCK + TAIL. Rows that see no more
    tokens than that list them all. Entries past the count are -1.
    """
    rows = sum(new for _, new in sequences)
    indices = np.full((rows, blocks * BLOCK + TAIL), -1, np.int32)
    counts = np.zeros(rows, np.int32)
    keep, fresh = np.float32(correlation), np.float32((1 - correlation**2) ** 0.5)
    row = 0
    for cached, new in sequences:
        num_blocks = (cached + new) // BLOCK
        score = rng.standard_normal(num_blocks, dtype=np.float32)
        for begin in range(0, new, _CHUNK):
            size = min(_CHUNK, new - begin)
            scores = rng.standard_normal((size, num_blocks), dtype=np.float32)
            scores *= fresh
            for step in scores:
                step += keep * score
                score = step
            seen = np.arange(cached + begin + 1, cached + begin + size + 1)  # a row sees itself
            counts[row : row + size] = _fill(indices[row : row + size], scores, seen, blocks)
            row += size
    return indices, counts


def _fill(lists: Lists, scores: NDArray[np.float32], seen: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """Write the lists of some rows that see `seen` tokens each; returns the counts."""
    complete = seen // BLOCK
    most = min(blocks, scores.shape[1])
    chosen = np.minimum(complete, blocks)
    if most:
        hidden = np.arange(scores.shape[1]) >= complete[:, None]
        keys = np.where(hidden, np.float32(np.inf), -scores)  # smallest first: an incomplete block comes last
        best = np.argpartition(keys, most - 1, axis=1)[:, :most]
        order = np.argsort(np.take_along_axis(keys, best, axis=1), axis=1)
        in_order = np.take_along_axis(best, order, axis=1).astype(np.int32)
        tokens = (in_order[:, :, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)).reshape(len(lists), most * BLOCK)
        lists[:, : most * BLOCK] = np.where(np.arange(most * BLOCK) < chosen[:, None] * BLOCK, tokens, -1)
    for offset in range(TAIL):
        rows = np.flatnonzero(offset < seen % BLOCK)
        lists[rows, chosen[rows] * BLOCK + offset] = complete[rows] * BLOCK + offset
    return chosen * BLOCK + seen % BLOCK


def neighbour_share(indices: Lists, counts: NDArray[np.int32], rows: Sequence[int]) -> float:
    """The fraction of a row's tokens that the next row lists too, averaged over `rows`: each has a next one."""
    shares = [
        float(np.isin(indices[row, : counts[row]], indices[row + 1, : counts[row + 1]]).mean())
        for row in rows
        if counts[row]
    ]
    return sum(shares) / len(shares) if shares else 0.0


def distinct_tokens(sequences: Sequence[tuple[int, int]], indices: Lists, counts: NDArray[np.int32]) -> int:
    """How many different tokens the lists name."""
    distinct = row = 0
    listed = np.arange(indices.shape[1]) < counts[:, None]
    for cached, new in sequences:
        named = np.zeros(cached + new, bool)
        named[indices[row : row + new][listed[row : row + new]]] = True
        distinct += int(named.sum())
        row += new
    return distinct
