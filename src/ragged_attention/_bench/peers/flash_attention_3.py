"""FlashAttention-3's ragged function, from the PyPI package flash-attn3-jax: Hopper, head dim 128.

JAX shares torch's memory through DLPack. Its streams are its own, so what the device spends on a call is read from the
profiler: see timing.py.
"""

from __future__ import annotations

import os
from typing import Any

from ..inputs import RaggedInputs
from .contestant import Contestant, Unavailable, joined, masked, module, offsets_of, on_gpu, sixteen_bit

HEAD_DIM = 128  # the only one that the package is built for


def prepare(inputs: RaggedInputs) -> Contestant:
    case = inputs.case
    on_gpu(inputs, "FlashAttention-3")
    sixteen_bit(case, "FlashAttention-3")
    if case.head_dim > HEAD_DIM:
        raise Unavailable(f"flash-attn3-jax is built for head dim {HEAD_DIM}")
    # torch has memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = module("jax")
    function = module("flash_attn3_jax", "flash-attn3-jax").flash_mha_varlen
    return contest(inputs, jax, function)


def contest(inputs: RaggedInputs, jax: Any, function: Any) -> Contestant:
    import torch

    case, mask = inputs.case, masked(inputs.case)
    longest = max(mask.lengths)
    padding = HEAD_DIM - case.head_dim
    window = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))

    def attention(q: Any, k: Any, v: Any, offsets: Any) -> Any:
        return function(
            q,
            k,
            v,
            offsets,
            offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=case.head_dim**-0.5,
            is_causal=mask.causal,
            window_size=(-1, -1) if mask.causal else window,
        )

    attend = jax.jit(attention)
    tensors = [
        torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor
        for tensor in (inputs.q, inputs.k, inputs.v)
    ]
    tensors.append(offsets_of(inputs, mask.lengths))
    if inputs.q.device.type == "cuda":
        torch.cuda.synchronize()
    arrays = [jax.dlpack.from_dlpack(tensor) for tensor in tensors]
    return Contestant(
        lambda: attend(*arrays),
        note=joined(f"head dim padded to {HEAD_DIM} outside of the timing" if padding else "", mask.note),
        capturable=False,
        wait=jax.block_until_ready,
        as_torch=lambda out: torch.from_dlpack(out)[..., : case.head_dim],
    )
