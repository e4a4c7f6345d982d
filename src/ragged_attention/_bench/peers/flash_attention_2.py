"""FlashAttention-2 as torch ships it: torch.nn.attention.varlen."""

from __future__ import annotations

from ..inputs import RaggedInputs
from .contestant import Contestant, Unavailable, joined, masked, offsets_of, on_gpu, sixteen_bit


def prepare(inputs: RaggedInputs) -> Contestant:
    case = inputs.case
    on_gpu(inputs, "torch's varlen_attn")
    sixteen_bit(case, "FlashAttention-2")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable("this torch has no torch.nn.attention.varlen") from error
    group = case.num_q_heads // case.num_kv_heads
    # It wants equal head counts; the copies are made here, outside of what is timed.
    k, v = (tensor.repeat_interleave(group, dim=1) if group > 1 else tensor for tensor in (inputs.k, inputs.v))
    mask = masked(case)
    offsets, longest = offsets_of(inputs, mask.lengths), max(mask.lengths)
    window = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    return Contestant(
        lambda: varlen_attn(inputs.q, k, v, offsets, offsets, longest, longest, window_size=window),
        note=joined("K/V heads repeated to the query heads outside of the timing" if group > 1 else "", mask.note),
    )
