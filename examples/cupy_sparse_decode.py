"""A decoding step over selected tokens of a paged KV cache, in CuPy on a GPU: qsa_sparse_attention.

Every sequence has one new token. Its row attends to a list of positions, as a selection would choose them, and not to
the rest of its context.
"""

import cupy as cp
import numpy as np

import ragged_attention as ra

rng = np.random.default_rng(0)
batch, heads, kv_heads, head_dim, page_size, layers = 3, 24, 2, 256, 64, 2
cached = np.array([4000, 900, 2500], np.int32)  # tokens before this step; the new one lies right after them
pages_each = -(-(int(cached.max()) + 1) // page_size)
num_pages = batch * pages_each

# [pages, K and V, layers, tokens of a page, kv heads, head_dim]; pages of a sequence lie anywhere.
shape = (num_pages, 2, layers, page_size, kv_heads, head_dim)
kv_blocks = cp.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))
page_table = rng.permutation(num_pages).reshape(batch, pages_each).astype(np.int32)
q = rng.standard_normal((batch, heads, head_dim), np.float32).astype(np.float16)

# Per row: 512 positions, the last one its own; the list is padded to its width, and the count says how much counts.
width, counts = 600, np.full(batch, 512, np.int32)
token_indices = np.full((batch, width), -1, np.int32)
for row in range(batch):
    chosen = rng.choice(cached[row], 511, replace=False)
    token_indices[row, :512] = [*np.sort(chosen), cached[row]]

operands = [np.arange(batch + 1, dtype=np.int32), cached, page_table, token_indices, counts]
offsets, lengths, table, indices, row_counts = map(cp.asarray, operands)
layer = 1
queries = cp.asarray(q)


def step(out: cp.ndarray | None = None) -> cp.ndarray:
    return ra.qsa_sparse_attention(
        queries, offsets, kv_blocks, lengths, table, layer, indices, row_counts, out=out, out_dtype="float32"
    )


stream = cp.cuda.Stream(non_blocking=True)
cp.cuda.get_current_stream().synchronize()
with stream:  # work goes to CuPy's current stream
    out = step()
    stream.begin_capture()  # and may be captured: a replay reads lists, lengths and tables anew
    step(out)
    graph = stream.end_capture()

    shifted = np.where(token_indices < 0, -1, np.maximum(token_indices - 7, 0))
    indices[...] = cp.asarray(shifted.astype(np.int32))
    graph.launch(stream)
stream.synchronize()

exact, _ = ra.reference.qsa_sparse_attention(
    q, operands[0], cp.asnumpy(kv_blocks), cached, page_table, layer, cp.asnumpy(indices), counts
)
error = np.abs(cp.asnumpy(out) - exact).max()
print(f"out {out.shape} {out.dtype}, largest error against the reference: {error:.1e}")
assert error < 2e-2
print("right")
