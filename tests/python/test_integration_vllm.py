"""The adapter for vLLM's QSA layers, against what vLLM's function promises; where it can run, against that function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys

import numpy as np
import pytest
from _cases import normal
from _checks import assert_matches, assert_same_bits
from _frameworks import FLOAT_DTYPES, numpy_dtype, optional

from ragged_attention import reference


@pytest.fixture(scope="module", autouse=True)
def integration():
    if optional("torch") is None:
        pytest.skip("torch is not installed")
    return importlib.import_module("ragged_attention.integrations.vllm")


class Step:
    """One step of vLLM: requests with cached tokens and new rows, in arrays of NumPy."""

    def __init__(
        self, rng, rows, cached, *, heads=(6, 1), head_dim=64, page_size=16, width=19, dtype="bfloat16", pad=2
    ):
        total, requests = sum(rows) + pad, len(rows)
        lengths = [new + old for new, old in zip(rows, cached, strict=True)]
        max_pages = -(-max(lengths) // page_size) + 1
        num_pages = requests * max_pages + 3
        self.q = normal(rng, (total, heads[0], head_dim), dtype)
        # As vLLM lays it out: [num_pages, heads, page_size, K then V], seen as [num_pages, page_size, heads, ...].
        self.kv = normal(rng, (num_pages, heads[1], page_size, 2 * head_dim), dtype)
        self.gate = normal(rng, (total, heads[0], head_dim), dtype)
        self.table = rng.permutation(num_pages)[: requests * max_pages].reshape(requests, max_pages).astype(np.int32)
        self.request = np.repeat(np.arange(requests), rows).astype(np.int32)
        self.request = np.concatenate([self.request, np.full(pad, -1, np.int32)])
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        self.lengths = np.array(lengths, np.int32)
        self.indices = rng.integers(-(2**31), 2**31, (total, width + 1)).astype(np.int32)
        position = np.concatenate([old + np.arange(new) for new, old in zip(rows, cached, strict=True)]).astype(int)
        for row in range(total):
            chosen = rng.permutation(position[row] + 1)[:width] if row < sum(rows) else np.arange(3)
            self.indices[row, : len(chosen)] = chosen
            self.indices[row, width] = len(chosen)

    def keys_and_values(self, kv=None):
        kv = self.kv if kv is None else kv
        dim = self.q.shape[2]
        seen = kv.swapaxes(1, 2) if isinstance(kv, np.ndarray) else kv.transpose(1, 2)
        return seen[..., :dim], seen[..., dim:]

    def expected(self, plain=False):
        """Attention in float64, or as it is in plain low precision, and the gate after it."""
        k, v = self.keys_and_values()
        page_size = k.shape[1]
        valid = (self.request >= 0) & (self.request < len(self.table))
        table = self.table[np.where(valid, self.request, 0)]
        rows = len(self.q)
        counts = np.where(valid, np.clip(self.indices[:, -1], 0, self.indices.shape[1] - 1), 0).astype(np.int32)
        out, lse = reference.qsa_sparse_attention(
            self.q,
            np.arange(rows + 1, dtype=np.int32),  # a sequence for each row
            np.stack([k, v], axis=1)[:, :, None],
            np.full(rows, table.shape[1] * page_size, np.int32),
            table,
            0,
            np.ascontiguousarray(self.indices[:, :-1]),
            counts,
            plain=plain,
        )
        if plain:
            out = out.astype(self.q.dtype)
        out = out.astype(np.float64) * (1 / (1 + np.exp(-self.gate.astype(np.float64))))
        return (out.astype(self.q.dtype) if plain else out), lse

    def check(self, out):
        exact, plain = self.expected(), self.expected(plain=True)
        dtype = self.q.dtype.name
        assert_matches(out, plain[1].astype(np.float32), exact, plain, dtypes=(dtype, dtype), unit_normal=True)

    def tensors(self, torch_device):
        kv = torch_device.tensor(self.kv)
        k, v = self.keys_and_values(kv)
        arrays = (self.indices, self.table, self.request)
        return [torch_device.tensor(self.q), k, v, *map(torch_device.tensor, arrays), False]

    def offsets(self, torch_device):
        return {
            "query_start_loc": torch_device.tensor(self.starts),
            "seq_lens": torch_device.tensor(self.lengths),
        }

    def gate_on(self, torch_device):
        return torch_device.tensor(self.gate)


each_way = pytest.mark.parametrize("ranges", [False, True], ids=["token_to_req", "query_start_loc"])


def attend(integration, torch_device, step, ranges=False, **changes):
    """The result as an array; `out` starts as NaN."""
    out = torch_device.full(step.q.shape, step.q.dtype.name)
    keywords = {"output_gate": step.gate_on(torch_device), **(step.offsets(torch_device) if ranges else {}), **changes}
    returned = integration.qsa_sparse_paged_attention(*step.tensors(torch_device), out, **keywords)
    assert returned is out
    return torch_device.numpy(out)


@each_way
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("heads", [(3, 1), (24, 2), (8, 8)], ids=str)
def test_a_step_of_prefill_and_decode(torch_device, rng, integration, ranges, dtype, heads):
    step = Step(rng, [5, 1, 0, 9, 1], [0, 200, 7, 40, 90], heads=heads, dtype=dtype)
    step.check(attend(integration, torch_device, step, ranges))


@each_way
def test_the_geometry_of_the_model(torch_device, rng, integration, ranges):
    step = Step(rng, [1, 3], [3000, 2500], heads=(24, 2), head_dim=256, page_size=64, width=2051)
    step.check(attend(integration, torch_device, step, ranges))


def test_both_ways_of_naming_sequences_agree_and_so_does_an_allocated_result(torch_device, rng, integration):
    step = Step(rng, [5, 1, 9], [0, 200, 40], dtype="float32")
    by_row, by_range = (attend(integration, torch_device, step, ranges) for ranges in (False, True))
    np.testing.assert_allclose(by_row, by_range, rtol=0, atol=1e-5)
    if torch_device.on_cpu:
        assert_same_bits(by_row, by_range)
    allocated = integration.qsa_sparse_paged_attention(
        *step.tensors(torch_device), output_gate=step.gate_on(torch_device).flatten(1)
    )
    assert_same_bits(torch_device.numpy(allocated), by_row, "allocated, with a flat gate")


def test_requests_in_any_order_and_rows_of_none(torch_device, rng, integration):
    """token_to_req need not ascend, and what is outside the table is nobody's."""
    step = Step(rng, [4, 4, 4], [30, 200, 40], pad=0)
    order = rng.permutation(12)
    step.request, step.q, step.gate, step.indices = (x[order] for x in (step.request, step.q, step.gate, step.indices))
    step.request[[2, 7, 9]] = [-1, 3, 2**31 - 1]
    out = attend(integration, torch_device, step)
    step.check(out)
    assert not out[[2, 7, 9]].astype(np.float32).any()


@each_way
def test_what_is_not_listed_is_not_read(torch_device, rng, integration, ranges):
    """NaN in every token that no row lists; negative entries, pages and counts out of range."""
    step = Step(rng, [6, 3], [120, 60], width=24)
    step.table[0, -1], step.table[1, -1] = -1, len(step.kv) + 5  # the last page, past the tokens that there are
    step.indices[0, 3], step.indices[1, 0] = -1, -(2**31)
    step.indices[2, 5] = 10**6  # past the page table
    step.indices[3, -1], step.indices[4, -1], step.indices[5, -1] = 0, -7, 10**6
    step.indices[5, :24] = np.arange(24)
    expected = step.expected()
    listed = np.zeros((len(step.kv), step.kv.shape[2]), bool)
    for row in range(9):
        table = step.table[step.request[row]]
        for token in step.indices[row, : np.clip(step.indices[row, -1], 0, 24)]:
            if 0 <= token < 16 * len(table) and 0 <= table[token // 16] < len(listed):
                listed[table[token // 16], token % 16] = True
    step.kv = np.where(listed[:, None, :, None], step.kv, np.array(np.nan, step.kv.dtype))
    out = attend(integration, torch_device, step, ranges)
    step.check(out)
    assert np.isfinite(expected[0]).all()
    assert not out[[3, 4]].astype(np.float32).any()


def test_the_gate(torch_device, rng, integration):
    """The result is rounded before the gate and after it; None is no gate; the gate may share memory with out."""
    step = Step(rng, [5, 3], [60, 20])
    alone = attend(integration, torch_device, step, output_gate=None)
    sigmoid = 1 / (1 + np.exp(-step.gate.astype(np.float64)))
    expected = (alone.astype(np.float64) * sigmoid).astype(step.q.dtype)
    gated = attend(integration, torch_device, step)
    wrong = np.flatnonzero(gated != expected)  # a float32 sigmoid may fall on the other side of a rounding boundary
    assert len(wrong) < 0.002 * gated.size
    np.testing.assert_allclose(gated.astype(np.float64), expected.astype(np.float64), rtol=2**-7)

    shared = step.gate_on(torch_device)
    integration.qsa_sparse_paged_attention(*step.tensors(torch_device), shared, output_gate=shared)
    assert_same_bits(torch_device.numpy(shared), gated, "in the gate's memory")


def test_k_and_v_in_memory_of_their_own(torch_device, rng, integration):
    step = Step(rng, [5, 3], [60, 20])
    expected = attend(integration, torch_device, step)
    tensors = step.tensors(torch_device)
    tensors[1:3] = [tensor.contiguous() for tensor in tensors[1:3]]
    apart = integration.qsa_sparse_paged_attention(*tensors, output_gate=step.gate_on(torch_device))
    assert_same_bits(torch_device.numpy(apart), expected)
    tensors[1] = step.tensors(torch_device)[1]
    with pytest.raises(NotImplementedError, match=r"^v_cache: .*strides"):
        integration.qsa_sparse_paged_attention(*tensors, output_gate=None)


def test_pools_of_token_slots(torch_device, rng, integration):
    """SGLang's caches: pages of one token, the slot of every position in a table, lists filled up with -1."""
    step = Step(rng, [5, 1, 9], [0, 200, 40], heads=(8, 2))
    expected = attend(integration, torch_device, step)
    q, k, v, indices, table, requests, _ = step.tensors(torch_device)
    k_pool, v_pool = (cache.reshape(-1, *cache.shape[2:]) for cache in (k, v))  # [slots, heads, head_dim]
    torch = torch_device.xp
    slots = (table[:, :, None] * 16 + torch.arange(16, dtype=torch.int32, device=q.device)).flatten(1)
    width = indices.shape[1] - 1
    listed = torch.arange(width, device=q.device) < indices[:, -1:]
    indices[:, :-1] = torch.where(listed, indices[:, :-1], -1)
    indices[:, -1] = width
    out = integration.qsa_sparse_paged_attention(
        q, k_pool[:, None], v_pool[:, None], indices, slots, requests, False, output_gate=step.gate_on(torch_device)
    )
    if torch_device.on_cpu:
        assert_same_bits(torch_device.numpy(out), expected)
    step.check(torch_device.numpy(out))


def test_refusals_by_name(torch_device, rng, integration):
    torch = torch_device.xp
    step = Step(rng, [5, 3], [60, 20])
    names = ["q", "k_cache", "v_cache", "logical_indices", "block_table", "token_to_req"]
    gate, given = step.gate_on(torch_device), dict(zip(names, step.tensors(torch_device), strict=False))
    offsets = step.offsets(torch_device)
    for expected, name, changes in (
        (NotImplementedError, "k_cache", {"k_cache": given["k_cache"].to(torch.float8_e4m3fn)}),
        (NotImplementedError, "v_cache", {"v_cache": given["v_cache"].to(torch.uint8)}),
        (TypeError, "v_cache", {"v_cache": given["v_cache"].float()}),
        (TypeError, "logical_indices", {"logical_indices": given["logical_indices"].long()}),
        (TypeError, "token_to_req", {"token_to_req": given["token_to_req"].long()}),
        (TypeError, "token_to_req", {"token_to_req": None}),
        (TypeError, "block_table", {"block_table": given["block_table"].float()}),
        (TypeError, "out", {"out": torch.empty_like(given["q"], dtype=torch.float32)}),
        (ValueError, "out", {"out": given["q"]}),
        (ValueError, "out", {"out": torch.empty_like(given["q"])[:-1]}),
        (ValueError, "output_gate", {"output_gate": gate[:-1]}),
        (ValueError, "logical_indices", {"logical_indices": given["logical_indices"][:-1]}),
        (ValueError, "logical_indices", {"logical_indices": given["logical_indices"][:, :0]}),
        (ValueError, "token_to_req", {"token_to_req": given["token_to_req"][:-1]}),
        (ValueError, "k_cache", {"k_cache": given["k_cache"][..., :-8]}),
        (ValueError, "v_cache", {"v_cache": given["v_cache"][:-1]}),
        (ValueError, "query_start_loc", {**offsets, "query_start_loc": offsets["query_start_loc"][1:]}),
        (ValueError, "seq_lens", {**offsets, "seq_lens": None}),
        (ValueError, "seq_lens", {**offsets, "seq_lens": offsets["seq_lens"][1:]}),
        (NotImplementedError, "q", {"q": given["q"].clone().requires_grad_()}),
    ):
        arguments = {**given, "use_prefill_config": True, "output_gate": gate, **changes}
        with pytest.raises(expected, match=rf"^{name}: "):
            integration.qsa_sparse_paged_attention(**arguments)


def test_empty_steps(torch_device, rng, integration):
    step = Step(rng, [5, 3], [60, 20])
    tensors = step.tensors(torch_device)
    for index in (0, 3, 5):
        tensors[index] = tensors[index][:0]
    out = integration.qsa_sparse_paged_attention(*tensors, output_gate=step.gate_on(torch_device)[:0])
    assert out.shape == (0, *step.q.shape[1:])
    nobody = step.tensors(torch_device)
    nobody[4] = nobody[4][:0]  # no request
    assert not integration.qsa_sparse_paged_attention(*nobody, output_gate=None).any()


def test_the_signature_is_vllms(integration):
    parameters = inspect.signature(integration.qsa_sparse_paged_attention).parameters
    cache, rows = ["k_cache", "v_cache"], ["logical_indices", "block_table", "token_to_req"]
    expected = ["q", *cache, *rows, "use_prefill_config", "out", "k_scale", "v_scale"]
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == expected
    assert [parameters[name].default for name in expected[7:]] == [None] * 3
    assert parameters["output_gate"].default is inspect.Parameter.empty
    assert parameters["output_gate"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "vllm" not in sys.modules


@each_way
def test_in_a_cuda_graph(torch_cuda, rng, integration, ranges):
    torch = torch_cuda.xp
    step = Step(rng, [4, 1, 3], [60, 200, 20])
    tensors, gate = step.tensors(torch_cuda), step.gate_on(torch_cuda)
    keywords = step.offsets(torch_cuda) if ranges else {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        integration.qsa_sparse_paged_attention(*tensors, output_gate=gate, **keywords)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = integration.qsa_sparse_paged_attention(*tensors, output_gate=gate, **keywords)
    other = Step(rng, [1, 6, 1], [10, 100, 50])
    other.table = np.pad(other.table, ((0, 0), (0, step.table.shape[1] - other.table.shape[1])))
    other.kv = np.concatenate([other.kv, other.kv, other.kv])[: len(step.kv)]
    for now in (step, other):
        for old, new in zip(tensors[:6], now.tensors(torch_cuda)[:6], strict=True):
            old.copy_(new)
        for name, new in now.offsets(torch_cuda).items():
            if ranges:
                keywords[name].copy_(new)
        gate.copy_(now.gate_on(torch_cuda))
        graph.replay()
        torch.cuda.synchronize()
        now.check(torch_cuda.numpy(out))


@each_way
def test_beside_vllms_own_function(torch_cuda, rng, integration, ranges):
    from ragged_attention._bench.peers import files, vllm_qsa

    if not os.environ.get(vllm_qsa.VARIABLE):
        pytest.skip(f"{vllm_qsa.VARIABLE} names no file of vLLM")
    try:
        theirs = vllm_qsa.load().qsa_sparse_paged_attention
    except files.Unavailable as error:
        pytest.skip(str(error))
    step = Step(rng, [1, 33, 1, 1], [3000, 2500, 60, 5000], heads=(24, 2), head_dim=256, page_size=64, width=2051)
    expected = theirs(*step.tensors(torch_cuda), output_gate=step.gate_on(torch_cuda))
    step.check(torch_cuda.numpy(expected))  # the contract that is tested here is theirs
    keywords = step.offsets(torch_cuda) if ranges else {}
    got = integration.qsa_sparse_paged_attention(
        *step.tensors(torch_cuda), output_gate=step.gate_on(torch_cuda), **keywords
    )
    difference = (got.float() - expected.float()).abs().max()
    assert float(difference) < 0.02
    assert numpy_dtype("bfloat16") == torch_cuda.numpy(got).dtype
