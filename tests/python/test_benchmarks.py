"""The parts of the benchmarks that a CPU can check: the cases, the timing, and a run from end to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ragged_attention._bench import cases, ceilings, inputs, measure, peers, report, run, timing  # noqa: E402
from ragged_attention._bench.peers import (  # noqa: E402
    contestant,
    cudnn_ragged,
    files,
    flash_attention_3,
    sdpa_loop,
    sglang_qsa,
    vllm_qsa,
)


def test_listing_cases_imports_no_framework():
    code = (
        "import sys; from ragged_attention._bench import run; assert run.list_cases();"
        "print(sorted({'torch', 'jax', 'cupy', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_cases_fit_the_operations():
    for name, case in cases.CASES.items():
        assert name == case.name
        assert case.num_q_heads % case.num_kv_heads == 0
        assert case.head_dim % 8 == 0
        assert case.op in peers.PEERS
    assert len(cases.CASES) == len({json.dumps(case.facts()["name"]) for case in cases.CASES.values()})
    assert {"cuda", "cpu"} == {case["device"] for case in run.list_cases()}
    quick = run.list_cases("cuda", quick=True)
    assert 10 < len(quick) < 30
    assert {case["op"] for case in quick} == {"ragged", "qsa"}


def test_every_peer_has_a_title():
    assert set(report.TITLES) == {name for of_op in peers.PEERS.values() for name in of_op}


def test_the_lengths_are_those_of_the_generator():
    generator = torch.Generator().manual_seed(1)
    assert torch.randint(64, 8192, (16,), generator=generator).tolist() == list(cases.MIXED16)
    assert torch.randint(16, 512, (256,), generator=generator).tolist() == list(cases.SHORT256)


SMALL = {
    "ragged": cases.RaggedCase(
        "ragged", (40, 3, 0, 17), 4, 2, 32, mask="sliding_window_causal", window=5, dtype="float32"
    ),
    "chunks": cases.RaggedCase("chunks", (40, 3, 0, 17), 4, 2, 32, mask="chunked_causal", window=16, dtype="float16"),
    "ahead": cases.RaggedCase(
        "ahead", (40, 3, 0, 17), 2, 2, 32, mask="sliding_window_noncausal", window=5, dtype="float32"
    ),
    "prefill": cases.QsaCase("prefill", ((30, 40),), 0.9, 12, 1, 64, page_size=16),
    "decode": cases.QsaCase("decode", ((2500, 1), (100, 1)), 0.9, 12, 1, 64, page_size=16, short=True),
}


@pytest.fixture
def a_run(monkeypatch):
    monkeypatch.setattr(measure, "SLOW_MS", math.inf)  # a machine that is busy with other things is no reason
    on_cpu = measure.Run("cpu", 2, 3, None, lambda kind, **facts: None)
    on_cpu.result["ceilings"] = {"matmul_tflops": 0.1, "copy_tbps": 0.01, "gather_tbps": None}
    return on_cpu


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_from_inputs_to_results(name, a_run, monkeypatch):
    for variable in (vllm_qsa.VARIABLE, sglang_qsa.VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    result = a_run.case(SMALL[name])
    assert "error" not in result["ours"]
    assert result["ours"]["path"] == "cpu"
    assert len(result["ours"]["samples_ms"]) == 6
    assert 0 < result["max_abs_error"] < 2e-2
    assert result["floor_ms"] > 0
    assert (result["share"] is not None) == (name == "prefill")
    assert set(result["peers"]) == set(peers.PEERS[result["op"]])
    for peer_name, peer in result["peers"].items():
        if peer_name == "sdpa":
            assert peer["ms"] > 0
        else:
            assert "ms" not in peer
            assert peer["error"].startswith("skipped: ")


def test_a_wrong_contestant_is_not_timed(a_run, monkeypatch):
    def wrong(inputs):
        return contestant.Contestant(lambda: torch.zeros_like(inputs.q), note="zeros")

    monkeypatch.setitem(peers.PEERS, "ragged", {"fa2": wrong})
    result = a_run.case(SMALL["ragged"])
    assert "ms" in result["ours"]
    assert "ms" not in result["peers"]["fa2"]
    assert result["peers"]["fa2"]["error"].startswith("wrong: ")


def test_a_peer_that_takes_absurdly_long_is_left_out(a_run, monkeypatch):
    monkeypatch.setattr(measure, "SLOW_MS", 0.0)
    monkeypatch.setattr(measure, "SLOW_TIMES", 0.0)
    peer = a_run.case(SMALL["ragged"])["peers"]["sdpa"]
    assert peer["error"].startswith("skipped: one call takes ")


def test_calls_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name), None) for name in "ab"}
    times = timing.interleaved(timing.Timer("cpu"), calls, rounds=2, samples=2)
    assert "".join(order) == "aabbaabb"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 4, "b": 4}


def test_slow_calls_get_fewer_samples():
    timer = timing.Timer("cpu")
    timer.samples_ms = lambda call, count, wait=None: [call()] * count
    calls = {"fast": (lambda: 0.0, None), "slow": (lambda: timing.time.sleep(0.02) or 20.0, None)}
    times = timing.interleaved(timer, calls, rounds=2, samples=50, seconds=0.2)
    assert len(times["fast"]) == 100
    assert 4 <= len(times["slow"]) < 20


def test_spans_between_flushes():
    kernels = [
        ("before", 0, 5),
        ("void bitwise_not_kernel", 10, 50),
        ("prepare", 100, 10),
        ("attention", 115, 1000),
        ("void bitwise_not_kernel", 2000, 50),
        ("attention", 2100, 2000),
        ("prepare", 2090, 5),
    ]
    assert timing.spans_ms(kernels) == [pytest.approx(1015e-6), pytest.approx(2010e-6)]


@pytest.fixture
def small_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_MATMUL", (16, 32))
    monkeypatch.setattr(ceilings, "CPU_COPY", 2**16)


def test_ceilings_of_the_cpu(small_ceilings):
    rates = ceilings.measure(timing.Timer("cpu"))
    assert list(rates) == ["matmul_tflops", "matmul_float32_tflops", "copy_tbps", "gather_tbps"]
    assert rates["matmul_tflops"] >= rates["matmul_float32_tflops"] > 0
    assert rates["copy_tbps"] > 0
    assert rates["gather_tbps"] is None


class _FakeTimer(timing.Timer):
    """Every call takes the same time, and is not made."""

    def __init__(self, ms):
        super().__init__("cpu")
        self.ms = ms
        self.counts = []

    def prepare(self, call, by_graph):
        return call

    def samples_ms(self, call, count, wait=None):
        self.counts.append(count)
        return [self.ms] * count


def test_a_copy_is_timed_as_often_as_there_is_time():
    for ms, times in ((1.0, ceilings.SAMPLES), (100.0, 10), (5000.0, ceilings.FEWEST)):
        timer = _FakeTimer(ms)
        assert ceilings._copy_tbps(timer, 1000) == pytest.approx(2000 / (ms * 1e-3) / 1e12)
        assert sum(timer.counts) == times


def test_matrix_products_grow_until_a_call_is_long(monkeypatch):
    tried = []

    def rate(timer, n, dtype):
        tried.append(n)
        return 2 * n**3 / 0.01 / 1e12 if n <= 1024 else 2 * n**3 / 0.1 / 1e12  # 10 ms, later 100

    monkeypatch.setattr(ceilings, "_matmul_tflops", rate)
    best = ceilings._cpu_matmul_tflops(timing.Timer("cpu"), torch.float32)
    assert tried == [512, 1024, 2048]
    assert best == pytest.approx(2 * 1024**3 / 0.01 / 1e12)


def test_the_floor_of_a_dtype_is_by_its_own_matrix_product():
    rates = {"matmul_tflops": 0.8, "matmul_float32_tflops": 0.2, "copy_tbps": 0.05}
    assert measure._floor_ms("bfloat16", 8 * 10**8, 1, rates) == pytest.approx(1.0)
    assert measure._floor_ms("float32", 8 * 10**8, 1, rates) == pytest.approx(4.0)
    assert measure._floor_ms("float32", 1, 10**9, rates) == pytest.approx(20.0)


def test_a_run_has_the_schema_and_says_what_it_does(monkeypatch, small_ceilings):
    monkeypatch.setitem(cases.CASES, "small", SMALL["ragged"])
    events = []
    result = run.run(
        ["small"], device="cpu", rounds=1, samples=2, seconds=5, on_event=lambda kind, **facts: events.append(kind)
    )
    json.dumps(result)
    header = "device driver versions commit dirty date ceilings host_us cases"
    assert set(result) == set(header.split())
    assert {"matmul_tflops", "copy_tbps", "gather_tbps"} <= set(result["ceilings"])
    expected = (
        "op case dtype head_dim num_q_heads num_kv_heads mask window share page_size ours peers floor_ms flops bytes"
    )
    assert set(result["cases"][0]) == {*expected.split(), "max_abs_error"}
    assert isinstance(result["dirty"], bool)
    assert not result["commit"].endswith("-dirty")
    assert result["host_us"]["ragged"]["torch"] > 0
    assert events[:2] == ["ceilings_measured", "case_started"]
    assert events[-1] == "case_done"
    assert events.count("contestant_checked") == 1 + len(peers.PEERS["ragged"])


def test_an_unknown_case_is_refused():
    with pytest.raises(KeyError, match="no such case: nonsense"):
        run.run(["nonsense"], device="cpu")


@pytest.mark.parametrize(("peer", "variable"), [(vllm_qsa, vllm_qsa.VARIABLE), (sglang_qsa, sglang_qsa.VARIABLE)])
def test_a_peer_that_is_one_file_is_skipped_by_name(peer, variable, tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "module", lambda *names: SimpleNamespace())  # Triton
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(peers.Unavailable, match=variable):
        peer.load()
    monkeypatch.setenv(variable, str(tmp_path / "missing.py"))
    with pytest.raises(peers.Unavailable, match="no such file"):
        peer.load()


def test_what_a_file_imports_is_stood_in_for_while_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text("from engine.parts.ops import answer\n")
    monkeypatch.setenv("RAGGED_ATTENTION_TEST_PEER", str(tmp_path / "peer.py"))
    module = files.load("RAGGED_ATTENTION_TEST_PEER", "a peer", {"engine.parts.ops": {"answer": 42}})
    assert module.answer == 42
    assert not [name for name in sys.modules if name.startswith("engine")]
    del sys.modules[module.__name__]


@pytest.mark.parametrize("name", ["ragged", "chunks", "ahead"])
def test_masks_in_the_words_of_the_peers(name):
    """The loop on the CPU reads the same description of the mask as every other peer."""
    made = inputs.make(SMALL[name], "cpu")
    out = sdpa_loop.prepare(made).call()
    assert made.sample().compare(out, None, made.case.dtype, inputs.to_numpy).ok


def test_cudnn_gets_packed_sequences(monkeypatch):
    """A stand-in for the frontend that records the graph; the arguments are checked, not the arithmetic."""
    graph = _Graph()
    cudnn = SimpleNamespace(
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32", INT32="int32", INT64="int64"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
        pygraph=lambda **options: graph,
    )
    monkeypatch.setattr(cudnn_ragged, "_handle", lambda cudnn: "handle")
    made = inputs.make(SMALL["ragged"], "cpu")
    cudnn_ragged.contest(made, cudnn)
    assert graph.attention["diagonal_band_left_bound"] == 5
    assert graph.attention["diagonal_band_right_bound"] == 0
    assert graph.tensors["q"] == {"dim": [4, 4, 40, 32], "stride": [40 * 128, 32, 128, 1]}
    assert graph.tensors["k"] == {"dim": [4, 2, 40, 32], "stride": [40 * 64, 32, 64, 1]}
    assert graph.tensors["offsets_q"]["dim"] == [5, 1, 1, 1]


class _Graph:
    def __init__(self):
        self.tensors = {}
        self.attention = {}

    def tensor(self, name, dim, stride, data_type=None):
        self.tensors[name] = {"dim": dim, "stride": stride}
        return _Tensor()

    def sdpa(self, **arguments):
        self.attention = arguments
        return _Tensor(), None

    def build(self, heuristics):
        pass

    def get_workspace_size(self):
        return 0


class _Tensor:
    def __getattr__(self, name):
        return lambda value: self


def test_flash_attention_3_is_padded_and_cropped():
    """With a stand-in for its function that gives back the padded queries."""
    jax = pytest.importorskip("jax")
    given = {}

    def function(q, k, v, offsets_q, offsets_k, **options):
        given.update(options)
        return q

    made = inputs.make(SMALL["ragged"], "cpu")
    fa3 = flash_attention_3.contest(made, jax, function)
    result = fa3.call()
    fa3.wait(result)
    assert result.shape == (60, 4, 128)
    assert torch.equal(fa3.as_torch(result), made.q)
    assert given["window_size"] == (4, 0)
    assert given["max_seqlen_q"] == 40
    assert given["softmax_scale"] == 32**-0.5
    assert "padded" in fa3.note
