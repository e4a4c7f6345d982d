"""Both operations as torch operators, and drop-ins for torch's and flash-attn's variable-length attention.

Importing this module registers ``torch.ops.ragged_attention.*`` for CPU and CUDA tensors, with shape functions for meta
and fake tensors, so that ``torch.compile`` and ``torch.export`` see one opaque operator instead of a graph break. Each
of the two operations has four forms:

===================  ==========================  ======================================================================
form                 returns                     written
===================  ==========================  ======================================================================
``<op>``             ``out``
``<op>_lse``         ``(out, lse)``
``<op>_out``         nothing                     the keyword ``out``
``<op>_lse_out``     nothing                     the keywords ``out`` and ``lse``
===================  ==========================  ======================================================================

Their arguments have the names, the order and the defaults of :func:`ragged_attention.ragged_flash_attention` and
:func:`ragged_attention.qsa_sparse_attention`, and may all be given by position or by name. What a schema cannot carry,
or must not, is left out: ``stream`` (an operator runs on the current stream), ``check_values`` (it synchronises), and
tensors as host scalars. ``out_dtype`` is a ``torch.dtype``; the forms with ``out`` take that of ``out``. Integers are
symbolic where they may change from call to call, so that a new maximum length, layer or window compiles nothing again.

With an explicit ``page_stride`` the operators ask for more than the function does: the storage of ``kv_blocks`` must
hold all of its pages. Under a compiler a tensor may be a copy of the view that it was, with nothing around it, and
reading on at the stride would leave it.

There is no backward: a tensor that requires grad is a ``NotImplementedError`` while grad mode is on, in eager calls and
when a graph is traced.

:func:`varlen_attn` and :func:`flash_attn_varlen_func` stand in for the functions of these names in
``torch.nn.attention.varlen`` and ``flash_attn``, on top of the operators. What they are asked for and this package does
not do is a ``NotImplementedError`` that names the argument. No offset is read, so nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ragged_attention

from .._frameworks import dtype_name, refuse_pending
from .._operations import check_mask_name

__all__ = ["flash_attn_varlen_func", "varlen_attn"]

_NAMESPACE = "ragged_attention"

# A compiler must hand over operands with the strides they were traced with: the last dimension has to be contiguous.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

_RAGGED = (
    "Tensor q, Tensor k, Tensor v, Tensor input_row_offsets, SymInt? q_max_seq_len=None, str mask_str='causal', "
    "SymInt local_window_size=-1, float? scale=None"
)
_QSA = (
    "Tensor q, Tensor input_row_offsets, Tensor kv_blocks, Tensor cache_lengths, Tensor kv_lookup_table, "
    "SymInt layer_idx, Tensor token_indices, Tensor counts, SymInt page_stride=-1, SymInt? max_prompt_length=None, "
    "SymInt? max_cache_length=None, float? scale=None, SymInt? group=None, int? warps=None, int? unroll=None"
)


def _qsa_sparse_attention(**arguments: Any) -> Any:
    _check_pages(arguments["kv_blocks"], arguments.get("page_stride", -1))
    return ragged_attention.qsa_sparse_attention(**arguments)


def _check_pages(kv_blocks: torch.Tensor, page_stride: int) -> None:
    """Refuse an explicit page stride that leads out of the storage: host arithmetic, nothing is read."""
    if page_stride < 0 or kv_blocks.dim() != 6 or kv_blocks.numel() == 0:
        return  # no explicit stride, or for the operation itself to refuse
    num_pages, page = kv_blocks.shape[0], kv_blocks[0].numel()
    needed = kv_blocks.storage_offset() + (num_pages - 1) * page_stride + page
    held = kv_blocks.untyped_storage().nbytes() // kv_blocks.element_size()
    if needed > held:
        raise ValueError(
            f"page_stride: expected one at which kv_blocks' storage holds all {num_pages} pages ({held} elements), got "
            f"{page_stride}, which needs {needed}; pass the pool itself, or call "
            f"ragged_attention.qsa_sparse_attention outside of a compiled graph"
        )


def _register_form(
    library: Any, name: str, schema: str, names: tuple[str, ...], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    library.define(f"{name}{schema}", tags=_TAGS)
    operator = getattr(torch.ops.ragged_attention, name).default

    # The dispatcher hands over what is no keyword by position, up to the last argument that is not at its default.
    def run(*args: Any, **keywords: Any) -> Any:
        return kernel(**dict(zip(names, args, strict=False)), **keywords)

    def shapes(*args: Any, **keywords: Any) -> Any:
        return fake(**dict(zip(names, args, strict=False)), **keywords)

    def refuse_grad(keyset: Any, *args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, value in (*zip(names, args, strict=False), *keywords.items()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse_pending({argument: value})
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **keywords)

    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    library.impl(name, refuse_grad, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=library)


def _written(*results: torch.Tensor) -> None:
    """Tell autograd's version counters, as an in-place operator of torch would."""
    for result in results:
        if not result.is_inference():
            torch.autograd.graph.increment_version(result)


def _register_operation(library: Any, name: str, operation: Callable[..., Any], operands: str, choice: str) -> None:
    """The four forms of an operation; `choice` is what only those that allocate take."""
    names = tuple(argument.split()[1].partition("=")[0] for argument in (operands + choice).split(", "))

    def run(**arguments: Any) -> Any:
        return operation(**arguments)

    def run_lse(**arguments: Any) -> Any:
        return operation(**arguments, return_lse=True)

    def run_out(**arguments: Any) -> None:
        operation(**arguments)
        _written(arguments["out"])

    def run_lse_out(**arguments: Any) -> None:
        operation(**arguments)
        _written(arguments["out"], arguments["lse"])

    # Shapes and dtypes alone: whatever compares two sizes here would guard on them. The call itself checks the rest.
    def fake_checks(arguments: dict[str, Any]) -> torch.Tensor:
        check_mask_name(arguments.get("mask_str", "causal"))
        q = arguments["q"]
        if q.dim() != 3:
            raise ValueError(f"q: expected 3 dimensions, got {q.dim()}")
        return q

    def fake(**arguments: Any) -> Any:
        q = fake_checks(arguments)
        dtype = arguments.get("out_dtype")
        if dtype is not None:
            dtype_name(dtype, "out_dtype")
        return q.new_empty(q.shape, dtype=dtype)

    def fake_lse(**arguments: Any) -> Any:
        q = arguments["q"]
        return fake(**arguments), q.new_empty(q.shape[:2], dtype=torch.float32)

    def fake_out(**arguments: Any) -> None:
        fake_checks(arguments)

    for form, schema, kernel, shapes in (
        ("", f"({operands}{choice}) -> Tensor", run, fake),
        ("_lse", f"({operands}{choice}) -> (Tensor, Tensor)", run_lse, fake_lse),
        # Nothing is returned: only then can functionalisation take every version of torch past a mutation.
        ("_out", f"({operands}, *, Tensor(a!) out) -> ()", run_out, fake_out),
        ("_lse_out", f"({operands}, *, Tensor(a!) out, Tensor(b!) lse) -> ()", run_lse_out, fake_out),
    ):
        _register_form(library, name + form, schema, names, kernel, shapes)


def _register() -> Any:
    """The library that keeps the operators; None where an earlier import of this module has registered them."""
    if hasattr(torch.ops.ragged_attention, "ragged_flash_attention"):
        return None
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _register_operation(library, "ragged_flash_attention", ragged_attention.ragged_flash_attention, _RAGGED, "")
    _register_operation(library, "qsa_sparse_attention", _qsa_sparse_attention, _QSA, ", ScalarType? out_dtype=None")
    return library


_library = _register() or globals().get("_library")  # a reload keeps the one there is


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """``torch.nn.attention.varlen.varlen_attn``, with the signature of torch 2.13, for self-attention without a cache.

    Args:
        query: ``[total, num_q_heads, head_dim]``; float32, float16 or bfloat16, on the CPU or a GPU.
        key: ``[total, num_kv_heads, head_dim]``.
        value: like key.
        cu_seq_q: ``[batch + 1]``: where each sequence begins, and where the last one ends.
        cu_seq_k: the very tensor that cu_seq_q is: queries and keys are the rows of the same sequences.
        max_q: the longest sequence; a hint. A tensor is not read.
        max_k: not used.
        return_aux: ``torch.nn.attention.varlen.AuxRequest``; with ``lse=True`` the LSE is returned too.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        window_size: ``(left, right)``; a negative side is unbounded. ``(-1, -1)`` is full attention, ``(-1, 0)``
            causal, ``(W, 0)`` the query and the W keys before it, ``(W, -1)`` these and all later keys. A bounded right
            side other than 0 is refused.
        enable_gqa: whether there may be fewer key than query heads.
        seqused_k: refused.
        block_table: refused.
        num_splits: None or 1, which are the same here: a sequence's bits never depend on the rest of the batch.

    Returns:
        ``out``, or ``(out, lse)``, lse float32 of shape ``[num_q_heads, total]``, as torch's own kernels give it: here
        a transposed view of ``[total, num_q_heads]``.

    Raises:
        NotImplementedError: an argument that asks for something else, by name; a tensor that requires grad.
        ValueError: what torch refuses too, or what :func:`ragged_attention.ragged_flash_attention` does.
    """
    _refuse("seqused_k", seqused_k is not None, "only a part of each key sequence")
    _refuse("block_table", block_table is not None, "a paged cache (ragged_attention.qsa_sparse_attention reads one)")
    _refuse("num_splits", num_splits not in (None, 1), "another number of splits than 1")
    _refuse(
        "cu_seq_k", cu_seq_k is not cu_seq_q, "another tensor than cu_seq_q: keys of other lengths than the queries'"
    )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa: expected True for {query.shape[1]} query heads and {key.shape[1]} key heads, got False"
        )
    want_lse = return_aux is not None and bool(return_aux.lse)
    out, lse = _self_attention(query, key, value, cu_seq_q, max_q, scale, window_size, want_lse)
    return (out, lse) if want_lse else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_func`` of flash-attn 2, for inference and self-attention without a cache.

    Args:
        q: ``[total, num_q_heads, head_dim]``; float32, float16 or bfloat16, on the CPU or a GPU.
        k: ``[total, num_kv_heads, head_dim]``; num_kv_heads divides num_q_heads.
        v: like k.
        cu_seqlens_q: ``[batch + 1]``: where each sequence begins, and where the last one ends.
        cu_seqlens_k: the very tensor that cu_seqlens_q is: queries and keys are the rows of the same sequences.
        max_seqlen_q: the longest sequence; a hint. A tensor is not read.
        max_seqlen_k: not used.
        dropout_p: 0.
        softmax_scale: factor on the scores; ``head_dim ** -0.5`` by default.
        causal: no key after the query, whatever the right side of window_size says.
        window_size: ``(left, right)``; a negative side is unbounded. With causal or a right side of 0, left ``W`` is
            the query and the W keys before it (``local_window_size=W + 1``); with ``(W, -1)`` all later keys too. A
            bounded right side other than 0 is refused, unless causal makes it 0.
        softcap: 0.
        alibi_slopes: refused.
        deterministic: either; the same inputs give the same bits here.
        return_attn_probs: also return the LSE and an empty tensor, as flash-attn does without dropout.
        block_table: refused.

    Returns:
        ``out``, or ``(out, lse, empty)``, lse float32 of shape ``[num_q_heads, total]``: here a transposed view of
        ``[total, num_q_heads]``.

    Raises:
        NotImplementedError: an argument that asks for something else, by name; a tensor that requires grad.
        ValueError: what :func:`ragged_attention.ragged_flash_attention` refuses.
    """
    _refuse("dropout_p", dropout_p != 0, "dropout")
    _refuse("softcap", softcap != 0, "capped scores")
    _refuse("alibi_slopes", alibi_slopes is not None, "a bias on the scores")
    _refuse("block_table", block_table is not None, "a paged cache (ragged_attention.qsa_sparse_attention reads one)")
    _refuse(
        "cu_seqlens_k",
        cu_seqlens_k is not cu_seqlens_q,
        "another tensor than cu_seqlens_q: keys of other lengths than the queries'",
    )
    left, right = _sides(window_size)
    window_size = (left, 0 if causal else right)
    out, lse = _self_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, return_attn_probs)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _refuse(argument: str, asked: bool, what: str) -> None:
    if asked:
        raise NotImplementedError(f"{argument}: not supported by ragged_attention: {what}")


def _sides(window_size: tuple[int, int]) -> tuple[int, int]:
    if len(window_size) != 2:
        raise ValueError(f"window_size: expected (left, right), got {window_size!r}")
    return window_size[0], window_size[1]


def _self_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: Any,
    scale: float | None,
    window_size: tuple[int, int],
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and, if wanted, the LSE with the heads first."""
    left, right = _sides(window_size)
    _refuse("window_size", right > 0, f"a bounded number of keys after the query, {tuple(window_size)}")
    if left < 0:
        mask, window = ("null" if right < 0 else "causal"), -1
    else:  # local_window_size counts the query's own key
        mask, window = ("sliding_window_noncausal" if right < 0 else "sliding_window_causal"), left + 1
    if isinstance(longest, torch.Tensor):
        longest = None  # only a hint: not worth waiting for a device
    operators = torch.ops.ragged_attention
    if not want_lse:
        return operators.ragged_flash_attention(q, k, v, offsets, longest, mask, window, scale), None
    out, lse = operators.ragged_flash_attention_lse(q, k, v, offsets, longest, mask, window, scale)
    return out, lse.transpose(0, 1)
