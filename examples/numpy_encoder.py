"""Attention of an encoder over sequences of different lengths, in NumPy on the CPU: ragged_flash_attention.

Sequences lie one after another in one array; offsets say where each begins. Nothing is padded.
"""

import numpy as np

import ragged_attention as ra

rng = np.random.default_rng(0)
offsets = np.cumsum([0, 5, 0, 12, 3])  # where sequences of these lengths begin, and where the last one ends
heads, kv_heads, head_dim = 8, 2, 64

# q, k and v as a projection gives them: slices of one array, read where they lie.
qkv = rng.standard_normal((offsets[-1], heads + 2 * kv_heads, head_dim), np.float32)
q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)

out, lse = ra.ragged_flash_attention(q, k, v, offsets, mask_str="null", return_lse=True)
print(f"out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}")

# The float64 reference, slow and readable, agrees.
exact, _ = ra.reference.ragged_flash_attention(q, k, v, offsets, mask_str="null")
error = np.abs(out - exact).max()
print(f"largest error against the reference: {error:.1e}")
assert error < 1e-5

# A sequence's result does not change with its neighbours, not in one bit.
third = slice(offsets[2], offsets[3])
alone = ra.ragged_flash_attention(q[third], k[third], v[third], np.array([0, 12]), mask_str="null")
assert np.array_equal(alone, out[third])

# Into memory of the caller, each row seeing itself and the 3 rows before it.
returned = ra.ragged_flash_attention(q, k, v, offsets, mask_str="sliding_window_causal", local_window_size=4, out=out)
assert returned is out
print("right")
