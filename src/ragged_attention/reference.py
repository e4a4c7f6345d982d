"""The two operations in plain NumPy and float64: slow, readable, and what the tests hold the kernels against.

Each function takes NumPy arrays of any floating dtype (``ml_dtypes.bfloat16`` included), converts to float64 and
returns float64 arrays ``(out, lse)``. Nothing is tiled, blocked or reordered: one row and one head at a time see their
keys, take a softmax and average the values.

``rows=`` computes only the given rows (in the given order), so that cases far too big for Python can be sampled.
Whatever the size, no more than one sequence of one head is held in float64 at once.

``plain=True`` gives the yardstick of the tolerances instead of the exact result: the same computation with the weights
P rounded to the input dtype and the output to the output dtype, which is what any implementation in that dtype does at
the least. The arrays are still float64; their values are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["MASKS", "WINDOWED_MASKS", "qsa_sparse_attention", "ragged_flash_attention", "visible_keys"]

Array = NDArray[Any]
Float64Array = NDArray[np.float64]

MASKS = ("null", "causal", "sliding_window_causal", "sliding_window_noncausal", "chunked", "chunked_causal")
WINDOWED_MASKS = MASKS[2:]


def visible_keys(mask_str: str, window: int, i: int, n: int) -> tuple[int, int]:
    """The keys ``lo <= j < hi`` that query ``i`` of a sequence of length ``n`` sees.

    Raises:
        ValueError: an unknown mask, a window below 1 where it takes one, or other than -1 where it takes none.
    """
    if mask_str not in MASKS:
        raise ValueError(f"mask_str is {mask_str!r}; accepted: {', '.join(MASKS)}")
    if mask_str in WINDOWED_MASKS and window < 1:
        raise ValueError(f"local_window_size is {window}; {mask_str} needs at least 1")
    if mask_str not in WINDOWED_MASKS and window != -1:
        raise ValueError(f"local_window_size is {window}; {mask_str} takes no window, so it must be -1")

    if mask_str == "null":
        return 0, n
    if mask_str == "causal":
        return 0, i + 1
    if mask_str == "sliding_window_causal":
        return max(0, i - window + 1), i + 1
    if mask_str == "sliding_window_noncausal":
        return max(0, i - window + 1), n
    chunk = i // window * window
    if mask_str == "chunked":
        return chunk, min(chunk + window, n)
    return chunk, i + 1  # chunked_causal


def ragged_flash_attention(
    q: Array,
    k: Array,
    v: Array,
    input_row_offsets: Array,
    q_max_seq_len: int | None = None,
    *,
    mask_str: str = "causal",
    local_window_size: int = -1,
    scale: float | None = None,
    rows: Array | None = None,
    plain: bool = False,
) -> tuple[Float64Array, Float64Array]:
    """Self-attention within each sequence of a ragged batch: :func:`ragged_attention.ragged_flash_attention`.

    Args:
        q: ``[total_seq_len, num_q_heads, head_dim]``, any floating dtype and any head_dim.
        k: ``[total_seq_len, num_kv_heads, head_dim]``.
        v: like k.
        input_row_offsets: ``[batch + 1]``, any integer dtype.
        q_max_seq_len: the operation's hint; changes nothing.
        mask_str: one of ``MASKS``.
        local_window_size: at least 1 for ``WINDOWED_MASKS``, else -1.
        scale: ``head_dim ** -0.5`` by default.
        rows: the rows to compute, in this order; all by default.
        plain: round the weights and the output to q's dtype.

    Returns:
        ``(out, lse)`` in float64, ``[len(rows), num_q_heads, head_dim]`` and ``[len(rows), num_q_heads]``.

    Raises:
        ValueError: what :func:`visible_keys` refuses, or query heads that are no multiple of the key/value heads.
    """
    total, num_q_heads, head_dim = q.shape
    group = _group(num_q_heads, k.shape[1])
    scale = head_dim**-0.5 if scale is None else float(scale)
    rows = np.arange(total) if rows is None else np.asarray(rows)
    out, lse = _nothing_attended(len(rows), num_q_heads, head_dim)
    p_dtype = q.dtype if plain else None

    for _, begin, end, members in _rows_of_each_sequence(input_row_offsets, rows):
        for kv_head in range(num_q_heads // group):
            keys = k[begin:end, kv_head].astype(np.float64)
            values = v[begin:end, kv_head].astype(np.float64)
            for place in members:
                row = int(rows[place])
                lo, hi = visible_keys(mask_str, local_window_size, row - begin, end - begin)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    query = q[row, head].astype(np.float64)
                    out[place, head], lse[place, head] = _attend(query, keys[lo:hi], values[lo:hi], scale, p_dtype)
    return (_rounded(out, q.dtype) if plain else out), lse


def qsa_sparse_attention(
    q: Array,
    input_row_offsets: Array,
    kv_blocks: Array,
    cache_lengths: Array,
    kv_lookup_table: Array,
    layer_idx: int,
    token_indices: Array,
    counts: Array,
    *,
    page_stride: int = -1,
    scale: float | None = None,
    out_dtype: DTypeLike | None = None,
    rows: Array | None = None,
    plain: bool = False,
) -> tuple[Float64Array, Float64Array]:
    """Attention of every row over the tokens that its list names: :func:`ragged_attention.qsa_sparse_attention`.

    With an explicit ``page_stride`` the caller's ``kv_blocks`` is taken as a window onto a larger buffer and elements
    are read at the address that the contract gives, outside the window where the stride leads there: the memory must
    be the caller's (``kv_blocks`` a view of an array that covers the span), or the process reads foreign memory.

    Args:
        q: ``[total_q, num_q_heads, head_dim]``, any floating dtype and any head_dim.
        input_row_offsets: ``[batch + 1]``, any integer dtype, as all that follow.
        kv_blocks: ``[num_pages, 2, num_layers, page_size, num_kv_heads, head_dim]``.
        cache_lengths: ``[batch]``.
        kv_lookup_table: ``[batch, max_pages]``.
        layer_idx: the layer of kv_blocks.
        token_indices: ``[total_q, selection_width]``.
        counts: ``[total_q]``.
        page_stride: elements from one page to the next; -1 takes kv_blocks' own strides.
        scale: ``head_dim ** -0.5`` by default.
        out_dtype: what ``plain=True`` rounds the output to; q's dtype by default.
        rows: the rows to compute, in this order; all by default.
        plain: round the weights to q's dtype and the output to out_dtype.

    Returns:
        ``(out, lse)`` in float64, ``[len(rows), num_q_heads, head_dim]`` and ``[len(rows), num_q_heads]``.

    Raises:
        ValueError: a page_stride below one packed page, or query heads that are no multiple of the key/value heads.
    """
    total, num_q_heads, head_dim = q.shape
    group = _group(num_q_heads, kv_blocks.shape[4])
    scale = head_dim**-0.5 if scale is None else float(scale)
    rows = np.arange(total) if rows is None else np.asarray(rows)
    out, lse = _nothing_attended(len(rows), num_q_heads, head_dim)
    p_dtype = q.dtype if plain else None
    blocks = kv_blocks if page_stride == -1 else _with_page_stride(kv_blocks, page_stride)

    for sequence, begin, end, members in _rows_of_each_sequence(input_row_offsets, rows):
        length = max(0, int(cache_lengths[sequence])) + end - begin
        for place in members:
            row = int(rows[place])
            width = token_indices.shape[1]
            count = min(max(0, int(counts[row])), width)
            pages, offsets = _locate(token_indices[row, :count], length, kv_lookup_table[sequence], blocks.shape)
            for kv_head in range(num_q_heads // group):
                keys = blocks[pages, 0, layer_idx, offsets, kv_head].astype(np.float64)
                values = blocks[pages, 1, layer_idx, offsets, kv_head].astype(np.float64)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    query = q[row, head].astype(np.float64)
                    out[place, head], lse[place, head] = _attend(query, keys, values, scale, p_dtype)
    return (_rounded(out, out_dtype or q.dtype) if plain else out), lse


def _attend(
    query: Float64Array, keys: Float64Array, values: Float64Array, scale: float, p_dtype: DTypeLike | None
) -> tuple[Float64Array, float]:
    """One query of one head over the keys it sees. ``p_dtype`` rounds the weights; None leaves them exact."""
    if len(keys) == 0:
        return np.zeros_like(query), -np.inf
    with np.errstate(all="ignore"):  # NaN and Inf that the row sees are meant to go through
        scores = keys @ query * scale
        # A row whose scores are all -inf has weights exp(-inf) = 0: subtracting -inf would make them NaN instead.
        top = 0.0 if np.all(scores == -np.inf) else scores.max()
        weights = np.exp(scores - top)
        total = weights.sum()
        if total == 0:
            return np.zeros_like(query), -np.inf
        weights /= total
        if p_dtype is not None:
            weights = _rounded(weights, p_dtype)
        return weights @ values, float(top + np.log(total))


def _locate(tokens: Array, length: int, table: Array, blocks_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Page and offset of each listed token, without those that count as not listed."""
    num_pages, page_size, max_pages = blocks_shape[0], blocks_shape[3], len(table)
    pages, offsets = [], []
    for token in map(int, tokens):
        slot = token // page_size
        if not 0 <= token < length or slot >= max_pages:
            continue
        page = int(table[slot])
        if 0 <= page < num_pages:
            pages.append(page)
            offsets.append(token % page_size)
    return np.array(pages, dtype=np.int64), np.array(offsets, dtype=np.int64)


def _with_page_stride(kv_blocks: Array, page_stride: int) -> Array:
    """kv_blocks with packed pages that start ``page_stride`` elements apart."""
    strides = [kv_blocks.itemsize]
    for extent in reversed(kv_blocks.shape[2:]):
        strides.insert(0, strides[0] * extent)
    if page_stride * kv_blocks.itemsize < strides[0] * kv_blocks.shape[1]:
        raise ValueError(f"page_stride is {page_stride}, less than one packed page")
    return np.lib.stride_tricks.as_strided(
        kv_blocks, kv_blocks.shape, (page_stride * kv_blocks.itemsize, *strides), writeable=False
    )


def _rows_of_each_sequence(offsets: Array, rows: Array) -> Iterator[tuple[int, int, int, list[int]]]:
    """(sequence, begin, end, places in ``rows`` whose row it owns) for each sequence that owns one of ``rows``."""
    bounds = [int(offset) for offset in offsets]  # uint32 arithmetic would wrap
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.searchsorted(ordered, bounds, side="left")
    for sequence in range(len(bounds) - 1):
        members = order[starts[sequence] : starts[sequence + 1]].tolist()
        if members:
            yield sequence, bounds[sequence], bounds[sequence + 1], members


def _nothing_attended(num_rows: int, num_heads: int, head_dim: int) -> tuple[Float64Array, Float64Array]:
    """What rows that no sequence owns keep: output 0 and LSE -inf."""
    return np.zeros((num_rows, num_heads, head_dim)), np.full((num_rows, num_heads), -np.inf)


def _rounded(array: Array, dtype: DTypeLike) -> Float64Array:
    with np.errstate(all="ignore"):
        return array.astype(dtype).astype(np.float64)


def _group(num_q_heads: int, num_kv_heads: int) -> int:
    if num_q_heads == 0:
        return 1  # nothing to compute, whatever the keys are
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are no multiple of {num_kv_heads} key/value heads")
    return num_q_heads // num_kv_heads
