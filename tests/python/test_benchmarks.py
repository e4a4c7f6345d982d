"""The parts of the benchmarks that a CPU can check: the selections, the timing, and a run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not (BENCHMARKS / "run.py").exists():
    pytest.skip("the benchmarks are not in this tree", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import cases  # noqa: E402
import inputs  # noqa: E402
import peers  # noqa: E402
import run  # noqa: E402
import selection  # noqa: E402
import timing  # noqa: E402


@pytest.mark.parametrize("sequences", [[(0, 9)], [(4093, 7), (0, 1), (0, 0), (2040, 20)], [(2, 1)]])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_every_row_lists_its_blocks_and_tail(sequences, correlation):
    indices, counts = selection.select(sequences, correlation, "cpu")
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (sum(new for _, new in sequences), selection.WIDTH)
    assert selection.WIDTH == 2051
    row = distinct = 0
    for cached, new in sequences:
        named = set()
        for i in range(new):
            seen = cached + i + 1
            listed = indices[row, : counts[row]].tolist()
            tail = seen % 4
            assert len(listed) == min(seen // 4, 512) * 4 + tail
            assert len(set(listed)) == len(listed)
            assert all(0 <= token < seen for token in listed)
            assert listed[len(listed) - tail :] == list(range(seen - tail, seen))
            for begin in range(0, len(listed) - tail, 4):
                assert listed[begin] % 4 == 0
                assert listed[begin : begin + 4] == list(range(listed[begin], listed[begin] + 4))
            if seen <= selection.WIDTH:
                assert sorted(listed) == list(range(seen))
            assert torch.all(indices[row, counts[row] :] == -1)
            named.update(listed)
            row += 1
        distinct += len(named)
    assert selection.distinct_tokens(sequences, indices, counts) == distinct


def test_blocks_are_in_no_order_of_position():
    indices, counts = selection.select([(8191, 1)], 0.0, "cpu")
    blocks = indices[0, : counts[0] : 4].tolist()
    assert len(blocks) == 512
    assert blocks != sorted(blocks)


def test_neighbours_share_more_the_higher_the_correlation():
    # Half of the 1024 blocks are listed, those above the median: both rows list a block with probability
    # 1/4 + asin(rho) / (2 pi), and the share is twice that.
    shares = [
        selection.neighbour_share(*selection.select([(4096, 64)], correlation, "cpu"))
        for correlation in (0.0, 0.5, 0.9, 0.98, 0.999)
    ]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.5, abs=0.02)
    assert shares[2] == pytest.approx(0.8564, abs=0.02)
    assert shares[3] == pytest.approx(0.9362, abs=0.015)


def test_rows_that_list_everything_share_everything():
    indices, counts = selection.select([(0, 100)], 0.0, "cpu")
    assert selection.neighbour_share(indices, counts) == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_lists():
    first, again, other = (selection.select([(3000, 5)], 0.9, "cpu", seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cases_are_told_apart_by_name_and_fit_the_operations():
    assert set(cases.CASES) == {case.name for case in cases.CASES.values()}
    for case in cases.CASES.values():
        assert case.num_q_heads % case.num_kv_heads == 0
        assert case.head_dim % 8 == 0
        assert case.op in peers.PEERS


SMALL = {
    "ragged": cases.RaggedCase("ragged", (40, 3, 0, 17), 4, 2, 32, mask="sliding_window_causal", window=5),
    "prefill": cases.QsaCase("prefill", ((30, 40),), 0.9, 12, 1, 64, page_size=16),
    "decode": cases.QsaCase("decode", ((2500, 1), (100, 1)), 0.9, 12, 1, 64, page_size=16, short=True),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_from_inputs_to_results(name, monkeypatch):
    case = SMALL[name]
    monkeypatch.delenv(peers.VLLM_QSA_VARIABLE, raising=False)
    ceiling = {"matmul_tflops": 0.1, "copy_tbps": 0.01, "gather_tbps": None}
    result = run.run_case(case, timing.Timer("cpu"), ceiling, rounds=2, samples=3)
    assert "error" not in result["ours"]
    assert result["ours"]["path"] == "cpu"
    assert len(result["ours"]["samples_ms"]) == 6
    assert 0 < result["max_abs_error"] < 2e-2
    assert result["floor_ms"] > 0
    assert (result["share"] is not None) == (name == "prefill")
    for peer in result["peers"].values():
        assert "ms" not in peer
        assert peer["error"].startswith("skipped: ")


def test_a_wrong_contestant_is_not_timed(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "ragged", {"fa2": lambda inputs: lambda: torch.zeros_like(inputs.q)})
    ceiling = {"matmul_tflops": 0.1, "copy_tbps": 0.01, "gather_tbps": None}
    result = run.run_case(SMALL["ragged"], timing.Timer("cpu"), ceiling, rounds=1, samples=1)
    assert "ms" in result["ours"]
    assert "ms" not in result["peers"]["fa2"]
    assert result["peers"]["fa2"]["error"].startswith("wrong: ")


def test_calls_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = timing.interleaved(timing.Timer("cpu"), calls, rounds=2, samples=2)
    assert "".join(order) == "aabbaabb"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 4, "b": 4}


def test_a_run_writes_the_schema(tmp_path, monkeypatch):
    monkeypatch.setitem(cases.CASES, "small", SMALL["ragged"])
    path = tmp_path / "result.json"
    assert run.main(["--device", "cpu", "--cases", "small", "--rounds", "1", "--samples", "1", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {"device", "driver", "versions", "commit", "dirty", "date", "ceilings", "cases"}
    assert set(result["ceilings"]) == {"matmul_tflops", "copy_tbps", "gather_tbps"}
    expected = (
        "op case dtype head_dim num_q_heads num_kv_heads mask window share page_size ours peers floor_ms flops bytes"
    )
    assert set(result["cases"][0]) == {*expected.split(), "max_abs_error"}
    assert isinstance(result["dirty"], bool)
    assert not result["commit"].endswith("-dirty")


def test_vllm_is_skipped_by_name(tmp_path, monkeypatch):
    small = inputs.make(SMALL["prefill"], "cpu")
    monkeypatch.delenv(peers.VLLM_QSA_VARIABLE, raising=False)
    with pytest.raises(peers.Unavailable, match=peers.VLLM_QSA_VARIABLE):
        peers.vllm(small)
    monkeypatch.setenv(peers.VLLM_QSA_VARIABLE, str(tmp_path / "qsa.py"))
    with pytest.raises(peers.Unavailable, match="no such file"):
        peers.vllm(small)
