"""Random calls of every shape against the reference.

Profiles: `ci` (the default: few examples, the same in every run) and `nightly` (10,000, fresh), chosen with
HYPOTHESIS_PROFILE.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from _cases import LAYOUTS, normal, poison_unlisted, qsa_case, ragged_case
from _checks import assert_all_same_bits
from _frameworks import FLOAT_DTYPES

from ragged_attention import reference

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=10_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

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


@given(case=ragged_cases())
def test_ragged_matches_the_reference(path, case):
    case.run_and_check(path)


@given(case=qsa_cases())
def test_qsa_matches_the_reference(path, case):
    case.run_and_check(path)


@given(case=st.one_of(ragged_cases(), qsa_cases()), data=st.data())
def test_a_sequence_has_the_same_bits_alone(path, case, data):
    batch = len(case.array("input_row_offsets")) - 1
    if batch == 0:
        return
    sequence = data.draw(st.integers(0, batch - 1))
    rows = slice(*case.bounds(sequence))
    out, lse = case.run(path)
    assert_all_same_bits((out[rows], lse[rows]), case.alone(sequence).run(path), f"sequence {sequence}")


@given(case=ragged_cases(), layouts=st.tuples(*[st.sampled_from(sorted(set(LAYOUTS) - {"reversed_rows"}))] * 3))
def test_ragged_with_strides_matches_the_reference(path, case, layouts):
    strided = {}
    for name, layout in zip("qkv", layouts, strict=True):
        array = case.array(name)
        if array.size and (layout != "odd_unit_strides" or array.shape[1] == 1):
            strided[name] = LAYOUTS[layout](array)
    case.replace(**strided).run_and_check(path)


@given(case=ragged_cases(), hint=st.integers(-(2**40), 2**40))
def test_the_hint_changes_no_bit(path, case, hint):
    assert_all_same_bits(case.run(path, q_max_seq_len=hint), case.run(path), f"hint {hint}")
