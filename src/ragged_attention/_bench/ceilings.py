"""What this device reaches on the simplest work, measured in the same run as the cases."""

from __future__ import annotations

import statistics
import sys

import torch

from .timing import Call, Timer

ROW = 128  # int32: 512 bytes, a head of 256 16-bit elements
SAMPLES, FEWEST = 20, 3
SECONDS = 1.0  # of each rate: slow calls are called less often

GPU_MATMUL, GPU_COPY = 8192, 2**31
# Far more than a cache holds, and less than the memory of a small machine.
CPU_COPY = 2**29
# Twice as large as long as a call is short: the rate of a few cores is reached soon, that of many late, and a dtype
# that the CPU has no instructions for must not take minutes.
CPU_MATMUL = (512, 1024, 2048, 4096, 8192)
CPU_MATMUL_SECONDS = 0.05


def measure(timer: Timer) -> dict[str, float | None]:
    """TFLOP/s of a matrix product, TB/s (read and write) of a copy, TB/s of a gather out of L2.

    On a GPU the product is of bfloat16. On the CPU there is one of float32 too, which is the floor's in that dtype;
    16-bit operands can be multiplied as either, and `matmul_tflops` is the faster. torch's threads compute it.
    """
    if timer.device.type == "cuda":
        return {
            "matmul_tflops": _matmul_tflops(timer, GPU_MATMUL, torch.bfloat16),
            "copy_tbps": _copy_tbps(timer, GPU_COPY),
            "gather_tbps": _gather_tbps(timer, 32768, 4096),
        }
    float32, bfloat16 = (_cpu_matmul_tflops(timer, dtype) for dtype in (torch.float32, torch.bfloat16))
    return {
        "matmul_tflops": max(float32, bfloat16),
        "matmul_float32_tflops": float32,
        "copy_tbps": _copy_tbps(timer, CPU_COPY),
        "gather_tbps": None,
    }


def _median_seconds(timer: Timer, call: Call) -> float:
    prepared = timer.prepare(call, by_graph=False)
    times = timer.samples_ms(prepared, FEWEST)
    room = int(1e3 * SECONDS / max(statistics.median(times), 1e-3))
    times += timer.samples_ms(prepared, max(0, min(SAMPLES, room) - FEWEST))
    return statistics.median(times) / 1e3


def _matmul_tflops(timer: Timer, n: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn((n, n), device=timer.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median_seconds(timer, lambda: torch.matmul(a, b, out=out)) / 1e12


def _cpu_matmul_tflops(timer: Timer, dtype: torch.dtype) -> float:
    """The best of the sizes: the largest need not be."""
    best = 0.0
    for n in CPU_MATMUL:
        rate = _matmul_tflops(timer, n, dtype)
        best = max(best, rate)
        if 2 * n**3 / (rate * 1e12) > CPU_MATMUL_SECONDS:
            break
    return best


def _copy_tbps(timer: Timer, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=timer.device)  # zeros may all be one page of the system's
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(timer, lambda: target.copy_(source)) / 1e12


def _gather_tbps(timer: Timer, rows: int, lists: int) -> float | None:
    """None where there is no Triton. Not a bound: a reference rate of a simple kernel."""
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
