"""The QSA selections that the demo and the benchmark make: their structure, and what neighbours share."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from ragged_attention._bench import cases
from ragged_attention._cli import selection


def select(sequences, correlation, seed=1):
    return selection.select(sequences, correlation, np.random.default_rng(seed))


def middle(rows, count=20):
    return range(rows // 2 - count // 2, rows // 2 + count // 2)


@pytest.mark.parametrize(
    "sequences", [[(0, 9)], [(4093, 7), (0, 1), (0, 0), (2040, 20)], [(2, 1)], [(3000, 3), (0, 600), (2050, 4)]]
)
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_every_row_lists_its_blocks_and_tail(sequences, correlation):
    indices, counts = select(sequences, correlation)
    assert indices.dtype == counts.dtype == np.int32
    assert indices.shape == (sum(new for _, new in sequences), selection.WIDTH)
    assert selection.WIDTH == 2051
    row = distinct = 0
    for cached, new in sequences:
        named = set()
        for i in range(new):
            seen = cached + i + 1
            listed = indices[row, : counts[row]]
            tail = seen % 4
            assert len(listed) == min(seen // 4, 512) * 4 + tail
            assert len(set(listed.tolist())) == len(listed)
            assert np.all((listed >= 0) & (listed < seen))
            assert listed[len(listed) - tail :].tolist() == list(range(seen - tail, seen))
            blocks = listed[: len(listed) - tail].reshape(-1, 4)
            assert np.all(blocks[:, 0] % 4 == 0)
            assert np.array_equal(blocks, blocks[:, :1] + np.arange(4))
            if seen <= selection.WIDTH:
                assert sorted(listed.tolist()) == list(range(seen))
            assert np.all(indices[row, counts[row] :] == -1)
            named.update(listed.tolist())
            row += 1
        distinct += len(named)
    assert selection.distinct_tokens(sequences, indices, counts) == distinct


def test_blocks_are_in_no_order_of_position():
    indices, counts = select([(8191, 1)], 0.0)
    blocks = indices[0, : counts[0] : 4].tolist()
    assert len(blocks) == 512
    assert blocks != sorted(blocks)


def test_neighbours_share_more_the_higher_the_correlation():
    # Half of the 1024 blocks are listed, those above the median: both rows list a block with probability
    # 1/4 + asin(rho) / (2 pi), and the share is twice that.
    shares = [
        selection.neighbour_share(*select([(4096, 64)], correlation), middle(64))
        for correlation in (0.0, 0.5, 0.9, 0.98, 0.999)
    ]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.5, abs=0.02)
    assert shares[2] == pytest.approx(0.8564, abs=0.02)
    assert shares[3] == pytest.approx(0.9362, abs=0.015)


def test_rows_that_list_everything_share_everything():
    indices, counts = select([(0, 100)], 0.0)
    assert selection.neighbour_share(indices, counts, middle(100)) == 1.0


def test_the_correlation_holds_across_the_chunks_in_which_scores_are_made():
    last = selection._CHUNK - 1
    indices, counts = select([(8192, 2 * selection._CHUNK)], 0.9999)
    assert selection.neighbour_share(indices, counts, [last]) > 0.95


def test_sequences_are_independent():
    indices, _ = select([(4095, 1), (4095, 1)], 0.999)
    assert len(np.intersect1d(indices[0], indices[1])) < 0.6 * 2048


def test_the_same_seed_gives_the_same_lists():
    first, again, other = (select([(3000, 5)], 0.9, seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def named_shares():
    """(share in the name, context that a row in the middle of the call sees, correlation, blocks that a row selects)"""
    found = set()
    for case in cases.CASES.values():
        if case.op == "qsa" and "-share" in case.name and "share1.0" not in case.name:
            ((cached, rows),) = case.sequences
            share = float(case.name.partition("-share")[2].partition("-")[0])
            found.add((share, cached + rows // 2, case.correlation, case.selected_blocks))
    assert len(found) > 5
    return sorted(found)


@pytest.mark.parametrize(("share", "context", "correlation", "blocks"), named_shares())
def test_the_measured_share_is_that_of_the_name(share, context, correlation, blocks):
    """Of the rows in the middle of a case's call alone: the process is the same from its first row on."""
    indices, counts = selection.select([(context - 10, 21)], correlation, np.random.default_rng(1), blocks)
    assert selection.neighbour_share(indices, counts, range(20)) == pytest.approx(share, abs=0.015)


def expected_share(correlation, listed):
    """Of two unit normals of this correlation: how often the second is among the top `listed`, where the first is."""
    low, high = -9.0, 9.0
    for _ in range(60):
        between = (low + high) / 2
        low, high = (between, high) if 0.5 * math.erfc(between / 2**0.5) > listed else (low, between)
    x = np.linspace(low, low + 9, 4001)
    spread = (1 - correlation**2) ** 0.5 * 2**0.5
    above = np.array([math.erfc((low - correlation * value) / spread) / 2 for value in x.tolist()])
    density = np.exp(-x * x / 2) / (2 * math.pi) ** 0.5 * above
    return float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum()) / listed


@pytest.mark.parametrize(("share", "context", "correlation", "blocks"), named_shares())
def test_the_correlations_give_the_shares_of_the_names(share, context, correlation, blocks):
    listed = blocks / (context / selection.BLOCK)
    assert expected_share(correlation, listed) == pytest.approx(share, abs=0.006)


def test_selections_need_no_framework():
    code = (
        "import sys; import numpy; from ragged_attention._cli import selection;"
        "selection.select([(0, 9)], 0.5, numpy.random.default_rng(1));"
        "print(sorted({'torch', 'jax', 'cupy', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
