"""The public API as typed code uses it, in every framework: checked by mypy --strict, never run.

A result has the type of q, so that a function which promises a tensor of its framework may return one: no cast, no
"Returning Any". scripts/lint checks it without the frameworks, .ci/run against torch's own types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ragged_attention as ra
from ragged_attention.integrations.torch import flash_attn_varlen_func, varlen_attn

Array = npt.NDArray[np.float32]


def numpy_ragged(q: Array, k: Array, v: Array, offsets: npt.NDArray[np.int32]) -> Array:
    return ra.ragged_flash_attention(q, k, v, offsets, mask_str="sliding_window_causal", local_window_size=128)


def numpy_with_lse(q: Array, k: Array, v: Array, offsets: npt.NDArray[np.int32]) -> tuple[Array, Array]:
    return ra.ragged_flash_attention(q, k, v, offsets, scale=np.float32(0.1), return_lse=True)


def numpy_in_place(q: Array, k: Array, v: Array, offsets: npt.NDArray[np.int32], out: Array, lse: Array) -> None:
    ra.ragged_flash_attention(q, k, v, offsets, out=out, lse=lse, check_values=True)


def numpy_qsa(
    q: Array,
    offsets: npt.NDArray[np.uint32],
    kv_blocks: Array,
    cache_lengths: npt.NDArray[np.uint32],
    pages: npt.NDArray[np.uint32],
    tokens: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
) -> Array:
    layer = np.array([3])  # host scalars may be one-element arrays
    return ra.qsa_sparse_attention(
        q, offsets, kv_blocks, cache_lengths, pages, layer, tokens, counts, page_stride=layer
    )


def torch_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.current_stream().cuda_stream
    return ra.ragged_flash_attention(q, k, v, offsets, 4096, mask_str="causal", stream=stream)


def torch_qsa_with_lse(
    q: torch.Tensor,
    offsets: torch.Tensor,
    kv_blocks: torch.Tensor,
    cache_lengths: torch.Tensor,
    pages: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    operands = (q, offsets, kv_blocks, cache_lengths, pages, 0, tokens, counts)
    return ra.qsa_sparse_attention(*operands, out_dtype=torch.float32, return_lse=True)


def torch_maybe_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, want: bool
) -> object:
    return ra.ragged_flash_attention(q, k, v, offsets, return_lse=want)


def torch_drop_ins(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> None:
    varlen_attn(q, k, v, offsets, offsets, 128, 128, window_size=(-1, 0))
    flash_attn_varlen_func(q, k, v, offsets, offsets, 128, 128, causal=True)


def without_types(q: Any, k: Any, v: Any, offsets: Any) -> Any:
    """CuPy, which has none, and whatever else speaks DLPack."""
    attend: Callable[..., Any] = ra.ragged_flash_attention
    out, lse = ra.ragged_flash_attention(q, k, v, offsets, return_lse=True)
    return attend(out, k, v, offsets), lse


def what_runs(device: torch.device) -> str:
    answer = ra.supports("ragged_flash_attention", device=device, dtype=torch.bfloat16, head_dim=128, group=4)
    threads: int = ra.num_threads()
    ra.set_num_threads(threads)
    version: str = ra.__version__
    info: dict[str, str] = ra.build_info()
    return answer.reason if answer.ok else f"{answer.path}, {version}, {info['cuda_version']}"


def reference(q: Array, k: Array, v: Array, offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    try:
        exact, _ = ra.reference.ragged_flash_attention(q, k, v, offsets)
    except ra.CudaError as error:
        raise RuntimeError(str(error)) from error
    return exact
