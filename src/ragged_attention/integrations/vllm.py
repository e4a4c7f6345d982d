"""An adapter for vLLM's QSA layers: ``qsa_sparse_paged_attention`` with the signature that vLLM has.

vLLM keeps K and V of a layer as two views of one block, names the sequence of every row in ``token_to_req``, packs each
row's list and its count into one buffer, and multiplies the result with the sigmoid of a gate. The compiled half takes
cache, lists and rows as they lie, without a copy.

Importing this module imports torch, not vLLM, and changes nothing in it; docs/vllm.md says how to plug it in.
"""

from __future__ import annotations

import torch

from .. import _C
from .._frameworks import framework_of, refuse_pending
from .._operations import stream_handle

__all__ = ["qsa_sparse_paged_attention"]


def qsa_sparse_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor | None,
    use_prefill_config: bool,
    out: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: torch.Tensor | None,
    query_start_loc: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """vLLM's ``qsa_sparse_paged_attention`` (version 0.33), for caches that are not quantised.

    Row ``r`` of request ``b = token_to_req[r]`` attends to the tokens ``logical_indices[r, :count]`` of its request,
    where ``count`` stands in the last column. The result is rounded to q's dtype, multiplied in float32 with the
    sigmoid of the gate, and rounded again. The definition is that of vLLM's function; the last two arguments are
    additions.

    Args:
        q: ``[total_q, num_q_heads, head_dim]``; bfloat16 as in vLLM, or float16 or float32.
        k_cache: ``[num_pages, page_size, num_kv_heads, head_dim]``, q's dtype; any strides, the last dimension
            contiguous.
        v_cache: like k_cache, with its strides.
        logical_indices: ``[total_q, selection_width + 1]``, int32: a row's list, and in the last column its count,
            which is clamped to ``[0, selection_width]``. Entries at or past it are never read. A negative entry, one
            past the page table and one on a page that does not exist count as not listed.
        block_table: ``[num_requests, max_pages]``; int32, uint32 or int64: page ids.
        token_to_req: ``[total_q]``, int32: a row's request; outside ``[0, num_requests)``, the row is 0. May be None
            with query_start_loc.
        use_prefill_config: not used: shapes and rows say it all.
        out: a tensor of q's shape and dtype to write to.
        k_scale: not used; a quantised cache is refused.
        v_scale: not used.
        output_gate: q's number of elements; None for no gate, an addition.
        query_start_loc: ``[num_requests + 1]``; int32, uint32 or int64: request b has the rows from
            ``query_start_loc[b]`` to ``query_start_loc[b + 1] - 1``, rows after the last are 0. If it is given,
            token_to_req is not read, and on Hopper neighbouring rows share what they gather, which is a good deal
            faster. vLLM has it in ``attn_metadata.query_start_loc``.
        seq_lens: ``[num_requests]``, given with query_start_loc: the tokens that a request has, new ones included; no
            row may list one past them. In vLLM, ``attn_metadata.seq_lens``.

    Returns:
        ``out``. Work is enqueued on the current stream; nothing is waited for, so CUDA graphs may capture it.

    Raises:
        ValueError: a shape, stride or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, or an object that is no tensor.
        NotImplementedError: a quantised cache, K and V at different strides, a head dim that nothing runs, a tensor
            that requires grad while grad mode is on.
    """
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "logical_indices": logical_indices,
        "block_table": block_table,
        "token_to_req": token_to_req,
        "out": out,
        "output_gate": output_gate,
    }
    optional = ("out", "output_gate") if query_start_loc is None else ("out", "output_gate", "token_to_req")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name in optional):
            raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    refuse_pending(tensors)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype == torch.uint8 or str(cache.dtype).startswith("torch.float8"):
            raise NotImplementedError(
                f"{name}: expected a cache of q's dtype {q.dtype}, got a quantised one, {cache.dtype}"
            )
    if out is None:
        out = q.new_empty(q.shape)
    elif out.dtype != q.dtype:
        raise TypeError(f"out: expected q's dtype {q.dtype}, got {out.dtype}")
    if output_gate is not None and (output_gate.numel() != q.numel() or output_gate.device != q.device):
        raise ValueError(
            f"output_gate: expected {q.numel()} elements on {q.device}, as q has, got {output_gate.numel()} on "
            f"{output_gate.device}"
        )
    # Before the attention, which may write to the gate's memory.
    factor = None if output_gate is None else torch.sigmoid(output_gate.float()).view(q.shape)
    _C.qsa_sparse_paged_attention(
        q,
        k_cache,
        v_cache,
        logical_indices,
        block_table,
        None if query_start_loc is not None else token_to_req,
        query_start_loc,
        seq_lens,
        out,
        None,
        stream_handle(framework_of(q, "q"), q, None),
    )
    return out if factor is None else torch.mul(out, factor, out=out)
