"""What this device reaches on the simplest work, measured in the same run as the cases."""

from __future__ import annotations

import statistics
import sys

import torch

from .timing import Call, Timer

ROW = 128  # int32: 512 bytes, a head of 256 16-bit elements


def measure(timer: Timer, scale: int = 1) -> dict[str, float | None]:
    """TFLOP/s of an 8192^3 bf16 matrix product, TB/s (read and write) of a copy, TB/s of a gather out of L2.

    `scale` divides the sizes, for tests.
    """
    return {
        "matmul_tflops": _matmul_tflops(timer, 8192 // scale),
        "copy_tbps": _copy_tbps(timer, 2**31 // scale**2),
        "gather_tbps": _gather_tbps(timer, 32768 // scale, 4096 // scale),
    }


def _median_seconds(timer: Timer, call: Call, samples: int = 20) -> float:
    return statistics.median(timer.samples_ms(timer.prepare(call, by_graph=False), samples)) / 1e3


def _matmul_tflops(timer: Timer, n: int) -> float:
    a, b = (torch.randn((n, n), dtype=torch.bfloat16, device=timer.device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median_seconds(timer, lambda: torch.matmul(a, b, out=out)) / 1e12


def _copy_tbps(timer: Timer, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(timer, lambda: target.copy_(source)) / 1e12


def _gather_tbps(timer: Timer, rows: int, lists: int) -> float | None:
    """None where there is no Triton or no GPU for it. Not a bound: a reference rate of a simple kernel."""
    if timer.device.type != "cuda":
        return None
    try:
        from .gather import gather
    except ImportError:
        return None
    count = 2048
    source = torch.randint(-(2**31), 2**31, (rows, ROW), dtype=torch.int32, device=timer.device)
    indices = torch.randint(0, rows, (lists, count), dtype=torch.int32, device=timer.device)
    result = torch.empty((lists, ROW), dtype=torch.int32, device=timer.device)
    try:
        seconds = _median_seconds(timer, lambda: gather(source, indices, result))
    except Exception as error:  # a Triton that does not fit: the cases can do without this rate
        print(f"the gather cannot be measured: {error}", file=sys.stderr)
        return None
    return lists * count * ROW * 4 / seconds / 1e12
