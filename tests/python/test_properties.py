"""Random calls of every shape against the contract: results, bits, poison, layouts, garbage.

Profiles: `ci` (the default: few examples, the same in every run) and `nightly` (10,000 of each property, fresh, or as
many as HYPOTHESIS_EXAMPLES says), chosen with HYPOTHESIS_PROFILE.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _cases import LAYOUTS, QSA, Case, normal, packed_strides, poison_unlisted, qsa_case, ragged_case, strided
from _checks import assert_all_same_bits, assert_same_bits
from _frameworks import FLOAT_DTYPES, Framework, PortableTorch, Strided, is_hopper, numpy_dtype

from ragged_attention import reference

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=200, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "10000")), **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

EXAMPLES: collections.Counter[str] = collections.Counter()


def examples(**strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """hypothesis's `given`, and a count of what was run."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            EXAMPLES[test.__name__] += 1
            test(*args, **kwargs)

        return given(**strategies)(counted)

    return decorate


@pytest.fixture(autouse=True)
def _record_examples(request, record_property):
    name = request.function.__name__
    before = EXAMPLES[name]
    yield
    record_property("examples", EXAMPLES[name] - before)


seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(FLOAT_DTYPES)
integer_dtypes = st.sampled_from(["int32", "uint32", "int64"])
# Mostly small, for the time that the reference takes; every multiple of 8 in the end.
head_dims = st.one_of(st.sampled_from([8, 16, 24, 64, 72, 80]), st.integers(1, 32).map(lambda n: 8 * n))
heads = st.tuples(st.integers(1, 3), st.integers(1, 5)).map(lambda pair: (pair[0] * pair[1], pair[0]))
lengths = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 80), st.just(64)), max_size=5)
scales = st.one_of(st.none(), st.sampled_from([0.0, -0.1, 0.05, 0.3]))


@st.composite
def masks(draw):
    mask_str = draw(st.sampled_from(reference.MASKS))
    windowed = mask_str in reference.WINDOWED_MASKS
    return {"mask_str": mask_str, "local_window_size": draw(st.integers(1, 90)) if windowed else -1}


@st.composite
def ragged_cases(draw):
    case = ragged_case(
        np.random.default_rng(draw(seeds)),
        draw(lengths),
        heads=draw(heads),
        head_dim=draw(head_dims),
        dtype=draw(dtypes),
        before=draw(st.integers(0, 3)),
        after=draw(st.integers(0, 3)),
        offsets_dtype=draw(integer_dtypes),
        **draw(masks()),
    )
    scale = draw(scales)
    return case if scale is None else case.replace(scale=scale, unit_normal=False)


@st.composite
def qsa_cases(draw):
    """With lists that hold duplicates and positions out of range, and tables that hold pages that do not exist."""
    rng = np.random.default_rng(draw(seeds))
    row_counts = draw(st.lists(st.integers(0, 6), max_size=4))
    cached = [draw(st.integers(0, 150)) for _ in row_counts]
    width = draw(st.integers(0, 70))
    dtype = draw(dtypes)
    integers = draw(integer_dtypes)
    case = qsa_case(
        rng,
        row_counts,
        cached,
        heads=draw(heads),
        head_dim=draw(head_dims),
        dtype=dtype,
        page_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        layer_idx=0,
        width=width,
        before=draw(st.integers(0, 3)),
        after=draw(st.integers(0, 3)),
        spare_pages=draw(st.integers(0, 2)),
        integers=integers,
    )
    total = case.array("q").shape[0]
    disorder = draw(st.sampled_from([0.0, 0.1, 0.9]))
    indices = case.array("token_indices").copy()
    stray = rng.random(indices.shape) < disorder
    indices[stray] = rng.integers(-5, 170, int(stray.sum()))
    table = case.array("kv_lookup_table").copy()
    stray = rng.random(table.shape) < disorder / 2
    table[stray] = rng.integers(0, case.array("kv_blocks").shape[0] + 3, int(stray.sum())).astype(integers)
    case = case.replace(
        token_indices=indices,
        kv_lookup_table=table,
        counts=rng.integers(-2, width + 3, total).astype(np.int32),
        kv_blocks=normal(rng, case.array("kv_blocks").shape, dtype),
    )
    case = case.replace(kv_blocks=poison_unlisted(case))
    scale = draw(scales)
    return case if scale is None else case.replace(scale=scale, unit_normal=False)


@examples(case=ragged_cases())
def test_ragged_matches_the_reference(path, case):
    case.run_and_check(path)


@examples(case=qsa_cases())
def test_qsa_matches_the_reference(path, case):
    case.run_and_check(path)


@examples(case=st.one_of(ragged_cases(), qsa_cases()), data=st.data())
def test_a_sequence_has_the_same_bits_alone(path, case, data):
    batch = len(case.array("input_row_offsets")) - 1
    if batch == 0:
        return
    sequence = data.draw(st.integers(0, batch - 1))
    rows = slice(*case.bounds(sequence))
    out, lse = case.run(path)
    assert_all_same_bits((out[rows], lse[rows]), case.alone(sequence).run(path), f"sequence {sequence}")


@examples(case=ragged_cases(), layouts=st.tuples(*[st.sampled_from(sorted(set(LAYOUTS) - {"reversed_rows"}))] * 3))
def test_ragged_with_strides_matches_the_reference(path, case, layouts):
    strided = {}
    for name, layout in zip("qkv", layouts, strict=True):
        array = case.array(name)
        if array.size and (layout != "odd_unit_strides" or array.shape[1] == 1):
            strided[name] = LAYOUTS[layout](array)
    case.replace(**strided).run_and_check(path)


@examples(case=ragged_cases(), hint=st.integers(-(2**40), 2**40))
def test_the_hint_changes_no_bit(path, case, hint):
    assert_all_same_bits(case.run(path, q_max_seq_len=hint), case.run(path), f"hint {hint}")


# Poison: what is not read may hold anything


@examples(case=st.one_of(ragged_cases(), qsa_cases()), seed=seeds)
def test_what_is_not_read_does_not_matter(path, case, seed):
    """The builders put NaN there; infinities and any numbers give the same bits."""
    rng = np.random.default_rng(seed)
    expected = case.run(path)
    changed = {}
    for name in ("q", "k", "v", "kv_blocks"):
        if name in case.operands:
            array = case.array(name).copy()
            unread = np.isnan(array.astype(np.float32))
            with np.errstate(over="ignore"):  # in float16
                array[unread] = rng.choice(np.array([np.inf, -np.inf, 3e38, 0.0, -1.5], np.float32), int(unread.sum()))
            changed[name] = array
    if case.op == QSA:
        indices, counts = case.array("token_indices").copy(), case.array("counts")
        past = np.arange(indices.shape[1]) >= np.maximum(counts, 0)[:, None]
        indices[past] = rng.integers(-(2**31), 2**31, int(past.sum()))
        changed["token_indices"] = indices
    assert_all_same_bits(case.replace(**changed).run(path), expected, "with other poison")


# Layouts


def takes_hopper_kernels(path: Framework) -> bool:
    return path.device == "cuda" and not isinstance(path, PortableTorch) and is_hopper(path)


def on_16_bytes(view: Strided) -> bool:
    size = view.buffer.itemsize
    return all(size * step % 16 == 0 for step in (view.offset, *view.strides[:-1]))


@examples(
    case=st.one_of(ragged_cases(), qsa_cases()), layout=st.sampled_from(sorted(set(LAYOUTS) - {"odd_unit_strides"}))
)
def test_outputs_may_be_views_and_what_lies_between_stays(path, case, layout):
    out, lse = case.run(path)
    if not out.size:
        return
    if layout == "reversed_rows" and path.name == "torch":  # which has no negative strides
        return
    heads = lse.shape[1]
    views = {
        "out": LAYOUTS[layout](np.full(case.out_shape, 7, out.dtype)),
        "lse": strided(np.full(lse.shape, 7, np.float32), (2 * heads + 3, 2), offset=1),
    }
    wholes = {name: path.tensor(view.buffer) for name, view in views.items()}
    case.call(path, **{name: path._view(wholes[name], view) for name, view in views.items()})
    written = {name: np.ascontiguousarray(view.over(path.numpy(wholes[name]))) for name, view in views.items()}
    case.check(written["out"], written["lse"])
    for name, expected in (("out", out), ("lse", lse)):
        view, whole = views[name], path.numpy(wholes[name])
        # An output that TMA cannot write is left to the portable kernels, whose bits are others.
        if not takes_hopper_kernels(path) or on_16_bytes(views["out"]):
            assert_same_bits(written[name], expected, name, "the packed one")
        between = np.ones(view.buffer.size, bool)
        view.over(between)[...] = False
        assert_same_bits(whole[between], view.buffer[between], f"what lies between {name}", "itself before the call")


@st.composite
def qsa_layouts(draw, case: Case):
    """The operands of a call behind other strides: nothing collides but where a stride is 0."""
    changed: dict[str, Any] = {}
    blocks = case.array("kv_blocks")
    if blocks.size and draw(st.booleans()):
        order = draw(st.permutations(range(5)))  # of the dimensions in memory, outermost first; head_dim is innermost
        step = blocks.shape[5] + 8 * draw(st.integers(0, 2))
        strides = [0] * 5 + [1]
        for dimension in reversed(order):
            strides[dimension] = step
            step *= blocks.shape[dimension]
        changed["kv_blocks"] = strided(blocks, strides, offset=draw(st.integers(0, 3)))
    indices = case.array("token_indices")
    if indices.size and draw(st.booleans()):
        changed["token_indices"] = strided(indices, (indices.shape[1] + draw(st.integers(1, 9)), 1))
    table = case.array("kv_lookup_table")
    if table.size and draw(st.booleans()):
        changed["kv_lookup_table"] = strided(table, (2, 2 * table.shape[0]))
    for name in ("input_row_offsets", "cache_lengths", "counts"):
        array = case.array(name)
        if array.size and draw(st.booleans()):
            changed[name] = strided(array, (draw(st.integers(2, 4)),))
    q = case.array("q")
    if q.size and draw(st.booleans()):
        changed["q"] = LAYOUTS[draw(st.sampled_from(["padded_rows", "heads_outside", "off_by_one"]))](q)
    return case.replace(**changed)


@examples(case=qsa_cases(), data=st.data())
def test_qsa_with_strides_matches_the_reference(path, case, data):
    data.draw(qsa_layouts(case)).run_and_check(path)


@examples(case=qsa_cases(), extra=st.integers(0, 40))
def test_an_explicit_page_stride_is_the_same_cache(path, case, extra):
    """Pages of a larger pool: the bits of the call with the view's own strides."""
    blocks = case.array("kv_blocks")
    if not blocks.size:
        return
    packed = packed_strides(blocks.shape)
    view = strided(blocks, (packed[0] + extra, *packed[1:]))
    expected = case.replace(kv_blocks=view).run(path)
    # The packed view into the pool that serving systems pass: the same memory under packed strides.
    pool = path.tensor(Strided(view.buffer, (view.buffer.size,), (1,)))
    window = path._view(pool, Strided(blocks, blocks.shape, tuple(packed)))
    results = case.call(path, kv_blocks=window, page_stride=packed[0] + extra, return_lse=True)
    assert_all_same_bits(map(path.numpy, results), expected, "with a page_stride")


# Garbage: without check_values nothing outside the tensors is touched, with it the first bad place is named


INTEGERS = {
    "input_row_offsets": ("int32", "uint32", "int64"),
    "cache_lengths": ("int32", "uint32", "int64"),
    "kv_lookup_table": ("int32", "uint32", "int64"),
    "token_indices": ("int32",),
    "counts": ("int32",),
}


@st.composite
def garbage(draw, case: Case):
    """Some of the integer operands replaced by whatever their type holds."""
    rng = np.random.default_rng(draw(seeds))
    names = [name for name in INTEGERS if name in case.operands]
    changed = {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, unique=True)):
        dtype = np.dtype(draw(st.sampled_from(INTEGERS[name])))
        limits = np.iinfo(dtype)
        size = max(1, case.array("q").shape[0])
        low, high = draw(
            st.sampled_from(
                [
                    (limits.min, limits.max),
                    (max(limits.min, -2 * size), 3 * size),
                    (limits.max - 2 * size, limits.max),
                    (limits.min, max(limits.min + 1, -1)),
                ]
            )
        )
        array = case.array(name).astype(dtype)
        bad = rng.random(array.shape) < draw(st.sampled_from([0.1, 0.5, 1.0]))
        array[bad] = rng.integers(low, high, int(bad.sum()), dtype=dtype, endpoint=True)
        changed[name] = array
    return case.replace(**changed)


def guarded(path: Framework, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """A tensor between two as large, and the whole."""
    size = int(np.prod(shape))
    whole = path.tensor(np.full(3 * size, 7, numpy_dtype(dtype)))
    return path._view(whole, Strided(np.empty(0), shape, tuple(packed_strides(shape)), size)), whole


@examples(case=st.one_of(ragged_cases(), qsa_cases()), data=st.data())
def test_garbage_touches_nothing_outside(path, case, data):
    """Offsets, lengths, tables, positions and counts of any value: inputs and guards stay, the next call is right."""
    if not case.array("q").size:
        return
    bad = data.draw(garbage(case))
    tensors = bad.tensors(path)
    before = {name: path.numpy(tensor).copy() for name, tensor in tensors.items()}
    (out, whole), (lse, whole_lse) = (
        guarded(path, case.out_shape, case.out_dtype),
        guarded(path, case.out_shape[:2], "float32"),
    )
    bad.call(path, **tensors, out=out, lse=lse)
    for buffer in (whole, whole_lse):
        values = path.numpy(buffer)
        third = len(values) // 3
        assert np.all(values[:third] == 7)
        assert np.all(values[2 * third :] == 7)
    for name, tensor in tensors.items():
        assert_same_bits(path.numpy(tensor), before[name], name, "itself before the call")
    case.run_and_check(path)


def bad_by_the_contract(case: Case) -> bool:
    """Whether check_values has something to find, by the sentences of the contract."""
    offsets = case.array("input_row_offsets").astype(object)  # Python integers: no width to overflow
    total = case.array("q").shape[0]
    if offsets[0] < 0 or offsets[-1] > total or any(a > b for a, b in itertools.pairwise(offsets.tolist())):
        return True
    if case.op != QSA:
        return False
    indices, counts, table = case.array("token_indices"), case.array("counts"), case.array("kv_lookup_table")
    lengths = case.array("cache_lengths").astype(object)
    if np.any(counts < 0) or np.any(counts > indices.shape[1]) or any(length < 0 for length in lengths):
        return True
    num_pages, page_size = case.array("kv_blocks").shape[0], case.array("kv_blocks").shape[3]
    for sequence, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        length = lengths[sequence] + end - begin
        for row in range(begin, end):
            for token in indices[row, : counts[row]].tolist():
                if not 0 <= token < length or token // page_size >= table.shape[1]:
                    return True
                if not 0 <= int(table[sequence, token // page_size]) < num_pages:
                    return True
    return False


@examples(case=st.one_of(ragged_cases(), qsa_cases()), data=st.data())
def test_check_values_raises_exactly_where_the_contract_says(path, case, data):
    if not case.array("q").size:
        return
    case = data.draw(st.one_of(st.just(case), garbage(case)))
    if not bad_by_the_contract(case):
        if case.op != QSA:  # new offsets may own rows of NaN, which may leak where the mask hides them
            inputs = {name: case.array(name) for name in ("q", "k", "v")}
            case = case.replace(**{name: np.where(np.isnan(x), np.zeros_like(x), x) for name, x in inputs.items()})
        case.run_and_check(path, check_values=True)
        return
    out = path.full(case.out_shape, case.out_dtype, 7.0)
    with pytest.raises(ValueError, match="|".join(INTEGERS)):
        case.call(path, out=out, check_values=True)
    assert np.all(path.numpy(out) == 7)
