"""QSA attention in plain Triton, row by row: the comparison where no other kernel is installed."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_HEADS = 16  # query heads of a kv head, padded to what a matrix product takes


@triton.jit
def _attend(
    q,
    k,
    v,
    indices,
    counts,
    table,
    sequences,
    out,
    partial,
    partial_lse,
    scale_log2,
    group,
    page_shift,
    stride_page,
    stride_token,
    stride_head,
    stride_list,
    stride_table,
    rows,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = group * tl.num_programs(1)
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, HEAD_DIM)
    tokens = tl.arange(0, BLOCK)
    mine = (row * num_heads + kv_head * group + heads)[:, None] * HEAD_DIM + columns[None, :]
    inside = (heads < group)[:, None]
    queries = tl.load(q + mine, mask=inside, other=0.0)
    begin = split * PER_SPLIT
    end = tl.minimum(tl.load(counts + row), begin + PER_SPLIT)
    pages = table + tl.load(sequences + row) * stride_table
    list_of_row = indices + row * stride_list
    k += kv_head * stride_head
    v += kv_head * stride_head
    most = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, HEAD_DIM), tl.float32)
    for start in range(begin, end, BLOCK):
        listed = start + tokens < end
        token = tl.load(list_of_row + start + tokens, mask=listed, other=0)
        page = tl.load(pages + (token >> page_shift), mask=listed, other=0).to(tl.int64)
        place = page * stride_page + (token & ((1 << page_shift) - 1)) * stride_token
        keys = tl.load(k + place[None, :] + columns[:, None], mask=listed[None, :], other=0.0)
        scores = tl.where(listed[None, :], tl.dot(queries, keys) * scale_log2, -float("inf"))
        above = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        before = tl.exp2(most - above)
        values = tl.load(v + place[:, None] + columns[None, :], mask=listed[:, None], other=0.0)
        result = tl.dot(weights.to(values.dtype), values, result * before[:, None])
        total = total * before + tl.sum(weights, 1)
        most = above
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + mine, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + split * rows * num_heads * HEAD_DIM + mine, result, mask=inside)
        lse = tl.where(total == 0, -float("inf"), most + tl.log2(total))
        tl.store(partial_lse + split * rows * num_heads + row * num_heads + kv_head * group + heads, lse, heads < group)


@triton.jit
def _merge(partial, partial_lse, out, count, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)  # a query head of a row
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, HEAD_DIM)
    lse = tl.load(partial_lse + splits * count + place)
    most = tl.max(lse, 0)
    weights = tl.where(lse == -float("inf"), 0.0, tl.exp2(lse - most))
    results = tl.load(partial + (splits[:, None] * count + place) * HEAD_DIM + columns[None, :])
    total = tl.sum(weights, 0)
    result = tl.sum(results * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + place * HEAD_DIM + columns, result.to(out.dtype.element_ty))


def attend(
    q,
    k,
    v,
    indices,
    counts,
    table,
    sequences,
    out,
    partial,
    partial_lse,
    scale,
    page_size,
    block,
    splits,
    warps,
    stages,
):
    """`k` and `v` are [pages, page_size, kv heads, head dim] of equal strides; `partial*` are for several splits."""
    rows, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    per_split = -(-indices.shape[1] // (splits * block)) * block
    _attend[(rows, kv_heads, splits)](
        q,
        k,
        v,
        indices,
        counts,
        table,
        sequences,
        out,
        partial,
        partial_lse,
        scale * 1.4426950408889634,
        num_heads // kv_heads,
        page_size.bit_length() - 1,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        indices.stride(0),
        table.stride(0),
        rows,
        HEAD_DIM=head_dim,
        HEADS=BLOCK_HEADS,
        PER_SPLIT=per_split,
        SPLITS=splits,
        BLOCK=block,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _merge[(rows * num_heads,)](
            partial, partial_lse, out, rows * num_heads, HEAD_DIM=head_dim, SPLITS=splits, num_warps=2
        )
