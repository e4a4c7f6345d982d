"""Both operations for JAX arrays: in eager code, under ``jax.jit``, and wherever XLA runs.

The functions of this module have the names, the order and the defaults of
:func:`ragged_attention.ragged_flash_attention` and :func:`ragged_attention.qsa_sparse_attention`; those two hand JAX
arrays on to them. Importing the module registers the compiled handlers with XLA (``jax.ffi``) for the CPU and for CUDA:
a call is one custom call of the program, runs on XLA's stream without the interpreter, and may be part of a command
buffer (a CUDA graph). Results are fresh arrays; operands are never written.

Arrays may be traced. Host parameters (mask, window, scale, layer, hints) are static: a traced value there is a
``TypeError``. Shapes, dtypes and parameters are checked when the call is traced, with the errors of the plain
functions.

Under ``jax.vmap`` a call runs once for each element, one after the other; to attend to more sequences at once, pack
them. There is no gradient: differentiating is a ``NotImplementedError``, unless ``jax.lax.stop_gradient`` is applied to
the operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _C
from .._frameworks import dtype_name, numpy_dtype
from .._host_scalars import host_bool, host_float_or_none, host_int, host_int_or_none
from .._operations import check_mask_name

__all__ = ["qsa_sparse_attention", "ragged_flash_attention"]

for _name, _platform, _handler in _C.xla_handlers():
    jax.ffi.register_ffi_target(_name, _handler, platform=_platform)


def ragged_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    input_row_offsets: Any,
    q_max_seq_len: Any = None,
    *,
    mask_str: str = "causal",
    local_window_size: Any = -1,
    scale: Any = None,
    return_lse: bool = False,
) -> Any:
    """:func:`ragged_attention.ragged_flash_attention` for JAX arrays.

    Args:
        q: ``[total_seq_len, num_q_heads, head_dim]``; float32, float16 or bfloat16. A JAX array, traced or not; the
            other operands may be NumPy arrays too, which JAX places as it does in any call.
        k: ``[total_seq_len, num_kv_heads, head_dim]``, q's dtype.
        v: like k.
        input_row_offsets: ``[batch + 1]``; uint32, int32 or int64.
        q_max_seq_len: a hint, on the host.
        mask_str: as there; static, as all that follow.
        local_window_size: as there.
        scale: as there.
        return_lse: also return the LSE.

    Returns:
        ``out`` of q's shape and dtype, or ``(out, lse)``, lse float32 ``[total_seq_len, num_q_heads]``.

    Raises:
        ValueError: a shape or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, an object that is no array, or a traced host parameter.
        NotImplementedError: a head dim that nothing runs; the call is differentiated.
        jax.errors.JaxRuntimeError: at run time, what only the device knows: a GPU that the build has no code for, an
            error of the CUDA driver.
    """
    check_mask_name(mask_str)
    operands = {"q": q, "k": k, "v": v, "input_row_offsets": input_row_offsets}
    parameters = {
        "mask_str": mask_str,
        "local_window_size": host_int(_static(local_window_size, "local_window_size"), "local_window_size"),
        "scale": host_float_or_none(_static(scale, "scale"), "scale"),
        "q_max_seq_len": host_int_or_none(_static(q_max_seq_len, "q_max_seq_len"), "q_max_seq_len"),
    }
    return _call("ragged_flash_attention", operands, parameters, None, return_lse)


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
    group: Any = None,
    warps: Any = None,
    unroll: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
) -> Any:
    """:func:`ragged_attention.qsa_sparse_attention` for JAX arrays.

    Args:
        q: ``[total_q, num_q_heads, head_dim]``; float32, float16 or bfloat16. A JAX array, traced or not; the other
            operands may be NumPy arrays too, which JAX places as it does in any call.
        input_row_offsets: ``[batch + 1]``; uint32, int32 or int64.
        kv_blocks: ``[num_pages, 2, num_layers, page_size, num_kv_heads, head_dim]``, q's dtype.
        cache_lengths: ``[batch]``; uint32, int32 or int64.
        kv_lookup_table: ``[batch, max_pages]``; uint32, int32 or int64.
        layer_idx: the layer of kv_blocks to read, on the host; static, as are all parameters below.
        token_indices: ``[total_q, selection_width]``, int32.
        counts: ``[total_q]``, int32.
        page_stride: -1, or one packed page: JAX arrays have no gaps.
        max_prompt_length: a hint, like the next.
        max_cache_length: the longest context.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        group: if given, must equal ``num_q_heads // num_kv_heads``.
        warps: CUDA only: force the row-by-row kernel with this many warps a CTA.
        unroll: CUDA only: force the row-by-row kernel with this many keys in flight a warp.
        out_dtype: dtype of the result; q's by default.
        return_lse: also return the LSE.

    Returns:
        ``out`` of q's shape, or ``(out, lse)``, lse float32 ``[total_q, num_q_heads]``.

    Raises:
        ValueError: a shape or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, an object that is no array, or a traced host parameter.
        NotImplementedError: a head dim that nothing runs; the call is differentiated.
        jax.errors.JaxRuntimeError: at run time, what only the device knows: a GPU that the build has no code for,
            ``warps`` or ``unroll`` that are not built, an error of the CUDA driver.
    """
    operands = {
        "q": q,
        "input_row_offsets": input_row_offsets,
        "kv_blocks": kv_blocks,
        "cache_lengths": cache_lengths,
        "kv_lookup_table": kv_lookup_table,
        "token_indices": token_indices,
        "counts": counts,
    }
    parameters = {
        "layer_idx": host_int(_static(layer_idx, "layer_idx"), "layer_idx"),
        "page_stride": host_int(_static(page_stride, "page_stride"), "page_stride"),
        "scale": host_float_or_none(_static(scale, "scale"), "scale"),
    }
    integers = {
        "max_prompt_length": max_prompt_length,
        "max_cache_length": max_cache_length,
        "group": group,
        "warps": warps,
        "unroll": unroll,
    }
    for name, value in integers.items():
        parameters[name] = host_int_or_none(_static(value, name), name)
    return _call("qsa_sparse_attention", operands, parameters, out_dtype, return_lse)


def _static(value: Any, name: str) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected a number that is known when the call is traced, got {value.aval}; close over it, or "
            f"name it in static_argnames of jax.jit"
        )
    return value


def _call(
    operation: str, operands: dict[str, Any], parameters: dict[str, Any], out_dtype: Any, return_lse: bool
) -> Any:
    numpy = False
    for name, operand in operands.items():
        if isinstance(operand, jax.Array):
            continue
        if name == "q" or not isinstance(operand, np.ndarray):
            raise TypeError(
                f"{name}: expected a JAX array{'' if name == 'q' else ' or a NumPy array'}, got "
                f"{type(operand).__name__}; jax.dlpack.from_dlpack takes what speaks DLPack"
            )
        numpy = True
    q = operands["q"]
    out = (q.shape, q.dtype if out_dtype is None else numpy_dtype(dtype_name(out_dtype, "out_dtype")))
    results: tuple[Any, ...] = (out,)
    if host_bool(return_lse, "return_lse"):
        results = (out, (q.shape[:2], np.dtype(np.float32)))
    call = _Call(operation, tuple(operands), tuple(parameters.items()), results)
    if numpy:  # before JAX makes its 64-bit numbers 32-bit ones
        call.check(operands.values())
    outputs = _launch(call, *operands.values())
    return outputs if return_lse else outputs[0]


class _Call(NamedTuple):
    """What of a call is known without its operands; hashable, and so the key of a compilation."""

    operation: str
    names: tuple[str, ...]
    parameters: tuple[tuple[str, Any], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # out, and lse if it is wanted: shapes and dtypes

    def check(self, operands: Iterable[Any]) -> None:
        """The checks of the plain functions, on shapes and dtypes alone."""
        tensors = [(x.shape, x.dtype) for x in operands]
        described = [(shape, str(dtype)) for shape, dtype in (*tensors, *self.results)]
        if not all(isinstance(size, int) for shape, _ in described for size in shape):
            return  # symbolic sizes, of jax.export: the call itself checks
        parameters = dict(self.parameters)
        given: dict[str, Any] = dict(zip((*self.names, "out", "lse"), described, strict=False))
        check = getattr(_C, f"check_{self.operation}")
        check(**{"lse": None, **given}, **parameters, stream=None, check_values=False)
        if parameters.get("page_stride", -1) != -1:
            packed = math.prod(given["kv_blocks"][0][1:])
            if parameters["page_stride"] != packed:
                raise ValueError(
                    f"page_stride: expected -1 or one packed page of {packed} elements with JAX arrays, which have no "
                    f"gaps, got {parameters['page_stride']}"
                )


def _trace(call: _Call, *operands: Any) -> Any:
    call.check(operands)
    varying = getattr(jax.typeof(operands[0]), "vma", None)  # the mesh axes it varies over, inside jax.shard_map
    kinds = tuple(
        jax.ShapeDtypeStruct(shape, dtype, **({"vma": varying} if varying else {})) for shape, dtype in call.results
    )
    attributes = {name: _attribute(value) for name, value in call.parameters if value is not None}
    launch = jax.ffi.ffi_call(f"ragged_attention.{call.operation}", kinds, vmap_method="sequential")
    return launch(*operands, **attributes)


def _refuse_gradient(call: _Call, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"ragged_attention.{call.operation} has no gradient yet: apply jax.lax.stop_gradient to its operands"
    )


_call_of_xla = jax.custom_jvp(_trace, nondiff_argnums=(0,))
_call_of_xla.defjvp(_refuse_gradient)
# jit, so that an eager call too is one look-up and one launch, and is checked once for its shapes.
_launch = jax.jit(_call_of_xla, static_argnums=0)


def _attribute(value: Any) -> Any:
    """Of the width that the handler reads, whatever jax_enable_x64 says."""
    return np.int64(value) if isinstance(value, int) else np.float64(value) if isinstance(value, float) else value
