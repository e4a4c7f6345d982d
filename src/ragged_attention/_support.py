"""What runs where, and how the package was built."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _C
from ._frameworks import dtype_name
from ._host_scalars import host_int
from ._operations import check_mask_name

_MAX_THREADS = 1024


class Support(NamedTuple):
    """The answer of :func:`supports`."""

    ok: bool  #: whether a call would run
    path: str  #: "cpu", "cuda_portable", "cuda_sm90" or "none"
    reason: str  #: why this path; or why none, and the way out


def supports(op: str, *, device: Any, dtype: Any, head_dim: int, group: int, mask_str: str | None = None) -> Support:
    """Say whether an operation runs, on which path, and why, without running anything.

    Args:
        op: "ragged_flash_attention" or "qsa_sparse_attention".
        device: "cpu", "cuda", "cuda:1", a CUDA ordinal, or a torch.device.
        dtype: of q: a framework's dtype, a NumPy dtype or a string.
        head_dim: elements of one head.
        group: query heads per key/value head.
        mask_str: the mask of the ragged operation; every mask runs on every path.

    Returns:
        :class:`Support`; for CUDA, about that very device.

    Raises:
        ValueError: an unknown operation, device or mask, or a CUDA device that does not exist.
        TypeError: a dtype that no path takes.
        CudaError: the driver cannot be asked.
    """
    if mask_str is not None:
        check_mask_name(mask_str)
    cuda, index = _device(device)
    return Support(*_C.supports(op, cuda, index, dtype_name(dtype, "dtype"), head_dim, group))


def _device(device: Any) -> tuple[bool, int]:
    if type(device) is int:
        return True, device
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "cuda") and (not index or index.isdigit()):
        return kind == "cuda", int(index or 0)
    raise ValueError(f"device: expected 'cpu', 'cuda', 'cuda:N' or a CUDA ordinal, got {device!r}")


def build_info() -> dict[str, str]:
    """Version, commit, compilers and architectures of this build, and the CPU instruction set in use.

    Returns:
        Texts under the keys ``version``, ``commit``, ``compiler``, ``cuda_version``, ``cuda_architectures``,
        ``cutlass_version`` and ``cpu_isa``. Those of CUDA are empty in a build without CUDA kernels.
    """
    return _C.build_info()


def num_threads() -> int:
    """The threads of the CPU backend, the caller's own included.

    By default one for each CPU in the affinity mask, or what the environment variable
    ``RAGGED_ATTENTION_NUM_THREADS`` says, which is read at the first call.

    Raises:
        ValueError: the environment variable is no integer from 1 to 1024.
    """
    return _C.num_threads()


def set_num_threads(n: int) -> None:
    """Set the threads of the CPU backend, for calls that begin from now on. No result depends on it.

    Args:
        n: 1 to 1024; 1 runs everything on the caller's thread.

    Raises:
        ValueError: n is out of range.
        TypeError: n is no integer.
    """
    number = host_int(n, "n")
    if not 1 <= number <= _MAX_THREADS:
        raise ValueError(f"n: expected a number of threads from 1 to {_MAX_THREADS}, got {number}")
    _C.set_num_threads(number)
