"""The frameworks that can hold the demo's tensors, behind one small interface. Each is imported when it is opened."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import _C
from .._support import supports

_L2_FLUSH_BYTES = 256 * 2**20
_CUDA_SAMPLES = 20
_CPU_SAMPLES, _CPU_SECONDS = 20, 1.5


class Unusable(Exception):
    """Why a framework or device cannot be used, in words."""


class Arrays:
    """Tensors of one framework on one device, of one floating dtype."""

    name: ClassVar[str]
    device: str
    dtype: str
    itemsize: int

    def normal(self, *shape: int) -> Any:
        """Unit normals."""
        raise NotImplementedError

    def integers(self, values: NDArray[Any]) -> Any:
        raise NotImplementedError

    def to_numpy(self, tensor: Any) -> NDArray[np.float32]:
        """Exact: float32 holds every value of the dtypes in use."""
        raise NotImplementedError

    def device_name(self) -> str:
        if self.device == "cpu":
            return f"CPU ({_C.num_threads()} threads, {_C.build_info()['cpu_isa']})"
        return str(_C.cuda_devices()["devices"][0]["name"])

    def samples_ms(self, call: Callable[[], Any]) -> list[float]:
        """Times of single calls, after a warm-up; on a GPU with an L2 cache that holds nothing of the inputs."""
        raise NotImplementedError


class _OnCpu(Arrays):
    device = "cpu"

    def samples_ms(self, call: Callable[[], Any]) -> list[float]:
        call()
        samples: list[float] = []
        while len(samples) < _CPU_SAMPLES and (len(samples) < 3 or sum(samples) < 1e3 * _CPU_SECONDS):
            begin = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - begin))
        return samples


class NumPy(_OnCpu):
    name = "numpy"
    dtype, itemsize = "float32", 4  # the 16-bit ones are slow to make here, and bfloat16 needs a package

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def normal(self, *shape: int) -> Any:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def integers(self, values: NDArray[Any]) -> Any:
        return values

    def to_numpy(self, tensor: Any) -> NDArray[np.float32]:
        return np.asarray(tensor, np.float32)


class _Torch(Arrays):
    name = "torch"
    dtype, itemsize = "bfloat16", 2

    def __init__(self) -> None:
        self._torch = _module("torch")
        if self.device == "cuda" and not self._torch.cuda.is_available():
            raise Unusable(f"torch {self._torch.__version__} finds no usable GPU")
        self._generator = self._torch.Generator(self.device).manual_seed(1)

    def normal(self, *shape: int) -> Any:
        torch = self._torch
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=self._generator)

    def integers(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values).to(self.device)

    def to_numpy(self, tensor: Any) -> NDArray[np.float32]:
        return np.asarray(tensor.float().cpu().numpy())


class TorchCpu(_Torch, _OnCpu):
    pass


class TorchCuda(_Torch):
    device = "cuda"

    def samples_ms(self, call: Callable[[], Any]) -> list[float]:
        cuda = self._torch.cuda
        flush = self._torch.empty(_L2_FLUSH_BYTES, dtype=self._torch.uint8, device=self.device)
        for _ in range(3):
            call()
        events = []
        for _ in range(_CUDA_SAMPLES):
            start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]


class CuPy(Arrays):
    name = "cupy"
    device = "cuda"
    dtype, itemsize = "float16", 2  # bfloat16 would need ml_dtypes

    def __init__(self) -> None:
        self._cupy = _module("cupy")
        try:
            self._cupy.cuda.runtime.getDeviceCount()
            self._rng = self._cupy.random.default_rng(1)
        except Exception as error:  # whatever CuPy raises where it finds no driver, no device or no library
            raise Unusable(f"cupy {self._cupy.__version__} finds no usable GPU: {error}") from error

    def normal(self, *shape: int) -> Any:
        return self._rng.standard_normal(shape, dtype=np.float32).astype(np.float16)

    def integers(self, values: NDArray[Any]) -> Any:
        return self._cupy.asarray(values)

    def to_numpy(self, tensor: Any) -> NDArray[np.float32]:
        return np.asarray(self._cupy.asnumpy(tensor), np.float32)

    def samples_ms(self, call: Callable[[], Any]) -> list[float]:
        cuda = self._cupy.cuda
        flush = self._cupy.empty(_L2_FLUSH_BYTES, "uint8")
        for _ in range(3):
            call()
        events = []
        for _ in range(_CUDA_SAMPLES):
            start, stop = cuda.Event(), cuda.Event()
            flush.fill(0)
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        cuda.get_current_stream().synchronize()
        return [float(cuda.get_elapsed_time(start, stop)) for start, stop in events]


ON: dict[str, tuple[type[Arrays], ...]] = {"cuda": (TorchCuda, CuPy), "cpu": (NumPy, TorchCpu)}


def choose(device: str | None = None, framework: str | None = None) -> tuple[Arrays, list[str]]:
    """The first framework that works, GPU before CPU, and what was passed over on the way.

    Raises Unusable where nothing that was asked for works.
    """
    passed_over: list[str] = []
    for place in ("cuda", "cpu") if device is None else (device,):
        kinds = [kind for kind in ON[place] if framework in (None, kind.name)]
        if not kinds:
            passed_over.append(f"{framework} has no tensors on {place}")
            continue
        if place == "cuda" and (problem := _cuda_problem()):
            passed_over.append(problem)
            continue
        for kind in kinds:
            try:
                return kind(), passed_over
            except Unusable as problem_there:
                passed_over.append(str(problem_there))
    raise Unusable("; ".join(passed_over))


def _cuda_problem() -> str:
    """Why no CUDA tensor could be computed with here; empty if one could."""
    cuda = _C.cuda_devices()
    if not cuda["devices"]:
        return f"no CUDA device: {cuda['problem'] or 'none is installed'}"
    answer = supports("ragged_flash_attention", device="cuda:0", dtype="float16", head_dim=128, group=1)
    return "" if answer.ok else answer.reason


def _module(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise Unusable(f"{name} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:  # an installation that does not fit this machine fails in its own way
        raise Unusable(f"{name} cannot be imported: {error}") from error
