"""Failures that users of such kernels reported in public, each kind with its small input.

"alone" means bit-equal to the sequence run by itself. What is a matter of streams and graphs is in test_cuda.py; what
is a matter of one sentence of the contract (window ends, page tables) also has its test beside that sentence.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from _cases import (
    LAYOUTS,
    Case,
    listed,
    normal,
    off_by_one,
    offsets_of,
    packed_qkv,
    packed_strides,
    poison_unlisted,
    qsa_case,
    ragged_case,
)
from _checks import assert_all_same_bits, assert_matches, assert_nothing_attended, assert_same_bits
from _frameworks import FLOAT_DTYPES, OnlyDlpack, Strided, numpy_dtype

each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)
low_precision = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def assert_sequences_as_alone(case: Case, path, results, sequences) -> None:
    for sequence in sequences:
        rows = slice(*case.bounds(sequence))
        alone = case.alone(sequence).run(path)
        assert_all_same_bits([result[rows] for result in results], alone, f"sequence {sequence}", "the same alone")


# ragged_flash_attention


@each_dtype
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_nan_past_the_end_does_not_leak(path, rng, dtype, names):
    """flash-attention 2374, sglang 15757, flashinfer 942: 0 * NaN."""
    case = ragged_case(rng, [21], dtype=dtype, after=3)
    zeros, poisoned = case, case
    for name in "qkv":
        array = case.array(name).copy()
        array[21:] = 0
        zeros = zeros.replace(**{name: array})
        if name in names:
            array = array.copy()
            array[21:] = np.nan
        poisoned = poisoned.replace(**{name: array})
    out, lse = poisoned.run(path)
    assert_all_same_bits((out, lse), zeros.run(path), "with NaN past the end", "with zeros there")
    zeros.check(out, lse)


def test_rows_past_the_last_offset_are_written_as_0(path, rng):
    """flash-attention 1228, pytorch 176793, TransformerEngine 3205."""
    case = ragged_case(rng, [144, 288, 512], heads=(1, 1), head_dim=32, after=2)
    assert case.array("q").shape[0] == 946
    out, lse = case.run_and_check(path)
    assert_nothing_attended(out[944:], lse[944:])


@low_precision
def test_zero_length_sequences_neither_crash_nor_hang(path, rng, dtype):
    """flash-attention 1343, 2470, 2562; cudnn-frontend 943."""
    case = ragged_case(rng, [0, 1208, 840, 0], heads=(1, 1), head_dim=256, dtype=dtype)
    assert case.array("input_row_offsets").tolist() == [0, 0, 1208, 2048, 2048]
    assert_sequences_as_alone(case, path, case.run(path), (1, 2))
    for batch in (0, 1, 5):
        empty = ragged_case(rng, [0] * batch, heads=(1, 1), head_dim=256, dtype=dtype, after=9)
        assert_nothing_attended(*empty.run(path))


@pytest.mark.large
def test_offsets_past_32_bits(path, rng):
    """flash-attention 1311, 2611: 410,923 rows, 9,728 elements apart, as slices of one buffer."""
    rows, stride, length, dim = 410_923, 9_728, 150, 64
    try:
        buffer = path.empty((rows * stride,), "float16")
    except MemoryError:
        pytest.skip("no 8 GB of address space here")
    case = ragged_case(rng, [length], heads=(2, 1), head_dim=dim, dtype="float16")
    tensors, column = {}, path.q_offset
    for name in "qkv":
        array = case.array(name)
        view = Strided(np.empty(0), (rows, *array.shape[1:]), (stride, dim, 1), column)
        if path.name == "numpy":
            view = np.lib.stride_tricks.as_strided(buffer[column:], view.shape, (2 * stride, 2 * dim, 2))
        elif path.name == "torch":
            view = buffer.as_strided(view.shape, view.strides, column)
        else:
            view = path.xp.lib.stride_tricks.as_strided(buffer[column:], view.shape, (2 * stride, 2 * dim, 2))
        view[-length:] = path.tensor(array)
        tensors[name] = view
        column += array.shape[1] * dim
    offsets = path.tensor(np.array([rows - length, rows], np.int32))
    out, lse = case.call(path, **tensors, input_row_offsets=offsets, return_lse=True)
    got = path.numpy(out[-length:]), path.numpy(lse[-length:])
    case.check(*got)
    if path.on_cpu:
        assert_all_same_bits(got, case.run(path), "at the end of a huge buffer")
    assert_nothing_attended(path.numpy(out[:5]), path.numpy(lse[:5]))


@pytest.mark.parametrize(
    ("window", "row", "expected"),
    [
        (4, 5, {2, 3, 4, 5}),
        (4, 0, {0}),
        (4, 3, {0, 1, 2, 3}),
        (1, 5, {5}),
        (100, 7, set(range(8))),
        (8, 7, set(range(8))),
    ],
)
@each_dtype
def test_windows_are_not_off_by_one(path, window, row, expected, dtype):
    """flash-attention 1133, 895; transformers 39408: W keys, the row's own included."""
    one_hot = np.eye(8)[:, None].astype(numpy_dtype(dtype))
    operands = {"q": np.zeros_like(one_hot), "k": one_hot, "v": one_hot, "input_row_offsets": offsets_of([8])}
    parameters = {"mask_str": "sliding_window_causal", "local_window_size": window}
    out, _ = Case("ragged_flash_attention", operands, parameters).run(path)
    assert set(np.flatnonzero(out[row, 0].astype(np.float32)).tolist()) == expected


def many_sequences(rng, batch: int, length: int) -> Case:
    return ragged_case(rng, [length] * batch, heads=(1, 1), head_dim=8, dtype="float16")


@pytest.mark.large
@pytest.mark.parametrize(("batch", "length"), [(80_000, 16), (100_000, 1), (70_000, 3)])
def test_more_than_65535_sequences(path, rng, batch, length):
    """flash-attention 1786, flashinfer 3125."""
    case = many_sequences(rng, batch, length)
    out, lse = case.run(path)
    rows = np.unique(np.concatenate([rng.choice(len(out), 200), np.arange(5), len(out) - 1 - np.arange(5)]))
    case.check(out[rows], lse[rows], rows)
    if length == 1:
        # Plus 0, since a weighted sum may turn -0.0, which a draw may round to, into 0.0.
        zero = out.dtype.type(0)
        assert_same_bits(out + zero, case.array("v") + zero, "the output of one-token sequences", "v")


@pytest.mark.large
def test_time_is_linear_in_the_number_of_sequences(path, rng):
    seconds = []
    for batch in (10_000, 80_000):
        case = many_sequences(rng, batch, 16)
        tensors = case.tensors(path)
        samples = []
        for _ in range(5):
            path.synchronize()
            start = time.perf_counter()
            case.call(path, **tensors)
            path.synchronize()
            samples.append(time.perf_counter() - start)
        seconds.append(min(samples))
    assert seconds[1] < 3 * 8 * max(seconds[0], 2e-5), seconds


@each_dtype
@pytest.mark.parametrize("head_dim", [16, 24, 72, 80, 96, 112, 160, 192, 256])
def test_every_head_dim_is_right(path, rng, head_dim, dtype):
    """flashinfer 4299: silently wrong. 264 and 20 are refused by name: test_validation.py."""
    ragged_case(rng, [130, 3], heads=(2, 1), head_dim=head_dim, dtype=dtype).run_and_check(path)


@low_precision
@pytest.mark.parametrize("mask_str", ["causal", "null"])
def test_bits_move_neither_with_the_batch_nor_with_the_hint(path, rng, dtype, mask_str):
    """vllm 51902, 47069, flash-attention 1897: alone, first, last, with long neighbours; any hint."""
    target = ragged_case(rng, [9], heads=(4, 1), head_dim=128, dtype=dtype, mask_str=mask_str)
    alone = target.run(path)
    for before, after in [((), (3,)), ((3,), ()), ((700,), (700,)), ((1,) * 40, (1,) * 3), ((64, 64), (0, 500))]:
        lengths = [*before, 9, *after]
        case = ragged_case(rng, lengths, heads=(4, 1), head_dim=128, dtype=dtype, mask_str=mask_str)
        rows = slice(sum(before), sum(before) + 9)
        for name in "qkv":
            case.array(name)[rows] = target.array(name)
        for hint in (None, 9, 10, max(lengths), 1, 10**6):
            results = case.run(path, q_max_seq_len=hint)
            assert_all_same_bits([result[rows] for result in results], alone, f"in {lengths} with hint {hint}", "alone")


@each_dtype
def test_strides_are_not_ignored(path, rng, dtype):
    """flash-attention 2541, vllm 40737: a packed qkv; transposed head and row dims; odd strides of size-1 dims."""
    case = ragged_case(rng, [70, 20], heads=(1, 1), head_dim=128, dtype=dtype)
    expected = case.run_and_check(path)
    odd = {
        name: Strided(case.array(name).ravel(), case.array(name).shape, (128, stride, 1))
        for name, stride in zip("qkv", (1, 7, 12_345), strict=True)
    }
    assert_all_same_bits(case.replace(**odd).run(path), expected, "with odd strides where they mean nothing")
    packed_qkv(case).run_and_check(path)


def test_a_transposed_head_dim_is_refused_by_name(path, rng):
    case = ragged_case(rng, [40], heads=(2, 2))
    view = Strided(case.array("k").transpose(2, 1, 0).ravel().copy(), (40, 2, 64), (1, 40, 80))
    with pytest.raises(ValueError, match=r"\bk\b.*contiguous"):
        case.call(path, k=path.tensor(view))


@each_dtype
def test_a_hint_that_is_too_small_drops_no_row(path, rng, dtype):
    """The origin system leaves the tail unwritten."""
    case = ragged_case(rng, [300], dtype=dtype)
    out, lse = case.run_and_check(path, q_max_seq_len=4)
    assert_all_same_bits((out, lse), case.run(path), "with hint 4")


def test_sequences_of_no_or_one_row_with_the_hint_1(path, rng):
    """flash-attention 1537: a wrong shape where the longest sequence has one row and others have none."""
    for lengths in ([0, 1, 0, 1], [0, 0, 1], [1], [1] * 9, [0] * 9 + [1]):
        case = ragged_case(rng, lengths, heads=(9, 3), dtype="bfloat16")
        out, lse = case.run_and_check(path, q_max_seq_len=1)
        assert_all_same_bits((out, lse), case.run(path), "with the hint 1")


@low_precision
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_no_length_is_undesirable(path, rng, head_dim, dtype):
    """cudnn-frontend 160: NaN where a length is no multiple of a tile."""
    lengths = rng.permutation(np.arange(1, 140))
    out, lse = ragged_case(rng, lengths, heads=(2, 1), head_dim=head_dim, dtype=dtype).run(path)
    assert np.all(np.isfinite(out.astype(np.float32)))
    assert np.all(np.isfinite(lse))
    for first in (1, 60, 120):
        case = ragged_case(rng, range(first, first + 15), heads=(2, 1), head_dim=head_dim, dtype=dtype)
        case.run_and_check(path)


@each_dtype
def test_keys_and_values_interleaved_and_rows_between(path, rng, dtype):
    """cudnn-frontend 538, 737: a token stride of more than heads * head_dim, and a first row that is not row 0."""
    case = ragged_case(rng, [90, 40], heads=(4, 2), head_dim=64, dtype=dtype, before=5, after=4)
    k, v = case.array("k"), case.array("v")
    buffer = np.stack([k, v], axis=2).reshape(-1)  # [rows, heads, 2, head_dim]
    views = {name: Strided(buffer, k.shape, (256, 128, 1), 64 * i) for i, name in enumerate("kv")}
    out, lse = case.replace(**views).run_and_check(path)
    assert_nothing_attended(out[:5], lse[:5])
    assert_nothing_attended(out[-4:], lse[-4:])


@each_dtype
def test_strides_survive_dlpack(path, rng, dtype):
    """jax 4196, 7657, 17784: an import that keeps the shape and drops the strides; jax 25066: those of size 1."""
    if dtype == "bfloat16" and path.name == "numpy":
        pytest.skip("NumPy's DLPack has no bfloat16")
    case = ragged_case(rng, [50, 20], heads=(1, 1), head_dim=64, dtype=dtype)
    for name, layout in LAYOUTS.items():
        if name == "reversed_rows" and path.name == "torch":  # which has no negative strides
            continue
        tensors = case.replace(**{name: layout(case.array(name)) for name in "qkv"}).tensors(path)
        out, lse = path.full(case.out_shape, dtype), path.full(case.out_shape[:2], "float32")
        wrapped = {name: OnlyDlpack(tensor) for name, tensor in tensors.items()}
        case.call(path, **wrapped, out=out, lse=lse, return_lse=True)
        case.check(path.numpy(out), path.numpy(lse))


@low_precision
def test_parts_merge_by_their_lse(path, rng, dtype):
    """vllm-flash-attention 87, flashinfer 4484: what cascade and distributed attention do with the LSE.

    A row over all keys is the sum of the row over each part, weighted by exp(LSE - LSE of all); a part without a key
    weighs nothing. Grouped heads and single rows, where head and row dimensions are easily exchanged.
    """
    lists = [rng.permutation(300)[:150] for _ in range(3)]
    shape = {"heads": (12, 2), "head_dim": 64, "dtype": dtype, "width": 150}
    whole = qsa_case(rng, [1, 1, 1], [299, 299, 299], lists=lists, **shape)
    parts = []
    for begin, end in ((0, 60), (60, 150), (150, 150)):
        indices = np.full_like(whole.array("token_indices"), -7)
        indices[:, : end - begin] = whole.array("token_indices")[:, begin:end]
        counts = np.full_like(whole.array("counts"), end - begin)
        parts.append(whole.replace(token_indices=indices, counts=counts, out_dtype="float32").run(path))
    out, lse = whole.run(path)
    whole.check(out, lse)
    total = np.logaddexp.reduce([part_lse.astype(np.float64) for _, part_lse in parts])
    merged = sum(part.astype(np.float64) * np.exp(part_lse - total)[..., None] for part, part_lse in parts)
    np.testing.assert_allclose(total, lse, atol=1e-4)
    np.testing.assert_allclose(merged, out.astype(np.float64), atol=2e-2)


def exact_logits(rng, dtype: str, logits, head_dim: int = 64) -> Case:
    """One sequence whose score of key j is exactly logits[j] for every row: q has ones, k the logits' binary parts."""
    n = len(logits)
    q = np.ones((n, 1, head_dim))
    k = np.zeros((n, 1, head_dim))
    k[:, 0, :] = (np.asarray(logits, np.float64) / head_dim)[:, None]
    operands = {
        "q": q.astype(numpy_dtype(dtype)),
        "k": k.astype(numpy_dtype(dtype)),
        "v": normal(rng, (n, 1, head_dim), dtype),
        "input_row_offsets": offsets_of([n]),
    }
    assert np.all(operands["k"].astype(np.float64) == k), "choose logits that this dtype holds"
    return Case("ragged_flash_attention", operands, {"mask_str": "null", "scale": 1.0}, unit_normal=False)


@each_dtype
@pytest.mark.parametrize("base", [-(2.0**20), -(2.0**21), -3 * 2.0**19])
def test_logits_far_below_a_finite_minus_infinity(path, rng, dtype, base):
    """flashinfer 4451: -1e6 and below in every visible key is still a softmax of them."""
    case = exact_logits(rng, dtype, [base] * 70)
    out, lse = case.run_and_check(path)
    assert np.all(np.isfinite(out.astype(np.float32)))
    assert np.all(np.isfinite(lse))


@pytest.mark.parametrize("score", [-1e30, -2e38])
def test_logits_down_to_the_end_of_float32(path, rng, score):
    """Finite scores that no mask value lies below; times log2(e), the last one is not even a float32."""
    case = ragged_case(rng, [40], heads=(1, 1), head_dim=8, mask_str="null", scale=1.0)
    q, k = np.zeros((2, 40, 1, 8), np.float32)
    q[..., 0], k[..., 0] = 1, score
    out, _ = case.replace(q=q, k=k).run_and_check(path)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exp_does_not_overflow(path, rng, dtype):
    """Logits of about +-1e4: all at the top, all at the bottom, and both ends in one row."""
    top = 2.0**13 + 2.0**11  # 10,240
    for logits in ([top] * 40, [-top] * 40, [top, -top] * 20, [-top] * 39 + [top], [top] + [-top] * 69):
        case = exact_logits(rng, dtype, logits)
        out, lse = case.run_and_check(path)
        assert np.all(np.isfinite(out.astype(np.float32)))
        assert np.all(np.isfinite(lse))


def test_a_later_key_far_above_the_earlier_ones_takes_over(path, rng):
    """The running maximum of an online softmax jumps in the last tile."""
    case = exact_logits(rng, "float32", [0.0] * 299 + [256.0])
    out, _ = case.run_and_check(path)
    np.testing.assert_allclose(out, np.broadcast_to(case.array("v")[-1], out.shape))


# qsa_sparse_attention


@each_dtype
def test_nan_in_unlisted_tokens_page_tails_and_unused_pages(path, rng, dtype):
    """sglang 38851, aiter 4245, flash-attention 1745: the builder fills everything not listed with NaN."""
    case = qsa_case(rng, [1], [500], dtype=dtype, width=64, counts=[3], page_size=64, head_dim=128)
    assert np.isnan(case.array("kv_blocks").astype(np.float32)).mean() > 0.99
    out, lse = case.run_and_check(path)
    assert np.all(np.isfinite(out.astype(np.float32)))
    assert np.all(np.isfinite(lse))


@each_dtype
@pytest.mark.parametrize("counts", [[0, 600, 0, 600], [0], [0, 0], [600, 0]], ids=str)
def test_count_0_among_full_rows(path, rng, dtype, counts):
    """vllm 49054: few rows, so that a list may be split."""
    case = qsa_case(rng, [1] * len(counts), [900] * len(counts), dtype=dtype, width=600, counts=counts)
    out, lse = case.run_and_check(path)
    empty = np.array(counts) == 0
    assert_nothing_attended(out[empty], lse[empty])


@each_dtype
def test_index_minus_1_and_past_the_end_alias_no_token(path, rng, dtype):
    """cudnn-frontend kf_qsa; a cache length that is no power of two."""
    lists = [[-1, 5, 1001, 7, -1, 1002, 1500], [1001, 0, 2**30, 3]]
    case = qsa_case(rng, [2], [1000], dtype=dtype, lists=lists, page_size=64)
    case.run_and_check(path)


@each_dtype
def test_a_list_wholly_out_of_range_gives_0_and_minus_infinity(path, rng, dtype):
    """flashinfer 4452, flash-attention 978: a finite LSE, or +inf, where nothing was attended; ROCm/ATOM 1831."""
    lists = [[-1, -5, 2**30, 103], [103, 104], [102], [-(2**31), 2**31 - 1]]
    case = qsa_case(rng, [4], [99], heads=(6, 2), dtype=dtype, lists=lists, width=4)
    out, lse = case.run_and_check(path)
    empty = [0, 1, 3]
    assert_nothing_attended(out[empty], lse[empty])
    # And a table whose entries are all free slots, as serving systems mark them.
    for free in (-1, 2**31 - 1, len(case.array("kv_blocks"))):
        table = np.full_like(case.array("kv_lookup_table"), free)
        assert_nothing_attended(*case.replace(kv_lookup_table=table).run(path))


@low_precision
@pytest.mark.parametrize("page_size", [16, 64])
def test_decoding_token_by_token(path, rng, page_size, dtype):
    """torchtitan 3235: about one step in a hundred came out as NaN. The cache beyond the context is NaN."""
    steps, start = 140, 50
    most = start + steps + 1
    case = qsa_case(
        rng, [1], [most - 1], heads=(12, 1), head_dim=128, dtype=dtype, page_size=page_size, width=most
    )  # fmt: skip
    order = np.arange(most, dtype=np.int32)
    keys = normal(rng, case.array("kv_blocks").shape, dtype)
    for length in range(start, start + steps, 1 if page_size == 16 else 7):
        step = case.replace(
            cache_lengths=np.array([length], np.int32),
            token_indices=np.roll(order, int(rng.integers(0, 300)))[None],  # positions past the context do not count
            counts=np.array([len(order)], np.int32),
            kv_blocks=keys,
        )
        step.replace(kv_blocks=poison_unlisted(step)).run_and_check(path)


@each_dtype
def test_the_same_input_30_times(path, rng, dtype):
    """Races between pipeline stages."""
    case = qsa_case(rng, [1, 33], [3000, 3000], heads=(12, 1), head_dim=256, dtype=dtype, page_size=64, width=300)
    tensors = case.tensors(path)
    first = [path.numpy(result) for result in case.call(path, **tensors, return_lse=True)]
    for _ in range(29):
        again = case.call(path, **tensors, return_lse=True)
        assert_all_same_bits(map(path.numpy, again), first, "a repeat")


@pytest.mark.large
def test_page_offsets_past_32_bits(path, rng):
    """vllm 50427: 12 layers, pages of 128 tokens; page ids past 1,400, and elements past 2^31 and 2^32 bytes."""
    case = qsa_case(
        rng, [2, 1], [300, 290], heads=(12, 1), head_dim=256, dtype="bfloat16", page_size=128, num_layers=12,
        layer_idx=11, width=200,
    )  # fmt: skip
    blocks = case.array("kv_blocks")
    num_pages = 2**31 // blocks[0].size + 200
    places = np.sort(rng.choice(np.arange(num_pages - 150, num_pages), len(blocks), replace=False))
    places[0], places[-1] = 1401, num_pages - 1
    try:
        cache = path.empty((num_pages, *blocks.shape[1:]), "bfloat16")
    except MemoryError:
        pytest.skip("no 4 GB of address space here")
    for place, block in zip(places.tolist(), blocks, strict=True):
        cache[place] = path.tensor(block)
    table = places[case.array("kv_lookup_table")].astype(np.int32)
    results = case.call(path, kv_blocks=cache, kv_lookup_table=path.tensor(table), return_lse=True)
    got = tuple(map(path.numpy, results))
    case.check(*got)
    assert_all_same_bits(got, case.run(path), "at the end of a huge cache")


TILE_EDGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 2050, 2051]


@pytest.mark.parametrize("count", TILE_EDGES)
@low_precision
def test_partial_last_tiles_do_not_over_read(path, rng, count, dtype):
    """sglang 37633. The last token of the last page is listed, and the cache ends there."""
    context = 2200
    tokens = [context, *rng.permutation(context)[: count - 1]]
    case = qsa_case(
        rng, [1], [context], heads=(3, 1), dtype=dtype, lists=[tokens], width=2051, spare_pages=0,
        page_size=(context + 1) // 31,
    )  # fmt: skip
    table = np.sort(case.array("kv_lookup_table"), axis=1)  # the last slot on the last page
    assert (context + 1) % 31 == 0
    case = case.replace(kv_lookup_table=table, kv_blocks=normal(rng, case.array("kv_blocks").shape, dtype))
    assert listed(case, 0, 0)[0] == (len(case.array("kv_blocks")) - 1, case.array("kv_blocks").shape[3] - 1)
    case.run_and_check(path)


@each_dtype
def test_each_row_uses_its_own_sequences_page_table(path, rng, dtype):
    """TensorRT-LLM 19138, vllm 55357: offsets [0, 4, 8], different tables, pad rows past the end."""
    lists = [rng.permutation(40)[:20] for _ in range(4)] * 2  # the same positions in both
    case = qsa_case(rng, [4, 4], [40, 40], dtype=dtype, lists=lists, after=3)
    out, lse = case.run_and_check(path)
    assert_nothing_attended(out[8:], lse[8:])
    assert_sequences_as_alone(case, path, (out, lse), (0, 1))


@each_dtype
def test_duplicates_also_across_rows_that_share_a_gather(path, rng, dtype):
    lists = [[5, 5, 9], [5, 9], [9, 9, 5], [5, 9, 5, 9], [9], [5, 5, 5]]
    case = qsa_case(rng, [6], [20], heads=(12, 1), dtype=dtype, lists=lists)
    out, lse = case.run_and_check(path)
    for row in range(6):
        single = case.replace(
            q=case.array("q")[row : row + 1],
            input_row_offsets=np.array([0, 1], np.int32),
            token_indices=case.array("token_indices")[row : row + 1],
            counts=case.array("counts")[row : row + 1],
        )
        exact, plain = single.reference(), single.reference(plain=True)
        assert_matches(out[row : row + 1], lse[row : row + 1], exact, plain, dtypes=(dtype, dtype), unit_normal=True)


@low_precision
@pytest.mark.parametrize("heads", [(3, 1), (6, 1), (12, 1), (24, 2), (16, 1), (8, 8), (15, 3)], ids=str)
def test_group_sizes(path, rng, heads, dtype):
    """kvcache-ai/sglang 70."""
    qsa_case(rng, [3, 2], [200, 90], heads=heads, head_dim=128, dtype=dtype, width=100).run_and_check(path)


@pytest.mark.parametrize("width", [1, 4, 192, 2052, 8195])
@low_precision
def test_widths(path, rng, width, dtype):
    """flashinfer 5135."""
    qsa_case(rng, [1, 2], [8400, 100], heads=(2, 1), dtype=dtype, page_size=64, width=width).run_and_check(path)


@each_dtype
def test_a_cache_base_off_by_one_element(path, rng, dtype):
    case = qsa_case(rng, [3], [90], dtype=dtype, head_dim=128)
    case.replace(kv_blocks=off_by_one(case.array("kv_blocks"))).run_and_check(path)
    odd_pages = [
        packed_strides(case.array("kv_blocks").shape)[0] + 1,
        *packed_strides(case.array("kv_blocks").shape)[1:],
    ]
    size = odd_pages[0] * len(case.array("kv_blocks"))
    buffer = np.zeros(size, case.array("kv_blocks").dtype)
    view = Strided(buffer, case.array("kv_blocks").shape, tuple(odd_pages))
    view.array[...] = case.array("kv_blocks")
    case.replace(kv_blocks=view).run_and_check(path)
