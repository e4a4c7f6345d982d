"""Times of GPU calls: the L2 cache flushed before each, every sample kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

Call = Callable[[], Any]
Wait = Callable[[Any], Any]

L2_FLUSH_BYTES = 256 * 2**20
WARM_UP = 3
ROUND_MS = 1500.0
_FLUSH_KERNEL = "bitwise_not"  # in the name of the kernel that flushes under the profiler, and in no contestant's


class Timer:
    """On the CPU (and for the tests of the benchmarks) it reads a clock and flushes nothing."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._flush: torch.Tensor | None = None
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
        return graph.replay  # type: ignore[no-any-return, unused-ignore]

    def samples_ms(self, call: Call, count: int, wait: Wait | None = None) -> list[float]:
        """With `wait`: a call that enqueues its work on streams of its own and gives what `wait` waits for."""
        if self._flush is None:
            return [self._clocked_ms(call, wait) for _ in range(count)]
        if wait is not None:
            return self._profiled_ms(call, count, wait)
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

    def once_ms(self, call: Call, wait: Wait | None = None) -> float:
        """One call by the clock, waited for."""
        self.synchronize()
        return self._clocked_ms(call, wait)

    def host_us(self, call: Call, count: int = 100) -> float:
        """What an eager call costs the host, without waiting for the device."""
        samples = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - begin))
        self.synchronize()
        return statistics.median(samples)

    def synchronize(self) -> None:
        if self._flush is not None:
            torch.cuda.synchronize()

    def _clocked_ms(self, call: Call, wait: Wait | None) -> float:
        begin = time.perf_counter()
        result = call()
        if wait is not None:
            wait(result)
        self.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def _profiled_ms(self, call: Call, count: int, wait: Wait) -> list[float]:
        """From the start of a call's first kernel to the end of its last, as the profiler saw them on the device.

        No event of torch's can be put before the work of another framework: its streams are its own, and what its
        launch costs the host would be in the time.
        """
        assert self._flush is not None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                torch.bitwise_not(self._flush, out=self._flush)
                torch.cuda.synchronize()
                wait(call())
            torch.cuda.synchronize()
        kernels = (
            (event.name(), event.start_ns(), event.duration_ns())
            for event in profile.profiler.kineto_results.events()
            if event.device_type().name == "CUDA"
        )
        spans = spans_ms(kernels)
        if len(spans) != count:
            raise RuntimeError(f"the profiler saw {len(spans)} of {count} calls")
        return spans


def spans_ms(kernels: Iterable[tuple[str, int, int]]) -> list[float]:
    """Of (name, start, duration) in nanoseconds: the span of what lies between two flushes."""
    spans: list[tuple[int, int]] = []
    flushed = False
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        end = start + duration
        if _FLUSH_KERNEL in name:
            flushed = True
        elif flushed:
            spans.append((start, end))
            flushed = False
        elif spans:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
    return [(end - start) / 1e6 for start, end in spans]


def interleaved(
    timer: Timer,
    calls: dict[str, tuple[Call, Wait | None]],
    rounds: int,
    samples: int,
    seconds: float | None = None,
    on_round: Callable[[str, int, list[float]], None] | None = None,
) -> dict[str, list[float]]:
    """`samples` times of each call in each of `rounds` rounds: all meet the same clocks and temperature.

    Fewer of a call so slow that its round would take longer than its part of `seconds`, or than ROUND_MS.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    room_ms = ROUND_MS
    if seconds is not None:
        room_ms = min(room_ms, 1e3 * seconds / max(1, rounds * len(calls)))
    for number in range(1, rounds + 1):
        for name, (call, wait) in calls.items():
            begin = time.perf_counter()
            first = timer.samples_ms(call, 1, wait) if wait is None else []
            cost = 1e3 * (time.perf_counter() - begin) if first else statistics.median(times[name] or [1.0])
            count = max(2, min(samples, int(room_ms / max(cost, 1e-3)))) - len(first)
            times[name] += first + timer.samples_ms(call, count, wait)
            if on_round is not None:
                on_round(name, number, times[name])
    return times
