"""On the CPU: torch's scaled_dot_product_attention, called once per sequence."""

from __future__ import annotations

from typing import Any

from ..inputs import RaggedInputs
from .contestant import Contestant, Unavailable, masked


def prepare(inputs: RaggedInputs) -> Contestant:
    if inputs.q.device.type != "cpu":
        raise Unavailable("it is the peer of the CPU backend")
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    case, mask = inputs.case, masked(inputs.case)
    bounds = offsets_of_cpu(mask.lengths)
    grouped = case.num_q_heads != case.num_kv_heads

    def seen(length: int) -> Any:
        if mask.full or mask.causal:
            return None
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]  # key - query
        allowed = torch.ones((length, length), dtype=torch.bool)
        if mask.left is not None:
            allowed &= distance >= -mask.left
        if mask.right is not None:
            allowed &= distance <= mask.right
        return allowed

    masks = {length: seen(length) for length in set(mask.lengths)}
    out = torch.empty_like(inputs.q)

    def call() -> Any:
        for begin, end in bounds:
            q, k, v = (tensor[begin:end].transpose(0, 1)[None] for tensor in (inputs.q, inputs.k, inputs.v))
            result = scaled_dot_product_attention(
                q, k, v, attn_mask=masks[end - begin], is_causal=mask.causal, enable_gqa=grouped
            )
            out[begin:end] = result[0].transpose(0, 1)
        return out

    return Contestant(call, note=mask.note)


def offsets_of_cpu(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    bounds, end = [], 0
    for length in lengths:
        if length:
            bounds.append((end, end + length))
        end += length
    return bounds
