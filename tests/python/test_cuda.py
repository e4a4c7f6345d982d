"""Streams, graphs, devices: what only a GPU can show."""

from __future__ import annotations

import numpy as np
import pytest
from _cases import QSA, RAGGED, Case, qsa_case, ragged_case
from _checks import assert_all_same_bits, assert_nothing_attended, capture, kernel_names
from _frameworks import open_framework, open_path

SLOW_CYCLES = 200_000_000  # of torch.cuda._sleep: about a tenth of a second
each_op = pytest.mark.parametrize("op", [RAGGED, QSA])
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make(rng, op, dtype="bfloat16") -> Case:
    if op == RAGGED:
        return ragged_case(rng, [130, 5, 70], heads=(4, 2), head_dim=128, dtype=dtype)
    return qsa_case(rng, [4, 1], [700, 90], heads=(12, 1), head_dim=128, dtype=dtype, width=130)


def results_of(framework, results):
    framework.xp.cuda.synchronize()
    return [framework.numpy(result) for result in results]


@each_op
@each_dtype
def test_work_is_ordered_after_a_slow_producer_on_the_current_side_stream(torch_cuda, rng, op, dtype):
    """flash-attention 1957: the inputs appear late, on a stream that is not the default one."""
    torch = torch_cuda.xp
    case = make(rng, op, dtype)
    expected = case.run(torch_cuda)
    values = case.tensors(torch_cuda)
    late = {name: torch.zeros_like(value) for name, value in values.items()}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.call(torch_cuda, **late, return_lse=True)  # the first allocation on a stream may wait for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW_CYCLES)
        for name, value in values.items():
            late[name].copy_(value)
        results = case.call(torch_cuda, **late, return_lse=True)
    assert not side.query(), "the call waited for the device"
    assert_all_same_bits(results_of(torch_cuda, results), expected, "on a side stream")


@each_op
def test_stream_handle_is_the_stream_that_is_used(torch_cuda, rng, op):
    torch = torch_cuda.xp
    case = make(rng, op)
    expected = case.run(torch_cuda)
    values = case.tensors(torch_cuda)
    late = {name: torch.zeros_like(value) for name, value in values.items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        for name, value in values.items():
            late[name].copy_(value)
    results = case.call(torch_cuda, **late, return_lse=True, stream=side.cuda_stream)
    assert not side.query(), "the call waited for the device"
    assert torch.cuda.current_stream().query(), "work went to the current stream"
    assert_all_same_bits(results_of(torch_cuda, results), expected, "on the given stream")


@each_op
def test_an_output_used_on_another_stream_is_recorded_there(torch_cuda, rng, op):
    """Else torch would hand its memory out again while the kernel is yet to write it."""
    torch = torch_cuda.xp
    case = make(rng, op)
    tensors = case.tensors(torch_cuda)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
    results = case.call(torch_cuda, **tensors, return_lse=True, stream=side.cuda_stream)
    taken = {result.data_ptr() for result in results}
    shapes = [(result.shape, result.dtype) for result in results]
    del results
    fresh = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes for _ in range(3)]
    assert not side.query(), "the sleep was too short to tell"
    assert taken.isdisjoint(tensor.data_ptr() for tensor in fresh)
    torch.cuda.synchronize()


@each_op
def test_a_call_neither_waits_for_the_device_nor_allocates_outside_the_frameworks_pool(torch_cuda, rng, op):
    torch = torch_cuda.xp
    case = make(rng, op)
    tensors = case.tensors(torch_cuda)
    case.call(torch_cuda, **tensors)  # warm-up
    taken: list[int] = []
    while 0 not in taken and len(taken) < 60:  # others on the GPU may allocate meanwhile; ours would every time
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        torch.cuda._sleep(SLOW_CYCLES)
        for _ in range(20):
            case.call(torch_cuda, **tensors)
        assert not torch.cuda.current_stream().query(), "a call waited for the device"
        torch.cuda.synchronize()
        taken.append(free - torch.cuda.mem_get_info()[0])
    assert 0 in taken, f"bytes taken from the device by 20 calls each: {taken}"


@each_op
def test_cupys_current_stream_is_used(rng, op):
    cupy_cuda = open_framework("cupy", "cuda")
    cupy = cupy_cuda.xp
    case = make(rng, op, "float16")
    expected = case.run(cupy_cuda)
    values = case.tensors(cupy_cuda)
    late = {name: cupy.zeros_like(value) for name, value in values.items()}
    source, target = (cupy.empty(2**31, cupy.uint8) for _ in range(2))  # copies need no kernel to be compiled
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as side:
        for _ in range(20):
            target[...] = source
        for name, value in values.items():
            late[name][...] = value
        results = case.call(cupy_cuda, **late, return_lse=True)
        side.synchronize()
    assert_all_same_bits([cupy_cuda.numpy(result) for result in results], expected, "on CuPy's stream")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask_str", ["causal", "null"])
def test_a_replayed_graph_follows_new_offsets(torch_cuda, rng, dtype, mask_str):
    """torchtitan 3893, vllm-flash-attention 18. Bits as in an eager call with those offsets."""
    torch = torch_cuda.xp
    case = ragged_case(rng, [130, 5, 70, 0], heads=(4, 2), head_dim=128, dtype=dtype, mask_str=mask_str)
    tensors = case.tensors(torch_cuda)
    graph, results = capture(torch, lambda: case.call(torch_cuda, **tensors, q_max_seq_len=130, return_lse=True))
    for lengths in ([130, 5, 70, 0], [0, 0, 205, 0], [1, 1, 1, 1], [50, 50, 50, 55], [0, 0, 0, 0]):
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        tensors["input_row_offsets"].copy_(torch.from_numpy(offsets))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        eager = case.replace(input_row_offsets=offsets)
        got = results_of(torch_cuda, results)
        assert_all_same_bits(got, eager.run(torch_cuda), f"replayed with {lengths}", "eager")
        eager.check(*got)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_replayed_graph_follows_new_lists_lengths_and_tables(torch_cuda, rng, dtype):
    torch = torch_cuda.xp
    geometry = {"heads": (12, 1), "head_dim": 128, "dtype": dtype, "width": 130}
    cases = [
        qsa_case(rng, lengths, cached, spare_pages=spare, **geometry)
        for lengths, cached, spare in (([3, 2], [640, 60], 6), ([1, 4], [640, 630], 6), ([5, 0], [0, 645], 6))
    ]
    widest = max(case.array("kv_lookup_table").shape[1] for case in cases)
    pages = max(len(case.array("kv_blocks")) for case in cases)
    padded = []
    for case in cases:
        table, blocks = case.array("kv_lookup_table"), case.array("kv_blocks")
        wide = np.zeros((2, widest), np.int32)
        wide[:, : table.shape[1]] = table
        more = np.full((pages - len(blocks), *blocks.shape[1:]), np.nan, blocks.dtype)
        padded.append(case.replace(kv_lookup_table=wide, kv_blocks=np.concatenate([blocks, more])))
    tensors = padded[0].tensors(torch_cuda)
    graph, results = capture(torch, lambda: padded[0].call(torch_cuda, **tensors, return_lse=True))
    for case in [*padded, padded[0]]:
        for name, tensor in case.tensors(torch_cuda).items():
            tensors[name].copy_(tensor)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        got = results_of(torch_cuda, results)
        assert_all_same_bits(got, case.run(torch_cuda), "replayed", "eager")
        case.check(*got)


@each_op
def test_check_values_is_refused_under_capture(torch_cuda, rng, op):
    torch = torch_cuda.xp
    case = make(rng, op)
    tensors = case.tensors(torch_cuda)
    case.call(torch_cuda, **tensors, check_values=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises((ValueError, NotImplementedError), match=r"check_values.*captur"):
            case.call(torch_cuda, **tensors, check_values=True)
        result = case.call(torch_cuda, **tensors)  # the capture goes on unharmed
    graph.replay()
    assert_all_same_bits(results_of(torch_cuda, [result]), case.run(torch_cuda)[:1], "after the refusal")


@each_op
def test_an_empty_call_under_capture(torch_cuda, rng, op):
    torch = torch_cuda.xp
    case = ragged_case(rng, [], after=5) if op == RAGGED else qsa_case(rng, [], [], after=5)
    tensors = case.tensors(torch_cuda)
    graph, results = capture(torch, lambda: case.call(torch_cuda, **tensors, return_lse=True))
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    assert_nothing_attended(*results_of(torch_cuda, results))


@each_op
def test_two_streams_at_once_do_not_share_scratch(torch_cuda, rng, op):
    torch = torch_cuda.xp
    cases = [make(rng, op), make(rng, op)]
    expected = [case.run(torch_cuda) for case in cases]
    tensors = [case.tensors(torch_cuda) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pending = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                pending.append((i, cases[i].call(torch_cuda, **tensors[i], return_lse=True)))
    torch.cuda.synchronize()
    for i, results in pending:
        assert_all_same_bits(map(torch_cuda.numpy, results), expected[i], f"on stream {i}")


@each_op
def test_tensors_on_another_device_than_the_current_one(torch_cuda, rng, op):
    """candle 3596."""
    torch = torch_cuda.xp
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make(rng, op)
    expected = case.run(torch_cuda)
    tensors = {name: tensor.to("cuda:1") for name, tensor in case.tensors(torch_cuda).items()}
    with torch.cuda.device(0):
        results = case.call(torch_cuda, **tensors, return_lse=True)
        assert torch.cuda.current_device() == 0
    assert all(result.device == torch.device("cuda:1") for result in results)
    torch.cuda.synchronize(1)
    assert_all_same_bits(map(torch_cuda.numpy, results), expected, "on cuda:1")
    tensors["input_row_offsets"] = tensors["input_row_offsets"].to("cuda:0")
    with pytest.raises(ValueError, match=r"input_row_offsets.*cuda:[01].*cuda:[01]"):
        case.call(torch_cuda, **tensors)


@each_op
def test_cuda_and_cpu_agree_within_the_tolerances(torch_cuda, numpy_cpu, rng, op):
    for dtype in ("float32", "float16", "bfloat16"):
        case = make(rng, op, dtype)
        for backend in (torch_cuda, numpy_cpu):
            case.run_and_check(backend)


@each_op
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_portable_path_of_the_tests_is_that(hopper, rng, op, dtype):
    """By their names in torch's profiler: what is as right on Hopper's kernels would not be noticed."""
    case = make(rng, op, dtype)
    for path, expected in (("cuda", "sm90::"), ("cuda_portable", "portable::")):
        framework = open_path(path)
        tensors = case.tensors(framework)
        names = kernel_names(hopper.xp, lambda f=framework, t=tensors: case.call(f, **t))
        if not names:
            pytest.skip("torch's profiler sees no kernels here")
        assert all(f"ragged_attention::{expected}" in name for name in names), (path, names)
