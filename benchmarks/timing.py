"""Times of GPU calls: CUDA events, the L2 cache flushed before each, every sample kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

L2_FLUSH_BYTES = 256 * 2**20
WARM_UP = 3
ROUND_MS = 1500


class Timer:
    """On the CPU (for the tests of the benchmarks) it reads a clock and flushes nothing."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._flush = None
        if self.device.type == "cuda":
            self._flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def prepare(self, call: Call, by_graph: bool) -> Call:
        """Warm `call` up; with `by_graph`, give the replay of a CUDA graph that holds one call.

        Short calls are timed so: on the host, launching one takes longer than running it.
        """
        if self._flush is None:
            call()
            return call
        if not by_graph:
            for _ in range(WARM_UP):
                call()
            torch.cuda.synchronize()
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def samples_ms(self, call: Call, count: int) -> list[float]:
        if self._flush is None:
            return [self._clocked_ms(call) for _ in range(count)]
        events = []
        for _ in range(count):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()  # long enough for the host to enqueue what follows
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def host_us(self, call: Call, count: int = 100) -> float:
        """What an eager call costs the host, without waiting for the device."""
        samples = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - begin))
        self._synchronize()
        return statistics.median(samples)

    def _clocked_ms(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)

    def _synchronize(self) -> None:
        if self._flush is not None:
            torch.cuda.synchronize()


def interleaved(timer: Timer, calls: dict[str, Call], rounds: int, samples: int) -> dict[str, list[float]]:
    """`samples` times of each call in each of `rounds` rounds: all meet the same clocks and temperature.

    Fewer of a call so slow that a round of it would take longer than ROUND_MS.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            first = timer.samples_ms(call, 1)
            affordable = int(ROUND_MS / max(first[0], 1e-3))
            times[name] += first + timer.samples_ms(call, min(samples - 1, affordable))
    return times
