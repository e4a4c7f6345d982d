"""What each framework does its own way: allocating a result, naming a dtype, and the current stream.

No framework is imported here: a tensor of one shows that it is already loaded.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from . import _C
from ._host_scalars import described, reason_of


class Framework:
    """A framework known by DLPack alone: it cannot be asked for a new tensor."""

    name = "DLPack"

    def is_cuda(self, tensor: Any) -> bool:
        return self._device(tensor)[0] in (2, 13)  # kDLCUDA, kDLCUDAManaged

    def device_index(self, tensor: Any) -> int:
        return self._device(tensor)[1]

    @staticmethod
    def _device(q: Any) -> tuple[int, int]:
        try:  # whatever an object makes of the protocol
            kind, index = q.__dlpack_device__()
            return int(kind), int(index)
        except Exception as error:
            raise TypeError(
                f"q: expected a tensor that speaks DLPack, got a {type(q).__name__} whose __dlpack_device__() does not "
                f"say where it lies: {reason_of(error)}"
            ) from error

    def current_stream(self, tensor: Any) -> int:
        stream = _C.current_stream(tensor, self.device_index(tensor))
        return 0 if stream is None else stream

    def empty(self, like: Any, rank: int, dtype: str | None, name: str) -> Any:
        """A new tensor of the first `rank` dimensions of `like`, of its dtype unless one is named."""
        raise ValueError(
            f"{name}: expected a tensor to write to, got None; {type(like).__name__} is known through DLPack alone, so "
            f"pass out= (and lse= with return_lse=True)"
        )

    def record_stream(self, tensor: Any, stream: int) -> None:
        """Tell the allocator that a result is in use on a stream other than the current one."""


class NumPy(Framework):
    name = "NumPy"

    def is_cuda(self, tensor: Any) -> bool:
        return False

    def empty(self, like: Any, rank: int, dtype: str | None, name: str) -> Any:
        return np.empty(like.shape[:rank], like.dtype if dtype is None else numpy_dtype(dtype))


class CuPy(Framework):
    name = "CuPy"

    def is_cuda(self, tensor: Any) -> bool:
        return True

    def device_index(self, tensor: Any) -> int:
        return int(tensor.device.id)

    def current_stream(self, tensor: Any) -> int:
        cupy = sys.modules["cupy"]
        with self._current(cupy, tensor):
            return int(cupy.cuda.get_current_stream().ptr)

    def empty(self, like: Any, rank: int, dtype: str | None, name: str) -> Any:
        cupy = sys.modules["cupy"]
        with self._current(cupy, like):
            return cupy.empty(like.shape[:rank], like.dtype if dtype is None else numpy_dtype(dtype))

    @staticmethod
    def _current(cupy: Any, tensor: Any) -> Any:
        if cupy.cuda.runtime.getDevice() == tensor.device.id:
            return contextlib.nullcontext()
        return tensor.device


class Torch(Framework):
    name = "torch"

    def is_cuda(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda)

    def device_index(self, tensor: Any) -> int:
        return int(tensor.get_device())

    def current_stream(self, tensor: Any) -> int:
        index = tensor.get_device()
        stream = _C.current_stream(tensor, index)
        if stream is None:  # a torch from before DLPack's C exchange API
            stream = int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)
        return stream

    def empty(self, like: Any, rank: int, dtype: str | None, name: str) -> Any:
        torch = sys.modules["torch"]
        if dtype is None and rank == like.dim() and like.layout is torch.strided:  # half the cost of new_empty
            if like.is_contiguous():
                return torch.empty_like(like)  # cheaper than with a format named
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        if dtype is None:
            return like.new_empty(like.shape[:rank])
        return like.new_empty(like.shape[:rank], dtype=getattr(torch, dtype))

    def record_stream(self, tensor: Any, stream: int) -> None:
        torch = sys.modules["torch"]
        tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))


class Jax(Framework):
    """By name alone: XLA allocates, and knows the stream. See integrations/jax.py."""

    name = "JAX"


_NUMPY, _CUPY, _TORCH, _JAX, _OTHER = NumPy(), CuPy(), Torch(), Jax(), Framework()
_KNOWN: dict[type, Framework] = {np.ndarray: _NUMPY}


def framework_of(tensor: Any, name: str) -> Framework:
    """The framework of a tensor by its type; TypeError where it is none."""
    known = _KNOWN.get(type(tensor))
    return known if known is not None else _recognise(tensor, name)


def _recognise(tensor: Any, name: str) -> Framework:
    if isinstance(tensor, type):
        raise TypeError(
            f"{name}: expected a tensor that speaks DLPack (torch, CuPy, NumPy, ...), got the type {tensor.__name__}"
        )
    kind = type(tensor)
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in roots:
        framework: Framework = _TORCH
    elif roots & {"jax", "jaxlib"}:
        framework = _JAX
    elif "cupy" in roots:
        framework = _CUPY
    elif isinstance(tensor, np.ndarray):
        framework = _NUMPY
    elif hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        framework = _OTHER
    else:
        got = "None" if tensor is None else kind.__name__
        raise TypeError(f"{name}: expected a tensor that speaks DLPack (torch, CuPy, NumPy, ...), got {got}")
    _KNOWN[kind] = framework
    return framework


def refuse_pending(tensors: dict[str, Any]) -> None:
    """Refuse a torch tensor with something pending that its memory does not show: a gradient, a lazy negation."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):  # not loaded, or still loading
        return
    if not _C.may_be_pending(tensors):
        return
    tensor_type = torch.Tensor
    for name, tensor in tensors.items():
        if tensor is None or not isinstance(tensor, tensor_type):
            continue
        if tensor.is_neg():
            raise ValueError(
                f"{name}: expected a materialised tensor, got a lazily negated view; call resolve_neg() on it first"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: expected a tensor that does not require grad, got one with requires_grad=True while grad "
                f"mode is on; there is no backward yet: detach it, or call under torch.no_grad()"
            )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A NumPy dtype by name; bfloat16 is the one of ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(
            "out_dtype: bfloat16 in NumPy or CuPy needs the package ml_dtypes, which is not installed; pass out= or "
            "choose float32"
        ) from error
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def dtype_name(dtype: Any, name: str) -> str:
    """'float32', 'float16' or 'bfloat16' of a framework's dtype, a NumPy dtype or a string."""
    if isinstance(dtype, str):
        text = dtype.removeprefix("torch.")
    elif isinstance(dtype, (type, np.dtype)):
        try:
            text = np.dtype(dtype).name
        except TypeError:
            text = ""
    elif type(dtype).__module__.partition(".")[0] == "torch":
        text = "" if hasattr(dtype, "dtype") else str(dtype).removeprefix("torch.")
    else:
        text = ""  # not even asked: an array would be shown with all its values
    if text not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {text[:80] or described(dtype)}")
    return text
