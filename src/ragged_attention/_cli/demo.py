"""Run both operations on real geometry, check them against the reference, and time them."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _C
from .._operations import qsa_sparse_attention, ragged_flash_attention
from .._support import build_info, supports
from . import tables
from .agreement import Agreement, qsa_sample, ragged_sample, sample_rows
from .arrays import ON, Arrays, Unusable, choose
from .selection import WIDTH, distinct_tokens, select
from .work import Work, qsa_work, ragged_work

_PAGE_SIZE, _LAYERS, _LAYER = 128, 2, 1
_CORRELATION = 0.98  # of a block's score from row to row
_STEPS = 3  # of a case: inputs, reference, timing


@dataclass(frozen=True)
class RaggedDemo:
    title: str
    shape: str
    lengths: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mask_str: str
    by_bandwidth: bool = False

    op = "ragged_flash_attention"


@dataclass(frozen=True)
class QsaDemo:
    """A layer of Qwen3.8-Flash-Next."""

    title: str
    shape: str
    sequences: tuple[tuple[int, int], ...]  # (cached tokens, new rows)
    by_bandwidth: bool
    num_q_heads: int = 24
    num_kv_heads: int = 2
    head_dim: int = 256

    op = "qsa_sparse_attention"


Demo = RaggedDemo | QsaDemo


@dataclass(frozen=True)
class Outcome:
    demo: Demo
    path: str
    samples_ms: list[float]
    work: Work
    agreement: Agreement

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default a GPU if one can be used")
    names = sorted({kind.name for kinds in ON.values() for kind in kinds})
    parser.add_argument("--framework", choices=names, help="whose tensors to use; by default the first that works")


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    if not tables.has_rich():
        print(tables.RICH_MISSING, file=sys.stderr)
        return 2, None
    try:
        arrays, passed_over = choose(arguments.device, arguments.framework)
    except Unusable as problem:
        print(f"The demo cannot run as asked: {problem}", file=sys.stderr)
        return 2, None
    demos = demos_for(arrays)
    outcomes, failures = _run_all(demos, arrays)
    tables.show([_table(outcomes, failures, arrays, passed_over)])
    ok = not failures and all(outcome.agreement.ok for outcome in outcomes)
    return (0 if ok else 1), _as_json(outcomes, failures, arrays, passed_over, ok)


def demos_for(arrays: Arrays) -> list[Demo]:
    """The cases, sized for the device."""
    on_gpu = arrays.device == "cuda"
    roomy = on_gpu and _C.cuda_devices()["devices"][0]["memory_bytes"] > 24 * 2**30
    rng = np.random.default_rng(2)
    sequences, longest = (512, 512) if on_gpu else (16, 256)
    lengths = tuple(rng.integers(16, longest, sequences).tolist())
    prefill_rows, prefill_context = (8192, 8192) if on_gpu else (128, 4096)
    decode_rows, decode_context = (32, 32768) if roomy else (8, 8192) if on_gpu else (4, 4096)
    qsa = f"24/2 heads, D 256, {WIDTH} of"
    return [
        RaggedDemo("vision windows", "64 x 64 tokens, 16/16 heads, D 80, null", (64,) * 64, 16, 16, 80, "null"),
        RaggedDemo(
            "embedding batch",
            f"{sequences} x {min(lengths)} to {max(lengths)} tokens, 32/8 heads, D 128, causal",
            lengths,
            32,
            8,
            128,
            "causal",
        ),
        QsaDemo(
            "QSA prefill",
            f"{prefill_rows} rows, {qsa} {prefill_context} tokens",
            ((prefill_context - prefill_rows, prefill_rows),),
            by_bandwidth=False,
        ),
        QsaDemo(
            "QSA decode",
            f"{decode_rows} sequences, {qsa} {decode_context} tokens",
            ((decode_context - 1, 1),) * decode_rows,
            by_bandwidth=True,
        ),
    ]


def _run_all(demos: list[Demo], arrays: Arrays) -> tuple[list[Outcome], dict[str, str]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    outcomes: list[Outcome] = []
    failures: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=tables.console(), transient=True) as progress:
        task = progress.add_task("", total=_STEPS * len(demos))
        for index, demo in enumerate(demos):

            def step(doing: str, title: str = demo.title) -> None:
                progress.update(task, description=f"{title}: {doing}")

            try:
                outcomes.append(_run_one(demo, arrays, step, lambda: progress.advance(task)))
            except (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError) as error:
                failures[demo.title] = f"{type(error).__name__}: {error}"
            progress.update(task, completed=_STEPS * (index + 1))
    return outcomes, failures


def _run_one(demo: Demo, arrays: Arrays, step: Callable[[str], None], done: Callable[[], None]) -> Outcome:
    step("making the inputs")
    prepare = _prepare_ragged if isinstance(demo, RaggedDemo) else _prepare_qsa
    call, sample, work = prepare(demo, arrays)
    done()
    step("checking against the reference")
    out, lse = call()
    agreement = sample().compare(out, lse, arrays.dtype, arrays.to_numpy)
    done()
    step("timing")
    samples_ms = arrays.samples_ms(call)
    group = demo.num_q_heads // demo.num_kv_heads
    support = supports(demo.op, device=arrays.device, dtype=arrays.dtype, head_dim=demo.head_dim, group=group)
    return Outcome(demo, support.path, samples_ms, work, agreement)


def _prepare_ragged(demo: Any, arrays: Arrays) -> tuple[Callable[[], Any], Callable[[], Any], Work]:
    total = sum(demo.lengths)
    q = arrays.normal(total, demo.num_q_heads, demo.head_dim)
    k, v = (arrays.normal(total, demo.num_kv_heads, demo.head_dim) for _ in range(2))
    offsets = arrays.integers(np.concatenate([[0], np.cumsum(demo.lengths)]).astype(np.int32))
    longest = max(demo.lengths)

    def call() -> Any:
        return ragged_flash_attention(q, k, v, offsets, longest, mask_str=demo.mask_str, return_lse=True)

    def sample() -> Any:
        chosen = sample_rows(demo.lengths, np.random.default_rng(3))
        return ragged_sample(q, k, v, demo.lengths, chosen, arrays.to_numpy, mask_str=demo.mask_str)

    heads = (demo.num_q_heads, demo.num_kv_heads)
    return call, sample, ragged_work(demo.lengths, *heads, demo.head_dim, arrays.itemsize, demo.mask_str)


def _prepare_qsa(demo: Any, arrays: Arrays) -> tuple[Callable[[], Any], Callable[[], Any], Work]:
    rng = np.random.default_rng(4)
    rows = sum(new for _, new in demo.sequences)
    max_pages = max(-(-(cached + new) // _PAGE_SIZE) for cached, new in demo.sequences)
    num_pages = max_pages * len(demo.sequences)
    table = rng.permutation(num_pages).reshape(len(demo.sequences), max_pages).astype(np.int32)
    indices, counts = select(demo.sequences, _CORRELATION, rng)
    q = arrays.normal(rows, demo.num_q_heads, demo.head_dim)
    kv_blocks = arrays.normal(num_pages, 2, _LAYERS, _PAGE_SIZE, demo.num_kv_heads, demo.head_dim)
    offsets = np.concatenate([[0], np.cumsum([new for _, new in demo.sequences])]).astype(np.int32)
    cached = np.array([cached for cached, _ in demo.sequences], np.int32)
    operands = [arrays.integers(array) for array in (offsets, cached, table, indices, counts)]

    def call() -> Any:
        offsets, cached, table, indices, counts = operands
        return qsa_sparse_attention(q, offsets, kv_blocks, cached, table, _LAYER, indices, counts, return_lse=True)

    def sample() -> Any:
        chosen = sample_rows([new for _, new in demo.sequences], rng)
        return qsa_sample(
            q, kv_blocks, _LAYER, demo.sequences, table, indices, counts, chosen, arrays.to_numpy, np.asarray
        )

    heads = (demo.num_q_heads, demo.num_kv_heads)
    distinct = distinct_tokens(demo.sequences, indices, counts)
    return call, sample, qsa_work(rows, int(counts.sum()), distinct, *heads, demo.head_dim, arrays.itemsize)


def _table(outcomes: list[Outcome], failures: dict[str, str], arrays: Arrays, passed_over: list[str]) -> tables.Table:
    rows: list[tuple[str, ...]] = [
        (
            outcome.demo.title,
            outcome.demo.shape,
            arrays.device,
            outcome.path,
            describe_time(outcome.median_ms),
            describe_rate(outcome),
            f"{outcome.agreement.max_abs_error:.1e}",
            "✓" if outcome.agreement.ok else "✗",
        )
        for outcome in outcomes
    ]
    rows += [(title, error, arrays.device, "", "", "", "", "✗") for title, error in failures.items()]
    notes = [
        f"Time: median of up to {max((len(outcome.samples_ms) for outcome in outcomes), default=0)} calls. "
        "Error: largest against the float64 reference, on a sample of rows. Bytes: every needed operand once.",
        *(f"Not used: {reason}." for reason in passed_over),
    ]
    return tables.Table(
        f"ragged-attention {build_info()['version']} on {arrays.device_name()}, {arrays.name} tensors, {arrays.dtype}",
        ("case", "shape", "device", "path", "time", "rate", "max error", ""),
        rows,
        right=frozenset(("time", "rate", "max error")),
        note=" ".join(notes),
    )


def describe_time(ms: float) -> str:
    if ms < 1:
        return f"{1e3 * ms:.1f} us"
    return f"{ms:.2f} ms" if ms < 1e3 else f"{ms / 1e3:.2f} s"


def describe_rate(outcome: Outcome) -> str:
    amount, unit = (outcome.work.bytes, "B/s") if outcome.demo.by_bandwidth else (outcome.work.flops, "FLOP/s")
    rate = amount / (outcome.median_ms / 1e3)
    return f"{rate / 1e12:.4g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.3g} G{unit}"


def _as_json(
    outcomes: list[Outcome], failures: dict[str, str], arrays: Arrays, passed_over: list[str], ok: bool
) -> dict[str, Any]:
    cases: list[dict[str, Any]] = [
        {
            "op": outcome.demo.op,
            "case": outcome.demo.title,
            "shape": outcome.demo.shape,
            "path": outcome.path,
            "ms": outcome.median_ms,
            "samples_ms": outcome.samples_ms,
            **dataclasses.asdict(outcome.work),
            **dataclasses.asdict(outcome.agreement),
        }
        for outcome in outcomes
    ]
    cases += [{"case": title, "ok": False, "error": error} for title, error in failures.items()]
    return {
        "build": build_info(),
        "device": arrays.device,
        "device_name": arrays.device_name(),
        "framework": arrays.name,
        "dtype": arrays.dtype,
        "passed_over": passed_over,
        "ok": ok,
        "cases": cases,
    }
