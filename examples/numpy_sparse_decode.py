"""A step over selected tokens of a paged KV cache, in NumPy on the CPU: qsa_sparse_attention in bfloat16.

The second sequence is a prompt of several rows, the others decode. Needs ml_dtypes, which brings bfloat16 to NumPy.
"""

import ml_dtypes
import numpy as np

import ragged_attention as ra

rng = np.random.default_rng(0)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
heads, kv_heads, head_dim, page_size, layers, layer = 12, 1, 128, 16, 2, 0
new, cached = np.array([1, 5, 1]), np.array([300, 0, 77], np.int32)
offsets = np.cumsum([0, *new]).astype(np.int32)
pages_each = -(-int((cached + new).max()) // page_size)

q = rng.standard_normal((offsets[-1], heads, head_dim), np.float32).astype(bfloat16)
shape = (len(new) * pages_each, 2, layers, page_size, kv_heads, head_dim)
kv_blocks = rng.standard_normal(shape, np.float32).astype(bfloat16)
page_table = rng.permutation(shape[0]).reshape(len(new), pages_each).astype(np.int32)

# Each row lists up to 32 positions, none after its own: causality is the selection's business.
token_indices, counts = np.zeros((len(q), 32), np.int32), np.zeros(len(q), np.int32)
for sequence, begin in enumerate(offsets[:-1]):
    for i in range(new[sequence]):
        seen = cached[sequence] + i + 1
        chosen = rng.choice(seen, min(32, seen), replace=False)
        token_indices[begin + i, : len(chosen)] = chosen
        counts[begin + i] = len(chosen)

arguments = (q, offsets, kv_blocks, cached, page_table, layer, token_indices, counts)
out, lse = ra.qsa_sparse_attention(*arguments, out_dtype="float32", return_lse=True, check_values=True)
exact, exact_lse = ra.reference.qsa_sparse_attention(*arguments)
error = np.abs(out - exact).max()
print(f"out {out.shape} {out.dtype}, largest error against the reference: {error:.1e}")
assert error < 2e-2
assert np.abs(lse - exact_lse).max() < 1e-3

# A bad list is found before it is read, on demand.
token_indices[2, 0] = 10**6
try:
    ra.qsa_sparse_attention(*arguments, check_values=True)
except ValueError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("a position that does not exist was not noticed")
print("right")
