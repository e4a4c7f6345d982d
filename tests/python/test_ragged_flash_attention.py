"""ragged_flash_attention: what it computes, sentence by sentence of its contract."""

from __future__ import annotations

import numpy as np
import pytest
from _cases import LAYOUTS, Case, normal, offsets_of, packed_qkv, ragged_case
from _checks import assert_all_same_bits, assert_nothing_attended
from _frameworks import FLOAT_DTYPES, Strided, numpy_dtype

from ragged_attention import reference

MASKS = [
    ("null", -1),
    ("causal", -1),
    ("sliding_window_causal", 1),
    ("sliding_window_causal", 37),
    ("sliding_window_noncausal", 1),
    ("sliding_window_noncausal", 37),
    ("chunked", 1),
    ("chunked", 37),
    ("chunked_causal", 1),
    ("chunked_causal", 37),
]
each_mask = pytest.mark.parametrize(("mask_str", "window"), MASKS, ids=lambda value: str(value))
each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES)

# Shorter than, equal to and longer than any tile of 16, 64 or 128 rows.
LENGTHS = [1, 64, 17, 0, 130, 65]


@each_dtype
@each_mask
def test_masks_and_dtypes(backend, rng, mask_str, window, dtype):
    case = ragged_case(rng, LENGTHS, dtype=dtype, mask_str=mask_str, local_window_size=window, before=2, after=3)
    case.run_and_check(backend)


HOPPER_HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_multiple_of_8_up_to_256_is_a_head_dim(backend, rng, head_dim):
    for dtype in FLOAT_DTYPES if head_dim in HOPPER_HEAD_DIMS else rng.choice(FLOAT_DTYPES, 1):
        ragged_case(rng, [33, 70], head_dim=head_dim, dtype=str(dtype)).run_and_check(backend)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (8, 8), (15, 3), (24, 2), (16, 1), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_query_head_h_reads_kv_head_h_over_group(backend, rng, heads, dtype):
    ragged_case(rng, [40, 3], heads=heads, head_dim=24, dtype=dtype, mask_str="null").run_and_check(backend)


@pytest.mark.parametrize("n", [1, 2, 9, 63, 64, 65, 128, 129, 200, 256])
@each_mask
def test_a_row_sees_exactly_its_keys(backend, n, mask_str, window):
    """q = 0 and v the indicator of the key's position: output j of row i is 1 / (keys i sees) if i sees j, else 0."""
    sees = np.zeros((n, n))
    for i in range(n):
        lo, hi = reference.visible_keys(mask_str, window, i, n)
        sees[i, lo:hi] = 1
    head_dim = -(-n // 8) * 8
    q = np.zeros((n, 1, head_dim), np.float32)
    v = np.zeros_like(q)
    v[:, 0, :n] = np.eye(n)
    operands = {"q": q, "k": q, "v": v, "input_row_offsets": offsets_of([n])}
    case = Case("ragged_flash_attention", operands, {"mask_str": mask_str, "local_window_size": window})
    out, lse = case.run(backend)
    np.testing.assert_array_equal(out[:, 0, :n] > 0, sees > 0)
    np.testing.assert_allclose(out[:, 0, :n], sees / sees.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(lse[:, 0], np.log(sees.sum(1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_str", reference.WINDOWED_MASKS)
@pytest.mark.parametrize("window", [49, 50, 51, 2**31 - 1, 2**31, 2**62])
def test_a_window_as_large_as_the_sequence_and_larger(backend, rng, mask_str, window):
    ragged_case(rng, [50, 7], head_dim=16, mask_str=mask_str, local_window_size=window).run_and_check(backend)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 0.01, 3.5, np.float32(0.25), np.float64(-2), np.array([0.5])])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_is_any_finite_number(backend, rng, scale, dtype):
    case = ragged_case(rng, [70, 5], head_dim=32, dtype=dtype, scale=scale)
    # Scores so far apart that the softmax is nearly a maximum make low precision arbitrarily wrong: keep them modest.
    narrow = case.array("k").astype(np.float32) * (0.2 if abs(float(np.squeeze(scale))) > 1 else 1)
    out, lse = case.replace(k=narrow.astype(numpy_dtype(dtype))).run(backend)
    case.replace(k=narrow.astype(numpy_dtype(dtype)), scale=float(np.squeeze(scale))).check(out, lse)


def test_defaults_are_causal_and_the_inverse_root_of_head_dim(backend, rng):
    case = ragged_case(rng, [70], head_dim=40)
    explicit = case.replace(mask_str="causal", local_window_size=-1, scale=40**-0.5)
    assert_all_same_bits(case.run(backend), explicit.run(backend), "the call with defaults", "the explicit one")


@each_dtype
def test_unowned_rows_and_empty_sequences_give_0_and_minus_inf(backend, rng, dtype):
    case = ragged_case(rng, [0, 3, 0, 0, 66, 0], dtype=dtype, before=67, after=130)
    out, lse = case.run_and_check(backend)
    assert_nothing_attended(out[:67], lse[:67])
    assert_nothing_attended(out[-130:], lse[-130:])


@pytest.mark.parametrize(("lengths", "total"), [([], 0), ([], 5), ([0], 4), ([0, 0, 0], 0), ([0, 0, 0], 130)])
def test_nothing_to_attend_to_fills_the_output(backend, rng, lengths, total):
    out, lse = ragged_case(rng, lengths, after=total).run_and_check(backend)
    assert_nothing_attended(out, lse)


def test_no_query_head_returns_an_empty_output(backend, rng):
    for heads in ((0, 0), (0, 2)):
        out, lse = ragged_case(rng, [4], heads=heads).run(backend)
        assert out.shape == (4, 0, 64)
        assert lse.shape == (4, 0)


@each_mask
def test_nan_of_other_sequences_never_leaks(backend, rng, mask_str, window):
    """Not even into the rows of a tile that two sequences share."""
    case = ragged_case(rng, [21, 50, 9], dtype="float16", mask_str=mask_str, local_window_size=window)
    clean = [case.alone(0).run(backend), case.alone(2).run(backend)]
    poisoned = case
    for name in "qkv":
        array = case.array(name).copy()
        array[21:71] = [[np.nan], [np.inf]] if name == "q" else np.nan
        poisoned = poisoned.replace(**{name: array})
    out, lse = poisoned.run(backend)
    for alone, rows in zip(clean, (slice(0, 21), slice(71, 80)), strict=True):
        assert_all_same_bits((out[rows], lse[rows]), alone, "a sequence next to NaN", "the same alone")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_non_finite_values_that_a_row_sees_go_through(backend, rng, value, where, dtype):
    """As IEEE arithmetic has it; with one key only, so that nothing depends on the order of the sums."""
    case = ragged_case(rng, [1, 40], head_dim=16, dtype=dtype, mask_str="null")
    array = case.array(where).copy()
    array[0, 0, 3] = value
    for name in "qk":  # a product with the infinity is infinite, of either sign but never 0 * inf
        other = np.abs(case.array(name)) + numpy_dtype(dtype).type(0.5)
        case = case.replace(**{name: other.astype(numpy_dtype(dtype))})
    if where != "v":
        array[0] = np.abs(array[0])
        array[0, 0, 3] = value
    case = case.replace(**{where: array}, unit_normal=False)
    case.run_and_check(backend)


def test_a_row_whose_visible_scores_are_all_minus_inf_has_no_weight(backend, rng):
    case = ragged_case(rng, [5], head_dim=8, mask_str="null")
    k = np.abs(case.array("k"))
    k[:, :, 0] = -np.inf
    out, lse = case.replace(q=np.abs(case.array("q")) + 1, k=k).run(backend)
    assert_nothing_attended(out, lse)


def test_a_key_with_score_minus_inf_has_weight_0(backend, rng):
    case = ragged_case(rng, [70], head_dim=8, mask_str="null")
    k = case.array("k").copy()
    k[::3, :, 0] = -np.inf
    case.replace(q=np.abs(case.array("q")) + 1, k=k, unit_normal=False).run_and_check(backend)


@pytest.mark.parametrize("offsets_dtype", ["uint32", "int32", "int64"])
def test_offsets_may_be_uint32_int32_or_int64_at_any_stride(backend, rng, offsets_dtype):
    case = ragged_case(rng, [5, 0, 70, 9], before=1, after=1, offsets_dtype=offsets_dtype)
    expected = case.run_and_check(backend)
    offsets = case.array("input_row_offsets")
    spread = Strided(np.repeat(offsets, 3), offsets.shape, (3,), 1)
    assert_all_same_bits(case.replace(input_row_offsets=spread).run(backend), expected, "strided offsets")


def test_offsets_may_have_a_negative_stride(numpy_cpu, rng):
    case = ragged_case(rng, [5, 0, 70, 9])
    offsets = case.array("input_row_offsets")
    backwards = Strided(offsets[::-1].copy(), offsets.shape, (-1,), len(offsets) - 1)
    assert_all_same_bits(case.replace(input_row_offsets=backwards).run(numpy_cpu), case.run(numpy_cpu))


def test_offsets_of_one_repeated_value_may_have_stride_0(backend, rng):
    case = ragged_case(rng, [0, 0, 0], after=9)
    zeros = Strided(np.zeros(1, np.int32), (4,), (0,))
    assert_nothing_attended(*case.replace(input_row_offsets=zeros).run(backend))


# Strides


def within_tolerance_and_mostly_equal(case: Case, strided: Case, backend) -> None:
    """A strided input gives the contiguous copy's result: its bits wherever both take one path, as on the CPU."""
    out, lse = strided.run(backend)
    case.check(out, lse)
    if backend.on_cpu:
        assert_all_same_bits((out, lse), case.run(backend), "strided inputs", "contiguous ones")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_may_have_any_outer_strides_and_any_base(backend, rng, layout, names, dtype):
    heads = (1, 1) if layout.__name__ == "odd_unit_strides" else (4, 2)
    case = ragged_case(rng, [40, 70], heads=heads, dtype=dtype)
    strided = case.replace(**{name: layout(case.array(name)) for name in names})
    within_tolerance_and_mostly_equal(case, strided, backend)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_slices_of_a_packed_qkv_work_without_a_copy(backend, rng, heads, head_dim, dtype):
    case = ragged_case(rng, [40, 70], heads=heads, head_dim=head_dim, dtype=dtype)
    within_tolerance_and_mostly_equal(case, packed_qkv(case), backend)


@pytest.mark.parametrize("shape", [(1, 4, 64), (50, 1, 64), (1, 1, 64), (50, 4, 64)], ids=str)
def test_inputs_may_have_stride_0(backend, rng, shape):
    rows, heads, head_dim = shape
    case = ragged_case(rng, [50], heads=(4, 4))
    base = normal(rng, shape, "float32")
    views = Strided(base.reshape(-1), (50, 4, 64), (heads * head_dim * (rows > 1), head_dim * (heads > 1), 1))
    strided = case.replace(q=views, k=views, v=views)
    copied = case.replace(**{name: np.broadcast_to(base, (50, 4, 64)).copy() for name in "qkv"})
    within_tolerance_and_mostly_equal(copied, strided, backend)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_may_have_any_outer_strides_and_nothing_between_them_is_written(backend, rng, layout, dtype):
    heads = (1, 1) if layout.__name__ == "odd_unit_strides" else (4, 2)
    case = ragged_case(rng, [40, 70], heads=heads, dtype=dtype, before=3, after=2)
    expected = case.run(backend)
    outs = layout(np.full(case.out_shape, 5, numpy_dtype(dtype)))
    # lse [rows, heads] the other way round in memory: it has no contiguous dimension to keep.
    total, num_heads, _ = case.out_shape
    lses = Strided(np.full(total * num_heads + 1, 5, np.float32), (total, num_heads), (1, total), 1)
    buffers = [backend.tensor(view.buffer) for view in (outs, lses)]
    out, lse = (backend._view(buffer, view) for buffer, view in zip(buffers, (outs, lses), strict=True))
    case.call(backend, out=out, lse=lse, return_lse=True)
    got = (backend.numpy(out), backend.numpy(lse))
    case.check(*got)
    if backend.on_cpu:
        assert_all_same_bits(map(np.ascontiguousarray, got), expected, "a strided output")
    gaps = np.ones(outs.buffer.size, bool)
    Strided(gaps, outs.shape, outs.strides, outs.offset).array[...] = False
    assert np.all(np.isnan(backend.numpy(buffers[0])[gaps]))


# Bits


@each_mask
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_alone_and_anywhere_in_a_batch(backend, rng, mask_str, window, dtype):
    parameters = {"mask_str": mask_str, "local_window_size": window}
    case = ragged_case(rng, [83, 1, 300, 0, 83, 20], dtype=dtype, before=1, **parameters)
    out, lse = case.run(backend)
    for sequence in (0, 1, 2, 4, 5):
        rows = slice(*case.bounds(sequence))
        alone = case.alone(sequence).run(backend)
        assert_all_same_bits((out[rows], lse[rows]), alone, f"sequence {sequence} in the batch", "the same alone")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("hint", [0, 1, 4, 9, 10, 300, 2**31, 2**40, -1])
def test_q_max_seq_len_changes_no_bit(backend, rng, dtype, hint):
    case = ragged_case(rng, [300, 9], dtype=dtype)
    assert_all_same_bits(case.run(backend, q_max_seq_len=hint), case.run(backend), f"with the hint {hint}")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_repeats_give_the_same_bits(backend, rng, dtype):
    case = ragged_case(rng, [130, 5, 70], heads=(6, 2), dtype=dtype)
    first = case.run(backend)
    for _ in range(5):
        assert_all_same_bits(case.run(backend), first, "a repeat")


def test_two_calls_back_to_back_of_different_shapes_are_both_right(backend, rng):
    cases = [
        ragged_case(rng, [70, 1, 33, 20, 8], head_dim=64),
        ragged_case(rng, [5, 130], head_dim=128, heads=(3, 3), mask_str="null"),
        ragged_case(rng, [1] * 40, head_dim=64, mask_str="chunked", local_window_size=3),
    ]
    pending = [(case, case.call(backend, return_lse=True)) for case in cases * 2]
    for case, results in pending:
        case.check(*map(backend.numpy, results))


# Sizes


@pytest.mark.large
def test_long_sequences(backend, rng):
    case = ragged_case(rng, [4097, 1000], heads=(4, 2), head_dim=128, dtype="bfloat16")
    out, lse = case.run(backend)
    rows = np.concatenate([rng.choice(len(out), 60), [0, 4095, 4096, 4097, 5096]])
    case.check(out[rows], lse[rows], rows)


@pytest.mark.large
@each_mask
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fast_path_geometries(backend, rng, mask_str, window, head_dim, dtype):
    """Several tiles of any path in each direction, sampled."""
    case = ragged_case(
        rng, [700, 3, 257], heads=(4, 2), head_dim=head_dim, dtype=dtype, mask_str=mask_str, local_window_size=window
    )
    out, lse = case.run(backend)
    rows = rng.choice(len(out), 150, replace=False)
    case.check(out[rows], lse[rows], rows)
