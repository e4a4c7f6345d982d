"""Results held against the float64 reference on a sample of rows, for tensors that are too large to compare whole.

Only what the sampled rows need is copied to the host. `to_numpy` makes an exact NumPy array of a tensor (or a slice of
one) of whatever framework is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference

ToNumpy = Callable[[Any], NDArray[Any]]

# The largest error allowed: of one element, and of all relative to their norm. Averages over thousands of values are
# so small that 2e-2 alone would let an output of zeros pass.
_MAX_ABS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
_MAX_RELATIVE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
_MAX_LSE = 1e-4  # times max(1, |lse|)


@dataclass(frozen=True)
class Agreement:
    max_abs_error: float
    relative_error: float
    lse_error: float | None  # relative to max(1, |lse|); None where there is no LSE
    ok: bool


@dataclass(frozen=True)
class Sample:
    """What some rows of a result should be."""

    rows: list[int]
    out: NDArray[np.float64]
    lse: NDArray[np.float64]

    def compare(self, out: Any, lse: Any, dtype: str, to_numpy: ToNumpy) -> Agreement:
        """`out` and `lse` (or None) are whole results; `dtype` is the inputs' and the output's."""
        got = np.stack([to_numpy(out[row]) for row in self.rows]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(got - self.out), nan=np.inf)
        max_abs = float(error.max(initial=0.0))
        norm = float(np.linalg.norm(self.out))
        relative = float(np.linalg.norm(error)) / norm if norm else max_abs
        ok = max_abs <= _MAX_ABS[dtype] and relative <= _MAX_RELATIVE[dtype]
        lse_error = None
        if lse is not None:
            lse_error = self._lse_error(np.stack([to_numpy(lse[row]) for row in self.rows]))
            ok = ok and lse_error <= _MAX_LSE
        return Agreement(max_abs, relative, lse_error, ok)

    def _lse_error(self, got: NDArray[Any]) -> float:
        same = got == self.lse  # -inf where nothing is attended to
        with np.errstate(invalid="ignore"):
            error = np.abs(got - self.lse) / np.maximum(1, np.abs(self.lse))
        return float(np.where(same, 0, np.nan_to_num(error, nan=np.inf)).max(initial=0.0))


def sample_rows(lengths: Sequence[int], rng: np.random.Generator, per_sequence: int = 4) -> dict[int, list[int]]:
    """Rows by sequence, counted from the sequence's first: ends and some between, of a few sequences."""
    nonempty = [s for s, length in enumerate(lengths) if length]
    if not nonempty:
        return {}
    longest = max(nonempty, key=lambda s: lengths[s])
    chosen = {nonempty[0], nonempty[-1], longest, int(rng.choice(nonempty))}
    return {
        s: sorted({0, lengths[s] - 1, *rng.integers(0, lengths[s], max(0, per_sequence - 2)).tolist()})
        for s in sorted(chosen)
    }


def ragged_sample(
    q: Any,
    k: Any,
    v: Any,
    lengths: Sequence[int],
    chosen: dict[int, list[int]],
    to_numpy: ToNumpy,
    *,
    mask_str: str,
    local_window_size: int = -1,
) -> Sample:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows: list[int] = []
    results = []
    for s, members in chosen.items():
        begin, end = int(offsets[s]), int(offsets[s + 1])
        results.append(
            reference.ragged_flash_attention(
                to_numpy(q[begin:end]),
                to_numpy(k[begin:end]),
                to_numpy(v[begin:end]),
                np.array([0, end - begin]),
                mask_str=mask_str,
                local_window_size=local_window_size,
                rows=np.array(members),
            )
        )
        rows += [begin + row for row in members]
    return _joined(rows, results)


def qsa_sample(
    q: Any,
    kv_blocks: Any,
    layer_idx: int,
    sequences: Sequence[tuple[int, int]],
    kv_lookup_table: NDArray[Any],
    token_indices: Any,
    counts: Any,
    chosen: dict[int, list[int]],
    to_numpy_of_floats: ToNumpy,
    to_numpy_of_integers: ToNumpy,
) -> Sample:
    """`sequences` has (cached tokens, new rows) of each. Every sampled sequence becomes a small call of its own."""
    page_size = kv_blocks.shape[3]
    rows: list[int] = []
    results = []
    for s, members in chosen.items():
        cached, new = sequences[s]
        begin = sum(rows_before for _, rows_before in sequences[:s])
        places = [begin + row for row in members]
        num_pages = -(-(cached + new) // page_size)
        pages = [to_numpy_of_floats(kv_blocks[int(page), :, layer_idx]) for page in kv_lookup_table[s, :num_pages]]
        results.append(
            reference.qsa_sparse_attention(
                np.stack([to_numpy_of_floats(q[row]) for row in places]),
                np.array([0, len(places)]),
                np.stack(pages)[:, :, None],  # one layer
                np.array([cached + new - len(places)]),  # so that the context keeps its length
                np.arange(num_pages)[None],
                0,
                np.stack([to_numpy_of_integers(token_indices[row]) for row in places]),
                np.array([int(counts[row]) for row in places]),
            )
        )
        rows += places
    return _joined(rows, results)


def _joined(rows: list[int], results: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> Sample:
    return Sample(rows, np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results]))
