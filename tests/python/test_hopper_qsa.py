"""The Hopper kernels of qsa_sparse_attention: every instantiation, groups of rows that share, plans, and bits.

The tests need a GPU of compute capability 9.0 and a build with its kernels. What they check stands in functions of its
own, which a few small calls of the CPU backend go through too: it makes the same promises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from _cases import Case, listed, off_by_one, qsa_case
from _checks import assert_all_same_bits, kernel_names
from _frameworks import Framework

from ragged_attention import supports

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
HEADS = ((24, 2), (12, 1), (6, 1), (3, 1), (16, 1), (2, 1), (4, 4), (33, 1), (64, 1))

# Rows of a sequence around groups of 1 to 10 rows, around 32, the most that are done row by row whatever the context,
# and around 128, the most that go to clusters (sm90/config.h).
ROWS = (1, 2, 4, 5, 6, 10, 11, 0, 31, 32, 33, 36, 64, 127, 128, 129, 131, 1)
# What a plan writes out at a time, and the least tokens that its window holds (sm90/config.h, plan.h).
LIST_ENTRIES, WINDOW = 1536, 7360

each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)

Lists = list[Sequence[int]]
ORDERS = ("none", "some", "all")  # which rows' lists ascend


def lists_alike(rng: np.random.Generator, rows: int, context: int, size: int, kept: float) -> Lists:
    """Each row keeps about that part of what the row before it lists."""
    lists: Lists = []
    chosen = np.empty(0, np.int64)
    for _ in range(rows):
        chosen = chosen[rng.random(len(chosen)) < kept]
        # Some more than are missing: a permutation of a long context would take its time.
        drawn = np.arange(context) if context < 4 * size else np.unique(rng.integers(0, context, 3 * size))
        fresh = rng.permutation(np.setdiff1d(drawn, chosen))
        chosen = rng.permutation(np.concatenate([chosen, fresh[: size - len(chosen)]]))
        assert len(chosen) == size
        lists.append(chosen.tolist())
    return lists


def check_rows(framework: Framework, rng: np.random.Generator, rows: Sequence[int], **shape: Any) -> None:
    cached = [int(n) for n in rng.integers(0, 400, len(rows))]
    qsa_case(rng, rows, cached, before=3, after=2, page_size=16, **shape).run_and_check(framework)


def check_duplicates(framework: Framework, rng: np.random.Generator, rows: int, **shape: Any) -> None:
    """Tokens that a row lists twice, or often, count as often, whatever its neighbours list of them."""
    lists = lists_alike(rng, rows, 300, 60, 0.8)
    for row in range(0, rows, 3):
        lists[row] = [*lists[row][:40], *lists[row][:20]]  # twice in this row, perhaps once in the next
    if rows > 4:
        lists[4] = [7] * 60
    case = qsa_case(rng, [rows], [300], lists=lists, width=70, **shape)
    case.run_and_check(framework)


def poisoned(case: Case, places: Sequence[tuple[int, int]], values: Sequence[float]) -> Case:
    """Values that are not finite in V of some tokens (and K of the first), each in one column of each kv head."""
    blocks = case.array("kv_blocks").copy()
    for i, ((page, offset), value) in enumerate(zip(places, values, strict=True)):
        blocks[page, 1, 1, offset, :, (7 * i + 3) % blocks.shape[-1]] = value
    page, offset = places[0]
    blocks[page, 0, 1, offset, :, 1] = np.nan
    return case.replace(kv_blocks=blocks)


def check_no_leaks(framework: Framework, rng: np.random.Generator, rows: int, **shape: Any) -> None:
    """0 * NaN counts as a leak: also what rows of the same group list."""
    shared = rng.permutation(280)[:50].tolist()
    poison = [280, 285, 290]
    lists: Lists = [shared if row % 2 == 0 else [*shared[:20], *poison, *shared[20:]] for row in range(rows)]
    case = qsa_case(rng, [rows], [300], lists=lists, width=64, **shape)
    clean = case.run(framework)
    bad = poisoned(case, listed(case, 1, 0)[20:23], (np.nan, np.inf, -np.inf))
    out, lse = bad.run(framework)
    even = slice(0, None, 2)
    assert_all_same_bits((lse[even],), (clean[1][even],), "LSE of rows beside NaN")
    np.testing.assert_allclose(out[even].astype(np.float32), clean[0][even].astype(np.float32), atol=1e-2)
    assert np.isnan(out[1::2]).all()  # K of the first is NaN: so are all its weights
    assert np.isnan(lse[1::2]).all()


def check_special_values(framework: Framework, rng: np.random.Generator, rows: int, **shape: Any) -> None:
    """Values that are not finite reach the rows that list them, in their own columns alone."""
    shared = rng.permutation(280)[:50].tolist()
    lists: Lists = [[*shared, 280 + row % 3] for row in range(rows)]
    case = qsa_case(rng, [rows], [300], lists=lists, width=64, **shape)
    blocks = case.array("kv_blocks").copy()
    values = (np.nan, np.inf, -np.inf)
    for row, value in enumerate(values[: min(rows, 3)]):
        (page, offset) = listed(case, row, 0)[50]
        blocks[page, 1, 1, offset, :, 5 + row] = value
    out, lse = case.replace(kv_blocks=blocks).run(framework)
    clean_out, clean_lse = case.run(framework)
    assert_all_same_bits((lse,), (clean_lse,), "LSE beside values that are not finite")
    for row in range(rows):
        finite = np.isfinite(out[row].astype(np.float32))
        np.testing.assert_array_equal(out[row, :, 5 + row % 3].astype(np.float32), np.float32(values[row % 3]))
        finite[:, 5 + row % 3] = True
        assert finite.all(), f"row {row}"
    finite = np.isfinite(out.astype(np.float32))
    difference = np.abs(out.astype(np.float32) - clean_out.astype(np.float32))[finite]
    assert difference.max() < 1e-2


def check_long_context(
    framework: Framework, rng: np.random.Generator, rows: int, context: int, order: str, page: int = 16, **shape: Any
) -> None:
    """More than one window of a plan, and more entries than it writes out at a time; pages used over and over.

    Lists come in any order; of those that ascend, some begin with entries that are no tokens or have one twice, and all
    end with the sequence's last token and one that it does not have.
    """
    size = 700
    indices = np.asarray(lists_alike(rng, rows, context, size, 0.3), np.int64)
    counts = np.full(rows, size, np.int32)
    counts[::11] = rng.integers(0, size, len(counts[::11]))
    if order != "none":
        ascend = slice(None) if order == "all" else slice(None, None, 2)
        indices[ascend, -2:] = [context - 1, context]
        indices[ascend] = np.sort(indices[ascend], axis=1)
        indices[::4, :3] = -1
        indices[1::3, 500] = indices[1::3, 501]
    indices = indices.astype(np.int32)
    case = qsa_case(rng, [rows], [page], width=size, counts=[0] * rows, page_size=page, **shape)
    table = rng.integers(0, len(case.array("kv_blocks")), (1, -(-(context + rows) // page))).astype(np.int32)
    blocks = rng.standard_normal(case.array("kv_blocks").shape).astype(case.array("kv_blocks").dtype)
    case.replace(
        kv_blocks=blocks,
        kv_lookup_table=table,
        token_indices=indices,
        counts=counts,
        cache_lengths=np.asarray([context - rows], np.int32),
    ).run_and_check(framework)


def check_rising_maxima(framework: Framework, rng: np.random.Generator, rows: Sequence[int], **shape: Any) -> None:
    """Scores so far apart that tile after tile of a long list brings a maximum far beyond the last one."""
    cached = [1200] * len(rows)
    lists = [rng.permutation(1200)[:1100].tolist() for _ in range(sum(rows))]
    qsa_case(rng, rows, cached, lists=lists, width=1100, scale=3.0, page_size=16, **shape).run_and_check(framework)


def check_bits(framework: Framework, rng: np.random.Generator, rows: Sequence[int], **shape: Any) -> None:
    """Of a sequence: alone, anywhere in a batch, with any hint, and every time."""
    cached = [int(n) for n in rng.integers(0, 500, len(rows))]
    case = qsa_case(rng, rows, cached, width=90, before=2, after=1, **shape)
    expected = case.run(framework)
    for hint in (0, 1, 128, 129, 10**6):
        assert_all_same_bits(case.run(framework, max_prompt_length=hint), expected, f"with the hint {hint}")
    for sequence, count in enumerate(rows):
        if count == 0:
            continue
        own = slice(*case.bounds(sequence))
        alone = case.alone(sequence).run(framework)
        assert_all_same_bits(alone, (expected[0][own], expected[1][own]), f"sequence {sequence} alone")


def check_decode(framework: Framework, rng: np.random.Generator, sequences: int, **shape: Any) -> None:
    """One row a sequence, lists of every length: right, and with the bits that each row has alone."""
    lengths = (0, 1, 15, 16, 17, 127, 128, 129, 300, 500)
    cached = [520] * sequences
    lists: Lists = [rng.permutation(520)[: lengths[i % len(lengths)]].tolist() for i in range(sequences)]
    case = qsa_case(rng, [1] * sequences, cached, lists=lists, width=520, page_size=16, **shape)
    case.run_and_check(framework)
    out, lse = case.run(framework)
    for sequence in {0, 3, 8, 9, sequences // 2, sequences - 1} & set(range(sequences)):
        alone = case.alone(sequence).run(framework)
        own = slice(sequence, sequence + 1)
        assert_all_same_bits(alone, (out[own], lse[own]), f"sequence {sequence} of {sequences} alone")


# On the GPU


@each_dtype
@each_head_dim
def test_every_instantiation_at_every_border(hopper, rng, dtype, head_dim):
    check_rows(hopper, rng, ROWS, dtype=dtype, head_dim=head_dim, heads=(24, 2), width=70)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_size_of_group(hopper, rng, heads):
    check_rows(hopper, rng, ROWS, dtype="bfloat16", head_dim=128, heads=heads, width=90)


@each_dtype
@each_head_dim
@pytest.mark.parametrize("rows", [3, 32, 33, 38, 140])
def test_tokens_listed_twice(hopper, rng, dtype, head_dim, rows):
    check_duplicates(hopper, rng, rows, dtype=dtype, head_dim=head_dim, heads=(12, 1))


@each_dtype
@each_head_dim
@pytest.mark.parametrize("rows", [2, 9, 34, 40, 140])
def test_what_a_neighbour_lists_does_not_leak(hopper, rng, dtype, head_dim, rows):
    check_no_leaks(hopper, rng, rows, dtype=dtype, head_dim=head_dim, heads=(12, 1))


@each_dtype
@each_head_dim
@pytest.mark.parametrize("rows", [1, 5, 37, 140])
def test_values_that_are_not_finite_stay_in_their_columns(hopper, rng, dtype, head_dim, rows):
    check_special_values(hopper, rng, rows, dtype=dtype, head_dim=head_dim, heads=(12, 1))


@pytest.mark.parametrize("heads", [(24, 2), (6, 1), (16, 1), (33, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 36, 130])
@pytest.mark.parametrize("context", [2 * LIST_ENTRIES, 3 * WINDOW, 20 * WINDOW, 3_000_000])
@pytest.mark.parametrize("order", ORDERS)
def test_long_contexts(hopper, rng, heads, rows, context, order):
    check_long_context(hopper, rng, rows, context, order, dtype="bfloat16", head_dim=64, heads=heads)


@pytest.mark.parametrize("order", ORDERS)
def test_the_longest_contexts_there_are(hopper, rng, order):
    """Tokens up to the last of 31 bits, on 2^17 pages of 2^14."""
    context = 2**31 - 1
    check_long_context(hopper, rng, 140, context, order, page=2**14, dtype="bfloat16", head_dim=64, heads=(12, 1))


@pytest.mark.parametrize("width", [2051, 8195])
def test_wide_lists_of_the_model(hopper, rng, width):
    lists = lists_alike(rng, 44, 12000, width, 0.9)
    qsa_case(
        rng,
        [7, 37],
        [12000, 12000],
        lists=lists,
        width=width,
        dtype="bfloat16",
        head_dim=256,
        heads=(12, 1),
        page_size=128,
    ).run_and_check(hopper)


@each_dtype
@each_head_dim
def test_bits(hopper, rng, dtype, head_dim):
    check_bits(hopper, rng, (1, 4, 130, 0, 5, 1, 64, 129, 32, 33), dtype=dtype, head_dim=head_dim, heads=(12, 1))


@each_dtype
@each_head_dim
@pytest.mark.parametrize("sequences", [1, 2, 10, 17, 33, 66, 67, 150])
def test_decode_by_any_number_of_ctas_a_row(hopper, rng, dtype, head_dim, sequences):
    """1 to 8 CTAs share a row: as many as there are multiprocessors for (sm90/row_plan.h)."""
    check_decode(hopper, rng, sequences, dtype=dtype, head_dim=head_dim, heads=(24, 2))


@pytest.mark.parametrize("heads", [(16, 1), (1, 1), (9, 3), (17, 1)], ids=str)
def test_decode_of_every_size_of_group(hopper, rng, heads):
    check_decode(hopper, rng, 20, dtype="bfloat16", head_dim=128, heads=heads)


def test_decode_of_more_rows_than_ctas(hopper, rng):
    """A CTA has several, one after the other."""
    lists: Lists = [rng.permutation(40)[: i % 41].tolist() for i in range(900)]
    case = qsa_case(
        rng, [1] * 900, [40] * 900, lists=lists, width=40, dtype="bfloat16", head_dim=64, heads=(24, 2), page_size=16
    )
    case.run_and_check(hopper)
    out, lse = case.run(hopper)
    for sequence in (0, 40, 41, 899):
        own = slice(sequence, sequence + 1)
        assert_all_same_bits(case.alone(sequence).run(hopper), (out[own], lse[own]), f"sequence {sequence} alone")


def test_rows_that_leave_most_warps_without_work(hopper, rng):
    """A CTA has many rows of a tile or two: warps without one of it are ahead of the others, or far behind."""
    torch = hopper.xp
    rows = 4000
    lists: Lists = [rng.permutation(40)[: rng.integers(0, 21)].tolist() for _ in range(rows)]
    case = qsa_case(
        rng, [1] * rows, [40] * rows, lists=lists, width=20, dtype="float16", head_dim=64, heads=(16, 1), page_size=16
    )
    expected = case.run(hopper)
    tensors = case.tensors(hopper)
    for _ in range(300):  # times 3 kernels, as many as fit into a launch queue: nothing waits
        result = case.call(hopper, **tensors, return_lse=True)
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + 60
    while not done.query():
        assert time.monotonic() < deadline, "the calls hang"
        time.sleep(0.01)
    assert_all_same_bits(map(hopper.numpy, result), expected, "the last of many calls")


def test_decode_of_few_among_many_empty_sequences(hopper, rng):
    """Most units are nobody's, and row i is not sequence i's."""
    rows = [0] * 700
    for sequence in (3, 4, 300, 699):
        rows[sequence] = 1
    check_rows(hopper, rng, rows, dtype="bfloat16", head_dim=256, heads=(24, 2), width=70)


def test_many_short_sequences_beside_a_long_one(hopper, rng):
    """So many groups that a cluster looks through several, and finds more than one that is its own."""
    rows = [1, 34] * 20 + [1500] + [36, 1, 0] * 15
    check_rows(hopper, rng, rows, dtype="bfloat16", head_dim=64, heads=(12, 1), width=30)


@each_dtype
def test_a_replayed_graph_gives_the_same_bits(hopper, rng, dtype):
    torch = hopper.xp
    case = qsa_case(rng, [1, 4, 140, 36], [300, 200, 100, 50], dtype=dtype, head_dim=256, heads=(12, 1), width=200)
    expected = case.run(hopper)
    tensors = case.tensors(hopper)
    out, lse = hopper.full(case.out_shape, case.out_dtype), hopper.full(case.out_shape[:2], "float32")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(hopper, **tensors, out=out, lse=lse, return_lse=True)
    for _ in range(3):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_all_same_bits((hopper.numpy(out), hopper.numpy(lse)), expected, "a replay")


@each_dtype
@each_head_dim
def test_maxima_that_rise_from_tile_to_tile(hopper, rng, dtype, head_dim):
    check_rising_maxima(hopper, rng, (1, 4, 40, 140), dtype=dtype, head_dim=head_dim, heads=(12, 1))


@pytest.mark.parametrize("scale", [1e6, -3.0, 0.0])
def test_scales_of_any_size_and_sign(hopper, rng, scale):
    qsa_case(
        rng, [1, 6, 140, 35], [90, 80, 30, 9], dtype="bfloat16", head_dim=128, heads=(12, 1), scale=scale
    ).run_and_check(hopper)


def test_what_takes_the_hopper_path(hopper):
    def path(**query: Any) -> str:
        return supports("qsa_sparse_attention", device="cuda", **query).path

    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            assert path(dtype=dtype, head_dim=head_dim, group=12) == "cuda_sm90"
        assert path(dtype="float32", head_dim=head_dim, group=12) == "cuda_portable"
        assert path(dtype="bfloat16", head_dim=head_dim, group=65) == "cuda_portable"
    assert path(dtype="bfloat16", head_dim=96, group=12) == "cuda_portable"


def test_a_call_runs_the_kernels_it_should(hopper, rng):
    """By their names in torch's profiler: everything else would be as right on the portable path."""
    torch = hopper.xp
    shape: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128, "heads": (12, 1)}
    few, more = qsa_case(rng, [1, 4], [90, 80], **shape), qsa_case(rng, [1, 33], [90, 80], **shape)
    many = qsa_case(rng, [140, 1], [90, 80], **shape)
    wide = qsa_case(rng, [1, 1], [90, 80], **{**shape, "heads": (17, 1)})
    kernels = ("sm90::qsa_rows_kernel<", "sm90::qsa_groups_kernel<", "portable::qsa_kernel<")
    if not kernel_names(torch, lambda: few.call(hopper)):
        pytest.skip("torch's profiler sees no kernels here")
    calls: list[tuple[str, Case, dict[str, Any], tuple[int, int, int]]] = [
        ("few rows", few, {}, (1, 0, 0)),
        ("more rows", more, {}, (1, 1, 0)),
        ("a long one too", many, {}, (1, 2, 0)),
        ("a wrong hint", many, {"max_prompt_length": 1}, (1, 2, 0)),
        ("more heads a kv head than the rows' kernel takes", wide, {}, (0, 1, 0)),
        ("a base off by one", many.replace(q=off_by_one(many.array("q"))), {}, (0, 0, 1)),
        ("a kernel that is asked for", many, {"warps": 4}, (0, 0, 1)),
    ]
    for what, case, extra, expected in calls:
        tensors = case.tensors(hopper)
        names = kernel_names(
            torch, lambda case=case, tensors=tensors, extra=extra: case.call(hopper, **tensors, **extra)
        )
        assert tuple(sum(kernel in name for name in names) for kernel in kernels) == expected, (what, names)


@each_head_dim
def test_as_many_ctas_share_a_row_as_there_is_room_for(hopper, rng, head_dim):
    """The bits do not tell, by the tests above; the name of the kernel does."""
    torch = hopper.xp
    seen = []
    for sequences in (1, 8, 20, 150):
        case = qsa_case(
            rng, [1] * sequences, [90] * sequences, dtype="bfloat16", head_dim=head_dim, heads=(24, 2), page_size=16
        )
        names = kernel_names(torch, lambda case=case: case.call(hopper))
        if not names:
            pytest.skip("torch's profiler sees no kernels here")
        seen += [int(n) for name in names for n in re.findall(r"QsaRowTraits<[^<>]*?(\d+)>", name)]
    assert seen == [8, 4, 2, 1]


# The same of the CPU backend


def test_the_cpu_backend_makes_the_same_promises(numpy_cpu, rng):
    shape = {"dtype": "float32", "head_dim": 16, "heads": (6, 1)}
    check_rows(numpy_cpu, rng, (1, 5, 0, 7), width=70, **shape)
    check_duplicates(numpy_cpu, rng, 7, **shape)
    check_no_leaks(numpy_cpu, rng, 6, **shape)
    check_special_values(numpy_cpu, rng, 5, **shape)
    check_rising_maxima(numpy_cpu, rng, (1, 2), **shape)
    for order in ORDERS:
        check_long_context(numpy_cpu, rng, 6, 3 * WINDOW, order, **shape)
    check_bits(numpy_cpu, rng, (1, 4, 0, 9), **shape)
    check_decode(numpy_cpu, rng, 11, **shape)
