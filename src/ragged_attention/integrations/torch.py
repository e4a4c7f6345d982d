"""Both operations as torch operators.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ragged_attention

from .._frameworks import dtype_name, refuse_pending
from .._operations import check_mask_name

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
