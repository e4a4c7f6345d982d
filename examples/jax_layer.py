"""A causal attention layer in JAX, compiled, for packed sequences; on a GPU where JAX has one."""

import jax
import jax.numpy as jnp
import numpy as np

import ragged_attention as ra

heads, kv_heads, head_dim = 8, 2, 64
width = heads * head_dim
jax.config.update("jax_default_matmul_precision", "highest")  # so that what is compared below is attention


@jax.jit
def layer(weights: dict[str, jax.Array], x: jax.Array, offsets: jax.Array) -> jax.Array:
    qkv = (x @ weights["qkv"]).reshape(x.shape[0], -1, head_dim)
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
    attended = ra.ragged_flash_attention(q, k, v, offsets, mask_str="causal")
    return x + attended.reshape(x.shape) @ weights["out"]


keys = jax.random.split(jax.random.key(0), 3)
weights = {
    "qkv": jax.random.normal(keys[0], (width, (heads + 2 * kv_heads) * head_dim)) * width**-0.5,
    "out": jax.random.normal(keys[1], (width, width)) * width**-0.5,
}
x = jax.random.normal(keys[2], (40, width))

# Lengths may change from call to call: the program is compiled once for 40 rows and 3 sequences.
for lengths in ([13, 20, 7], [1, 0, 39]):
    offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    packed = layer(weights, x, offsets)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if begin == end:
            continue
        alone = layer(weights, x[begin:end], jnp.array([0, end - begin, end - begin, end - begin], jnp.int32))
        np.testing.assert_allclose(packed[begin:end], alone, rtol=0, atol=1e-3)
print(f"{packed.devices()}: right")
