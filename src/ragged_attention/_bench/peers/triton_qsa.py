"""A plain Triton kernel of this project (triton_kernel.py), launched as it runs fastest on the case."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from ..inputs import QsaInputs
from .contestant import Contestant, Unavailable, module, on_gpu

Launch = tuple[int, int, int, int]  # tokens at a time, splits of a list, warps, stages
FEW_ROWS: tuple[Launch, ...] = ((32, 16, 2, 2), (64, 32, 4, 2), (64, 16, 4, 2), (32, 32, 2, 3), (64, 8, 4, 3))
MANY_ROWS: tuple[Launch, ...] = ((32, 1, 1, 2), (32, 1, 2, 3), (64, 1, 4, 2), (32, 1, 4, 3))
MANY = 512  # programs without splitting the lists: from here on every SM has enough of them


def prepare(inputs: QsaInputs) -> Contestant:
    on_gpu(inputs, "the Triton kernel")
    module("triton")
    calls = contest(inputs)
    times: dict[Launch, float] = {}
    problem: Exception | None = None
    for launch, call in calls.items():
        try:
            times[launch] = _quick_ms(call)
        except Exception as error:  # a launch that does not fit this GPU
            problem = error
    if not times:
        raise Unavailable(f"no launch works: {problem}")
    best = min(times, key=lambda launch: times[launch])
    block, splits, warps, stages = best
    note = f"{block} tokens at a time, {splits} splits, {warps} warps, {stages} stages: best of {len(times)} launches"
    return Contestant(calls[best], note=note)


def contest(inputs: QsaInputs) -> dict[Launch, Callable[[], Any]]:
    import torch

    from . import triton_kernel

    case = inputs.case
    if case.head_dim & (case.head_dim - 1) or case.page_size & (case.page_size - 1):
        raise Unavailable("the Triton kernel takes head dims and pages that are powers of two")
    if case.num_q_heads // case.num_kv_heads > triton_kernel.BLOCK_HEADS:
        raise Unavailable(f"the Triton kernel takes up to {triton_kernel.BLOCK_HEADS} query heads a kv head")
    k, v = (inputs.kv_blocks[:, kv, case.layer_idx] for kv in range(2))
    sequences = inputs.sequence_of_row()
    kernel: Any = triton_kernel.attend  # not typed: Triton's arguments are not
    out = torch.empty_like(inputs.q)

    def call_of(block: int, splits: int, warps: int, stages: int) -> Callable[[], Any]:
        partial = partial_lse = out
        if splits > 1:
            partial, partial_lse = (
                torch.empty((splits, *shape), dtype=torch.float32, device=out.device)
                for shape in (out.shape, out.shape[:2])
            )

        def call() -> Any:
            kernel(
                inputs.q,
                k,
                v,
                inputs.indices,
                inputs.counts,
                inputs.table,
                sequences,
                out,
                partial,
                partial_lse,
                case.head_dim**-0.5,
                case.page_size,
                block,
                splits,
                warps,
                stages,
            )
            return out

        return call

    launches = MANY_ROWS if case.rows * case.num_kv_heads >= MANY else FEW_ROWS
    return {launch: call_of(*launch) for launch in launches}


def _quick_ms(call: Callable[[], Any]) -> float:
    import torch

    call()  # compiles
    samples: list[float] = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        samples.append(float(start.elapsed_time(stop)))
    return statistics.median(samples)
