"""What is refused, how, and that the message names the argument, what was given and what is accepted."""

from __future__ import annotations

import array
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _cases import QSA, RAGGED, Case, packed_strides, qsa_case, ragged_case
from _checks import assert_all_same_bits
from _frameworks import FLOAT_DTYPES, OnlyDlpack, Strided, open_framework

import ragged_attention

ROWS, Q_HEADS, KV_HEADS, DIM = 7, 6, 2, 16
PAGES, LAYERS, PAGE, WIDTH = 9, 3, 4, 5
PAGE_ELEMENTS = 2 * LAYERS * PAGE * KV_HEADS * DIM


def ragged(rng, dtype="float32"):
    return ragged_case(rng, [4, 3], heads=(Q_HEADS, KV_HEADS), head_dim=DIM, dtype=dtype)


def qsa(rng, dtype="float32"):
    return qsa_case(
        rng,
        [4, 3],
        [6, 2],
        heads=(Q_HEADS, KV_HEADS),
        head_dim=DIM,
        dtype=dtype,
        page_size=PAGE,
        num_layers=LAYERS,
        width=WIDTH,
    )


BASES = {RAGGED: ragged, QSA: qsa}
each_op = pytest.mark.parametrize("op", [RAGGED, QSA])


def signature_of(op):
    return inspect.signature(getattr(ragged_attention, op))


SIGNATURES = {
    RAGGED: "q, k, v, input_row_offsets, q_max_seq_len=None, *, mask_str='causal', local_window_size=-1, scale=None, "
    "out=None, lse=None, return_lse=False, stream=None, check_values=False",
    QSA: "q, input_row_offsets, kv_blocks, cache_lengths, kv_lookup_table, layer_idx, token_indices, counts, *, "
    "page_stride=-1, max_prompt_length=None, max_cache_length=None, scale=None, group=None, warps=None, unroll=None, "
    "out=None, out_dtype=None, lse=None, return_lse=False, stream=None, check_values=False",
}


@each_op
def test_the_signature_is_the_contracts(op):
    parts, starred = [], False
    for parameter in signature_of(op).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(parameter.name + default)
    assert ", ".join(parts) == SIGNATURES[op]


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*shape):
    return np.zeros(shape, np.int32)


def with_stride(array, strides, offset=0):
    return Strided(np.zeros(4 * array.size + 64, array.dtype), array.shape, tuple(strides), offset)


# name: (operation, arguments that replace good ones, exception, words that the message must hold).
# Arrays become tensors of the framework; everything else is passed as it is.
REFUSALS = {
    # Ranks
    "ragged q rank": (RAGGED, {"q": f32(ROWS, DIM)}, ValueError, ["q", "3", "2"]),
    "ragged k rank": (RAGGED, {"k": f32(ROWS, KV_HEADS, DIM, 1)}, ValueError, ["k", "3", "4"]),
    "ragged v rank": (RAGGED, {"v": f32(DIM)}, ValueError, ["v", "3", "1"]),
    "ragged offsets rank": (RAGGED, {"input_row_offsets": i32(3, 1)}, ValueError, ["input_row_offsets", "1", "2"]),
    "ragged offsets 0-d": (RAGGED, {"input_row_offsets": i32()}, ValueError, ["input_row_offsets", "1", "0"]),
    "ragged out rank": (RAGGED, {"out": f32(ROWS, Q_HEADS * DIM)}, ValueError, ["out", "3", "2"]),
    "ragged lse rank": (RAGGED, {"lse": f32(ROWS, Q_HEADS, 1), "return_lse": True}, ValueError, ["lse", "2", "3"]),
    "qsa q rank": (QSA, {"q": f32(ROWS, Q_HEADS, DIM, 1)}, ValueError, ["q", "3", "4"]),
    "qsa offsets rank": (QSA, {"input_row_offsets": i32(1, 3)}, ValueError, ["input_row_offsets", "1", "2"]),
    "qsa kv rank": (QSA, {"kv_blocks": f32(PAGES, 2, PAGE, KV_HEADS, DIM)}, ValueError, ["kv_blocks", "6", "5"]),
    "qsa lengths rank": (QSA, {"cache_lengths": i32(2, 1)}, ValueError, ["cache_lengths", "1", "2"]),
    "qsa table rank": (QSA, {"kv_lookup_table": i32(6)}, ValueError, ["kv_lookup_table", "2", "1"]),
    "qsa indices rank": (QSA, {"token_indices": i32(ROWS)}, ValueError, ["token_indices", "2", "1"]),
    "qsa counts rank": (QSA, {"counts": i32(ROWS, 1)}, ValueError, ["counts", "1", "2"]),
    # More dimensions than any operation has
    "ragged q rank 9": (RAGGED, {"q": f32(*[1] * 9)}, ValueError, ["q", "3", "9"]),
    # Shapes
    "ragged k rows": (RAGGED, {"k": f32(ROWS + 1, KV_HEADS, DIM)}, ValueError, ["k", "7", "8"]),
    "ragged v rows": (RAGGED, {"v": f32(ROWS - 1, KV_HEADS, DIM)}, ValueError, ["v", "7", "6"]),
    "ragged k head_dim": (RAGGED, {"k": f32(ROWS, KV_HEADS, 24)}, ValueError, ["k", "16", "24"]),
    "ragged v head_dim": (RAGGED, {"v": f32(ROWS, KV_HEADS, 8)}, ValueError, ["v", "16", "8"]),
    "ragged v heads": (RAGGED, {"v": f32(ROWS, 3, DIM)}, ValueError, ["v", "2", "3"]),
    "ragged heads": (RAGGED, {"k": f32(ROWS, 4, DIM), "v": f32(ROWS, 4, DIM)}, ValueError, ["k", "6", "4"]),
    "ragged no kv head": (RAGGED, {"k": f32(ROWS, 0, DIM), "v": f32(ROWS, 0, DIM)}, ValueError, ["k", "6", "0"]),
    "ragged no offsets": (RAGGED, {"input_row_offsets": i32(0)}, ValueError, ["input_row_offsets", "0"]),
    "ragged head_dim 0": (
        RAGGED,
        {"q": f32(ROWS, Q_HEADS, 0), "k": f32(ROWS, KV_HEADS, 0), "v": f32(ROWS, KV_HEADS, 0)},
        ValueError,
        ["head_dim", "0"],
    ),
    "ragged out shape": (RAGGED, {"out": f32(ROWS, Q_HEADS, 8)}, ValueError, ["out", "16", "8"]),
    "ragged out rows": (RAGGED, {"out": f32(ROWS + 1, Q_HEADS, DIM)}, ValueError, ["out", "7", "8"]),
    "ragged lse shape": (RAGGED, {"lse": f32(Q_HEADS, ROWS), "return_lse": True}, ValueError, ["lse", "7", "6"]),
    "qsa lengths shape": (QSA, {"cache_lengths": i32(3)}, ValueError, ["cache_lengths", "2", "3"]),
    "qsa table shape": (QSA, {"kv_lookup_table": i32(1, 4)}, ValueError, ["kv_lookup_table", "2", "1"]),
    "qsa indices shape": (QSA, {"token_indices": i32(ROWS + 1, WIDTH)}, ValueError, ["token_indices", "7", "8"]),
    "qsa counts shape": (QSA, {"counts": i32(ROWS - 1)}, ValueError, ["counts", "7", "6"]),
    "qsa kv not 2": (
        QSA,
        {"kv_blocks": f32(PAGES, 3, LAYERS, PAGE, KV_HEADS, DIM)},
        ValueError,
        ["kv_blocks", "2", "3"],
    ),
    "qsa head_dim": (
        QSA,
        {"kv_blocks": f32(PAGES, 2, LAYERS, PAGE, KV_HEADS, 8)},
        ValueError,
        ["kv_blocks", "16", "8"],
    ),
    "qsa heads": (QSA, {"kv_blocks": f32(PAGES, 2, LAYERS, PAGE, 4, DIM)}, ValueError, ["kv_blocks", "6", "4"]),
    "qsa no kv head": (QSA, {"kv_blocks": f32(PAGES, 2, LAYERS, PAGE, 0, DIM)}, ValueError, ["kv_blocks", "6", "0"]),
    "qsa page_size 0": (QSA, {"kv_blocks": f32(PAGES, 2, LAYERS, 0, KV_HEADS, DIM)}, ValueError, ["page_size", "0"]),
    "qsa num_layers 0": (QSA, {"kv_blocks": f32(PAGES, 2, 0, PAGE, KV_HEADS, DIM)}, ValueError, ["num_layers", "0"]),
    "qsa no offsets": (QSA, {"input_row_offsets": i32(0)}, ValueError, ["input_row_offsets", "0"]),
    "qsa head_dim 0": (
        QSA,
        {"q": f32(ROWS, Q_HEADS, 0), "kv_blocks": f32(PAGES, 2, LAYERS, PAGE, KV_HEADS, 0)},
        ValueError,
        ["head_dim", "0"],
    ),
    "qsa out shape": (QSA, {"out": f32(ROWS, Q_HEADS + 1, DIM)}, ValueError, ["out", "6", "7"]),
    # Head dims and group sizes
    **{
        f"ragged head_dim {dim}": (
            RAGGED,
            {"q": f32(ROWS, Q_HEADS, dim), "k": f32(ROWS, KV_HEADS, dim), "v": f32(ROWS, KV_HEADS, dim)},
            NotImplementedError,
            ["head_dim", str(dim), "8", "256"],
        )
        for dim in (1, 4, 12, 20, 250, 264, 512)
    },
    **{
        f"qsa head_dim {dim}": (
            QSA,
            {"q": f32(ROWS, Q_HEADS, dim), "kv_blocks": f32(PAGES, 2, LAYERS, PAGE, KV_HEADS, dim)},
            NotImplementedError,
            ["head_dim", str(dim), "8", "256"],
        )
        for dim in (1, 4, 12, 20, 250, 264, 512)
    },
    "qsa group": (QSA, {"group": 4}, ValueError, ["group", "4", "3"]),
    # Dtypes
    "ragged q float64": (
        RAGGED,
        {"q": f32(ROWS, Q_HEADS, DIM).astype(np.float64)},
        TypeError,
        ["q", "float64", "float32"],
    ),
    "ragged q int32": (RAGGED, {"q": i32(ROWS, Q_HEADS, DIM)}, TypeError, ["q", "int32", "float16", "bfloat16"]),
    "ragged q complex": (RAGGED, {"q": np.zeros((ROWS, Q_HEADS, DIM), np.complex64)}, TypeError, ["q", "complex64"]),
    "ragged q bool": (RAGGED, {"q": np.zeros((ROWS, Q_HEADS, DIM), bool)}, TypeError, ["q", "bool"]),
    "ragged k dtype": (
        RAGGED,
        {"k": np.zeros((ROWS, KV_HEADS, DIM), np.float16)},
        TypeError,
        ["k", "float16", "float32"],
    ),
    "ragged v dtype": (
        RAGGED,
        {"v": np.zeros((ROWS, KV_HEADS, DIM), np.float64)},
        TypeError,
        ["v", "float64", "float32"],
    ),
    "ragged offsets int16": (
        RAGGED,
        {"input_row_offsets": np.zeros(3, np.int16)},
        TypeError,
        ["input_row_offsets", "int16", "uint32", "int32", "int64"],
    ),
    "ragged offsets float": (
        RAGGED,
        {"input_row_offsets": f32(3)},
        TypeError,
        ["input_row_offsets", "float32", "int32"],
    ),
    "ragged out dtype": (RAGGED, {"out": np.zeros((ROWS, Q_HEADS, DIM), np.float16)}, TypeError, ["out", "float16"]),
    "ragged lse dtype": (
        RAGGED,
        {"lse": np.zeros((ROWS, Q_HEADS), np.float64), "return_lse": True},
        TypeError,
        ["lse", "float64", "float32"],
    ),
    "qsa kv dtype": (
        QSA,
        {"kv_blocks": np.zeros((PAGES, 2, LAYERS, PAGE, KV_HEADS, DIM), np.float16)},
        TypeError,
        ["kv_blocks", "float16", "float32"],
    ),
    **{
        f"qsa {name} {np.dtype(dtype).name}": (
            QSA,
            {name: np.zeros(shape, dtype)},
            TypeError,
            [name, np.dtype(dtype).name, accepted],
        )
        for name, shape, accepted in [
            ("input_row_offsets", (3,), "int64"),
            ("cache_lengths", (2,), "int64"),
            ("kv_lookup_table", (2, 3), "int64"),
            ("token_indices", (ROWS, WIDTH), "int32"),
            ("counts", (ROWS,), "int32"),
        ]
        for dtype in (np.int16, np.uint8, np.float32)
    },
    # int64, as topk gives, is a TypeError that says so
    "qsa token_indices int64": (
        QSA,
        {"token_indices": np.zeros((ROWS, WIDTH), np.int64)},
        TypeError,
        ["token_indices", "int32", "int64"],
    ),
    "qsa counts int64": (QSA, {"counts": np.zeros(ROWS, np.int64)}, TypeError, ["counts", "int32", "int64"]),
    "qsa token_indices uint32": (
        QSA,
        {"token_indices": np.zeros((ROWS, WIDTH), np.uint32)},
        TypeError,
        ["token_indices", "int32", "uint32"],
    ),
    "qsa out dtype": (QSA, {"out": np.zeros((ROWS, Q_HEADS, DIM), np.int32)}, TypeError, ["out", "int32", "float32"]),
    "qsa out_dtype integer": (QSA, {"out_dtype": "int32"}, TypeError, ["out_dtype", "int32", "float32"]),
    "qsa out_dtype float64": (QSA, {"out_dtype": np.float64}, TypeError, ["out_dtype", "float64", "float32"]),
    "qsa out_dtype nonsense": (QSA, {"out_dtype": "float33"}, (TypeError, ValueError), ["out_dtype", "float33"]),
    "qsa out_dtype disagrees": (
        QSA,
        {"out_dtype": "float16", "out": f32(ROWS, Q_HEADS, DIM)},
        ValueError,
        ["out_dtype", "out", "float16", "float32"],
    ),
    # Strides
    "ragged q innermost": (
        RAGGED,
        {"q": with_stride(f32(ROWS, Q_HEADS, DIM), (Q_HEADS * DIM * 2, DIM * 2, 2))},
        ValueError,
        ["q", "contiguous"],
    ),
    "ragged k innermost": (
        RAGGED,
        {"k": with_stride(f32(ROWS, KV_HEADS, DIM), (KV_HEADS * DIM, 1, KV_HEADS))},
        ValueError,
        ["k", "contiguous"],
    ),
    "ragged v innermost 0": (
        RAGGED,
        {"v": with_stride(f32(ROWS, KV_HEADS, DIM), (KV_HEADS * DIM, DIM, 0))},
        ValueError,
        ["v", "contiguous"],
    ),
    "ragged out innermost": (
        RAGGED,
        {"out": with_stride(f32(ROWS, Q_HEADS, DIM), (Q_HEADS * DIM * 2, DIM * 2, 2))},
        ValueError,
        ["out", "contiguous"],
    ),
    "qsa kv innermost": (
        QSA,
        {
            "kv_blocks": with_stride(
                f32(PAGES, 2, LAYERS, PAGE, KV_HEADS, DIM),
                [2 * step for step in packed_strides((PAGES, 2, LAYERS, PAGE, KV_HEADS, DIM))],
            )
        },
        ValueError,
        ["kv_blocks", "contiguous"],
    ),
    "qsa indices innermost": (
        QSA,
        {"token_indices": with_stride(i32(ROWS, WIDTH), (1, ROWS))},
        ValueError,
        ["token_indices", "contiguous"],
    ),
    "ragged out stride 0": (
        RAGGED,
        {"out": with_stride(f32(ROWS, Q_HEADS, DIM), (0, DIM, 1))},
        ValueError,
        ["out", "overlap"],
    ),
    "ragged out overlaps itself": (
        RAGGED,
        {"out": with_stride(f32(ROWS, Q_HEADS, DIM), (DIM, DIM, 1))},
        ValueError,
        ["out", "overlap"],
    ),
    "ragged lse stride 0": (
        RAGGED,
        {"lse": with_stride(f32(ROWS, Q_HEADS), (0, 1)), "return_lse": True},
        ValueError,
        ["lse", "overlap"],
    ),
    "qsa out stride 0": (
        QSA,
        {"out": with_stride(f32(ROWS, Q_HEADS, DIM), (Q_HEADS * DIM, 0, 1))},
        ValueError,
        ["out", "overlap"],
    ),
    # Masks and windows: any other string or window lists the six
    **{
        f"ragged mask {mask!r} {window}": (
            RAGGED,
            {"mask_str": mask, "local_window_size": window},
            ValueError,
            [str(window) if mask in SIX else mask, *SIX],
        )
        for SIX in [
            ["null", "causal", "sliding_window_causal", "sliding_window_noncausal", "chunked", "chunked_causal"]
        ]
        for mask, window in [
            ("null", 4),
            ("null", 0),
            ("causal", 128),
            ("causal", 0),
            ("causal", -2),
            ("sliding_window_causal", -1),
            ("sliding_window_causal", 0),
            ("sliding_window_noncausal", -1),
            ("sliding_window_noncausal", -5),
            ("chunked", -1),
            ("chunked", 0),
            ("chunked_causal", -1),
            ("chunked_causal", 0),
            ("full", -1),
            ("Causal", -1),
            ("", -1),
            ("causal ", -1),
            ("alibi", 3),
        ]
    },
    "ragged mask None": (RAGGED, {"mask_str": None}, (TypeError, ValueError), ["mask_str", "None"]),
    "ragged mask bytes": (RAGGED, {"mask_str": b"causal"}, (TypeError, ValueError), ["mask_str", "bytes|b'causal'"]),
    # Parameters
    **{
        f"{op} scale {value}": (op, {"scale": value}, ValueError, ["scale", str(value), "finite"])
        for op in (RAGGED, QSA)
        for value in (float("nan"), float("inf"), -float("inf"))
    },
    **{f"{op} scale str": (op, {"scale": "0.5"}, TypeError, ["scale", "str|'0.5'"]) for op in (RAGGED, QSA)},
    **{f"{op} scale list": (op, {"scale": [0.5]}, TypeError, ["scale", r"list|\[0.5\]"]) for op in (RAGGED, QSA)},
    "scale of 2 elements": (RAGGED, {"scale": ("host", np.ones(2))}, (ValueError, TypeError), ["scale", "2"]),
    "ragged window float": (
        RAGGED,
        {"mask_str": "chunked", "local_window_size": 2.5},
        TypeError,
        ["local_window_size"],
    ),
    "ragged hint str": (RAGGED, {"q_max_seq_len": "7"}, TypeError, ["q_max_seq_len", "str|'7'"]),
    "ragged hint float": (RAGGED, {"q_max_seq_len": 7.5}, TypeError, ["q_max_seq_len", "7.5"]),
    "ragged hint of 2": (
        RAGGED,
        {"q_max_seq_len": ("host", np.array([7, 7]))},
        (ValueError, TypeError),
        ["q_max_seq_len", "2"],
    ),
    "qsa layer_idx 3": (QSA, {"layer_idx": 3}, ValueError, ["layer_idx", "3"]),
    "qsa layer_idx -1": (QSA, {"layer_idx": -1}, ValueError, ["layer_idx", "-1", "3"]),
    "qsa layer_idx 2**40": (QSA, {"layer_idx": 2**40}, ValueError, ["layer_idx", str(2**40), "3"]),
    "qsa layer_idx float": (QSA, {"layer_idx": 1.0}, TypeError, ["layer_idx", "1.0"]),
    "qsa layer_idx None": (QSA, {"layer_idx": None}, TypeError, ["layer_idx", "None"]),
    **{
        f"qsa page_stride {stride}": (
            QSA,
            {"page_stride": stride},
            ValueError,
            ["page_stride", str(stride), str(PAGE_ELEMENTS), "-1"],
        )
        for stride in (0, 1, -2, PAGE_ELEMENTS - 1, -PAGE_ELEMENTS)
    },
    "qsa page_stride str": (QSA, {"page_stride": "768"}, TypeError, ["page_stride", "str|'768'"]),
    "qsa page_stride unpacked": (
        QSA,
        {
            "page_stride": 10 * PAGE_ELEMENTS,
            "kv_blocks": with_stride(
                f32(PAGES, 2, LAYERS, PAGE, KV_HEADS, DIM),
                packed_strides((PAGES, 2, LAYERS, PAGE, KV_HEADS, 2 * DIM)),
            ),
        },
        ValueError,
        ["kv_blocks", "packed", "page_stride"],
    ),
}


def test_refusals(framework, rng, refusals):
    """The whole table on each framework, in one test each: the cases are many and cost microseconds."""
    bases = {(op, dtype): BASES[op](rng, dtype) for op in BASES for dtype in ("float32",)}
    with refusals as check:
        for name, (op, changes, exception, words) in REFUSALS.items():
            arguments = {}
            for key, value in changes.items():
                if isinstance(value, tuple):  # ("host", value): an array that stays NumPy's
                    arguments[key] = value[1]
                elif isinstance(value, (np.ndarray, Strided)):
                    arguments[key] = framework.tensor(value)
                else:
                    arguments[key] = value
            check(name, lambda a=arguments, o=op: bases[o, "float32"].call(framework, **a), exception, words)


class _CollectedFailures:
    """Runs a table of refusals to its end and fails with every row that is wrong."""

    def __enter__(self):
        self.failures = []
        return self.check

    def check(self, name, call, exception, words):
        try:
            call()
        except exception as error:
            text = str(error)
            missing = [word for word in words if not re.search(rf"(?<![\w.])(?:{_pattern(word)})(?!\w)", text)]
            if missing:
                self.failures.append(f"{name}: {type(error).__name__} lacks {missing}: {text}")
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__} instead of {exception}: {error}")
        else:
            self.failures.append(f"{name}: accepted; expected {exception}")

    def __exit__(self, kind, *_):
        if kind is None:
            assert not self.failures, f"{len(self.failures)} wrong:\n" + "\n".join(self.failures)


def _pattern(word):
    return word if "|" in word else re.escape(word)


@pytest.fixture
def refusals():
    return _CollectedFailures()


TENSORS = {
    RAGGED: ["q", "k", "v", "input_row_offsets"],
    QSA: ["q", "input_row_offsets", "kv_blocks", "cache_lengths", "kv_lookup_table", "token_indices", "counts"],
}
NOT_TENSORS = [
    None,
    [1.0, 2.0],
    (1, 2),
    [[[0.0]]],
    b"0123456789abcdef",
    bytearray(16),
    memoryview(bytes(16)),
    array.array("f", [1.0] * 4),
    "tensor",
    3.0,
    7,
    np.float32(2),
    object(),
    np.ndarray,
]


def shown(value):
    return "None" if value is None else type(value).__name__


@each_op
def test_whatever_is_no_tensor_is_a_type_error_that_names_the_argument(numpy_cpu, rng, op, refusals):
    case = BASES[op](rng)
    with refusals as check:
        for name in TENSORS[op]:
            for value in NOT_TENSORS:
                check(
                    f"{name}={value!r}",
                    lambda n=name, v=value: case.call(numpy_cpu, **{n: v}),
                    TypeError,
                    [name, shown(value)],
                )
        for name in ("out", "lse"):
            for value in NOT_TENSORS[1:]:
                check(
                    f"{name}={value!r}",
                    lambda n=name, v=value: case.call(numpy_cpu, **{n: v}, return_lse=True),
                    TypeError,
                    [name, shown(value)],
                )


@each_op
def test_arrays_of_foreign_byte_order_and_odd_dtypes_are_type_errors(numpy_cpu, rng, op, refusals):
    case = BASES[op](rng)
    with refusals as check:
        for dtype in (">f4", ">f2", "O", "U1", "S4", "V2", "M8[s]", "longdouble", [("a", "f4")]):
            odd = np.zeros(case.array("q").shape, dtype)
            check(f"q {dtype}", lambda o=odd: case.call(numpy_cpu, q=o), TypeError, ["q"])
        offsets = case.array("input_row_offsets").astype(">i4")
        check("offsets >i4", lambda: case.call(numpy_cpu, input_row_offsets=offsets), TypeError, ["input_row_offsets"])


@each_op
def test_an_unaligned_base_is_right_or_refused_by_name(numpy_cpu, rng, op):
    """NumPy can put a float32 on an odd address."""
    case = BASES[op](rng)
    expected = case.run(numpy_cpu)
    for name in TENSORS[op]:
        source = case.array(name)
        odd = np.frombuffer(bytearray(b"\0" + source.tobytes()), source.dtype, offset=1).reshape(source.shape)
        try:
            results = case.call(numpy_cpu, **{name: odd}, return_lse=True)
        except ValueError as error:
            text = str(error)
        else:
            assert_all_same_bits(results, expected, f"with {name} on an odd address")
            continue
        assert re.search(rf"\b{name}\b.*align", text)


# Outputs


@each_op
def test_read_only_outputs_are_refused(numpy_cpu, rng, op):
    case = BASES[op](rng)
    for name, shape in (("out", case.out_shape), ("lse", case.out_shape[:2])):
        buffer = numpy_cpu.full(shape, "float32")
        buffer.flags.writeable = False
        with pytest.raises(ValueError, match=rf"\b{name}\b.*(read-only|writable|writeable)"):
            case.call(numpy_cpu, **{name: buffer}, return_lse=True)
        assert np.all(np.isnan(buffer))


@each_op
def test_read_only_inputs_are_accepted_and_no_input_is_written(framework, rng, op):
    case = BASES[op](rng)
    tensors = case.tensors(framework)
    if framework.name == "numpy":
        for tensor in tensors.values():
            tensor.flags.writeable = False
    expected = case.run(framework)
    results = case.call(framework, **tensors, return_lse=True)
    assert_all_same_bits(map(framework.numpy, results), expected, "read-only inputs")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(framework.numpy(tensor), case.array(name))


@each_op
def test_outputs_that_overlap_an_input_by_byte_range_are_refused(backend, rng, op, refusals):
    case = BASES[op](rng)
    size = case.array("q").size
    rows = case.array("q").shape[0]
    # Two rows of heads in turn: no element in common, but one byte range.
    interleaved = tuple(packed_strides((rows, 2, *case.out_shape[1:])))[:1] + tuple(packed_strides(case.out_shape))[1:]
    with refusals as check:
        for name in TENSORS[op]:
            source = case.array(name)
            # One buffer, long enough for either, that the input and the output both lie in.
            units = 2 * max(size, source.size) + 64
            buffer = backend.tensor(np.zeros(units, np.float32))
            if source.dtype != np.float32:
                buffer = buffer.view(backend.dtype(source.dtype.name))
            given = backend._view(buffer, Strided(source, source.shape, tuple(packed_strides(source.shape)), 8))
            given[...] = backend.tensor(source)
            floats = buffer.view(backend.dtype("float32")) if source.dtype != np.float32 else buffer
            outs = {
                "the same": Strided(source, case.out_shape, tuple(packed_strides(case.out_shape)), 8),
                "its last element": Strided(
                    source, case.out_shape, tuple(packed_strides(case.out_shape)), 8 + source.size - 1
                ),
            }
            for kind, view in outs.items():
                out = backend._view(floats, view)
                check(
                    f"out over {name}, {kind}",
                    lambda n=name, g=given, o=out: case.call(backend, **{n: g}, out=o),
                    ValueError,
                    ["out", name],
                )
            lse = backend._view(
                floats, Strided(source, case.out_shape[:2], tuple(packed_strides(case.out_shape[:2])), 8)
            )
            check(
                f"lse over {name}",
                lambda n=name, g=given, o=lse: case.call(backend, **{n: g}, lse=o, return_lse=True),
                ValueError,
                ["lse", name],
            )
        both = backend.tensor(np.zeros(2 * size, np.float32))
        q, out = (
            backend._view(both, Strided(case.array("q"), case.out_shape, interleaved, offset))
            for offset in (0, size // rows)
        )
        check("interleaved", lambda: case.call(backend, q=q, out=out), ValueError, ["out", "q"])


@each_op
def test_an_output_right_behind_an_input_in_one_buffer_is_accepted(backend, rng, op):
    case = BASES[op](rng)
    q = case.array("q")
    buffer = backend.tensor(np.concatenate([q.ravel(), np.full(q.size, np.nan, np.float32)]))
    packed = tuple(packed_strides(q.shape))
    views = [backend._view(buffer, Strided(q, q.shape, packed, offset)) for offset in (0, q.size)]
    result = case.call(backend, q=views[0], out=views[1])
    assert result is views[1]
    assert_all_same_bits([backend.numpy(result)], case.run(backend)[:1], "behind the input")


@each_op
def test_a_refused_call_writes_nothing(backend, rng, op):
    case = BASES[op](rng)
    out = backend.full(case.out_shape, "float32")
    with pytest.raises(ValueError, match="scale"):
        case.call(backend, out=out, scale=float("nan"))
    assert np.all(np.isnan(backend.numpy(out)))


# Devices and streams


@each_op
def test_an_operand_on_another_device_is_refused_with_both_devices(rng, op, refusals):
    gpu = open_framework("torch", "cuda")
    cpu = open_framework("torch", "cpu")
    case = BASES[op](rng)
    with refusals as check:
        for name in TENSORS[op]:
            here = cpu.tensor(case.array(name))
            words = [name, "cpu", "cuda:0|cuda"] if name != "q" else ["cpu", "cuda:0|cuda"]
            check(f"{name} on the CPU", lambda n=name, h=here: case.call(gpu, **{n: h}), ValueError, words)
        for name, shape in (("out", case.out_shape), ("lse", case.out_shape[:2])):
            check(
                f"{name} on the CPU",
                lambda n=name, s=shape: case.call(gpu, **{n: cpu.full(s, "float32")}, return_lse=True),
                ValueError,
                [name, "cpu", "cuda:0|cuda"],
            )


@each_op
def test_a_stream_with_cpu_tensors_is_refused(numpy_cpu, rng, op):
    with pytest.raises(ValueError, match=r"\bstream\b.*"):
        BASES[op](rng).call(numpy_cpu, stream=1)


@each_op
def test_a_stream_that_is_no_integer_is_refused(framework, rng, op):
    with pytest.raises(ValueError if framework.on_cpu else TypeError, match=r"\bstream\b"):
        BASES[op](rng).call(framework, stream="default")


# Host scalars

HOST_SCALARS = {
    RAGGED: {"q_max_seq_len": 4, "scale": 0.25},
    QSA: {
        "layer_idx": 1,
        "page_stride": PAGE_ELEMENTS,
        "scale": 0.25,
        "max_prompt_length": 4,
        "max_cache_length": 9,
        "group": 3,
    },
}


def forms_of(value):
    if isinstance(value, float):
        return [
            np.float32(value),
            np.float64(value),
            np.array([value]),
            np.array(value, np.float32),
            np.array([[value]]),
        ]
    return [
        np.int64(value),
        np.uint32(value),
        np.array([value], np.uint32),  # as the source documents have them
        np.array([value]),
        np.array(value, np.int32),
    ]


@each_op
def test_host_scalars_may_be_python_or_numpy_scalars_or_one_element_host_arrays(backend, rng, op):
    case = BASES[op](rng)
    for name, value in HOST_SCALARS[op].items():
        expected = case.run(backend, **{name: value})
        forms = forms_of(value)
        if backend.name == "torch":
            forms.append(backend.xp.tensor([value]))
        for form in forms:
            assert_all_same_bits(case.run(backend, **{name: form}), expected, f"{name}={form!r}")


@each_op
def test_a_device_array_as_a_host_scalar_is_a_type_error(rng, op, refusals):
    gpu = open_framework("torch", "cuda")
    case = BASES[op](rng)
    with refusals as check:
        for name, value in HOST_SCALARS[op].items():
            on_device = gpu.xp.tensor([value], device="cuda")
            check(name, lambda n=name, d=on_device: case.call(gpu, **{n: d}), TypeError, [name, "cuda:0|cuda|device"])


# Gradients

GRADIENTS = [(RAGGED, name) for name in ("q", "k", "v", "out")] + [(QSA, name) for name in ("q", "kv_blocks", "out")]


@pytest.mark.parametrize(("op", "name"), GRADIENTS)
def test_a_tensor_that_requires_grad_is_refused_while_grad_mode_is_on(torch_device, rng, op, name):
    torch = torch_device.xp
    case = BASES[op](rng)
    expected = case.run(torch_device)
    source = np.zeros(case.out_shape, np.float32) if name == "out" else case.array(name)
    leaf = torch_device.tensor(source).requires_grad_()
    derived = leaf * 1
    for tensor in (leaf, derived):
        with pytest.raises(NotImplementedError, match="grad"):
            case.call(torch_device, **{name: tensor})
        for accepting in (torch.no_grad, torch.inference_mode):
            with accepting():
                results = case.call(torch_device, **{name: tensor}, return_lse=True)
            assert_all_same_bits(map(torch_device.numpy, results), expected, f"under {accepting.__name__}")
    assert not case.call(torch_device, **{name: leaf.detach()}).requires_grad


@each_op
def test_tensors_made_under_inference_mode_are_accepted(torch_device, rng, op):
    case = BASES[op](rng)
    with torch_device.xp.inference_mode():
        tensors = case.tensors(torch_device)
        inside = case.call(torch_device, **tensors, return_lse=True)
    outside = case.call(torch_device, **tensors, return_lse=True)
    for results in (inside, outside):
        assert_all_same_bits(map(torch_device.numpy, results), case.run(torch_device))


# Values on the device


def changed(case, name, index, value):
    array = case.array(name).copy()
    array[index] = value
    return {name: array}


BAD_VALUES = {
    "offsets fall": (RAGGED, "input_row_offsets", 1, 8, ["input_row_offsets", "7", "1|2"]),
    "offsets past the rows": (RAGGED, "input_row_offsets", 2, 9, ["input_row_offsets", "9", "2", "7"]),
    "offsets negative": (RAGGED, "input_row_offsets", 0, -1, ["input_row_offsets", "-1", "0"]),
    "qsa offsets fall": (QSA, "input_row_offsets", 1, 8, ["input_row_offsets", "7", "1|2"]),
    "qsa offsets past the rows": (QSA, "input_row_offsets", 2, 900, ["input_row_offsets", "900", "2", "7"]),
    "counts negative": (QSA, "counts", 5, -1, ["counts", "-1", "5"]),
    "counts past the width": (QSA, "counts", 3, WIDTH + 1, ["counts", "6", "3", "5"]),
    "position negative": (QSA, "token_indices", (3, 2), -1, ["token_indices", "-1", "3", "2"]),
    "position past the end": (QSA, "token_indices", (3, 2), 10, ["token_indices", "10", "3", "2"]),
    # The place of a bad page is that of the first token on it: sequence 1 starts at row 4, and its lists at token 0.
    "page negative": (QSA, "kv_lookup_table", (1, 0), -1, ["kv_lookup_table", "-1", "4", "0"]),
    "page past the cache": (QSA, "kv_lookup_table", (1, 0), 99, ["kv_lookup_table", "99", "4", "0"]),
}


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_check_values_raises_with_the_first_bad_place(backend, rng, bad):
    op, name, index, value, words = BAD_VALUES[bad]
    case = BASES[op](rng)
    if op == QSA:  # every row lists five keys, so every bad place is one that is looked at
        case = qsa_all_listed(rng)
    broken = case.replace(**changed(case, name, index, value))
    collected = _CollectedFailures()
    with collected as check:
        check(bad, lambda: broken.call(backend, check_values=True), ValueError, words)
    broken.call(backend)  # without it: some result, and no crash
    backend.synchronize()
    assert_all_same_bits(case.run(backend, check_values=True), case.run(backend), "good values with check_values")


def qsa_all_listed(rng) -> Case:
    lists = [rng.permutation(7)[:5] for _ in range(4)] + [[0, 1, 2, 3, 4]] * 3
    return qsa_case(
        rng,
        [4, 3],
        [6, 2],
        heads=(Q_HEADS, KV_HEADS),
        head_dim=DIM,
        page_size=PAGE,
        num_layers=LAYERS,
        width=5,
        lists=lists,
    )


def test_check_values_names_a_position_past_the_page_table(backend, rng):
    case = qsa_all_listed(rng)
    table = np.ascontiguousarray(case.array("kv_lookup_table")[:, :1])  # 4 tokens of each sequence
    with pytest.raises(ValueError, match=r"token_indices.*page table"):
        case.replace(kv_lookup_table=table).call(backend, check_values=True)


def test_the_first_of_several_bad_places_is_named(backend, rng):
    case = qsa_all_listed(rng)
    indices = case.array("token_indices").copy()
    indices[2, 4], indices[5, 0], indices[5, 1] = -44, -55, -56
    with pytest.raises(ValueError, match=r"token_indices.*-44"):
        case.replace(token_indices=indices).call(backend, check_values=True)


def test_check_values_accepts_what_is_legal(backend, rng):
    """Duplicates, offsets[-1] < total, garbage past the counts and pages that nothing names."""
    ragged_case(rng, [4, 0, 3], before=2, after=2).run_and_check(backend, check_values=True)
    case = qsa_case(
        rng, [3, 1], [9, 4], lists=[[1, 1, 1], [2], [], [0]], width=8, before=1, after=2, page_size=4, spare_pages=5
    )
    counts = case.array("counts").copy()
    counts[[0, -1, -2]] = 0  # rows of no sequence
    case.replace(counts=counts).run_and_check(backend, check_values=True)


HOSTILE_OFFSETS = [
    [5, 3, 1],
    [-9, 4, 7],
    [0, 2**31 - 1, 7],
    [2**31 - 1, 0, 2**31 - 1],
    [-(2**31), 2**31 - 1, -1],
    [7, 7, 0],
    [100, 200, 300],
]


@each_op
@pytest.mark.parametrize("offsets", HOSTILE_OFFSETS, ids=str)
def test_bad_offsets_without_check_values_touch_nothing_outside_the_tensors(backend, rng, op, offsets):
    """The result is unspecified; the output lies between guards that must stay."""
    case = BASES[op](rng).replace(input_row_offsets=np.array(offsets, np.int32))
    size = int(np.prod(case.out_shape))
    buffer = backend.tensor(np.full(3 * size, 7, np.float32))
    out = backend._view(buffer, Strided(case.array("q"), case.out_shape, tuple(packed_strides(case.out_shape)), size))
    case.call(backend, out=out)
    guards = backend.numpy(buffer)
    assert np.all(guards[:size] == 7)
    assert np.all(guards[2 * size :] == 7)


# Frameworks known only by DLPack


@each_op
def test_a_framework_known_only_by_dlpack_needs_out_and_lse(framework, rng, op):
    case = BASES[op](rng)
    wrapped = {name: OnlyDlpack(tensor) for name, tensor in case.tensors(framework).items()}
    out = framework.full(case.out_shape, "float32")
    lse = framework.full(case.out_shape[:2], "float32")
    with pytest.raises(ValueError, match=r"\bout\b"):
        case.call(framework, **wrapped)
    with pytest.raises(ValueError, match=r"\blse\b"):
        case.call(framework, **wrapped, out=out, return_lse=True)
    case.call(framework, **wrapped, out=out, lse=lse, return_lse=True)
    assert_all_same_bits(map(framework.numpy, (out, lse)), case.run(framework), "through DLPack alone")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@each_op
def test_every_float_dtype_is_accepted(framework, rng, op, dtype):
    BASES[op](rng, dtype).run_and_check(framework)


def test_torch_dtypes_that_numpy_lacks_are_named(torch_device, rng):
    torch = torch_device.xp
    case = ragged(rng)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(TypeError, match=r"\bq\b.*float8"):
            case.call(torch_device, q=torch.zeros(case.out_shape, device=torch_device.device).to(dtype))


@each_op
def test_torch_tensors_without_ordinary_memory_are_refused_by_name(torch_device, rng, op, refusals):
    case = BASES[op](rng)
    with refusals as check:
        for name in TENSORS[op]:
            whole = torch_device.tensor(case.array(name))
            for kind, odd in {"meta": whole.to("meta"), "sparse": whole.to_sparse()}.items():
                check(
                    f"{name} {kind}",
                    lambda n=name, o=odd: case.call(torch_device, **{n: o}),
                    (TypeError, ValueError, NotImplementedError),
                    [name],
                )


@each_op
def test_an_lse_buffer_is_written_and_returned_without_return_lse(backend, rng, op):
    """As the docstrings have it: lse= implies return_lse."""
    case = BASES[op](rng)
    lse = backend.full(case.out_shape[:2], "float32")
    out, returned = case.call(backend, lse=lse)
    assert returned is lse
    assert_all_same_bits(map(backend.numpy, (out, lse)), case.run(backend))


class LyingDlpack:
    """Says that it speaks DLPack."""

    def __init__(self, capsule, device):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_):
        if isinstance(self.capsule, BaseException):
            raise self.capsule
        return self.capsule

    def __dlpack_device__(self):
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


def test_an_error_of_the_producer_is_told_in_short(numpy_cpu, rng):
    """Its class and words: no traceback, not of any length, whatever the text holds."""
    case = ragged(rng)
    for raised, told in (
        (ValueError("no such buffer"), "ValueError: no such buffer"),
        (KeyError(), "KeyError"),
        (RuntimeError("long " * 10_000), "RuntimeError: long long"),
        (RuntimeError("lone \ud800 surrogate"), r"RuntimeError: lone \\ud800 surrogate"),
        (Unspeakable(), "Unspeakable"),
    ):
        for name in ("k", "out"):
            out = numpy_cpu.full(case.out_shape, "float32")
            with pytest.raises(TypeError, match=rf"^{name}: .*{told}") as refusal:
                case.call(numpy_cpu, **{"out": out, name: LyingDlpack(raised, (1, 0))})
            assert "Traceback" not in str(refusal.value)
            assert len(str(refusal.value)) < 400


def test_an_interrupt_in_a_producer_is_no_refusal(numpy_cpu, rng):
    for stop in (KeyboardInterrupt, SystemExit):
        with pytest.raises(stop):
            ragged(rng).call(numpy_cpu, k=LyingDlpack(stop(), (1, 0)))


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


LIES = [
    LyingDlpack(capsule, device)
    for capsule, device in (
        (None, (1, 0)),
        (b"", (1, 0)),
        (ValueError("no"), (1, 0)),
        (None, None),
        (None, (1,)),
        (None, ("a", "b")),
        (None, "cpu"),
        (None, (2**40, 0)),
        (None, RuntimeError("no")),
    )
]


@each_op
def test_an_object_that_lies_about_dlpack_is_refused_by_name(numpy_cpu, rng, op, refusals):
    case = BASES[op](rng)
    out = {"out": numpy_cpu.full(case.out_shape, "float32")}  # of what is known by DLPack alone, none can be made
    scalars = [name for name, parameter in signature_of(op).parameters.items() if parameter.default == -1]
    with refusals as check:
        for name in (*TENSORS[op], "out", "lse", *scalars, "scale"):
            for i, lie in enumerate(LIES):
                check(
                    f"{name} {i}",
                    lambda n=name, o=lie: case.call(numpy_cpu, **{**out, n: o}),
                    (TypeError, ValueError),
                    [name],
                )


@each_op
def test_switches_and_names_of_another_type_are_refused_by_name(numpy_cpu, rng, op, refusals):
    """An array has no truth value and compares by element: neither may be what the message is about."""
    case = BASES[op](rng)
    with refusals as check:
        for odd in (f32(2), f32(1), i32(0), "yes", 2, 1.0, [True], object()):
            for name in ("return_lse", "check_values"):
                check(f"{name} {odd!r}", lambda n=name, o=odd: case.call(numpy_cpu, **{n: o}), TypeError, [name])
            if op == RAGGED:
                check(f"mask_str {odd!r}", lambda o=odd: case.call(numpy_cpu, mask_str=o), ValueError, ["mask_str"])
        for odd in (1j, np.complex64(1j), np.array([1j])):
            check(f"scale {odd!r}", lambda o=odd: case.call(numpy_cpu, scale=o), TypeError, ["scale"])


@each_op
def test_a_message_is_short_whatever_was_given(framework, rng, op):
    """No tensor is shown with its values, which would also synchronise a device, and no number with all its digits."""
    case = BASES[op](rng)
    given = (framework.full((9, 9, 9), "float32", 0.0), "x" * 10_000, b"x" * 10_000, 10**400, 10**5000, [0] * 10_000)
    for name in signature_of(op).parameters:
        for value in given:
            if name == "scale" and hasattr(value, "shape"):
                value = framework.full((9,), "float32", 0.0)
            with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b") as refusal:
                case.call(framework, **{name: value})
            assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("page_stride", [2**60 // PAGES + 1, 2**62, 2**63 - 1])
def test_a_page_stride_whose_offsets_overflow_is_refused(framework, rng, page_stride):
    with pytest.raises(ValueError, match=rf"page_stride: .*{PAGES} pages, got {page_stride}"):
        qsa(rng).call(framework, page_stride=page_stride)


def test_random_calls(tmp_path):
    """The fuzzer, in short; it is meant for sanitised builds and millions of calls."""
    script = Path(__file__).parents[2] / "scripts" / "fuzz_calls"
    out = tmp_path / "counts.json"
    command = [sys.executable, str(script), "--calls", "20000", "--seed", "11", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(out.read_text())
    assert min(counts["outcomes"][outcome] for outcome in ("returned", "ValueError", "TypeError")) > 1000


def test_cuda_error_is_a_runtime_error():
    assert issubclass(ragged_attention.CudaError, RuntimeError)


@each_op
def test_the_result_is_out_or_out_and_lse(framework, rng, op):
    case = BASES[op](rng)
    alone = case.call(framework)
    assert isinstance(alone, type(framework.full((1,), "float32")))
    both = case.call(framework, return_lse=True)
    assert isinstance(both, tuple)
    assert [tuple(tensor.shape) for tensor in both] == [case.out_shape, case.out_shape[:2]]
    assert [framework.numpy(tensor).dtype.name for tensor in both] == ["float32", "float32"]
    out = framework.full(case.out_shape, "float32")
    assert case.call(framework, out=out) is out
