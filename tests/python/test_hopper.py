"""The Hopper kernels of ragged_flash_attention: every instantiation, every border of theirs, and bits.

The tests need a GPU of compute capability 9.0 and a build with its kernels. What they check stands in functions of its
own, which a few small calls of the CPU backend go through too: it makes the same promises.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from _cases import (
    RAGGED,
    Case,
    heads_outside,
    normal,
    off_by_one,
    offsets_of,
    packed_qkv,
    padded_rows,
    ragged_case,
    strided,
)
from _checks import assert_all_same_bits, assert_nothing_attended, assert_same_bits, kernel_names
from _frameworks import FLOAT_DTYPES, Array, Framework, Strided, numpy_dtype

from ragged_attention import ragged_flash_attention, supports

# What has a kernel of its own; 72 shares that of 80.
HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
MASKS = ("null", "causal", "sliding_window_causal", "sliding_window_noncausal", "chunked", "chunked_causal")
WINDOWED = MASKS[2:]
CAUSAL = ("causal", "sliding_window_causal", "chunked_causal")
GROUPS = (1, 2, 3, 4, 5, 8)

# Around tiny sequences, the rows of a warpgroup, and tiles of 64, 128 and 192 rows.
BORDERS = (0, 1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)

# Launches take the counters that hand out their work from a pool of this many, round robin (tickets.cu).
TICKET_COUNTERS = 1 << 17

each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def short_rows(head_dim: int, mask_str: str = "causal") -> int:
    """The most rows of a sequence that the short kernel takes (sm90/config.h); under a causal mask most of all."""
    if head_dim == 64:
        return 1024 if mask_str in CAUSAL else 256
    return 256 if head_dim <= 128 else 1024


def launches(case: Case) -> int:
    """The long kernel where there may be a sequence for it (sm90/dispatch.cpp), and the short one."""
    head_dim, mask_str = case.out_shape[2], case.parameters["mask_str"]
    window = case.parameters.get("local_window_size", -1)
    narrow = 0 < window <= short_rows(head_dim, "null") and mask_str != "sliding_window_noncausal"
    return 2 if case.out_shape[0] > short_rows(head_dim, mask_str) and not narrow else 1


def masked(mask_str: str, window: int) -> dict[str, Any]:
    return {"mask_str": mask_str, "local_window_size": window if mask_str in WINDOWED else -1}


def some_masks(head_dim: int, dtype: str) -> list[dict[str, Any]]:
    """The causal mask and another one, so that all head dims and dtypes together meet them all, narrow and wide."""
    others = [("null", -1)] + [(mask, window) for mask in WINDOWED for window in (37, short_rows(head_dim) + 5)]
    index = HEAD_DIMS.index(head_dim) * 2 + DTYPES.index(dtype)
    return [masked("causal", -1), masked(*others[index % len(others)])]


def sampled_rows(rng: np.random.Generator, case: Case, each: int) -> Array:
    """The first and the last row of every sequence, some between, and some that no sequence owns."""
    offsets = case.array("input_row_offsets").astype(np.int64)
    total = len(case.array("q"))
    rows = [0, offsets[0] - 1, offsets[-1], total - 1]
    for begin, end in itertools.pairwise(offsets.tolist()):
        if begin < end:
            rows += [begin, end - 1, *rng.integers(begin, end, min(each, end - begin)).tolist()]
    return np.unique([row for row in rows if 0 <= row < total])


def with_empty_sequences(rng: np.random.Generator, case: Case, count: int) -> Case:
    """The same rows among many empty sequences.

    To a kernel that looks like enough work to take several heads at once: 16 units of work for each CTA, of which there
    may be 264, less the number of heads in a unit.
    """
    offsets = case.array("input_row_offsets")
    return case.replace(input_row_offsets=np.sort(np.concatenate([offsets, rng.choice(offsets, count)])))


def sequences_of(case: Case, results: Sequence[Array]) -> list[tuple[Array, Array]]:
    """The results of each sequence of the case."""
    bounds = itertools.pairwise(case.array("input_row_offsets").astype(np.int64).tolist())
    return [(results[0][begin:end], results[1][begin:end]) for begin, end in bounds]


# What is checked


def check_sampled(framework: Framework, rng: np.random.Generator, case: Case, each: int = 4) -> tuple[Array, Array]:
    """Right where it is sampled, written everywhere, and the same without an LSE."""
    out, lse = case.run(framework)
    rows = sampled_rows(rng, case, each)
    case.check(out[rows], lse[rows], rows)
    assert not np.isnan(out).any()
    assert not np.isnan(lse).any()
    without_lse = framework.full(case.out_shape, case.out_dtype)
    case.call(framework, out=without_lse)
    assert_same_bits(framework.numpy(without_lse), out, "the output without an LSE", "the one with it")
    return out, lse


def check_windows(
    framework: Framework, rng: np.random.Generator, case: Case, windows: Sequence[int], each: int = 8
) -> None:
    for window in windows:
        check_sampled(framework, rng, case.replace(local_window_size=window), each)


def check_bits_in_any_company(framework: Framework, rng: np.random.Generator, case: Case) -> None:
    """Each sequence of the case has the same bits whatever comes with it."""
    results = case.run(framework)
    expected = sequences_of(case, results)
    assert_all_same_bits(case.run(framework), results, "a repeat", "the first run")
    for hint in (0, 1, 100, 2**31):  # which of two kernels is launched first
        assert_all_same_bits(case.run(framework, q_max_seq_len=hint), results, f"with the hint {hint}")
    for sequence, alone in enumerate(expected):
        if len(alone[0]):
            got = case.alone(sequence).run(framework)
            assert_all_same_bits(got, alone, f"sequence {sequence} alone", "the same in the batch")
    crowded = with_empty_sequences(rng, case, 6000)
    assert_all_same_bits(crowded.run(framework), results, "among empty sequences", "without them")

    # In another order, at other rows, with strangers between them.
    order = rng.permutation(len(expected)).tolist()
    strangers = rng.integers(0, 150, len(order)).tolist()
    pieces: dict[str, list[Array]] = {name: [] for name in "qkv"}
    lengths = []
    for sequence, stranger in zip(order, strangers, strict=True):
        begin, end = case.bounds(sequence)
        lengths += [stranger, end - begin]
        for name, parts in pieces.items():
            array = case.array(name)
            parts += [normal(rng, (stranger, *array.shape[1:]), array.dtype.name), array[begin:end]]
    moved = case.replace(
        input_row_offsets=offsets_of(lengths),
        **{name: np.concatenate(parts) for name, parts in pieces.items()},
    )
    found = sequences_of(moved, moved.run(framework))[1::2]
    for sequence, got in zip(order, found, strict=True):
        assert_all_same_bits(got, expected[sequence], f"sequence {sequence} in another place", "the same before")


def check_any_hint(framework: Framework, rng: np.random.Generator, case: Case, hints: Sequence[int]) -> None:
    expected = check_sampled(framework, rng, case.replace(q_max_seq_len=hints[0]), each=2)
    for hint in hints[1:]:
        results = case.run(framework, q_max_seq_len=hint)
        assert_all_same_bits(results, expected, f"with the hint {hint}", f"with {hints[0]}")


def check_bits_of_heads(framework: Framework, case: Case) -> None:
    """Heads do not depend on each other, nor on how many share a kv head."""
    out, lse = case.run(framework)
    q_heads, kv_heads = out.shape[1], case.array("k").shape[1]
    group = q_heads // kv_heads
    for heads in (range(group), range(q_heads - group, q_heads), range(1), range(q_heads - 1, q_heads)):
        kv_head = heads[0] // group
        part = case.replace(
            q=case.array("q")[:, heads[0] : heads[-1] + 1].copy(),
            k=case.array("k")[:, kv_head : kv_head + 1].copy(),
            v=case.array("v")[:, kv_head : kv_head + 1].copy(),
        )
        expected = (out[:, heads[0] : heads[-1] + 1], lse[:, heads[0] : heads[-1] + 1])
        assert_all_same_bits(part.run(framework), expected, f"heads {heads} alone", "the same among others")


def check_nothing_leaks(framework: Framework, case: Case) -> None:
    """NaN and infinity in every other sequence do not change the rest, first the odd ones, then the even ones."""
    expected = sequences_of(case, case.run(framework))
    for poisoned in (0, 1):
        arrays = {name: case.array(name).copy() for name in "qkv"}
        for sequence in range(poisoned, len(expected), 2):
            begin, end = case.bounds(sequence)
            for name, array in arrays.items():
                array[begin:end] = np.nan if name == "v" else np.inf
                array[begin : min(begin + 3, end)] = np.nan if name != "v" else -np.inf
        results = sequences_of(case, case.replace(**arrays).run(framework))
        for sequence in range(1 - poisoned, len(expected), 2):
            assert_all_same_bits(results[sequence], expected[sequence], f"sequence {sequence} beside NaN", "without")


def check_same_bits_strided(framework: Framework, case: Case) -> None:
    """Inputs that TMA takes as they are."""
    expected = case.run(framework)
    views = {
        "slices of a packed qkv": packed_qkv(case),
        "heads first": case.replace(**{name: heads_outside(case.array(name)) for name in "qkv"}),
        "padded rows": case.replace(**{name: padded_rows(case.array(name)) for name in "qkv"}),
        "k alone heads first": case.replace(k=heads_outside(case.array("k"))),
    }
    for what, view in views.items():
        assert_all_same_bits(view.run(framework), expected, what, "contiguous inputs")


def middle_of_packed(array: Array) -> Strided:
    """As the second of three tensors side by side."""
    rows, heads, head_dim = array.shape
    return strided(
        array, [3 * heads * head_dim, head_dim, 1], offset=heads * head_dim, size=rows * 3 * heads * head_dim
    )


def odd_rows(array: Array) -> Strided:
    """Rows that are one element too long."""
    _, heads, head_dim = array.shape
    return strided(array, [heads * head_dim + 1, head_dim, 1])


def run_into(framework: Framework, case: Case, layout: Any) -> tuple[Array, Array]:
    """The results in an output of this layout and an LSE with its heads outside; the gaps stay as they are."""
    outs = layout(np.full(case.out_shape, 5, numpy_dtype(case.out_dtype)))
    rows, heads, _ = case.out_shape
    lses = Strided(np.full(rows * heads + 2, 5, np.float32), (rows, heads), (1, rows), 1)
    buffers = [framework.tensor(view.buffer) for view in (outs, lses)]
    out, lse = (framework._view(buffer, view) for buffer, view in zip(buffers, (outs, lses), strict=True))
    case.call(framework, out=out, lse=lse)
    for view, buffer in zip((outs, lses), buffers, strict=True):
        between = np.ones(view.buffer.size, bool)
        Strided(between, view.shape, view.strides, view.offset).array[...] = False
        assert_same_bits(framework.numpy(buffer)[between], view.buffer[between], "what lies between", "what was there")
    return tuple(np.ascontiguousarray(framework.numpy(result)) for result in (out, lse))  # type: ignore[return-value]


def check_same_bits_into_views(framework: Framework, case: Case) -> None:
    """Outputs that TMA takes as they are."""
    expected = case.run(framework)
    for layout in (middle_of_packed, heads_outside, padded_rows):
        got = run_into(framework, case, layout)
        assert_all_same_bits(got, expected, f"an output with {layout.__name__}", "a contiguous one")


def check_not_for_tma(framework: Framework, case: Case) -> None:
    """Calls that TMA cannot take, or a softmax that scales last, are still right."""
    views = [{name: layout(case.array(name))} for layout in (off_by_one, odd_rows) for name in "qkv"]
    for view in [*views, {"scale": 0.0}, {"scale": -0.2}]:
        other = case.replace(**view, unit_normal="scale" not in view)
        other.run_and_check(framework)
    for layout in (off_by_one, odd_rows):
        case.check(*run_into(framework, case, layout))
    # One row for all tokens, and one head for all heads.
    _, heads, head_dim = case.array("k").shape
    for strides in ((0, head_dim, 1), (heads * head_dim, 0, 1)):
        view = Strided(case.array("k").reshape(-1), case.array("k").shape, strides)
        values = np.ascontiguousarray(view.array)
        case.replace(k=values).check(*case.replace(k=view).run(framework))


def check_offset_types(framework: Framework, rng: np.random.Generator, case: Case) -> None:
    results = check_sampled(framework, rng, case)
    offsets = case.array("input_row_offsets")
    first, last = int(offsets[0]), int(offsets[-1])
    assert first > 0
    assert last < len(results[0])
    assert_nothing_attended(results[0][:first], results[1][:first])
    assert_nothing_attended(results[0][last:], results[1][last:])
    for dtype in ("int64", "uint32"):
        other = case.replace(input_row_offsets=offsets.astype(dtype))
        assert_all_same_bits(other.run(framework), results, f"offsets of {dtype}", "of int32")
    spread = Strided(np.repeat(offsets, 2), offsets.shape, (2,), 1)
    assert_all_same_bits(case.replace(input_row_offsets=spread).run(framework), results, "strided offsets")


# Which kernels


def test_supports_names_the_hopper_kernels(hopper):
    for head_dim, dtype, group in itertools.product(range(8, 257, 8), FLOAT_DTYPES, (1, 3, 8)):
        answer = supports(RAGGED, device="cuda", dtype=dtype, head_dim=head_dim, group=group)
        fast = head_dim in HEAD_DIMS and dtype != "float32"
        assert answer.ok
        assert answer.path == ("cuda_sm90" if fast else "cuda_portable"), (head_dim, dtype, answer)
        assert ("Hopper" in answer.reason) == fast


def test_a_call_runs_the_kernels_it_should(hopper, rng):
    """By their names in torch's profiler: everything else would be as right on the portable path."""
    torch = hopper.xp
    case = ragged_case(rng, [300, 70, 5], heads=(4, 4), head_dim=128, dtype="bfloat16")
    long, short, portable = "RaggedTraits<cutlass::bfloat16_t, 128, true>", "bfloat16_t, 128, false>", "portable::"
    if not kernel_names(torch, lambda: case.call(hopper)):
        pytest.skip("torch's profiler sees no kernels here")
    windowed = masked("sliding_window_causal", 200)
    calls: list[tuple[str, Case, list[str]]] = [
        ("contiguous", case, [long, short]),
        ("slices of a packed qkv", packed_qkv(case), [long, short]),
        ("heads first", case.replace(q=heads_outside(case.array("q"))), [long, short]),
        ("only short sequences", case.alone(1), [short]),
        ("a narrow mask", case.replace(**windowed), [short]),
        ("a wide mask", case.replace(mask_str="chunked", local_window_size=257), [long, short]),
        ("a base off by one", case.replace(k=off_by_one(case.array("k"))), [portable]),
        ("odd rows", case.replace(v=odd_rows(case.array("v"))), [portable]),
        ("a negative scale", case.replace(scale=-1.0), [portable]),
    ]
    for what, other, expected in calls:
        tensors = other.tensors(hopper)
        names = kernel_names(torch, lambda other=other, tensors=tensors: other.call(hopper, **tensors))
        for kernel in (long, short, portable):
            assert any(kernel in name for name in names) == (kernel in expected), (what, kernel, names)


# Results


@pytest.mark.parametrize("mask_str", MASKS)
@each_dtype
@each_head_dim
def test_sequences_around_every_border(hopper, rng, head_dim, dtype, mask_str):
    border = short_rows(head_dim, mask_str)
    lengths = [*BORDERS, border, border + 1]
    group = GROUPS[(HEAD_DIMS.index(head_dim) + DTYPES.index(dtype) + MASKS.index(mask_str)) % len(GROUPS)]
    case = ragged_case(
        rng,
        rng.permutation(lengths).tolist(),
        heads=(2 * group, 2),
        head_dim=head_dim,
        dtype=dtype,
        before=3,
        after=70,
        **masked(mask_str, 37),
    )
    check_sampled(hopper, rng, case, each=3)


@pytest.mark.parametrize("mask_str", WINDOWED)
@each_dtype
@each_head_dim
def test_narrow_and_wide_windows_in_long_sequences(hopper, rng, head_dim, dtype, mask_str):
    narrow, border = short_rows(head_dim, "null"), short_rows(head_dim, mask_str)
    case = ragged_case(rng, [border + 450, 90, border + 1], heads=(2, 1), head_dim=head_dim, dtype=dtype)
    windows = [1, 100, narrow, narrow + 1, border + 200]
    check_windows(hopper, rng, case.replace(mask_str=mask_str), windows)


@pytest.mark.parametrize("mask_str", ["null", "causal"])
@each_head_dim
def test_long_sequences(hopper, rng, head_dim, mask_str):
    for dtype in DTYPES:
        case = ragged_case(rng, [3001, 2049], heads=(2, 1), head_dim=head_dim, dtype=dtype, **masked(mask_str, -1))
        check_sampled(hopper, rng, case, each=12)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_several_heads_at_once(hopper, rng, head_dim, group):
    """Up to 8 heads of a tile, whose keys stay where they are if they all fit."""
    lengths = [3, 17, 64, 65, 100, 128, 129, 130, 200, 256, 16, 40]
    for mask in (masked("null", -1), masked("causal", -1), masked("sliding_window_causal", 20)):
        case = ragged_case(rng, lengths, heads=(2 * group, 2), head_dim=head_dim, dtype="bfloat16", **mask)
        crowded = with_empty_sequences(rng, case, 17500 // group)
        results = check_sampled(hopper, rng, crowded)
        assert_all_same_bits(results, case.run(hopper), "among empty sequences", "without them")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_several_heads_at_once_of_longer_sequences(hopper, rng, head_dim):
    """The long kernel takes several where the hint says 512 rows at most, and there are 16 units for each CTA of 132.

    64 sequences are 152 to 382 tile numbers, times 32 heads: two of these at once, or four.
    """
    lengths = [257, 512, *rng.integers(257, 513, 62).tolist()]
    case = ragged_case(rng, lengths, heads=(32, 8), head_dim=head_dim, dtype="bfloat16", mask_str="null")
    check_any_hint(hopper, rng, case, [512, 513])  # several, and one at a time


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "float16"), (80, "bfloat16"), (128, "bfloat16"), (256, "float16")]
)
def test_two_thousand_short_sequences(hopper, rng, head_dim, dtype):
    lengths = rng.integers(0, 41, 2000).tolist()
    case = ragged_case(rng, lengths, heads=(4, 2), head_dim=head_dim, dtype=dtype, before=1, after=5)
    out, lse = case.run(hopper)
    rows = rng.choice(len(out), 400, replace=False)
    case.check(out[rows], lse[rows], rows)
    assert not np.isnan(out).any()
    assert_nothing_attended(out[-5:], lse[-5:])
    assert np.all(np.isfinite(lse[1:-5]))


@each_head_dim
def test_only_tiny_sequences(hopper, rng, head_dim):
    for group, dtype in zip(GROUPS, itertools.cycle(DTYPES)):
        lengths = rng.integers(0, 17, 40).tolist()
        mask = masked(str(rng.choice(MASKS)), int(rng.integers(1, 18)))
        case = ragged_case(rng, lengths, heads=(2 * group, 2), head_dim=head_dim, dtype=dtype, **mask)
        check_sampled(hopper, rng, case, each=2)


@each_dtype
@each_head_dim
def test_calls_that_tma_cannot_take(hopper, rng, head_dim, dtype):
    lengths = [1, 17, 70]
    check_not_for_tma(hopper, ragged_case(rng, lengths, heads=(2, 1), head_dim=head_dim, dtype=dtype))


@each_dtype
@each_head_dim
def test_the_scale_is_any_positive_number(hopper, rng, head_dim, dtype):
    case = ragged_case(rng, [9, 130, short_rows(head_dim) + 20], heads=(2, 2), head_dim=head_dim, dtype=dtype)
    # Scores so far apart that the softmax is nearly a maximum make low precision arbitrarily wrong: keep them modest.
    for scale in (1e-30, 0.01, 4.0 / head_dim):
        check_sampled(hopper, rng, case.replace(scale=scale, unit_normal=False), each=10)


# Values


@each_dtype
@each_head_dim
def test_scores_of_any_size(hopper, rng, head_dim, dtype):
    """Every kernel, with logits whose rounding alone is more than a softmax can bear: ties have to stay ties."""
    lengths = [1, 11, 150, short_rows(head_dim) + 200]
    case = ragged_case(rng, lengths, heads=(4, 2), head_dim=head_dim, dtype=dtype)
    q, k = np.zeros_like(case.array("q")), np.zeros_like(case.array("k"))
    # 1e9 and its neighbours, both signs, many keys alike.
    q[:, :, 0] = rng.choice([-16384, 16384], q.shape[:2])
    k[:, :, 0] = rng.choice([-2, 1, 2, 1.5], k.shape[:2]) * 16384
    for mask in (masked("causal", -1), masked("null", -1), masked("sliding_window_causal", 37)):
        check_sampled(hopper, rng, case.replace(q=q, k=k, scale=2.0, unit_normal=False, **mask), each=6)


@each_head_dim
def test_equal_large_logits_over_a_long_sequence(hopper, rng, head_dim):
    """A factor that is not quite 1 while the maximum stays would add up over the tiles."""
    case = ragged_case(rng, [5000], heads=(2, 1), head_dim=head_dim, dtype="bfloat16")
    q, k = np.zeros_like(case.array("q")), np.zeros_like(case.array("k"))
    q[:, :, 0], k[:, :, 0] = 100, 120
    q[1::3] *= -1
    for mask in (masked("causal", -1), masked("sliding_window_causal", 100)):
        check_sampled(hopper, rng, case.replace(q=q, k=k, scale=1.0, unit_normal=False, **mask), each=30)


@each_dtype
@each_head_dim
def test_nothing_of_other_sequences_or_of_no_sequence_leaks(hopper, rng, head_dim, dtype):
    """Sequences that end inside a tile, in the short and in the long kernel and between tiny ones."""
    lengths = [21, 50, 9, 16, 130, 5, short_rows(head_dim) + 30, 1, 70, short_rows(head_dim) + 7]
    for mask in some_masks(head_dim, dtype):
        case = ragged_case(rng, lengths, heads=(4, 2), head_dim=head_dim, dtype=dtype, before=40, after=50, **mask)
        check_nothing_leaks(hopper, case)


@each_head_dim
@each_dtype
def test_a_visible_nan_goes_through_and_minus_infinity_weighs_nothing(hopper, rng, head_dim, dtype):
    lengths = [7, 100, short_rows(head_dim) + 90]
    case = ragged_case(rng, lengths, heads=(2, 1), head_dim=head_dim, dtype=dtype, mask_str="null")
    offsets = case.array("input_row_offsets")
    v = case.array("v").copy()
    v[offsets[:-1] + 3, 0, 5] = np.nan
    rows = sampled_rows(rng, case, 5)
    nan = case.replace(v=v)
    out, lse = nan.run(hopper)
    nan.check(out[rows], lse[rows], rows)

    # Of the first sequence all keys, of the others those of whole tiles at the beginning.
    k = case.array("k").copy()
    for begin, count in zip(offsets.tolist(), (7, 65, 260), strict=False):
        k[begin : begin + count, :, 0] = -np.inf
    positive = (np.abs(case.array("q").astype(np.float32)) + 0.5).astype(numpy_dtype(dtype))
    infinite = case.replace(q=positive, k=k, unit_normal=False)
    out, lse = infinite.run(hopper)
    infinite.check(out[rows], lse[rows], rows)
    assert_nothing_attended(out[:7], lse[:7])


# Bits


def lengths_for_bits(head_dim: int) -> list[int]:
    return [1, 16, 17, 70, 129, 257, 0, short_rows(head_dim) + 60]


@each_dtype
@each_head_dim
def test_a_sequence_has_the_same_bits_in_any_company(hopper, rng, head_dim, dtype):
    for mask in some_masks(head_dim, dtype):
        case = ragged_case(rng, lengths_for_bits(head_dim), heads=(4, 2), head_dim=head_dim, dtype=dtype, **mask)
        check_bits_in_any_company(hopper, rng, case)


@each_dtype
@each_head_dim
def test_a_head_has_the_same_bits_among_any_others(hopper, rng, head_dim, dtype):
    for group in (1, 3, 4):
        case = ragged_case(rng, lengths_for_bits(head_dim), heads=(2 * group, 2), head_dim=head_dim, dtype=dtype)
        check_bits_of_heads(hopper, case)


@each_dtype
@each_head_dim
def test_a_graph_replays_the_bits_of_an_eager_call(hopper, rng, head_dim, dtype):
    """Under capture units are taken in a fixed order, here also of several heads; a replay follows new lengths."""
    torch = hopper.xp
    lengths = lengths_for_bits(head_dim)
    for mask, empty in zip(some_masks(head_dim, dtype), (0, 6000), strict=True):
        case = ragged_case(
            rng, lengths + [0] * empty, heads=(4, 2), head_dim=head_dim, dtype=dtype, before=1, after=1, **mask
        )
        tensors = case.tensors(hopper)
        case.call(hopper, **tensors, return_lse=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = case.call(hopper, **tensors, return_lse=True)
        for order in (lengths, lengths[::-1], [0] * 7 + [sum(lengths)], [3] * 8, lengths):
            offsets = offsets_of(order + [0] * empty, before=1)
            tensors["input_row_offsets"].copy_(torch.from_numpy(offsets))
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            expected = case.replace(input_row_offsets=offsets).run(hopper)
            assert_all_same_bits(map(hopper.numpy, results), expected, f"replayed with {order}", "eager")


@each_head_dim
def test_strided_views_give_the_bits_of_contiguous_tensors(hopper, rng, head_dim):
    lengths = [5, 70, 16, short_rows(head_dim) + 33]
    for dtype, heads in zip(DTYPES, ((4, 2), (3, 3)), strict=True):
        case = ragged_case(rng, lengths, heads=heads, head_dim=head_dim, dtype=dtype, before=2, after=3)
        check_same_bits_strided(hopper, case)
        check_same_bits_into_views(hopper, case)


def test_a_single_head_or_row_may_have_any_stride(hopper, rng):
    """It means nothing, odd or not: the fast path is taken, with the same bits."""
    for lengths, heads, strides in (([70, 5, 300], (1, 1), [64, 7, 1]), ([1], (4, 4), [7, 64, 1])):
        case = ragged_case(rng, lengths, heads=heads, dtype="bfloat16")
        odd = case.replace(**{name: strided(case.array(name), strides) for name in "qkv"})
        assert_all_same_bits(odd.run(hopper), case.run(hopper), "an odd stride", "a contiguous tensor")


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (72, "float16"), (192, "bfloat16")])
def test_offsets_of_every_type_with_gaps_at_both_ends(hopper, rng, head_dim, dtype):
    lengths = [5, 0, 70, short_rows(head_dim) + 1, 130]
    for gap in (1, 65, short_rows(head_dim) + 1):
        case = ragged_case(
            rng, lengths, heads=(2, 1), head_dim=head_dim, dtype=dtype, before=gap, after=gap + 1, mask_str="null"
        )
        check_offset_types(hopper, rng, case)


# Streams, and many calls


def varied_cases(rng: np.random.Generator, count: int) -> list[Case]:
    cases = []
    for index in range(count):
        head_dim = HEAD_DIMS[index % len(HEAD_DIMS)]
        lengths = rng.integers(0, rng.choice([20, 80, 300]), int(rng.integers(1, 12))).tolist()
        if index % 3 == 0:
            lengths.append(short_rows(head_dim) + 1 + index)
        group = int(rng.choice(GROUPS[:4]))
        mask = masked(str(rng.choice(MASKS)), int(rng.integers(1, 600)))
        heads, dtype = (2 * group, 2), str(rng.choice(DTYPES))
        cases.append(ragged_case(rng, lengths, heads=heads, head_dim=head_dim, dtype=dtype, after=3, **mask))
    return cases


def integers(torch: Any, tensor: Any) -> Any:
    """The tensor's bits."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def test_the_next_kernel_on_the_stream_finds_the_results(hopper, rng):
    """The second of a call's kernels starts before the first has ended; nothing behind them may."""
    torch = hopper.xp
    cases = varied_cases(rng, 8)
    expected = [case.run(hopper) for case in cases]
    tensors = [case.tensors(hopper) for case in cases]
    out = [
        torch.empty(case.out_shape, dtype=given["q"].dtype, device="cuda")
        for case, given in zip(cases, tensors, strict=True)
    ]
    read = []
    for _ in range(10):
        for index, case in enumerate(cases):
            out[index].fill_(float("nan"))
            case.call(hopper, **tensors[index], out=out[index])
            read.append((index, out[index].clone()))
    for index, result in read:
        assert_same_bits(hopper.numpy(result), expected[index][0], f"case {index} read at once", "after a wait")


def test_two_streams_at_once(hopper, rng):
    torch = hopper.xp
    cases = varied_cases(rng, 8)
    expected = [case.run(hopper) for case in cases]
    tensors = [case.tensors(hopper) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pending = []
    for turn in range(15):
        for index, case in enumerate(cases):
            with torch.cuda.stream(streams[(index + turn) % 2]):
                pending.append((index, case.call(hopper, **tensors[index], return_lse=True)))
    torch.cuda.synchronize()
    for index, results in pending:
        assert_all_same_bits(map(hopper.numpy, results), expected[index], f"case {index} on two streams")


def test_a_thousand_calls_and_again_when_every_counter_has_been_used(hopper, rng):
    """A counter that a launch left behind wrong would let a later one leave out tiles."""
    torch = hopper.xp
    cases = varied_cases(rng, 28)
    expected = [case.run(hopper) for case in cases]
    tensors = [case.tensors(hopper) for case in cases]
    order = rng.integers(0, len(cases), 1000).tolist()

    on_device = [[integers(torch, hopper.tensor(result)) for result in results] for results in expected]

    def run_all(when: str) -> None:
        pending = []
        for index in order:
            out = torch.full(cases[index].out_shape, float("nan"), dtype=tensors[index]["q"].dtype, device="cuda")
            pending.append(cases[index].call(hopper, **tensors[index], out=out, return_lse=True))
        torch.cuda.synchronize()
        for index, results in zip(order, pending, strict=True):
            # Compared where they are: to copy them takes far longer than to compute them.
            pairs = zip(results, on_device[index], strict=True)
            if not all(torch.equal(integers(torch, result), bits) for result, bits in pairs):
                assert_all_same_bits(map(hopper.numpy, results), expected[index], f"case {index} {when}", "alone")

    run_all("in a row")
    used = sum(launches(cases[index]) for index in order)
    # Two launches a call, since there are more rows than the short kernel takes; from here on the thousand's counters.
    small = ragged_case(rng, [17, 1, 270], heads=(1, 1), dtype="bfloat16")
    q, k, v, offsets = small.tensors(hopper).values()
    out = torch.full_like(q, float("nan"))
    for _ in range((TICKET_COUNTERS - used) // 2):
        ragged_flash_attention(q, k, v, offsets, out=out)
    assert_same_bits(hopper.numpy(out), small.run(hopper)[0], "after as many calls as there are counters", "alone")
    run_all("with counters that were used before")


# The same checks, small, on the CPU


def small_case(rng: np.random.Generator, dtype: str = "bfloat16", **parameters: Any) -> Case:
    return ragged_case(rng, [5, 17, 0, 40], heads=(4, 2), head_dim=64, dtype=dtype, before=2, after=3, **parameters)


@each_dtype
def test_the_checks_of_results_on_the_cpu(numpy_cpu, rng, dtype):
    for mask_str in MASKS:
        check_sampled(numpy_cpu, rng, small_case(rng, dtype, **masked(mask_str, 9)))
    check_windows(numpy_cpu, rng, small_case(rng, dtype, mask_str="chunked_causal"), [1, 9, 100])
    check_not_for_tma(numpy_cpu, small_case(rng, dtype))
    check_nothing_leaks(numpy_cpu, small_case(rng, dtype))
    check_offset_types(numpy_cpu, rng, small_case(rng, dtype))


@each_dtype
def test_the_checks_of_bits_on_the_cpu(numpy_cpu, rng, dtype):
    check_bits_in_any_company(numpy_cpu, rng, small_case(rng, dtype))
    check_bits_of_heads(numpy_cpu, small_case(rng, dtype))
    check_any_hint(numpy_cpu, rng, small_case(rng, dtype), [512, 513, 0])
    check_same_bits_strided(numpy_cpu, small_case(rng, dtype))
    check_same_bits_into_views(numpy_cpu, small_case(rng, dtype))
    for case in varied_cases(rng, 3):
        check_sampled(numpy_cpu, rng, case, each=1)
