"""Inputs of the two operations as data: built in NumPy, run through any framework, compared with the reference.

Every builder poisons with NaN whatever the operation must not look at: rows that no sequence owns, tokens that no list
names, other layers, list entries past their count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _checks import assert_matches, assert_same_bits
from _frameworks import Array, Framework, Strided, numpy_dtype

import ragged_attention
from ragged_attention import reference

RAGGED = "ragged_flash_attention"
QSA = "qsa_sparse_attention"

# Hints and switches that the reference has no word for, because no result may depend on them.
_NOT_FOR_THE_REFERENCE = ("max_prompt_length", "max_cache_length", "group", "warps", "unroll")


@dataclass(frozen=True)
class Case:
    """One call: tensors by argument name, in the order of the signature, and host parameters."""

    op: str
    operands: dict[str, Array | Strided]
    parameters: dict[str, Any] = field(default_factory=dict)
    unit_normal: bool = True  # the absolute bound of the tolerances holds for such inputs only

    def array(self, name: str) -> Array:
        operand = self.operands[name]
        return operand.array if isinstance(operand, Strided) else operand

    def replace(self, **changes: Any) -> Case:
        """The same call with other tensors (arrays or Strided) or host parameters, told apart by name."""
        operands = {name: changes.pop(name, operand) for name, operand in self.operands.items()}
        unit_normal = changes.pop("unit_normal", self.unit_normal)
        return dataclasses.replace(
            self, operands=operands, parameters={**self.parameters, **changes}, unit_normal=unit_normal
        )

    @property
    def out_dtype(self) -> str:
        return str(np.dtype(self.parameters.get("out_dtype") or self.array("q").dtype).name)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.array("q").shape

    def tensors(self, framework: Framework) -> dict[str, Any]:
        return {name: framework.operand(name, operand) for name, operand in self.operands.items()}

    def call(self, framework: Framework, **extra: Any) -> Any:
        """The bare call, as a user writes it. Extra arguments may replace operands."""
        # Only what is not replaced becomes a tensor: a copy to the device would synchronise, and break a capture.
        tensors = {n: framework.operand(n, operand) for n, operand in self.operands.items() if n not in extra}
        arguments: dict[str, Any] = {**tensors, **self.parameters, **extra}
        return getattr(ragged_attention, self.op)(**arguments)

    def run(self, framework: Framework, **extra: Any) -> tuple[Array, Array]:
        """Output and LSE as NumPy arrays, from poisoned buffers of the caller and once more from allocated ones."""
        tensors = self.tensors(framework)
        out = framework.full(self.out_shape, self.out_dtype)
        lse = framework.full(self.out_shape[:2], "float32")
        given = self.call(framework, **tensors, **extra, out=out, lse=lse, return_lse=True)
        assert given[0] is out
        assert given[1] is lse
        results = framework.numpy(out), framework.numpy(lse)

        # Freed at once, so that a caching allocator hands the poisoned memory to the next call.
        framework.full(self.out_shape, self.out_dtype)
        framework.full(self.out_shape[:2], "float32")
        allocated = self.call(framework, **tensors, **extra, return_lse=True)
        for result, again in zip(results, map(framework.numpy, allocated), strict=True):
            assert again.dtype == result.dtype
            assert_same_bits(again, result, "an allocated output", "a given one")
        return results

    def reference(self, rows: Array | None = None, plain: bool = False) -> tuple[Array, Array]:
        parameters = {name: value for name, value in self.parameters.items() if name not in _NOT_FOR_THE_REFERENCE}
        if self.op == RAGGED:
            parameters.pop("q_max_seq_len", None)
        elif not plain:
            parameters.pop("out_dtype", None)
        arrays = {name: self.array(name) for name in self.operands}
        return getattr(reference, self.op)(**arrays, **parameters, rows=rows, plain=plain)  # type: ignore[no-any-return]

    def check(self, out: Array, lse: Array, rows: Array | None = None) -> None:
        """Compare with the reference; with `rows`, `out` and `lse` are those rows only."""
        assert_matches(
            out,
            lse,
            self.reference(rows),
            self.reference(rows, plain=True),
            dtypes=(self.array("q").dtype.name, self.out_dtype),
            unit_normal=self.unit_normal,
        )

    def run_and_check(self, framework: Framework, **extra: Any) -> tuple[Array, Array]:
        out, lse = self.run(framework, **extra)
        self.check(out, lse)
        return out, lse

    def alone(self, sequence: int) -> Case:
        """The call with nothing but this sequence in it."""
        begin, end = self.bounds(sequence)
        cut: dict[str, Array | Strided] = {}
        for name in self.operands:
            array = self.array(name)
            if name == "input_row_offsets":
                array = np.array([0, end - begin], array.dtype)
            elif name in ("cache_lengths", "kv_lookup_table"):
                array = array[sequence : sequence + 1]
            elif name != "kv_blocks":
                array = array[begin:end]
            cut[name] = array
        return dataclasses.replace(self, operands=cut)

    def bounds(self, sequence: int) -> tuple[int, int]:
        offsets = self.array("input_row_offsets")
        return int(offsets[sequence]), int(offsets[sequence + 1])


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
    return rng.standard_normal(tuple(shape), dtype=np.float32).astype(numpy_dtype(dtype))


def offsets_of(lengths: Sequence[int], before: int = 0, dtype: str = "int32") -> Array:
    return np.cumsum([before, *lengths]).astype(dtype)


def ragged_case(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    dtype: str = "float32",
    before: int = 0,
    after: int = 0,
    offsets_dtype: str = "int32",
    **parameters: Any,
) -> Case:
    """`before` and `after` rows belong to no sequence."""
    offsets = offsets_of(lengths, before, offsets_dtype)
    total = int(offsets[-1]) + after
    operands: dict[str, Array | Strided] = {}
    for name, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
        array = normal(rng, (total, count, head_dim), dtype)
        array[:before] = np.nan
        array[total - after :] = np.nan
        operands[name] = array
    operands["input_row_offsets"] = offsets
    return Case(RAGGED, operands, parameters, unit_normal="scale" not in parameters)


def qsa_case(
    rng: np.random.Generator,
    lengths: Sequence[int],
    cached: Sequence[int],
    *,
    heads: tuple[int, int] = (6, 1),
    head_dim: int = 64,
    dtype: str = "float32",
    page_size: int = 16,
    num_layers: int = 2,
    layer_idx: int = 1,
    width: int = 24,
    counts: Sequence[int] | None = None,
    lists: Sequence[Sequence[int]] | None = None,
    before: int = 0,
    after: int = 0,
    spare_pages: int = 3,
    integers: str = "int32",
    **parameters: Any,
) -> Case:
    """By default each row lists, in random order, as many distinct keys up to its own position as fit, or `counts`.

    `lists` names the keys of each owned row instead; a list that is longer than its row's count is cut by the count.
    """
    offsets = offsets_of(lengths, before, integers)
    total = int(offsets[-1]) + after
    batch = len(lengths)
    max_pages = max([-(-(c + n) // page_size) for c, n in zip(cached, lengths, strict=True)], default=0)
    num_pages = batch * max_pages + spare_pages
    table = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages).astype(integers)

    indices = rng.integers(-(2**31), 2**31, (total, width)).astype(np.int32)  # garbage past each count
    row_counts = rng.integers(-5, width + 5, total).astype(np.int32)  # unowned rows keep this
    row = before
    for length, prefix in zip(lengths, cached, strict=True):
        for i in range(length):
            if lists is not None:
                chosen = np.asarray(lists[row - before], dtype=np.int64)
            else:
                visible = prefix + i + 1
                wanted = width if counts is None else counts[row - before]
                chosen = rng.permutation(visible)[: min(width, max(0, wanted))]
            indices[row, : len(chosen)] = chosen
            row_counts[row] = len(chosen) if counts is None else counts[row - before]
            row += 1

    operands: dict[str, Array | Strided] = {
        "q": normal(rng, (total, heads[0], head_dim), dtype),
        "input_row_offsets": offsets,
        "kv_blocks": normal(rng, (num_pages, 2, num_layers, page_size, heads[1], head_dim), dtype),
        "cache_lengths": np.asarray(cached, integers),
        "kv_lookup_table": table,
        "token_indices": indices,
        "counts": row_counts,
    }
    operands["q"][:before] = np.nan  # type: ignore[index]
    operands["q"][total - after :] = np.nan  # type: ignore[index]
    case = Case(QSA, operands, {"layer_idx": layer_idx, **parameters}, unit_normal="scale" not in parameters)
    return case.replace(kv_blocks=poison_unlisted(case))


def listed(case: Case, row: int, sequence: int) -> list[tuple[int, int]]:
    """(page, offset in it) of what the row lists and may see; written apart from the reference, to check it too."""
    indices, counts, table = case.array("token_indices"), case.array("counts"), case.array("kv_lookup_table")
    num_pages, _, _, page_size = case.array("kv_blocks").shape[:4]
    begin, end = case.bounds(sequence)
    length = max(0, int(case.array("cache_lengths")[sequence])) + end - begin
    places = []
    for token in indices[row, : max(0, int(counts[row]))].tolist():
        if 0 <= token < length and token // page_size < table.shape[1]:
            page = int(table[sequence, token // page_size])
            if 0 <= page < num_pages:
                places.append((page, token % page_size))
    return places


def poison_unlisted(case: Case) -> Array:
    """kv_blocks with NaN in every key and value that no row lists, and in every other layer."""
    blocks = case.array("kv_blocks")
    layer = int(case.parameters["layer_idx"])
    poisoned = np.full_like(blocks, np.nan)
    for sequence in range(len(case.array("cache_lengths"))):
        for row in range(*case.bounds(sequence)):
            for page, offset in listed(case, row, sequence):
                poisoned[page, :, layer, offset] = blocks[page, :, layer, offset]
    return poisoned


# Layouts: the same values behind other strides. Each takes a contiguous array and gives a Strided with NaN in the gaps.


def _poisoned(array: Array, size: int) -> Array:
    fill = np.nan if array.dtype.kind not in "iu" else np.iinfo(array.dtype).max
    return np.full(size, fill, array.dtype)


def strided(array: Array, strides: Sequence[int], offset: int = 0, size: int | None = None) -> Strided:
    """The values of `array` at these element strides, which must not make elements collide."""
    reach = [stride * (extent - 1) for stride, extent in zip(strides, array.shape, strict=True)]
    offset -= sum(step for step in reach if step < 0)
    needed = offset + sum(step for step in reach if step > 0) + 1
    view = Strided(_poisoned(array, size or needed), array.shape, tuple(strides), offset)
    view.array[...] = array
    return view


def packed_strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides


def padded_rows(array: Array) -> Strided:
    first, *rest = packed_strides(array.shape)
    return strided(array, [first + 24, *rest])


def heads_outside(array: Array) -> Strided:
    """[rows, heads, head_dim] stored as [heads, rows, head_dim]."""
    rows, _, head_dim = array.shape
    return strided(array, [head_dim, rows * head_dim, 1])


def reversed_rows(array: Array) -> Strided:
    first, *rest = packed_strides(array.shape)
    return strided(array, [-first, *rest])


def off_by_one(array: Array) -> Strided:
    """A base that is aligned to nothing but its own element."""
    return strided(array, packed_strides(array.shape), offset=1)


def odd_unit_strides(array: Array) -> Strided:
    """Meaningless odd strides in the dimensions of size 1."""
    packed = packed_strides(array.shape)
    return strided(array, [7 if extent == 1 else stride for extent, stride in zip(array.shape, packed, strict=True)])


LAYOUTS = {
    layout.__name__: layout for layout in (padded_rows, heads_outside, reversed_rows, off_by_one, odd_unit_strides)
}


def packed_qkv(case: Case) -> Case:
    """q, k and v as slices of one [rows, q heads + 2 * kv heads, head_dim] tensor."""
    arrays = [case.array(name) for name in "qkv"]
    head_dim = arrays[0].shape[2]
    all_heads = sum(array.shape[1] for array in arrays)
    buffer = np.concatenate(arrays, axis=1).reshape(-1)
    views, head = {}, 0
    for name, array in zip("qkv", arrays, strict=True):
        views[name] = Strided(buffer, array.shape, (all_heads * head_dim, head_dim, 1), head * head_dim)
        head += array.shape[1]
    return case.replace(**views)
