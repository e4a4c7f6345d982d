"""Every argument of both operations with every kind of bad value, as one table on every framework and device.

Of each row: an error that names the argument, no output changed, and the next call right. test_validation.py has the
words of the messages; here stands that there is no gap.
"""

from __future__ import annotations

import array
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from _cases import QSA, RAGGED, Case, packed_strides, qsa_case, ragged_case
from _checks import assert_all_same_bits, kernel_names
from _frameworks import Array, Framework, OnlyDlpack, Strided, first_framework, has_gpu

import ragged_attention

ROWS, Q_HEADS, KV_HEADS, DIM = 7, 6, 2, 16
PAGES, LAYERS, PAGE, WIDTH = 9, 3, 4, 5

FLOATS = {"q", "k", "v", "kv_blocks"}
SELECTION = {"token_indices", "counts"}  # int32 alone; the other integers come in three widths
OUTPUTS = {"out": 3, "lse": 2}  # and how many of q's dimensions they have
INNER_CONTIGUOUS = {"q", "k", "v", "kv_blocks", "token_indices", "out"}

KINDS = ("missing", "wrong type", "rank", "dtype", "device", "shape", "stride", "alignment", "overlap", "read-only")
KINDS += ("requires grad", "value", "no DLPack")

REFUSALS = (ValueError, TypeError, NotImplementedError)


def base(rng: np.random.Generator, op: str) -> Case:
    if op == RAGGED:
        return ragged_case(rng, [4, 3], heads=(Q_HEADS, KV_HEADS), head_dim=DIM)
    return qsa_case(
        rng, [4, 3], [6, 2], heads=(Q_HEADS, KV_HEADS), head_dim=DIM, page_size=PAGE, num_layers=LAYERS, width=WIDTH
    )


def parameters_of(op: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(ragged_attention, op)).parameters)


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    what: str
    value: Any  # or MISSING
    names: tuple[str, ...]  # one of which the message has to name
    may_be_right: bool = False  # refused, or taken with the right result
    with_: tuple[tuple[str, Any], ...] = ()  # what comes with it


MISSING = object()


class Table:
    """The rows of an operation on a framework."""

    def __init__(self, framework: Framework, case: Case) -> None:
        self.framework, self.case = framework, case
        self.tensors = {**case.tensors(framework)}
        self.buffers = {name: framework.full(case.out_shape[:rank], "float32", 7.0) for name, rank in OUTPUTS.items()}

    def __iter__(self) -> Iterator[Row]:
        for name, parameter in parameters_of(self.case.op).items():
            if parameter.default is parameter.empty:
                yield Row(name, "missing", "left out", MISSING, (name,))
            if name in self.tensors or name in OUTPUTS:
                yield from self.tensor_rows(name)
            else:
                yield from self.scalar_rows(name)

    # Tensors

    def source(self, name: str) -> Array:
        if name in OUTPUTS:
            return np.full(self.case.out_shape[: OUTPUTS[name]], 7.0, np.float32)
        return self.case.array(name)

    def tensor_rows(self, name: str) -> Iterator[Row]:
        source = self.source(name)
        tensor = self.framework.tensor

        def row(kind: str, what: str, value: Any, *others: str, **more: Any) -> Row:
            return Row(name, kind, what, value, (name, *others), **more)

        for value in no_tensors(required=name not in OUTPUTS):
            yield row("wrong type", f"{type(value).__name__}", value)
        for lie in LIES:
            yield row("no DLPack", repr(lie), lie)
        yield row("rank", "one more", tensor(source[None]))
        yield row("rank", "one less", tensor(source[0]))
        yield row("rank", "none", tensor(np.zeros((), source.dtype)))
        yield row("rank", "nine", tensor(np.zeros((1,) * 9, source.dtype)))
        for dtype in bad_dtypes(name):
            yield row("dtype", dtype, tensor(np.zeros(source.shape, dtype)), *self.partners(name))
        any_length = self.case.op == RAGGED and name == "input_row_offsets"  # but 0
        for what, shape in [("empty", (0,))] if any_length else bad_shapes(name, source.shape):
            yield row("shape", what, tensor(np.zeros(shape, source.dtype)), *self.partners(name))
        if name in INNER_CONTIGUOUS:
            doubled = Strided(np.zeros(2 * source.size, source.dtype), source.shape, doubled_strides(source.shape))
            yield row("stride", "every other element", tensor(doubled))
            flat = (*packed_strides(source.shape)[:-1], 0)
            yield row("stride", "innermost 0", tensor(Strided(np.zeros(source.size, source.dtype), source.shape, flat)))
        if name in OUTPUTS:
            for axis in range(source.ndim):
                strides = packed_strides(source.shape)
                strides[axis] = 0
                view = Strided(source.ravel(), source.shape, tuple(strides))
                yield row("stride", f"0 in dimension {axis}", tensor(view))
        yield from self.device_rows(row, source)
        if self.framework.name == "numpy":
            yield row("alignment", "an odd address", at_an_odd_address(source), may_be_right=True)
        if name in OUTPUTS:
            yield from self.overlap_rows(row, source)
            if self.framework.name == "numpy":
                read_only = source.copy()
                read_only.flags.writeable = False
                yield row("read-only", "NumPy's flag", read_only)
                if name == "out":
                    yield row("read-only", "through DLPack alone", OnlyDlpack(read_only))
        if self.framework.name == "torch" and source.dtype.kind == "f":
            yield row("requires grad", "a leaf", tensor(source).requires_grad_(), "grad")
            yield row("requires grad", "derived", tensor(source).requires_grad_() * 1, "grad")

    def partners(self, name: str) -> tuple[str, ...]:
        """What a message may name instead where two disagree: q decides shapes, and so do lengths and pages."""
        deciding = {"q": (*FLOATS, *OUTPUTS, "head_dim", *SELECTION), "k": ("v", "q"), "v": ("k",)}
        deciding |= {"kv_blocks": ("q", "page_size", "num_layers", "num_kv_heads", "head_dim")}
        deciding |= {"input_row_offsets": ("cache_lengths", "kv_lookup_table"), "out": ("out_dtype",)}
        return deciding.get(name, ())

    def device_rows(self, row: Any, source: Array) -> Iterator[Row]:
        if self.framework.name == "torch":
            yield row("device", "meta", self.framework.tensor(source).to("meta"))
        if not self.framework.on_cpu:
            yield row("device", "the CPU", first_framework("cpu").tensor(source), "q")
        elif has_gpu():
            yield row("device", "a GPU", first_framework("cuda").tensor(source), "q")

    def overlap_rows(self, row: Any, source: Array) -> Iterator[Row]:
        for other in (*self.tensors, *OUTPUTS):
            shared = self.source(other)
            size = max(source.size, shared.size) + 8
            buffer = self.framework.tensor(np.zeros(size, np.float32))
            whole = buffer if shared.dtype == np.float32 else buffer.view(self.framework.dtype(shared.dtype.name))
            if shared.dtype.itemsize != 4 or other == row("overlap", "", None).name:
                continue
            theirs = self.framework._view(whole, Strided(shared, shared.shape, tuple(packed_strides(shared.shape))))
            theirs[...] = self.framework.tensor(shared)
            ours = self.framework._view(
                buffer, Strided(source, source.shape, tuple(packed_strides(source.shape)), min(4, shared.size - 1))
            )
            yield row("overlap", f"with {other}", ours, other, with_=((other, theirs),))

    # Scalars

    def scalar_rows(self, name: str) -> Iterator[Row]:
        many = self.framework.full((2,), "float32", 1.0)
        others: dict[str, tuple[str, ...]] = {"local_window_size": ("mask_str",), "unroll": ("warps",)}
        others["mask_str"] = ("local_window_size",)
        for value in (*BAD_SCALARS[name](self.framework.on_cpu), many, b"bytes", object(), [1], {}, 1j):
            kind = "value" if isinstance(value, (int, float, str)) else "wrong type"
            what = "a huge integer" if isinstance(value, int) and value == HUGE[-1] else repr(value)[:40]
            yield Row(name, kind, what, value, (name, *others.get(name, ())))
        if name not in ("mask_str", "return_lse", "check_values", "out_dtype"):
            for lie in LIES:
                yield Row(name, "no DLPack", repr(lie), lie, (name,))


class Lie:
    """Says that it speaks DLPack."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __repr__(self) -> str:
        return f"{self.capsule!r} on {self.device!r}"

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


LIES = [Lie(capsule, (1, 0)) for capsule in (None, b"dltensor", 3, object(), ValueError("no"), KeyError("no"))]
LIES += [Lie(None, device) for device in (None, (1,), ("a", "b"), "cpu", (2**40, 0), (99, 0), OSError("no"))]


def no_tensors(required: bool) -> list[Any]:
    values = [[1.0, 2.0], [[[0.0]]], (1, 2), {}, "tensor", b"0123456789abcdef", bytearray(16), memoryview(bytes(16))]
    values += [array.array("f", [1.0] * 4), 3.0, 7, True, np.float32(2), np.float32, object(), np.ndarray, range(3)]
    return values + [None] * required


def bad_dtypes(name: str) -> list[str]:
    if name in FLOATS or name in OUTPUTS:
        return ["float64", "int32", "int16", "uint8", "bool", "complex64"] + ["float16"] * (name not in ("q", "out"))
    if name in SELECTION:
        return ["int64", "int16", "int8", "uint8", "float32", "bool"]
    return ["int16", "int8", "uint8", "float32", "float64", "bool"]


def bad_shapes(name: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for axis, extent in enumerate(shape):
        for other in (0, extent - 1, extent + 1, 2 * extent + 1):
            if (name, axis) in LEGAL and (other > 0 or 0 in LEGAL[name, axis]):
                continue
            if other == extent or (name in ("q", "kv_blocks") and axis == len(shape) - 1 and other == 0):
                continue
            yield f"{other} for {extent} in dimension {axis}", (*shape[:axis], other, *shape[axis + 1 :])
    if name == "kv_blocks":
        yield "heads that do not divide q's", (*shape[:4], Q_HEADS - 1, shape[5])
    if name in ("q", "kv_blocks"):
        yield "head_dim 0", (*shape[:-1], 0)


# Dimensions that may have any size, and whether 0 is one.
LEGAL: dict[tuple[str, int], tuple[int, ...]] = {
    ("kv_blocks", 0): (0,),  # pages
    ("kv_blocks", 2): (),  # layers; that there is layer 1 is layer_idx's business
    ("kv_blocks", 3): (),  # page_size
    ("kv_blocks", 4): (),  # heads; that they divide q's is below
    ("kv_lookup_table", 1): (0,),  # max_pages
    ("token_indices", 1): (0,),  # selection_width
}


def doubled_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * stride for stride in packed_strides(shape))


def at_an_odd_address(source: Array) -> Array:
    buffer = np.zeros(source.nbytes + 1, np.uint8)
    view = buffer[1:].view(source.dtype).reshape(source.shape)
    view[...] = source
    return view


NOT_INTEGERS = (None, "1", 1.5, float("nan"), np.float64(2))
HUGE = (2**63, -(2**63) - 1, 2**64, 2**200, 10**5000)
PAGE_ELEMENTS = 2 * LAYERS * PAGE * KV_HEADS * DIM


def window_values(_: bool) -> tuple[Any, ...]:
    return (*NOT_INTEGERS, *HUGE, 0, -2, 1, 5, 2**31, 2**62, -(2**63))  # under the causal mask: -1 alone


BAD_SCALARS: dict[str, Any] = {
    "q_max_seq_len": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, True),
    "max_prompt_length": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, True),
    "max_cache_length": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, True),
    "mask_str": lambda cpu: (
        None,
        "",
        "full",
        "Causal",
        "causal ",
        "c" * 10_000,
        "chunked",
        "sliding_window_causal",
        0,
    ),
    "local_window_size": window_values,
    "scale": lambda cpu: (float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400, "0.5", True),
    "layer_idx": lambda cpu: (*NOT_INTEGERS, *HUGE, -1, LAYERS, 2**31, 2**32 + 1, 2**62, -(2**63), True),
    "page_stride": lambda cpu: (*NOT_INTEGERS, *HUGE, 0, 1, -2, PAGE_ELEMENTS - 1, -(2**63), 2**62, 2**63 - 1),
    "group": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, 0, -3, 2, 4, 6, 2**31, 2**32 + 3),
    "warps": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, 0, -1, 3, 1000, 2**32 + 4),
    "unroll": lambda cpu: (*NOT_INTEGERS[1:], *HUGE, 0, -1, 3, 1000, 2**32 + 4),
    "out_dtype": lambda cpu: ("int32", "float64", "float33", "", "f" * 10_000, np.float64, np.int8, int, 3, 2.5),
    "return_lse": lambda cpu: (None, 2, -1, 1.0, "yes", ""),
    "check_values": lambda cpu: (None, 2, -1, 1.0, "yes", ""),
    "stream": lambda cpu: (0, 1, "default", 1.5, *HUGE) if cpu else ("default", 1.5, -1, *HUGE),
}


# The tests


@pytest.fixture(params=[RAGGED, QSA])
def table(request: pytest.FixtureRequest, framework: Framework, rng: np.random.Generator) -> Table:
    return Table(framework, base(rng, request.param))


def refusal(table: Table, row: Row) -> Exception | None:
    given = {**table.tensors, **table.case.parameters, **table.buffers, **dict(row.with_), row.name: row.value}
    if row.name == "out_dtype":
        del given["out"]  # which would say the dtype
    if row.value is MISSING:
        del given[row.name]
    try:
        getattr(ragged_attention, table.case.op)(**given)
    except REFUSALS as error:
        return error
    return None


def test_every_argument_with_every_kind_of_bad_value(table, record_property):
    framework, case = table.framework, table.case
    expected = case.run(framework)
    problems, rows = [], 0
    for row in table:
        rows += 1
        error = refusal(table, row)
        what = f"{row.name}, {row.kind} {row.what}"
        if error is None and not row.may_be_right:
            problems.append(f"{what}: accepted")
        if error is not None and not any(re.search(rf"\b{name}\b", str(error)) for name in row.names):
            problems.append(f"{what}: names none of {row.names}: {error}")
        if error is not None and len(str(error)) > 600:
            problems.append(f"{what}: a message of {len(str(error))} characters")
        for name, buffer in table.buffers.items():
            if error is not None and not np.all(framework.numpy(buffer) == 7):
                problems.append(f"{what}: {name} was written")
            buffer[...] = 7.0
        results = case.call(framework, **table.tensors, return_lse=True)
        assert_all_same_bits(map(framework.numpy, results), expected, f"the call after {what}")
    assert not problems, f"{len(problems)} of {rows} rows wrong:\n" + "\n".join(problems)
    record_property("bad_values", rows)


def test_the_table_has_every_argument_and_kind(table):
    seen = {(row.name, row.kind) for row in table}
    arguments = parameters_of(table.case.op)
    assert {name for name, _ in seen} == set(arguments)
    absent = set()
    if table.framework.name != "numpy":
        absent |= {"alignment", "read-only"}  # torch and CuPy cannot make such tensors
    if table.framework.name != "torch":
        absent.add("requires grad")
        if table.framework.on_cpu and not has_gpu():
            absent.add("device")
    assert {kind for _, kind in seen} == set(KINDS) - absent
    for name, parameter in arguments.items():
        kinds = {kind for row, kind in seen if row == name}
        if name in table.tensors:
            assert {"missing", "wrong type", "rank", "dtype", "shape", "no DLPack"} <= kinds, name
        elif name in OUTPUTS:
            assert {"wrong type", "rank", "dtype", "shape", "stride", "overlap", "no DLPack"} <= kinds, name
        else:
            assert {"wrong type", "value"} <= kinds, name
            assert ("missing" in kinds) == (parameter.default is parameter.empty)


def test_no_bad_value_launches_a_kernel(table):
    """By torch's profiler, over the whole table."""
    if table.framework.name != "torch" or table.framework.on_cpu:
        pytest.skip("torch's profiler sees torch's GPU")
    torch = table.framework.xp
    if not kernel_names(torch, lambda: table.case.call(table.framework, **table.tensors)):
        pytest.skip("torch's profiler sees no kernels here")
    rows = [row for row in table if not row.may_be_right]

    def refuse_all() -> None:
        for row in rows:
            refusal(table, row)

    assert kernel_names(torch, refuse_all) == set()
