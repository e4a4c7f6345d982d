#!/usr/bin/env python3
"""Small calls of both operations, to be run under a memory checker: every buffer exactly as large as it must be.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python scripts/sanitizer_cases.py
    python scripts/sanitizer_cases.py --kernels KERNELS.json    # which kernels of the wheel they do not run

The variable is needed: a caching allocator gives every tensor room around it and hides what the checker looks for.
Results are compared with the reference where the inputs are valid; garbage needs only to be survived. scripts/sanitize
runs them under each tool of compute-sanitizer and writes down what it found.

KERNELS.json is what `scripts/check_kernels WHEEL --names KERNELS.json` writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ragged_attention
from ragged_attention import reference

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (8, 72, 80, 128, 256)
# Where 16-bit inputs have kernels of their own on Hopper; 72 shares those of 80.
HOPPER_HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)
MASKS = (
    ("null", -1),
    ("causal", -1),
    ("sliding_window_causal", 5),
    ("sliding_window_noncausal", 5),
    ("chunked", 7),
    ("chunked_causal", 7),
)

# And where they have none: one for each portable kernel.
PORTABLE_HEAD_DIMS = (40, 88, 120, 136, 200)

# More rows than Hopper's short kernels take of a sequence (sm90/config.h): up to D 128, and above; and QSA's.
LONG = (260, 1030)
QSA_HOPPER_HEAD_DIMS = (64, 128, 256)
LONG_QSA = 131
DECODED = (3, 20, 40, 100)  # how many CTAs share a row depends on how many rows there are, of 132 multiprocessors

# Partial tiles of every size that a kernel may use, an empty sequence, and rows that no sequence owns at both ends.
LENGTHS = (1, 0, 63, 65, 130, 7)
BEFORE, AFTER = 2, 3

PAGE_SIZE, PAGES, SPARE_PAGES = 16, 9, 2
WIDTH = 51


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-reference", action="store_true", help="only run; compare nothing")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="every Nth case, from the Ith on")
    parser.add_argument("--seconds", type=float, help="start no case after so many")
    parser.add_argument(
        "--kernels", type=Path, metavar="FILE.json", help="fail where a kernel of this list was not run"
    )
    arguments = parser.parse_args()
    cases = Cases(arguments.device, compare=not arguments.no_reference)
    number, of = arguments.shard
    chosen = list(cases.list())[number - 1 :: of]
    if arguments.kernels is not None:
        return missing_kernels(chosen, json.loads(arguments.kernels.read_text(encoding="utf-8")))
    began = time.monotonic()
    wrong = count = 0
    for name, run in chosen:
        if arguments.seconds is not None and time.monotonic() - began > arguments.seconds:
            break
        error = run()
        count += 1
        wrong += error is not None
        print(f"{count:3} {name}: {error or 'ok'}", flush=True)
    print(f"{count} of {len(chosen)} cases, {wrong} wrong")
    return 1 if wrong else 0


def shard(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text}")
    return number, of


def missing_kernels(cases: list[tuple[str, Run]], names: list[str]) -> int:
    """By torch's profiler: the names of the kernels that the cases run, held against those that were built."""
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _, run in cases:
            run()
        torch.cuda.synchronize()
    run_names = {short(event.key) for event in profiler.key_averages()}
    missing = sorted(set(names) - run_names)
    print(f"{len(names) - len(missing)} of {len(names)} kernels run by {len(cases)} cases")
    for name in missing:
        print(f"  not run: {name}")
    return 1 if missing else 0


def short(name: str) -> str:
    """A demangled name as check_kernels has it."""
    for noise in ("ragged_attention::", "(anonymous namespace)::", "void "):
        name = name.replace(noise, "")
    return name


Run = Callable[[], "str | None"]  # what is wrong, if anything


class Cases:
    def __init__(self, device: str, compare: bool) -> None:
        self.device = device
        self.compare = compare
        self.rng = np.random.default_rng(1)

    def list(self) -> Iterator[tuple[str, Run]]:
        """Every kernel at least once. Each case draws its own numbers: a part of them runs as the whole does."""
        for number, (name, method, arguments, options) in enumerate(self.table()):

            def run(
                number: int = number, method: Any = method, arguments: Any = arguments, options: Any = options
            ) -> str | None:
                self.rng = np.random.default_rng(number)
                return method(*arguments, **options)  # type: ignore[no-any-return]

            yield name, run

    def table(self) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
        """Name, method, its arguments and options."""
        for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
            # Every mask with the head dims that have kernels of their own, two of them with the rest.
            masks = MASKS if head_dim in (80, 128) else (MASKS[0], MASKS[2])
            for mask, window in masks:
                yield f"ragged {dtype} D {head_dim} {mask}", self.ragged, (dtype, head_dim, mask, window), {}
            for heads in ((24, 2), (3, 3)):
                yield f"qsa {dtype} D {head_dim} heads {heads[0]}/{heads[1]}", self.qsa, (dtype, head_dim, heads), {}
        for dtype, head_dim in itertools.product(DTYPES[1:], HOPPER_HEAD_DIMS):
            # Tiny sequences (up to 16 rows), the short and the long kernel in one call, each with as few heads as show
            # that they are told apart.
            lengths = (LONG[head_dim > 128], 16, 17, 0, 130, 1)
            for mask, window in (MASKS[1], ("sliding_window_noncausal", 40)):
                yield (
                    f"ragged {dtype} D {head_dim} {mask}, long and short",
                    self.ragged,
                    (dtype, head_dim, mask, window, lengths),
                    {"heads": (2, 1)},
                )
        for dtype, head_dim in itertools.product(DTYPES[1:], QSA_HOPPER_HEAD_DIMS):
            # A cluster of CTAs for each group of rows, and one CTA; plans, and lists as they stand.
            for twice in (False, True):
                yield (
                    f"qsa {dtype} D {head_dim}, long and short{', tokens listed twice' * twice}",
                    self.qsa,
                    (dtype, head_dim, (12, 1)),
                    {"rows": (1, 6, 0, LONG_QSA), "twice": twice},
                )
            # Sequences of one row and of two, few and many: clusters of every size.
            for count, new in (*((count, 1) for count in DECODED), (3, 2), (100, 2)):
                yield (
                    f"qsa {dtype} D {head_dim}, {count} sequences of {new}",
                    self.qsa,
                    (dtype, head_dim, (12, 1)),
                    {"rows": (new,) * count},
                )
        for dtype, head_dim in itertools.product(DTYPES[1:], PORTABLE_HEAD_DIMS):
            yield f"ragged {dtype} D {head_dim}", self.ragged, (dtype, head_dim, *MASKS[1]), {}
            yield f"qsa {dtype} D {head_dim}", self.qsa, (dtype, head_dim, (12, 1)), {}
        for dtype, (warps, unroll) in itertools.product(DTYPES[1:], ((1, 16), (2, 64), (8, 16), (4, 32))):
            forced = {"warps": warps, "unroll": unroll}
            yield f"qsa {dtype} D 128 {forced}", self.qsa, (dtype, 128, (20, 1)), {"forced": forced}
        for dtype, head_dim in itertools.product(DTYPES[1:], (64, 128, 256)):  # TMA does not take these
            yield (
                f"ragged {dtype} D {head_dim} off by one",
                self.ragged,
                (dtype, head_dim, *MASKS[1]),
                {"off_by_one": True},
            )
            yield f"qsa {dtype} D {head_dim} off by one", self.qsa, (dtype, head_dim, (6, 1)), {"off_by_one": True}
        for dtype in DTYPES[1:]:
            yield f"ragged {dtype} many sequences", self.many_sequences, (dtype,), {}
        for dtype in DTYPES:
            yield f"{dtype} with check_values", self.checked, (dtype,), {}
            for integers in ("int32", "uint32", "int64"):
                for kind in ("random", "negative", "descending", "past the end"):
                    for head_dim in (64,) if dtype == "float32" else (120, 128):  # portable, and Hopper's own
                        yield (
                            f"ragged {dtype} D {head_dim} {integers} offsets {kind}",
                            self.garbage_offsets,
                            (dtype, head_dim, kind, integers),
                            {},
                        )
                for kind in ("indices", "counts", "table", "lengths", "offsets", "everything"):
                    if integers != "int32" and kind in ("indices", "counts"):
                        continue
                    for head_dim in (256,) if dtype == "float32" else (200, 256):
                        yield (
                            f"qsa {dtype} D {head_dim} garbage in {kind}, {integers}",
                            self.garbage_qsa,
                            (dtype, head_dim, kind, integers),
                            {},
                        )

    def tensor(self, array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        # Converted before it is copied: torch's kernels would be checked too, and take their time.
        return (tensor if dtype is None else tensor.to(getattr(torch, dtype))).to(self.device)

    def normal(self, dtype: str, *shape: int) -> torch.Tensor:
        return self.tensor(self.rng.standard_normal(shape, dtype=np.float32), dtype)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def verdict(self, results: tuple[torch.Tensor, torch.Tensor], expected: Any, dtype: str) -> str | None:
        self.synchronize()
        if not self.compare:
            return None
        for what, got, wanted in zip(("out", "lse"), results, expected, strict=True):
            limit = 1e-4 if what == "lse" or dtype == "float32" else 3e-2
            got = got.cpu().double().numpy()
            same = got == wanted  # also -inf
            with np.errstate(invalid="ignore"):
                close = np.abs(got - wanted) <= limit * np.maximum(1, np.abs(wanted))
            if not np.all(same | close):
                return f"{what} is wrong at {int(np.sum(~(same | close)))} of {got.size} places"
        return None

    def ragged_operands(
        self,
        dtype: str,
        head_dim: int,
        lengths: Sequence[int] = LENGTHS,
        heads: tuple[int, int] = (4, 2),
        off_by_one: bool = False,
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        offsets = np.cumsum([BEFORE, *lengths]).astype(np.int32)
        total = int(offsets[-1]) + AFTER
        tensors = []
        for count in (heads[0], heads[1], heads[1]):
            size = total * count * head_dim
            # One element more in front of it, none behind.
            values = self.normal(dtype, size + off_by_one)[int(off_by_one) :]
            tensors.append(values.view(total, count, head_dim))
        return tensors, offsets

    def ragged(self, dtype: str, head_dim: int, mask: str, window: int, *geometry: Any, **options: Any) -> str | None:
        tensors, offsets = self.ragged_operands(dtype, head_dim, *geometry, **options)
        results = ragged_attention.ragged_flash_attention(
            *tensors, self.tensor(offsets), mask_str=mask, local_window_size=window, return_lse=True
        )
        return self.verdict(results, self.sampled_ragged(tensors, offsets, mask, window, results), dtype)

    def many_sequences(self, dtype: str) -> str | None:
        """So many that the short kernel takes several heads at once and, where they fit, keeps their keys."""
        lengths = np.zeros(2500, np.int64)
        lengths[::250] = (17, 5, 64, 100, 128, 130, 1, 20, 65, 16)
        return self.ragged(dtype, 64, *MASKS[0], lengths=lengths.tolist(), heads=(16, 2))

    def sampled_ragged(
        self, tensors: list[torch.Tensor], offsets: np.ndarray, mask: str, window: int, results: Any
    ) -> Any:
        """The reference on some rows; the others are taken as they are, so that only the sampled ones can differ."""
        if not self.compare:
            return None
        rows = np.unique([0, *offsets[:-1], *(offsets[1:] - 1), int(offsets[-1])])
        sampled = reference.ragged_flash_attention(
            *(tensor.cpu().float().numpy() for tensor in tensors),
            offsets,
            mask_str=mask,
            local_window_size=window,
            rows=rows,
        )
        expected = [result.cpu().double().numpy() for result in results]
        for whole, some in zip(expected, sampled, strict=True):
            whole[rows] = some
        return expected

    def qsa_operands(
        self,
        dtype: str,
        head_dim: int,
        heads: tuple[int, int],
        rows: Sequence[int] = (1, 6, 0, 4),
        twice: bool = False,
        off_by_one: bool = False,
    ) -> dict[str, Any]:
        new_rows = rows
        # The last of every four fills its pages to the end, but for one token.
        cached = [(100, 3, 50, PAGES * PAGE_SIZE - 1 - new)[i % 4] for i, new in enumerate(rows)]
        offsets = np.cumsum([BEFORE, *new_rows]).astype(np.int32)
        total = int(offsets[-1]) + AFTER
        num_pages = len(new_rows) * PAGES + SPARE_PAGES
        table = self.rng.permutation(num_pages)[: len(new_rows) * PAGES].reshape(len(new_rows), PAGES)
        indices = self.rng.integers(-(2**31), 2**31, (total, WIDTH)).astype(np.int32)  # garbage past the count
        counts = np.full(total, WIDTH, np.int32)
        for sequence, (new, length) in enumerate(zip(new_rows, cached, strict=True)):
            for i in range(new):
                row = int(offsets[sequence]) + i
                chosen = self.rng.permutation(length + i + 1)[:WIDTH]
                indices[row, : len(chosen)] = chosen
                counts[row] = len(chosen)
                if twice and row % 3 == 0:
                    indices[row, len(chosen) - 1] = indices[row, 0]
        return {
            "q": self.normal(dtype, total * heads[0] * head_dim + off_by_one)[int(off_by_one) :].view(
                total, heads[0], head_dim
            ),
            "input_row_offsets": offsets,
            "kv_blocks": self.normal(dtype, num_pages, 2, 2, PAGE_SIZE, heads[1], head_dim),
            "cache_lengths": np.array(cached, np.int32),
            "kv_lookup_table": table.astype(np.int32),
            "token_indices": indices,
            "counts": counts,
        }

    def call_qsa(self, operands: dict[str, Any], **more: Any) -> Any:
        tensors = {
            name: self.tensor(operand) if isinstance(operand, np.ndarray) else operand
            for name, operand in operands.items()
        }
        return ragged_attention.qsa_sparse_attention(**tensors, layer_idx=1, return_lse=True, **more)

    def qsa(
        self,
        dtype: str,
        head_dim: int,
        heads: tuple[int, int],
        forced: dict[str, int] | None = None,
        **options: Any,
    ) -> str | None:
        operands = self.qsa_operands(dtype, head_dim, heads, **options)
        results = self.call_qsa(operands, **(forced or {}) if self.device == "cuda" else {})
        expected = None
        if self.compare:
            arrays = {
                name: operand if isinstance(operand, np.ndarray) else operand.cpu().float().numpy()
                for name, operand in operands.items()
            }
            expected = reference.qsa_sparse_attention(**arrays, layer_idx=1)
        return self.verdict(results, expected, dtype)

    def checked(self, dtype: str) -> str | None:
        """check_values has kernels of its own: where there is nothing to find, and where there is."""
        tensors, offsets = self.ragged_operands(dtype, 64)
        operands = self.qsa_operands(dtype, 64, (6, 1))
        owned = np.zeros(len(operands["counts"]), bool)
        owned[operands["input_row_offsets"][0] : operands["input_row_offsets"][-1]] = True
        operands["counts"] *= owned
        found = 0
        for bad in (0, 1000):
            ends = offsets.copy()
            ends[-1] += bad
            lengths = operands["cache_lengths"] - bad
            for call in (
                lambda ends=ends: ragged_attention.ragged_flash_attention(
                    *tensors, self.tensor(ends), check_values=True
                ),
                lambda lengths=lengths: self.call_qsa({**operands, "cache_lengths": lengths}, check_values=True),
            ):
                try:
                    call()
                except ValueError:
                    found += 1
        self.synchronize()
        return None if found == 2 else f"check_values found something in {found} of 2 bad calls"

    def garbage_offsets(self, dtype: str, head_dim: int, kind: str, integers: str) -> str | None:
        tensors, offsets = self.ragged_operands(dtype, head_dim)
        total = len(tensors[0])
        garbage = {
            "random": self.random_integers(integers, offsets.shape),
            "negative": offsets - total,
            "descending": offsets[::-1],
            "past the end": offsets + total // 2,
        }[kind]
        for mask, window in (MASKS[0], MASKS[1], MASKS[2]):
            ragged_attention.ragged_flash_attention(
                *tensors,
                self.tensor(garbage.astype(integers)),
                mask_str=mask,
                local_window_size=window,
                return_lse=True,
            )
        self.synchronize()
        return None

    def garbage_qsa(self, dtype: str, head_dim: int, kind: str, integers: str) -> str | None:
        operands = self.qsa_operands(dtype, head_dim, (24, 2))
        names = {
            "indices": "token_indices",
            "counts": "counts",
            "table": "kv_lookup_table",
            "lengths": "cache_lengths",
            "offsets": "input_row_offsets",
        }
        for name in names.values() if kind == "everything" else (names[kind],):
            width = "int32" if name in ("token_indices", "counts") else integers
            operands[name] = self.random_integers(width, operands[name].shape)
        self.call_qsa(operands)
        self.synchronize()
        return None

    def random_integers(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        limits = np.iinfo(dtype)
        return self.rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


if __name__ == "__main__":
    sys.exit(main())
