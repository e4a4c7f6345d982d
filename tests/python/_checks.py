"""What counts as equal: the contract's tolerances, and bits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _frameworks import Array, bits

# Significand bits (the hidden one included) and the exponent of the smallest normal number.
_FORMATS = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}


def importing_from(folder: Path) -> dict[str, str]:
    """For the environment of a process: its modules, and still those that this one has from PYTHONPATH."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run_python(code: str, **environment: str) -> str:
    """Output of the code in a process of its own; a hang is a failure."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.strip()


def ulp(magnitude: Array, dtype: str) -> Array:
    """The spacing of `dtype`'s numbers at this magnitude."""
    digits, lowest = _FORMATS[dtype]
    exponent = np.frexp(magnitude)[1] - 1  # of 0 as well: frexp gives exponent 0, cut below
    exponent = np.where(magnitude == 0, lowest, np.maximum(exponent, lowest))
    return np.ldexp(1.0, exponent - (digits - 1))


def assert_same_positions(got: Array, expected: Array, what: str) -> None:
    for kind in (np.isnan, np.isposinf, np.isneginf):
        wrong = np.argwhere(kind(got) != kind(expected))
        assert len(wrong) == 0, (
            f"{kind.__name__} of {what} differs at {len(wrong)} of {got.size} places, first {wrong[0].tolist()}: "
            f"got {got[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
        )


def assert_matches(
    out: Array,
    lse: Array,
    exact: tuple[Array, Array],
    plain: tuple[Array, Array],
    *,
    dtypes: tuple[str, str],
    unit_normal: bool,
) -> None:
    """Hold `out` and `lse` against the float64 reference; `plain` is its low-precision version, the yardstick.

    `dtypes`: of the inputs and of the output.
    """
    out = out.astype(np.float64)
    lse = lse.astype(np.float64)
    assert_same_positions(out, exact[0], "out")
    assert_same_positions(lse, exact[1], "lse")

    finite = np.isfinite(exact[0])
    expected = exact[0][finite]
    error = np.abs(out[finite] - expected)
    if dtypes == ("float32", "float32"):
        norm, reference_norm = np.linalg.norm(error), np.linalg.norm(expected)
        assert norm <= 1e-5 * reference_norm, f"relative error of out is {norm / reference_norm:.3e}, allowed 1e-5"
    else:
        finite_plain = np.isfinite(plain[0][finite])  # rounding to the out dtype may overflow
        plain_error = np.abs(plain[0][finite] - expected)[finite_plain].max(initial=0.0)
        spacing = ulp(np.abs(expected), dtypes[1])
        _assert_below(error, 2 * plain_error + spacing, "out", f"twice the plain error ({plain_error:.3e}) and one ulp")
        if unit_normal:
            # An ulp of bfloat16 is more than 2e-2 from 4 on, where a normal value may well land.
            _assert_below(error, np.maximum(2e-2, spacing), "out", "2e-2")

    finite = np.isfinite(exact[1])
    expected = exact[1][finite]
    _assert_below(np.abs(lse[finite] - expected), 1e-4 * np.maximum(1, np.abs(expected)), "lse", "1e-4 * max(1, |lse|)")


def _assert_below(error: Array, limit: Array, what: str, rule: str) -> None:
    over = np.flatnonzero(error > limit)
    assert len(over) == 0, (
        f"error of {what} exceeds {rule} at {len(over)} of {error.size} finite places; worst: "
        f"{error[over].max():.3e} where {limit[over][error[over].argmax()]:.3e} is allowed"
    )


def assert_same_bits(got: Array, expected: Array, what: Any = "the result", other: Any = "the expected one") -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    wrong = np.argwhere(bits(np.ascontiguousarray(got)) != bits(np.ascontiguousarray(expected)))
    assert len(wrong) == 0, (
        f"{what} differs from {other} in {len(wrong)} of {got.size} elements, first at {wrong[0].tolist()}: "
        f"{got[tuple(wrong[0])]} and {expected[tuple(wrong[0])]}"
    )


def assert_all_same_bits(
    results: Any, expected: Any, what: Any = "the result", other: Any = "the expected one"
) -> None:
    """Output and LSE at once."""
    for got, want in zip(results, expected, strict=True):
        assert_same_bits(got, want, what, other)


def assert_nothing_attended(out: Array, lse: Array) -> None:
    assert np.all(out.astype(np.float64) == 0)
    assert np.all(lse == -np.inf)


def capture(torch: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph of the call, and what the capture returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # warm-up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # torch's own choice is a stream of the device that captured first
        results = call()
    return graph, results


def kernel_names(torch: Any, call: Any) -> set[str]:
    """Of this package's kernels that a call runs, by torch's profiler; nothing where it sees none."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profiler.key_averages() if "ragged_attention::" in event.key}
