"""The reference itself: against values worked out by hand, and against the contract's predicates taken literally."""

from __future__ import annotations

import math

import numpy as np
import pytest
from _cases import listed, offsets_of, qsa_case, ragged_case
from _frameworks import numpy_dtype

from ragged_attention import reference

LOG2, LOG3 = math.log(2), math.log(3)

# The masks as the contract's table has them: does query i see key j?
PREDICATES = {
    "null": lambda i, j, w: True,
    "causal": lambda i, j, w: j <= i,
    "sliding_window_causal": lambda i, j, w: i - w + 1 <= j <= i,
    "sliding_window_noncausal": lambda i, j, w: j >= i - w + 1,
    "chunked": lambda i, j, w: i // w == j // w,
    "chunked_causal": lambda i, j, w: j <= i and i // w == j // w,
}


def windows(mask_str):
    return (-1,) if mask_str in ("null", "causal") else (1, 2, 3, 4, 5, 7, 8, 100)


@pytest.mark.parametrize("mask_str", reference.MASKS)
def test_visible_keys_are_those_of_the_predicate(mask_str):
    for window in windows(mask_str):
        for n in range(1, 13):
            for i in range(n):
                lo, hi = reference.visible_keys(mask_str, window, i, n)
                expected = [j for j in range(n) if PREDICATES[mask_str](i, j, window)]
                assert list(range(lo, hi)) == expected, (window, n, i)


def test_visible_keys_are_monotone_in_the_row():
    for mask_str in reference.MASKS:
        for window in windows(mask_str):
            bounds = np.array([reference.visible_keys(mask_str, window, i, 12) for i in range(12)])
            assert np.all(np.diff(bounds, axis=0) >= 0), (mask_str, window)


@pytest.mark.parametrize(
    ("mask_str", "window"),
    [("null", 4), ("causal", 1), ("sliding_window_causal", -1), ("chunked", 0), ("chunked_causal", -2), ("full", -1)],
)
def test_visible_keys_refuses_what_the_contract_refuses(mask_str, window):
    with pytest.raises(ValueError, match=r"mask_str|local_window_size"):
        reference.visible_keys(mask_str, window, 0, 1)


def column(*values, dtype=np.float32):
    """[rows, 1 head, head_dim 1]."""
    return np.array(values, dtype).reshape(-1, 1, 1)


@pytest.mark.parametrize(
    ("mask_str", "window", "out", "lse"),
    [
        # Every logit is 0, so each output is the mean of the visible values 1, 2, 4, 8 and lse is log(how many).
        ("null", -1, [3.75, 3.75, 3.75, 3.75], [4, 4, 4, 4]),
        ("causal", -1, [1, 1.5, 7 / 3, 3.75], [1, 2, 3, 4]),
        ("sliding_window_causal", 2, [1, 1.5, 3, 6], [1, 2, 2, 2]),
        ("sliding_window_noncausal", 2, [3.75, 3.75, 14 / 3, 6], [4, 4, 3, 2]),
        ("chunked", 3, [7 / 3, 7 / 3, 7 / 3, 8], [3, 3, 3, 1]),
        ("chunked_causal", 3, [1, 1.5, 7 / 3, 8], [1, 2, 3, 1]),
    ],
)
def test_ragged_means_by_hand(mask_str, window, out, lse):
    zeros = column(0, 0, 0, 0)
    got = reference.ragged_flash_attention(
        zeros, zeros, column(1, 2, 4, 8), np.array([0, 4]), mask_str=mask_str, local_window_size=window
    )
    np.testing.assert_allclose(got[0].ravel(), out, rtol=1e-15)
    np.testing.assert_allclose(got[1].ravel(), np.log(lse), rtol=1e-15)


def test_ragged_softmax_by_hand():
    # Scores of row 1: 2 * log 2 * 0 = 0 and 2 * log 2 * 0.5 = log 2, so weights 1/3 and 2/3.
    out, lse = reference.ragged_flash_attention(
        column(1, 2, dtype=np.float64), column(0, LOG2 / 2, dtype=np.float64), column(3, 6), np.array([0, 2]), scale=1
    )
    np.testing.assert_allclose(out.ravel(), [3, 5], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [0, LOG3], atol=1e-15)


def test_default_scale_is_the_inverse_root_of_head_dim():
    q = np.ones((2, 1, 4))
    k = np.array([0.0, LOG2 / 2]).reshape(2, 1, 1).repeat(4, 2)  # q . k = 0 and 2 log 2; halved by the scale
    _, lse = reference.ragged_flash_attention(q, k, k, np.array([0, 2]), mask_str="null")
    np.testing.assert_allclose(lse, LOG3, rtol=1e-15)


def test_ragged_sequences_heads_and_unowned_rows_by_hand():
    # Rows 0 and 5 belong to nobody; sequences are rows 1-2, none, rows 3-4. Query heads 0, 1 read head 0; 2, 3 head 1.
    v = np.zeros((6, 2, 1))
    v[:, 0, 0] = [np.nan, 1, 3, 5, 7, np.nan]
    v[:, 1, 0] = [np.nan, 10, 30, 50, 70, np.nan]
    q = np.zeros((6, 4, 1))
    out, lse = reference.ragged_flash_attention(q, np.zeros((6, 2, 1)), v, np.array([1, 3, 3, 5], np.uint32))
    np.testing.assert_array_equal(
        out[..., 0], [[0] * 4, [1, 1, 10, 10], [2, 2, 20, 20], [5, 5, 50, 50], [6, 6, 60, 60], [0] * 4]
    )
    np.testing.assert_allclose(lse[:, 0], [-np.inf, 0, LOG2, 0, LOG2, -np.inf])


@pytest.mark.parametrize(
    ("keys", "values", "out", "lse"),
    [
        ([-np.inf, -np.inf], [1, 2], 0, -np.inf),  # no weight at all
        ([-np.inf, 0], [1, 2], 2, 0),
        ([np.nan, 0], [1, 2], np.nan, np.nan),
        ([np.inf, 0], [1, 2], np.nan, np.nan),  # inf - inf
        ([0, 0], [np.inf, 2], np.inf, LOG2),
        ([0, 0], [np.inf, -np.inf], np.nan, LOG2),
        ([0, 0], [np.nan, 2], np.nan, LOG2),
        ([-1e6, -1e6], [1, 3], 2, -1e6 + LOG2),
        ([1e4, -1e4], [1, 3], 1, 1e4),
    ],
)
def test_non_finite_and_extreme_scores_follow_ieee(keys, values, out, lse):
    got = reference.ragged_flash_attention(
        column(1, 1), column(*keys), column(*values), np.array([0, 2]), mask_str="null", scale=1.0
    )
    np.testing.assert_allclose(got[0].ravel(), [out, out])
    np.testing.assert_allclose(got[1].ravel(), [lse, lse])


def tiny_cache():
    """2 pages of 2 tokens, 2 layers, 1 head, head_dim 1; V of layer 1 is 1, 2 on page 0 and 4, 8 on page 1."""
    blocks = np.full((2, 2, 2, 2, 1, 1), np.nan)
    blocks[:, 0, 1] = 0
    blocks[:, 1, 1, :, 0, 0] = [[1, 2], [4, 8]]
    return blocks


@pytest.mark.parametrize(
    ("tokens", "count", "out", "seen"),
    [
        ([0, 1, 2], 3, (4 + 8 + 1) / 3, 3),  # the table maps slots 0, 1 to pages 1, 0
        ([2, 1, -7], 2, (1 + 8) / 2, 2),  # entries past the count are not read
        ([2, 2, 0], 3, (1 + 1 + 4) / 3, 3),  # a duplicate counts twice
        ([-1, 0, 3], 3, 4, 1),  # -1, and 3 = the length, are not listed
        ([0, 1, 2], 99, 13 / 3, 3),  # counts are clamped
        ([0, 1, 2], -1, 0, 0),
        ([0, 1, 2], 0, 0, 0),
    ],
)
def test_qsa_lists_by_hand(tokens, count, out, seen):
    got = reference.qsa_sparse_attention(
        np.zeros((1, 1, 1)),
        np.array([0, 1]),
        tiny_cache(),
        np.array([2]),  # with this step's row: 3 keys
        np.array([[1, 0]]),
        1,
        np.array([tokens], np.int32),
        np.array([count], np.int32),
    )
    assert got[0].item() == pytest.approx(out, rel=1e-15)
    assert got[1].item() == (pytest.approx(math.log(seen)) if seen else -np.inf)


@pytest.mark.parametrize(
    ("length", "table", "seen"),
    [
        (-5, [[1, 0]], 1),  # a negative length counts as 0: only this step's own key
        (3, [[1]], 2),  # no second slot in the table
        (3, [[1, -1]], 2),
        (3, [[1, 2]], 2),  # there is no page 2
        (2**40, [[1, 0]], 4),
    ],
)
def test_qsa_tokens_that_count_as_not_listed(length, table, seen):
    _, lse = reference.qsa_sparse_attention(
        np.zeros((1, 1, 1)),
        np.array([0, 1]),
        tiny_cache(),
        np.array([length]),
        np.array(table),
        1,
        np.arange(6, dtype=np.int32)[None],
        np.array([6]),
    )
    assert lse.item() == pytest.approx(math.log(seen))


def test_qsa_page_stride_reads_at_the_contracts_address():
    rng = np.random.default_rng(1)
    pages, layers, size, heads, dim, stride = 3, 2, 4, 2, 8, 300
    buffer = rng.standard_normal(pages * stride)
    blocks = buffer[: pages * 2 * layers * size * heads * dim].reshape(pages, 2, layers, size, heads, dim)
    strided = reference._with_page_stride(blocks, stride)
    for page, kv, layer, offset, head, d in np.ndindex(strided.shape):
        address = page * stride + ((kv * layers + layer) * size + offset) * heads * dim + head * dim + d
        assert strided[page, kv, layer, offset, head, d] == buffer[address]
    with pytest.raises(ValueError, match="page_stride"):
        reference._with_page_stride(blocks, 2 * layers * size * heads * dim - 1)


def test_qsa_attends_to_what_the_lists_name(rng):
    """All logits 0, and V the indicator of one token: the output is that token's share of the list."""
    case = qsa_case(
        rng, [3, 2], [20, 33], heads=(2, 1), head_dim=8, width=9, lists=[[1, 5, 5, 22], [2], [], [7, 34], [0]]
    )
    blocks = np.zeros(case.array("kv_blocks").shape)
    case = case.replace(q=np.zeros(case.array("q").shape))
    for sequence, row in [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]:
        places = listed(case, row, sequence)
        for page, offset in set(places):
            marked = blocks.copy()
            marked[page, 1, 1, offset] = 1
            out, lse = case.replace(kv_blocks=marked).reference()
            np.testing.assert_allclose(out[row], places.count((page, offset)) / len(places))
            np.testing.assert_allclose(lse[row], math.log(len(places)))


@pytest.mark.parametrize("plain", [False, True])
def test_rows_are_a_sample_of_the_whole(rng, plain):
    rows = np.array([9, 0, 4, 4, 10, 7])
    for case in (
        ragged_case(rng, [3, 0, 5], before=1, after=2, head_dim=8),
        qsa_case(rng, [3, 0, 5], [9, 2, 30], before=1, after=2, head_dim=8),
    ):
        for sample, whole in zip(case.reference(rows, plain), case.reference(plain=plain), strict=True):
            np.testing.assert_array_equal(sample, whole[rows])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_is_the_reference_with_p_and_o_rounded(rng, dtype):
    case = ragged_case(rng, [40], dtype=dtype, mask_str="null", head_dim=16, heads=(1, 1))
    q, k, v = (case.array(name)[:, 0].astype(np.float64) for name in "qkv")
    p = np.exp(q @ k.T / 4)
    p = (p / p.sum(1, keepdims=True)).astype(numpy_dtype(dtype)).astype(np.float64)
    out, lse = case.reference(plain=True)
    np.testing.assert_allclose(out[:, 0], (p @ v).astype(numpy_dtype(dtype)).astype(np.float64), rtol=2**-7)
    np.testing.assert_array_equal(out, out.astype(numpy_dtype(dtype)).astype(np.float64))
    np.testing.assert_array_equal(lse, case.reference()[1])


def test_low_precision_inputs_are_converted_exactly(rng):
    case = ragged_case(rng, [9], dtype="bfloat16", head_dim=8)
    doubled = case.replace(**{name: case.array(name).astype(np.float64) for name in "qkv"})
    for got, expected in zip(case.reference(), doubled.reference(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_empty_inputs():
    empty = np.zeros((0, 2, 8))
    out, lse = reference.ragged_flash_attention(empty, empty, empty, np.array([0]))
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
    assert offsets_of([]).tolist() == [0]
