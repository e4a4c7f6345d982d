"""The tensor frameworks that the tests drive, behind one small interface.

Tests build their data as NumPy arrays (bfloat16 as ml_dtypes.bfloat16) and let a framework turn them into its own
tensors on its device. What is missing on a machine is skipped with its name in the reason.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def optional(module: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    ml_dtypes = optional("ml_dtypes")
    if ml_dtypes is None:
        pytest.skip("ml_dtypes is not installed: no bfloat16 in NumPy to compare with")
    return np.dtype(ml_dtypes.bfloat16)


def bits(array: Array) -> Array:
    """The array as integers of its own width: NumPy without bfloat16 carries it so, and bits compare so."""
    return array.view(np.dtype(f"int{8 * array.itemsize}"))


@dataclass(frozen=True)
class Strided:
    """A view of a flat buffer: offset and strides in elements."""

    buffer: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def array(self) -> Array:
        return self.over(self.buffer)

    def over(self, buffer: Array, as_strided: Any = np.lib.stride_tricks.as_strided) -> Any:
        strides = tuple(stride * buffer.itemsize for stride in self.strides)
        return as_strided(buffer[self.offset :], self.shape, strides)


@dataclass(frozen=True)
class Framework:
    name: str
    device: str  # "cpu" or "cuda"
    xp: Any = field(repr=False)

    q_offset = 0  # elements by which queries are off their alignment

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def tensor(self, source: Array | Strided) -> Any:
        """A fresh tensor with these values: contiguous, or with the strides of a Strided."""
        if isinstance(source, Strided):
            return self._view(self._contiguous(source.buffer), source)
        return self._contiguous(source)

    def operand(self, name: str, source: Array | Strided) -> Any:
        """The tensor that a call gets as this argument."""
        return self.tensor(source)

    def full(self, shape: tuple[int, ...], dtype: str, value: float = np.nan) -> Any:
        return self.tensor(np.full(shape, value, numpy_dtype(dtype)))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory that is not written, so that a huge buffer costs only what is touched."""
        return self.xp.empty(shape, dtype=self.dtype(dtype))

    def _contiguous(self, array: Array) -> Any:
        return np.array(array, order="C")

    def _view(self, buffer: Any, view: Strided) -> Any:
        return view.over(buffer)

    def numpy(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def dtype(self, name: str) -> Any:
        return numpy_dtype(name)

    def synchronize(self) -> None:
        pass


class Torch(Framework):
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.xp.empty(shape, dtype=self.dtype(dtype), device=self.device)

    def _contiguous(self, array: Array) -> Any:
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            return self.xp.from_numpy(bits(array)).view(self.xp.bfloat16).to(self.device)
        return self.xp.from_numpy(array).to(self.device)

    def _view(self, buffer: Any, view: Strided) -> Any:
        if min(view.strides, default=0) < 0:
            pytest.skip("torch has no negative strides")
        return buffer.as_strided(view.shape, view.strides, buffer.storage_offset() + view.offset)

    def numpy(self, tensor: Any) -> Array:
        tensor = tensor.detach().cpu()
        if tensor.dtype == self.xp.bfloat16:
            return np.asarray(tensor.view(self.xp.int16).numpy().view(numpy_dtype("bfloat16")))
        return np.asarray(tensor.numpy())

    def dtype(self, name: str) -> Any:
        return getattr(self.xp, name)

    def synchronize(self) -> None:
        if not self.on_cpu:
            self.xp.cuda.synchronize()


class PortableTorch(Torch):
    """torch on a Hopper GPU, with queries that its own kernels do not take: the portable ones run."""

    q_offset = 1

    def operand(self, name: str, source: Array | Strided) -> Any:
        if name != "q":
            return self.tensor(source)
        if isinstance(source, Strided):
            return self._view(self._off_by_one(source.buffer), source)
        return self._off_by_one(source)

    def _off_by_one(self, array: Array) -> Any:
        """A base that is aligned to nothing but its own element."""
        buffer = self._contiguous(np.concatenate([np.zeros(1, array.dtype), array.reshape(-1)]))
        return buffer[1:].view(array.shape)


class Cupy(Framework):
    def _contiguous(self, array: Array) -> Any:
        if array.dtype.name != "bfloat16":
            return self.xp.array(array, order="C")
        try:
            tensor = self.xp.array(array, order="C")
            self.xp.from_dlpack(tensor)
        except Exception as error:
            pytest.skip(f"this CuPy cannot hand out bfloat16: {error}")
        return tensor

    def _view(self, buffer: Any, view: Strided) -> Any:
        return view.over(buffer, self.xp.lib.stride_tricks.as_strided)

    def numpy(self, tensor: Any) -> Array:
        return np.asarray(self.xp.asnumpy(tensor))

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()


ALL = (("numpy", "cpu"), ("torch", "cpu"), ("torch", "cuda"), ("cupy", "cuda"))
_CLASSES: dict[str, type[Framework]] = {"numpy": Framework, "torch": Torch, "cupy": Cupy}


@functools.cache
def why_not(name: str, device: str) -> str | None:
    """Why this framework can't be used on this device here; None if it can."""
    module = optional(name)
    if module is None:
        return f"{name} is not installed"
    if device == "cpu":
        return None
    try:
        count = module.cuda.device_count() if name == "torch" else module.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"{name} finds no usable GPU: {error}"
    return None if count else f"{name} finds no usable GPU"


@functools.cache
def _open(name: str, device: str) -> Framework:
    return _CLASSES[name](name, device, optional(name))


def open_framework(name: str, device: str) -> Framework:
    reason = why_not(name, device)
    if reason is not None:
        pytest.skip(reason)
    return _open(name, device)


def first_framework(device: str) -> Framework:
    """The one framework through which a device's arithmetic is tested: the others share everything below DLPack."""
    names = [name for name, where in ALL if where == device]
    reasons = [why_not(name, device) for name in names]
    for name, reason in zip(names, reasons, strict=True):
        if reason is None:
            return _open(name, device)
    pytest.skip("; ".join(reason for reason in reasons if reason))


def is_hopper(framework: Framework) -> bool:
    return framework.name == "torch" and framework.xp.cuda.get_device_capability() == (9, 0)


# Where a call can run: on the CPU, on what a GPU takes first (its own kernels or the portable ones), and, where those
# are two, on the portable ones.
PATHS = ("cpu", "cuda", "cuda_portable")


def open_path(path: str) -> Framework:
    if path != "cuda_portable":
        return first_framework(path)
    framework = open_framework("torch", "cuda")
    if not is_hopper(framework):
        pytest.skip("the portable kernels are the only ones for this GPU")
    return PortableTorch("torch", "cuda", framework.xp)


def has_gpu() -> bool:
    return any(why_not(name, device) is None for name, device in ALL if device == "cuda")


class OnlyDlpack:
    """A tensor of a framework that is known by nothing but DLPack."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()
