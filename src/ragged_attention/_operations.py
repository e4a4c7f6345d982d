"""The two operations. The contracts stand in the docstrings; checks and kernels are in C++."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from . import _C
from ._frameworks import Framework, dtype_name, framework_of, refuse_pending
from ._host_scalars import described, host_bool, host_float_or_none, host_int, host_int_or_none

Tensor = TypeVar("Tensor")  # q's own type: results are of its framework

MASKS = (
    "null",
    "causal",
    "sliding_window_causal",
    "sliding_window_noncausal",
    "chunked",
    "chunked_causal",
)


def check_mask_name(mask_str: str) -> None:
    if not isinstance(mask_str, str) or mask_str not in MASKS:
        raise ValueError(f"mask_str: expected one of {', '.join(map(repr, MASKS))}, got {described(mask_str)}")


def _through_jax(operation: str, q: Any, *operands: Any, **keywords: Any) -> Any:
    """A call with JAX arrays, which may be traced: an operation of XLA. `q` shows that JAX is loaded."""
    for name, refused, why in (
        ("out", None, "results are fresh arrays"),
        ("lse", None, "results are fresh arrays; ask for it with return_lse=True"),
        ("stream", None, "XLA chooses the stream"),
        ("check_values", False, "a program of XLA cannot raise; check NumPy copies"),
    ):
        value = keywords.pop(name)
        if value is not refused and (refused is None or host_bool(value, name)):
            raise ValueError(f"{name}: expected {refused} with JAX arrays ({why}), got {type(value).__name__}")
    from .integrations import jax

    return getattr(jax, operation)(q, *operands, **keywords)


def stream_handle(framework: Framework, q: Any, stream: Any) -> int | None:
    """The handle the work is enqueued on; None with CPU tensors."""
    if not framework.is_cuda(q):
        if stream is not None:
            raise ValueError(f"stream: expected None with CPU tensors, got {described(stream)}")
        return None
    if stream is None:
        return framework.current_stream(q)
    handle = host_int(stream, "stream")
    if handle < 0:
        raise ValueError(f"stream: expected a CUDA stream handle, got {handle}")
    return handle


def _record_streams(results: list[Any], stream: int | None) -> None:
    """A torch result that is used on another stream than the current one is recorded there, for torch's allocator."""
    for result in results:
        framework = framework_of(result, "out")
        if stream is not None and framework.name == "torch" and framework.current_stream(result) != stream:
            framework.record_stream(result, stream)


# fmt: off
@overload
def ragged_flash_attention(
    q: Tensor, k: Any, v: Any, input_row_offsets: Any, q_max_seq_len: Any = None, *, mask_str: str = "causal",
    local_window_size: int = -1, scale: Any = None, out: Any = None, lse: None = None,
    return_lse: Literal[False] = False, stream: int | None = None, check_values: bool = False,
) -> Tensor: ...
@overload
def ragged_flash_attention(
    q: Tensor, k: Any, v: Any, input_row_offsets: Any, q_max_seq_len: Any = None, *, mask_str: str = "causal",
    local_window_size: int = -1, scale: Any = None, out: Any = None, lse: Any = None,
    return_lse: Literal[True], stream: int | None = None, check_values: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def ragged_flash_attention(
    q: Tensor, k: Any, v: Any, input_row_offsets: Any, q_max_seq_len: Any = None, *, mask_str: str = "causal",
    local_window_size: int = -1, scale: Any = None, out: Any = None, lse: Any = None,
    return_lse: bool = False, stream: int | None = None, check_values: bool = False,
) -> Any: ...
# fmt: on
def ragged_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    input_row_offsets: Any,
    q_max_seq_len: Any = None,
    *,
    mask_str: str = "causal",
    local_window_size: int = -1,
    scale: Any = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    stream: int | None = None,
    check_values: bool = False,
) -> Any:
    """Flash attention over sequences packed one after another, without a KV cache.

    For each sequence and each query head ``h``, with ``g = h // (num_q_heads // num_kv_heads)``:
    ``softmax(scale * q[:, h] @ k[:, g].T + mask) @ v[:, g]``. Accumulation and softmax are in float32. The definition
    is that of the MAX kernel library's ``RaggedFlashAttentionGPU`` (graph op ``mo.mha.ragged.no_cache``); grouped
    heads, the LSE and the defaults of mask and scale are additions.

    Args:
        q: ``[total_seq_len, num_q_heads, head_dim]``; float32, float16 or bfloat16. Its framework, device and current
            stream are those of the call. head_dim: a multiple of 8, at most 256.
        k: ``[total_seq_len, num_kv_heads, head_dim]``, q's dtype. num_kv_heads divides num_q_heads.
        v: like k.
        input_row_offsets: ``[batch + 1]``; uint32, int32 or int64. Sequence ``s`` owns the rows
            ``input_row_offsets[s]`` to ``input_row_offsets[s + 1] - 1`` of q, k and v. Rows that no sequence owns get
            output 0 and LSE -inf.
        q_max_seq_len: the length of the longest sequence. A hint: the result is right, and the same, whatever it says.
        mask_str: which keys ``j`` a query ``i`` sees, as positions in their sequence, with ``W = local_window_size``:
            ``"null"`` all; ``"causal"`` j <= i; ``"sliding_window_causal"`` i - W + 1 <= j <= i;
            ``"sliding_window_noncausal"`` j >= i - W + 1; ``"chunked"`` i // W == j // W; ``"chunked_causal"`` both of
            the last and j <= i.
        local_window_size: W, at least 1; -1 for ``"null"`` and ``"causal"``.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        out: a tensor of q's shape and dtype to write to.
        lse: a float32 tensor ``[total_seq_len, num_q_heads]`` to write to; implies ``return_lse``.
        return_lse: also return the natural logarithm of the sum of exp of the scaled, visible scores.
        stream: a CUDA stream handle to enqueue on instead of q's framework's current stream.
        check_values: read the offsets and raise on a bad one; synchronises, and is refused under graph capture. Without
            it, bad offsets give an unspecified result but touch no memory outside the tensors.

    Returns:
        ``out``, or ``(out, lse)``. New tensors are of q's framework, on q's device. JAX arrays, traced ones too, become
        a call of XLA's (:mod:`ragged_attention.integrations.jax`): without out, lse, stream and check_values.

    Raises:
        ValueError: a shape, stride or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, or an object that is no tensor.
        NotImplementedError: nothing on this device runs it (see :func:`supports`), or a tensor requires grad while grad
            mode is on.
        CudaError: the driver or runtime failed.
    """
    check_mask_name(mask_str)
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        return _through_jax(
            "ragged_flash_attention",
            q,
            k,
            v,
            input_row_offsets,
            q_max_seq_len,
            mask_str=mask_str,
            local_window_size=local_window_size,
            scale=scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            stream=stream,
            check_values=check_values,
        )
    refuse_pending({"q": q, "k": k, "v": v, "input_row_offsets": input_row_offsets, "out": out, "lse": lse})
    handle = stream_handle(framework, q, stream)
    if out is None:
        out = framework.empty(q, 3, None, "out")
    return_lse, check_values = host_bool(return_lse, "return_lse"), host_bool(check_values, "check_values")
    if lse is None and return_lse:
        lse = framework.empty(q, 2, "float32", "lse")
    _C.ragged_flash_attention(
        q,
        k,
        v,
        input_row_offsets,
        out,
        lse,
        mask_str,
        host_int(local_window_size, "local_window_size"),
        host_float_or_none(scale, "scale"),
        host_int_or_none(q_max_seq_len, "q_max_seq_len"),
        handle,
        check_values,
    )
    if stream is not None:
        _record_streams([out] if lse is None else [out, lse], handle)
    return out if lse is None else (out, lse)


# fmt: off
@overload
def qsa_sparse_attention(
    q: Tensor, input_row_offsets: Any, kv_blocks: Any, cache_lengths: Any, kv_lookup_table: Any, layer_idx: Any,
    token_indices: Any, counts: Any, *, page_stride: Any = -1, max_prompt_length: Any = None,
    max_cache_length: Any = None, scale: Any = None, group: int | None = None, warps: int | None = None,
    unroll: int | None = None, out: Any = None, out_dtype: Any = None, lse: None = None,
    return_lse: Literal[False] = False, stream: int | None = None, check_values: bool = False,
) -> Tensor: ...
@overload
def qsa_sparse_attention(
    q: Tensor, input_row_offsets: Any, kv_blocks: Any, cache_lengths: Any, kv_lookup_table: Any, layer_idx: Any,
    token_indices: Any, counts: Any, *, page_stride: Any = -1, max_prompt_length: Any = None,
    max_cache_length: Any = None, scale: Any = None, group: int | None = None, warps: int | None = None,
    unroll: int | None = None, out: Any = None, out_dtype: Any = None, lse: Any = None,
    return_lse: Literal[True], stream: int | None = None, check_values: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def qsa_sparse_attention(
    q: Tensor, input_row_offsets: Any, kv_blocks: Any, cache_lengths: Any, kv_lookup_table: Any, layer_idx: Any,
    token_indices: Any, counts: Any, *, page_stride: Any = -1, max_prompt_length: Any = None,
    max_cache_length: Any = None, scale: Any = None, group: int | None = None, warps: int | None = None,
    unroll: int | None = None, out: Any = None, out_dtype: Any = None, lse: Any = None,
    return_lse: bool = False, stream: int | None = None, check_values: bool = False,
) -> Any: ...
# fmt: on
def qsa_sparse_attention(
    q: Any,
    input_row_offsets: Any,
    kv_blocks: Any,
    cache_lengths: Any,
    kv_lookup_table: Any,
    layer_idx: Any,
    token_indices: Any,
    counts: Any,
    *,
    page_stride: Any = -1,
    max_prompt_length: Any = None,
    max_cache_length: Any = None,
    scale: Any = None,
    group: int | None = None,
    warps: int | None = None,
    unroll: int | None = None,
    out: Any = None,
    out_dtype: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    stream: int | None = None,
    check_values: bool = False,
) -> Any:
    """Grouped-query attention over the tokens that a QSA (Qwen Sparse Attention) selection names, in a paged KV cache.

    Row ``r`` of sequence ``b`` attends to the positions ``token_indices[r, :counts[r]]`` of its own sequence, cached
    and new, the same list for all heads. A position listed twice counts twice. No mask is applied on top. The
    definition is that of the MAX kernel library's ``QSASparseAttentionRaggedPaged`` (graph op
    ``mo.qsa.attention.ragged.paged``).

    Args:
        q: ``[total_q, num_q_heads, head_dim]``; float32, float16 or bfloat16. Its framework, device and current stream
            are those of the call. head_dim: a multiple of 8, at most 256.
        input_row_offsets: ``[batch + 1]``; uint32, int32 or int64: which rows of q belong to which sequence. Rows that
            no sequence owns get output 0 and LSE -inf.
        kv_blocks: ``[num_pages, 2, num_layers, page_size, num_kv_heads, head_dim]``, q's dtype; 0 is K, 1 is V. Never
            written. num_kv_heads divides num_q_heads.
        cache_lengths: ``[batch]``; uint32, int32 or int64: keys cached before this step. This step's own keys are in
            the cache already, right after them.
        kv_lookup_table: ``[batch, max_pages]``; uint32, int32 or int64: page ids. Token ``t`` of sequence ``b`` lies on
            page ``kv_lookup_table[b, t // page_size]`` at ``t % page_size``.
        layer_idx: the layer of kv_blocks to read; a host integer or a one-element host array.
        token_indices: ``[total_q, selection_width]``, int32. Entries at or past the count are never read.
        counts: ``[total_q]``, int32; clamped to ``[0, selection_width]``.
        page_stride: elements from one page to the next, for a kv_blocks that is a packed view into a larger pool; -1
            takes kv_blocks' own strides. The caller vouches that the pool covers every page id in use.
        max_prompt_length: the most new rows of any sequence. A hint, like the next.
        max_cache_length: the longest context.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        group: if given, must equal ``num_q_heads // num_kv_heads``.
        warps: CUDA only: force the row-by-row kernel with this many warps a CTA.
        unroll: CUDA only: force the row-by-row kernel with this many keys in flight a warp.
        out: a tensor of q's shape to write to; float32, float16 or bfloat16.
        out_dtype: dtype of the result: a framework's dtype, a NumPy dtype or a string; q's by default.
        lse: a float32 tensor ``[total_q, num_q_heads]`` to write to; implies ``return_lse``.
        return_lse: also return the natural logarithm of the sum of exp of the scaled scores.
        stream: a CUDA stream handle to enqueue on instead of q's framework's current stream.
        check_values: read offsets, counts, lengths, positions and pages, and raise on a bad one; synchronises, and is
            refused under graph capture. Without it, a position outside its sequence or page table, or on a page that
            does not exist, counts as not listed.

    Returns:
        ``out``, or ``(out, lse)``. New tensors are of q's framework, on q's device. JAX arrays, traced ones too, become
        a call of XLA's (:mod:`ragged_attention.integrations.jax`): without out, lse, stream and check_values.

    Raises:
        ValueError: a shape, stride or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, or an object that is no tensor.
        NotImplementedError: nothing on this device runs it (see :func:`supports`), or a tensor requires grad while grad
            mode is on.
        CudaError: the driver or runtime failed.
    """
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        return _through_jax(
            "qsa_sparse_attention",
            q,
            input_row_offsets,
            kv_blocks,
            cache_lengths,
            kv_lookup_table,
            layer_idx,
            token_indices,
            counts,
            page_stride=page_stride,
            max_prompt_length=max_prompt_length,
            max_cache_length=max_cache_length,
            scale=scale,
            group=group,
            warps=warps,
            unroll=unroll,
            out=out,
            out_dtype=out_dtype,
            lse=lse,
            return_lse=return_lse,
            stream=stream,
            check_values=check_values,
        )
    refuse_pending(
        {
            "q": q,
            "input_row_offsets": input_row_offsets,
            "kv_blocks": kv_blocks,
            "cache_lengths": cache_lengths,
            "kv_lookup_table": kv_lookup_table,
            "token_indices": token_indices,
            "counts": counts,
            "out": out,
            "lse": lse,
        }
    )
    handle = stream_handle(framework, q, stream)
    dtype = None if out_dtype is None else dtype_name(out_dtype, "out_dtype")
    if out is None:
        out = framework.empty(q, 3, dtype, "out")
    elif dtype is not None:
        given = dtype_name(out.dtype, "out") if hasattr(out, "dtype") else dtype
        if given != dtype:
            raise ValueError(f"out_dtype: expected out's dtype {given}, got {dtype}")
    return_lse, check_values = host_bool(return_lse, "return_lse"), host_bool(check_values, "check_values")
    if lse is None and return_lse:
        lse = framework.empty(q, 2, "float32", "lse")
    _C.qsa_sparse_attention(
        q,
        input_row_offsets,
        kv_blocks,
        cache_lengths,
        kv_lookup_table,
        host_int(layer_idx, "layer_idx"),
        token_indices,
        counts,
        out,
        lse,
        host_int(page_stride, "page_stride"),
        host_float_or_none(scale, "scale"),
        host_int_or_none(max_prompt_length, "max_prompt_length"),
        host_int_or_none(max_cache_length, "max_cache_length"),
        host_int_or_none(group, "group"),
        host_int_or_none(warps, "warps"),
        host_int_or_none(unroll, "unroll"),
        handle,
        check_values,
    )
    if stream is not None:
        _record_streams([out] if lse is None else [out, lse], handle)
    return out if lse is None else (out, lse)
