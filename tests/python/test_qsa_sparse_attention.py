"""qsa_sparse_attention: what it computes, sentence by sentence of its contract."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from _cases import (
    LAYOUTS,
    Case,
    listed,
    normal,
    off_by_one,
    packed_strides,
    padded_rows,
    poison_unlisted,
    qsa_case,
    strided,
)
from _checks import assert_all_same_bits, assert_matches, assert_nothing_attended, assert_same_bits
from _frameworks import FLOAT_DTYPES, Strided, numpy_dtype

import ragged_attention

each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)


@each_dtype
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_dtypes_and_page_sizes(backend, rng, dtype, page_size):
    lengths, cached = [3, 0, 1, 5], [100, 7, 0, 31]
    qsa_case(rng, lengths, cached, dtype=dtype, page_size=page_size, width=70, before=2, after=3).run_and_check(backend)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_multiple_of_8_up_to_256_is_a_head_dim(backend, rng, head_dim):
    for dtype in FLOAT_DTYPES if head_dim in (64, 128, 256) else rng.choice(FLOAT_DTYPES, 1):
        qsa_case(rng, [2, 1], [90, 5], head_dim=head_dim, dtype=str(dtype), width=50).run_and_check(backend)


HEADS = [(24, 2), (12, 1), (6, 1), (3, 1), (16, 1), (8, 8), (15, 3), (1, 1), (40, 1), (34, 2)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_query_head_h_reads_kv_head_h_over_group_for_every_group_size(backend, rng, heads, dtype):
    case = qsa_case(rng, [2, 3], [60, 0], heads=heads, head_dim=32, dtype=dtype, width=40)
    expected = case.run_and_check(backend)
    assert_all_same_bits(case.run(backend, group=heads[0] // heads[1]), expected, "with group given")


def geometry(rng, rows: int, context: int, heads: tuple[int, int], page_size: int, dtype: str = "bfloat16") -> Case:
    """The geometry of the model: 512 unsorted blocks of 4 tokens and a causal tail of up to 3, width 2051."""
    lists = []
    for i in range(rows):
        visible = context + i + 1
        blocks = rng.permutation(visible // 4)[:512]
        lists.append([*(blocks[:, None] * 4 + np.arange(4)).ravel(), *range(visible // 4 * 4, visible)])
    return qsa_case(
        rng, [rows], [context], heads=heads, head_dim=256, dtype=dtype, page_size=page_size, width=2051, lists=lists
    )


@pytest.mark.parametrize("heads", [(24, 2), (12, 1), (6, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_the_geometry_that_must_be_fastest(backend, rng, heads, page_size):
    geometry(rng, 2, 2500, heads, page_size).run_and_check(backend)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 130])
@pytest.mark.large
def test_the_geometry_with_many_rows(backend, rng, rows, dtype):
    case = geometry(rng, rows, 5000, (12, 1), 128, dtype)
    out, lse = case.run(backend)
    sample = rng.choice(rows, min(rows, 6), replace=False)
    case.check(out[sample], lse[sample], sample)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_counts_around_every_tile(backend, rng, count):
    qsa_case(rng, [2], [200], head_dim=32, width=140, counts=[count, 140]).run_and_check(backend)


def test_entries_past_the_count_are_never_read(backend, rng):
    case = qsa_case(rng, [3, 2], [40, 9], width=30, counts=[3, 0, 30, 5, 1])
    expected = case.run(backend)
    for filler in (0, 5, -1, 2**31 - 1, -(2**31)):
        indices = case.array("token_indices").copy()
        indices[np.arange(30) >= case.array("counts")[:, None]] = filler
        assert_all_same_bits(case.replace(token_indices=indices).run(backend), expected, f"with {filler} past counts")


@pytest.mark.parametrize("given", [-(2**31), -1, 25, 1000, 2**31 - 1])
def test_counts_are_clamped_to_the_width(backend, rng, given):
    case = qsa_case(rng, [2], [60], width=24)
    counts = case.array("counts").copy()
    counts[0] = given
    clamped = counts.copy()
    clamped[0] = 0 if given < 0 else 24
    expected = case.replace(counts=clamped).run(backend)
    assert_all_same_bits(case.replace(counts=counts).run(backend), expected, f"with count {given}")


def test_a_position_listed_twice_counts_twice(backend, rng):
    lists = [[5, 5, 9], [7] * 20, [1, 2, 1], [5, 9, 5]]
    case = qsa_case(rng, [4], [20], heads=(2, 1), head_dim=16, lists=lists)
    case.run_and_check(backend)
    # With all scores 0 and V the indicator of token 5, its weight is 2/3.
    marked = np.zeros_like(case.array("kv_blocks"))
    page, offset = listed(case, 0, 0)[0]
    marked[page, 1, 1, offset] = 1
    out, _ = case.replace(q=np.zeros_like(case.array("q")), kv_blocks=marked).run(backend)
    np.testing.assert_allclose(out[:, 0, 0], [2 / 3, 0, 0, 2 / 3], rtol=1e-6)


def test_no_mask_is_applied_on_top(backend, rng):
    """The first row may list the last key of its step."""
    qsa_case(rng, [4], [6], lists=[[9, 8, 7], [9], [0, 9], [9, 1]]).run_and_check(backend)


LENGTH, ROWS, PAGE = 1000, 2, 16


@pytest.mark.parametrize(
    "stray",
    [[-1], [-(2**31)], [LENGTH + ROWS], [LENGTH + ROWS + 1], [2**31 - 1], [LENGTH + ROWS, -1, 2**31 - 1, 1 << 20]],
    ids=str,
)
@each_dtype
def test_positions_outside_the_sequence_are_treated_as_not_listed(backend, rng, stray, dtype):
    """A slack page in the table, full of NaN, stands where an unclamped read would land."""
    lists = [rng.permutation([*range(40), *stray]), [LENGTH + ROWS - 1, *stray, 3]]
    case = qsa_case(rng, [ROWS], [LENGTH], dtype=dtype, lists=lists, width=50, head_dim=32)
    slack = np.full((1, 2), case.array("kv_blocks").shape[0] - 1, np.int32)
    case.replace(kv_lookup_table=np.concatenate([case.array("kv_lookup_table"), slack], 1)).run_and_check(backend)


@pytest.mark.parametrize("integers", ["int32", "uint32", "int64"])
def test_pages_that_do_not_exist_are_treated_as_not_listed(backend, rng, integers):
    case = qsa_case(rng, [3], [60], page_size=4, integers=integers, width=40)
    num_pages = case.array("kv_blocks").shape[0]
    bad = {
        "int32": [-1, num_pages, 2**31 - 1, -(2**31)],
        "uint32": [num_pages, 2**31, 2**32 - 1],
        "int64": [-1, num_pages, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1],
    }[integers]
    table = case.array("kv_lookup_table").copy()
    for slot, page in enumerate(bad):
        table[0, 2 * slot] = page
    case.replace(kv_lookup_table=table).run_and_check(backend)


def test_positions_past_the_page_table_are_treated_as_not_listed(backend, rng):
    case = qsa_case(rng, [3], [60], page_size=4, width=40)
    for columns in (5, 1, 0):
        table = np.ascontiguousarray(case.array("kv_lookup_table")[:, :columns])
        case.replace(kv_lookup_table=table).run_and_check(backend)


@pytest.mark.parametrize(
    ("integers", "length"),
    [
        ("int32", -1),
        ("int32", -(2**31)),
        ("int32", 2**31 - 1),
        ("uint32", 2**32 - 1),
        ("int64", -5),
        ("int64", -(2**63)),
        ("int64", 2**32),
        ("int64", 2**63 - 1),
    ],
)
def test_cache_lengths_are_summed_in_64_bits_and_negative_counts_as_0(backend, rng, integers, length):
    """A negative length leaves the step's own keys; with a huge one the page table alone is the limit."""
    lists = [[0, 1, 2, 3, 50, 77, 78], [2, 3, 4], [79, 80, 96, 2**31 - 1]]
    case = qsa_case(rng, [3], [77], page_size=16, lists=lists, integers=integers)
    lengths = np.array([length], integers)
    case = case.replace(cache_lengths=lengths, kv_blocks=normal(rng, case.array("kv_blocks").shape, "float32"))
    case.replace(kv_blocks=poison_unlisted(case)).run_and_check(backend)


@pytest.mark.parametrize("name", ["input_row_offsets", "cache_lengths", "kv_lookup_table"])
@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
def test_integers_may_be_uint32_int32_or_int64_each_by_itself(backend, rng, name, dtype):
    case = qsa_case(rng, [3, 1], [60, 10])
    other = case.replace(**{name: case.array(name).astype(dtype)})
    assert_all_same_bits(other.run(backend), case.run(backend), f"{name} as {dtype}")


@pytest.mark.parametrize("name", ["input_row_offsets", "cache_lengths", "counts"])
@pytest.mark.parametrize("stride", [2, 5, -1])
def test_1d_integers_may_have_any_stride(backend, rng, name, stride):
    case = qsa_case(rng, [3, 1, 2], [60, 10, 4])
    view = strided(case.array(name), [stride])
    assert_all_same_bits(case.replace(**{name: view}).run(backend), case.run(backend), f"{name} at stride {stride}")


def test_1d_integers_may_have_stride_0(backend, rng):
    case = qsa_case(rng, [2, 2], [30, 30], width=9, counts=[9] * 4)
    once = {"cache_lengths": (np.array([30], np.int32), 2), "counts": (np.array([9], np.int32), 4)}
    for name, (value, extent) in once.items():
        view = Strided(value, (extent,), (0,))
        assert_all_same_bits(case.replace(**{name: view}).run(backend), case.run(backend), f"{name} at stride 0")


@pytest.mark.parametrize("layout", [padded_rows, off_by_one], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", ["token_indices", "kv_lookup_table"])
def test_lists_and_tables_may_have_any_row_stride_and_base(backend, rng, layout, name):
    case = qsa_case(rng, [3, 1, 2], [60, 10, 4])
    assert_all_same_bits(case.replace(**{name: layout(case.array(name))}).run(backend), case.run(backend), name)


def test_a_page_table_may_have_any_strides(backend, rng):
    """Only the token lists need a contiguous innermost dimension."""
    case = qsa_case(rng, [3, 1, 2], [60, 10, 4])
    table = case.array("kv_lookup_table")
    view = strided(table, [1, table.shape[0]])
    assert_all_same_bits(case.replace(kv_lookup_table=view).run(backend), case.run(backend), "a transposed table")


# Where a token lies


@pytest.mark.parametrize("num_layers", [1, 3, 12])
def test_layer_idx_chooses_the_layer(backend, rng, num_layers):
    """The other layers hold NaN."""
    for layer in {0, num_layers // 2, num_layers - 1}:
        qsa_case(rng, [2], [40], head_dim=32, num_layers=num_layers, layer_idx=layer).run_and_check(backend)


def test_each_sequence_uses_its_own_page_table_even_sharing_pages(backend, rng):
    case = qsa_case(rng, [4, 4], [40, 40], width=30)
    table = case.array("kv_lookup_table").copy()
    table[1, 0] = table[0, 1]  # a shared prefix page, at another slot
    case = case.replace(kv_lookup_table=table, kv_blocks=normal(rng, case.array("kv_blocks").shape, "float32"))
    case.replace(kv_blocks=poison_unlisted(case)).run_and_check(backend)


# Caches in the field: [num_pages, 2, num_layers, page_size, num_kv_heads, head_dim] in another order in memory.
CACHE_ORDERS = {
    "heads_before_tokens": (0, 1, 2, 4, 3, 5),
    "layers_outermost": (2, 0, 1, 3, 4, 5),
    "k_and_v_outermost": (1, 0, 2, 3, 4, 5),
    "k_and_v_innermost": (0, 2, 3, 4, 1, 5),
}


def in_order(array, order):
    """The same values, stored with the dimensions in this order."""
    inner = packed_strides([array.shape[d] for d in order])
    return strided(array, [inner[order.index(d)] for d in range(len(order))])


@pytest.mark.parametrize("order", CACHE_ORDERS.values(), ids=CACHE_ORDERS)
@each_dtype
def test_without_page_stride_the_caches_own_strides_apply(backend, rng, order, dtype):
    case = qsa_case(rng, [3, 2], [60, 9], heads=(4, 2), dtype=dtype, num_layers=3)
    view = in_order(case.array("kv_blocks"), order)
    out, lse = case.replace(kv_blocks=view).run_and_check(backend)
    if backend.on_cpu:
        assert_all_same_bits((out, lse), case.run(backend), "a strided cache")


KV_LAYOUTS = {
    "padded_pages": lambda blocks: strided(
        blocks, [packed_strides(blocks.shape)[0] + 40, *packed_strides(blocks.shape)[1:]]
    ),
    "reversed_pages": lambda blocks: strided(
        blocks, [-packed_strides(blocks.shape)[0], *packed_strides(blocks.shape)[1:]]
    ),
    "off_by_one": off_by_one,
    "odd_token_stride": lambda blocks: strided(blocks, packed_strides([*blocks.shape[:5], blocks.shape[5] + 1])),
}


@pytest.mark.parametrize("layout", KV_LAYOUTS.values(), ids=KV_LAYOUTS)
@each_dtype
def test_caches_with_any_outer_stride_and_base(backend, rng, layout, dtype):
    case = qsa_case(rng, [3, 2], [60, 9], dtype=dtype)
    case.replace(kv_blocks=layout(case.array("kv_blocks"))).run_and_check(backend)


@pytest.mark.parametrize("stride0", [0, 1, 2, 4], ids=["page", "kv", "layer", "head"])
def test_a_cache_may_have_stride_0(backend, rng, stride0):
    case = qsa_case(rng, [3, 2], [60, 9], heads=(4, 2))
    shape = list(case.array("kv_blocks").shape)
    full, shape[stride0] = tuple(shape), 1
    base = normal(rng, shape, "float32")
    strides = packed_strides(shape)
    strides[stride0] = 0
    case.replace(kv_blocks=Strided(base.reshape(-1), full, tuple(strides))).run_and_check(backend)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@each_dtype
def test_q_and_out_may_have_any_outer_strides_and_base(backend, rng, layout, dtype):
    heads = (1, 1) if layout.__name__ == "odd_unit_strides" else (4, 2)
    case = qsa_case(rng, [3, 2], [60, 9], heads=heads, dtype=dtype, before=1)
    out_view = layout(np.full(case.out_shape, np.nan, numpy_dtype(dtype)))
    out = backend.tensor(out_view)
    lse = backend.full(case.out_shape[:2], "float32")
    strided_case = case.replace(q=layout(case.array("q")))
    strided_case.call(backend, out=out, lse=lse, return_lse=True)
    case.check(backend.numpy(out), backend.numpy(lse))


def with_page_stride(case: Case, page_stride: int) -> Case:
    """kv_blocks as a packed view of the front of a buffer whose pages lie page_stride elements apart."""
    blocks = case.array("kv_blocks")
    size = blocks[0].size
    buffer = np.full(page_stride * len(blocks), np.nan, blocks.dtype)
    for page, block in enumerate(blocks):
        buffer[page * page_stride : page * page_stride + size] = block.ravel()
    view = Strided(buffer, blocks.shape, tuple(packed_strides(blocks.shape)))
    return case.replace(kv_blocks=view, page_stride=page_stride)


@pytest.mark.parametrize("extra", [0, 1, 8, 999])
@each_dtype
def test_page_stride_gives_the_distance_of_pages_in_elements(backend, rng, extra, dtype):
    case = qsa_case(rng, [3, 2], [60, 9], heads=(4, 2), dtype=dtype)
    size = case.array("kv_blocks")[0].size
    case_with = with_page_stride(case, size + extra)
    out, lse = case_with.run_and_check(backend)
    if backend.on_cpu:
        assert_all_same_bits((out, lse), case.run(backend), "with a page stride")


def test_page_stride_overrides_the_caches_own_page_stride(backend, rng):
    """A view whose own stride along the pages says something else: the argument wins."""
    case = qsa_case(rng, [3], [60])
    size = case.array("kv_blocks")[0].size
    explicit = with_page_stride(case, 2 * size)
    view = explicit.operands["kv_blocks"]
    for own in (size, 2 * size, 0):
        other = explicit.replace(kv_blocks=Strided(view.buffer, view.shape, (own, *view.strides[1:])))
        assert_all_same_bits(other.run(backend), explicit.run(backend), f"own stride {own}")


# Rows and sequences


def test_rows_that_list_nothing_or_belong_to_no_sequence_give_0_and_minus_inf(backend, rng):
    case = qsa_case(rng, [2, 0, 3], [30, 5, 9], width=9, counts=[0, 9, 0, -3, 4], before=3, after=5)
    out, lse = case.run_and_check(backend)
    empty = [0, 1, 2, 3, 5, 6, *range(8, 13)]
    assert_nothing_attended(out[empty], lse[empty])


@pytest.mark.parametrize(
    ("lengths", "cached", "changes"),
    [
        ([], [], {"after": 4}),  # no sequence
        ([3], [9], {"width": 0, "counts": [0, 5, -1]}),
        ([0, 0], [4, 0], {"after": 3}),
        ([2], [9], {"lists": [[-1, -1], [5000]]}),
    ],
    ids=["no_sequence", "width_0", "no_rows_in_any_sequence", "nothing_valid"],
)
def test_nothing_to_attend_to_fills_the_output(backend, rng, lengths, cached, changes):
    out, lse = qsa_case(rng, lengths, cached, **changes).run_and_check(backend)
    assert_nothing_attended(out, lse)


def test_a_cache_without_pages_fills_the_output(backend, rng):
    case = qsa_case(rng, [3], [9])
    empty = case.array("kv_blocks")[:0]
    assert_nothing_attended(*case.replace(kv_blocks=empty).run(backend))


@pytest.mark.parametrize(("lengths", "cached", "heads"), [([], [], (6, 1)), ([0], [5], (6, 1)), ([2], [5], (0, 1))])
def test_an_output_without_elements(backend, rng, lengths, cached, heads):
    case = qsa_case(rng, lengths, cached, heads=heads)
    out, lse = case.run(backend)
    assert out.size == 0
    assert lse.size == 0


@each_dtype
def test_nan_that_a_row_does_not_list_never_reaches_it(backend, rng, dtype):
    """Not even what the rows next to it list."""
    shared = rng.permutation(200)[:60].tolist()
    poison = [200, 201]
    lists = [shared if row % 2 == 0 else [*shared[:30], *poison, *shared[30:]] for row in range(9)]
    case = qsa_case(rng, [9], [300], dtype=dtype, lists=lists, width=64)
    clean = case.run(backend)
    blocks = case.array("kv_blocks").copy()
    for value, (page, offset) in zip((np.nan, np.inf), listed(case, 1, 0)[30:32], strict=True):
        blocks[page, :, 1, offset] = value
    out, lse = case.replace(kv_blocks=blocks).run(backend)
    even = slice(0, None, 2)
    assert_all_same_bits((out[even], lse[even]), (clean[0][even], clean[1][even]), "rows next to NaN")
    assert np.all(np.isnan(out[1::2]))
    assert np.all(np.isnan(lse[1::2]))


@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_that_a_row_lists_go_through(backend, rng, side, value):
    case = qsa_case(rng, [1], [30], heads=(3, 1), head_dim=16, lists=[[7]])
    blocks = np.abs(case.array("kv_blocks"))
    (page, offset), *_ = listed(case, 0, 0)
    blocks[page, side, 1, offset, 0, 3] = value
    case.replace(q=np.abs(case.array("q")) + 1, kv_blocks=blocks, unit_normal=False).run_and_check(backend)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, np.float32(0.25), np.array([0.5])])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_is_any_finite_number(backend, rng, scale, dtype):
    case = qsa_case(rng, [2, 2], [60, 9], head_dim=32, dtype=dtype, scale=scale)
    out, lse = case.run(backend)
    case.replace(scale=float(np.squeeze(scale))).check(out, lse)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES)
def test_out_dtype(backend, rng, dtype, out_dtype):
    case = qsa_case(rng, [5, 2], [60, 30], heads=(12, 1), head_dim=128, dtype=dtype, width=40)
    case.replace(out_dtype=numpy_dtype(out_dtype)).run_and_check(backend)
    for form in (out_dtype, backend.dtype(out_dtype)):
        assert backend.numpy(case.call(backend, out_dtype=form)).dtype == numpy_dtype(out_dtype)
    assert backend.numpy(case.call(backend)).dtype == numpy_dtype(dtype)
    out = backend.full(case.out_shape, out_dtype)
    assert case.call(backend, out=out) is out  # without out_dtype, out= says it


# Bits


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("width", [24, 600])
def test_a_sequence_has_the_same_bits_alone_and_anywhere_in_a_batch(backend, rng, dtype, width):
    lengths, cached = [1, 7, 0, 1, 40, 2], [650, 20, 9, 0, 800, 700]
    case = qsa_case(rng, lengths, cached, dtype=dtype, width=width, before=1, after=2)
    out, lse = case.run(backend)
    for sequence in (0, 1, 3, 4, 5):
        rows = slice(*case.bounds(sequence))
        alone = case.alone(sequence).run(backend)
        assert_all_same_bits((out[rows], lse[rows]), alone, f"sequence {sequence} in the batch", "the same alone")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", ["max_prompt_length", "max_cache_length"])
def test_hints_change_no_bit(backend, rng, dtype, name):
    case = qsa_case(rng, [3, 9], [600, 30], dtype=dtype, width=300)
    expected = case.run(backend)
    for hint in (-1, 0, 1, 9, 600, 609, 2**31, 2**40):
        assert_all_same_bits(case.run(backend, **{name: hint}), expected, f"with {name} {hint}")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_repeats_give_the_same_bits(backend, rng, dtype):
    case = qsa_case(rng, [5, 1], [600, 700], dtype=dtype, width=500)
    first = case.run(backend)
    for _ in range(15):  # two calls each
        assert_all_same_bits(case.run(backend), first, "a repeat")


@each_dtype
def test_the_order_and_grouping_of_lists_change_rounding_only(backend, rng, dtype):
    """Unsorted, unaligned, not in blocks of 4, one row empty, two sequences side by side: each row as by itself."""
    lists = [rng.permutation(300)[:70] for _ in range(3)] + [[]] + [rng.permutation(290)[:33] for _ in range(4)]
    case = qsa_case(rng, [5, 3], [310, 290], lists=lists, width=70, dtype=dtype)
    case.run_and_check(backend)
    shuffled = case.array("token_indices").copy()
    for row, count in enumerate(case.array("counts")):
        shuffled[row, :count] = rng.permutation(shuffled[row, :count])
    case.replace(token_indices=shuffled).run_and_check(backend)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbouring_rows_that_list_much_the_same(backend, rng, overlap, dtype):
    """A gather that rows share has to leave to each row its own list, in any order, duplicates included."""
    common = rng.permutation(400)[:90]
    lists = []
    for _ in range(17):
        kept = common[: int(overlap * 90)]
        lists.append(rng.permutation([*kept, *rng.integers(0, 500, 90 - len(kept)), *kept[:3]]))
    case = qsa_case(rng, [9, 8], [500, 500], heads=(12, 1), head_dim=256, dtype=dtype, lists=lists, width=96)
    case.run_and_check(backend)


# warps and unroll


def test_warps_and_unroll_are_refused_on_the_cpu_by_name(numpy_cpu, rng):
    case = qsa_case(rng, [1], [9])
    for name in ("warps", "unroll"):
        with pytest.raises((ValueError, NotImplementedError), match=rf"\b{name}\b"):
            case.call(numpy_cpu, **{name: 4})


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_warps_and_unroll_force_a_kernel_on_cuda_and_others_are_listed(backend, rng, dtype):
    if backend.on_cpu:
        pytest.skip("warps and unroll choose CUDA kernels")
    case = qsa_case(rng, [3, 1], [90, 70], heads=(12, 1), head_dim=256, dtype=dtype, width=65)
    built = {}
    for name in ("warps", "unroll"):
        with pytest.raises(ValueError, match=rf"\b{name}\b") as refusal:
            case.call(backend, **{name: 77})
        built[name] = sorted({int(number) for number in re.findall(r"\d+", str(refusal.value))} - {77})
        assert built[name], f"the refusal lists no {name}: {refusal.value}"
    for warps in built["warps"]:
        case.run_and_check(backend, warps=warps)
    ran = 0
    for warps, unroll in itertools.product(built["warps"], built["unroll"]):
        refusal = ""
        try:
            case.run_and_check(backend, unroll=unroll, warps=warps)
            ran += 1
        except ValueError as error:  # more shared memory than the device has: the refusal lists the pairs that fit
            refusal = str(error)
        assert f"({warps}, {unroll})" not in refusal.partition("got")[0]
    assert ran >= len(built["warps"])


# Sizes


@pytest.mark.large
@pytest.mark.parametrize("width", [2052, 8195])
def test_wide_lists(backend, rng, width):
    case = qsa_case(rng, [2], [9000], heads=(12, 1), head_dim=128, dtype="bfloat16", page_size=64, width=width)
    case.run_and_check(backend)


def test_many_sequences_of_one_row(backend, rng):
    batch = 300
    cached = rng.integers(0, 40, batch).tolist()
    case = qsa_case(rng, [1] * batch, cached, heads=(2, 1), head_dim=16, page_size=8, width=8)
    case.run_and_check(backend)


def test_a_result_equals_dense_attention_when_everything_is_listed(backend, rng):
    """QSA over all keys of one sequence is the ragged operation without a mask."""
    n, heads, dim = 30, 4, 32
    q, k, v = (normal(rng, (n, heads, dim), "float32") for _ in range(3))
    offsets = np.array([0, n], np.int32)
    blocks = np.full((2, 2, 1, 16, heads, dim), np.nan, np.float32)
    for token in range(n):
        blocks[token // 16, 0, 0, token % 16] = k[token]
        blocks[token // 16, 1, 0, token % 16] = v[token]
    everything = np.tile(np.arange(n, dtype=np.int32), (n, 1))
    ints = {
        "cache_lengths": np.zeros(1, np.int32),
        "kv_lookup_table": np.array([[0, 1]], np.int32),
        "token_indices": everything,
        "counts": np.full(n, n, np.int32),
    }
    operands = {"q": q, "input_row_offsets": offsets, "kv_blocks": blocks, **ints}
    out, lse = Case("qsa_sparse_attention", operands, {"layer_idx": 0}).run(backend)
    dense = ragged_attention.ragged_flash_attention(
        *map(backend.tensor, (q, k, v, offsets)), mask_str="null", return_lse=True
    )
    exact = tuple(backend.numpy(tensor).astype(np.float64) for tensor in dense)
    assert_matches(out, lse, exact, exact, dtypes=("float32", "float32"), unit_normal=True)


def test_call_without_lse_gives_the_same_output(backend, rng):
    case = qsa_case(rng, [3, 1], [60, 10])
    assert_same_bits(backend.numpy(case.call(backend)), case.run(backend)[0], "without lse")
