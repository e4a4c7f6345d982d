"""What an eager call costs the host: microseconds, by framework, of a call that has next to nothing to compute."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

import ragged_attention

from .timing import Timer

Convert = Callable[[torch.Tensor], Any]


def measure(timer: Timer, operations: Iterable[str]) -> dict[str, dict[str, float | str]]:
    """By operation and framework: the median, or why there is none. torch is measured with and without `out=`."""
    result: dict[str, dict[str, float | str]] = {}
    for op in sorted(operations):
        result[op] = {}
        for name, convert in _FRAMEWORKS[timer.device.type].items():
            try:
                result[op][name] = timer.host_us(_call(op, timer.device, convert(), with_out=False))
            except Exception as error:  # not installed, or not for this device
                result[op][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        result[op]["torch, out="] = timer.host_us(_call(op, timer.device, lambda tensor: tensor, with_out=True))
    return result


def _call(op: str, device: torch.device, convert: Convert, with_out: bool) -> Callable[[], Any]:
    """One row of one sequence, or of a context of 16 tokens in one page."""

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.float16)

    def integers(values: Any) -> Any:
        return convert(torch.tensor(values, dtype=torch.int32, device=device))

    q = floats(1, 8, 128)
    out: dict[str, Any] = {"out": torch.empty_like(q)} if with_out else {}
    offsets = integers([0, 1])
    if op == "ragged":
        q, k, v = (convert(tensor) for tensor in (q, floats(1, 8, 128), floats(1, 8, 128)))

        def call() -> Any:
            return ragged_attention.ragged_flash_attention(q, k, v, offsets, 1, **out)

    else:
        q, blocks = convert(q), convert(floats(1, 2, 1, 16, 8, 128))
        lengths, table, lists, counts = integers([15]), integers([[0]]), integers([[3, 5]]), integers([2])

        def call() -> Any:
            return ragged_attention.qsa_sparse_attention(q, offsets, blocks, lengths, table, 0, lists, counts, **out)

    for _ in range(10):
        call()
    return call


def _torch() -> Convert:
    return lambda tensor: tensor


def _numpy() -> Convert:
    return lambda tensor: np.ascontiguousarray(tensor.numpy())


def _cupy() -> Convert:
    from_dlpack: Convert = importlib.import_module("cupy").from_dlpack
    return from_dlpack


def _jax() -> Convert:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has memory on the same device
    from_dlpack: Convert = importlib.import_module("jax").dlpack.from_dlpack
    return from_dlpack


_FRAMEWORKS: dict[str, dict[str, Callable[[], Convert]]] = {
    "cuda": {"torch": _torch, "cupy": _cupy, "jax": _jax},
    "cpu": {"torch": _torch, "numpy": _numpy, "jax": _jax},
}
