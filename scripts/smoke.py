"""A quick look at an installed package, with NumPy alone: both operations against the reference, and a light import.

    python scripts/smoke.py [--expect-cuda | --expect-cpu-only]

Run it outside the source tree's `src`, so that the installed package is what is tested.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

import numpy as np

import ragged_attention as ra

FRAMEWORKS = ("torch", "cupy", "jax", "jaxlib", "tensorflow", "ml_dtypes")

# Against float64, on inputs rounded to the dtype. tests/python holds the kernels to the contract's bounds; these only
# tell a working kernel from a broken one.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3}


def check_import() -> None:
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    assert not loaded, f"importing ragged_attention imported {', '.join(loaded)}"
    installed = importlib.metadata.version("ragged-attention")
    assert ra.__version__ == installed, f"the package says {ra.__version__}, its metadata {installed}"


def check_close(name: str, got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for part, a, b in zip(("out", "lse"), got, expected, strict=True):
        a = a.astype(np.float64)
        assert np.array_equal(np.isfinite(a), np.isfinite(b)), f"{name}: {part} is finite in other places"
        finite = np.isfinite(b)
        error = np.abs(a[finite] - b[finite]).max(initial=0.0)
        bound = TOLERANCE[name.split()[1]] if part == "out" else 1e-4 * max(1.0, np.abs(b[finite]).max(initial=0.0))
        assert error <= bound, f"{name}: {part} is off by {error:.3g}, allowed {bound:.3g}"


def check_ragged(dtype: str, rng: np.random.Generator) -> None:
    q = rng.standard_normal((30, 6, 72)).astype(dtype)
    k, v = (rng.standard_normal((30, 2, 72)).astype(dtype) for _ in range(2))
    offsets = np.array([1, 1, 18, 28], np.int32)  # an empty sequence, and rows that no sequence owns
    for mask, window in (("null", -1), ("causal", -1), ("sliding_window_causal", 4), ("chunked", 5)):
        options = {"mask_str": mask, "local_window_size": window}
        got = ra.ragged_flash_attention(q, k, v, offsets, return_lse=True, **options)
        check_close(f"ragged {dtype} {mask}", got, ra.reference.ragged_flash_attention(q, k, v, offsets, **options))


def check_qsa(dtype: str, rng: np.random.Generator) -> None:
    q = rng.standard_normal((5, 12, 128)).astype(dtype)
    kv_blocks = rng.standard_normal((9, 2, 2, 16, 1, 128)).astype(dtype)
    cache_lengths = np.array([40, 3], np.uint32)
    table = rng.permutation(9)[:8].reshape(2, 4).astype(np.uint32)
    offsets = np.array([0, 3, 5], np.uint32)
    tokens = np.stack([rng.permutation(43 if row < 3 else 5)[:5] for row in range(5)]).astype(np.int32)
    tokens[0, :2] = [-1, 1000]  # not in the sequence: count as not listed
    counts = np.array([5, 0, 2, 3, 5], np.int32)
    arguments = (q, offsets, kv_blocks, cache_lengths, table, 1, tokens, counts)
    got = ra.qsa_sparse_attention(*arguments, return_lse=True)
    check_close(f"qsa {dtype}", got, ra.reference.qsa_sparse_attention(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--expect-cuda", action="store_true", help="fail unless the build has CUDA kernels")
    build.add_argument("--expect-cpu-only", action="store_true", help="fail if the build has CUDA kernels")
    options = parser.parse_args()

    check_import()
    info = ra.build_info()
    assert not (options.expect_cuda and not info["cuda_version"]), "this build has no CUDA kernels"
    assert not (options.expect_cpu_only and info["cuda_version"]), "this build has CUDA kernels"
    rng = np.random.default_rng(20240229)
    for dtype in TOLERANCE:
        check_ragged(dtype, rng)
        check_qsa(dtype, rng)
    print(
        f"smoke: Python {sys.version.split()[0]}, NumPy {np.__version__}, ragged_attention {info['version']}, "
        f"CUDA {info['cuda_version'] or 'none'}, CPU code {info['cpu_isa']}: right"
    )


if __name__ == "__main__":
    main()
