"""cuDNN's attention through torch: sequences of one length, as a batch."""

from __future__ import annotations

from typing import Any

from ..inputs import RaggedInputs
from .contestant import Contestant, Unavailable, masked, on_gpu, sixteen_bit


def prepare(inputs: RaggedInputs) -> Contestant:
    case, mask = inputs.case, masked(inputs.case)
    on_gpu(inputs, "cuDNN")
    sixteen_bit(case, "cuDNN")
    if not mask.equal:
        raise Unavailable("cuDNN's dense attention takes equal lengths only")
    if not (mask.full or mask.causal):
        raise Unavailable(f"torch gives cuDNN no mask {case.mask}")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        tensor.view(len(mask.lengths), mask.lengths[0], -1, case.head_dim).transpose(1, 2)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    grouped = case.num_q_heads != case.num_kv_heads

    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=grouped)

    return Contestant(
        call, note=mask.note, as_torch=lambda out: out.transpose(1, 2).reshape(len(inputs.q), -1, case.head_dim)
    )
