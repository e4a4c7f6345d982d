"""Threads, streams, graphs, devices, forks and frees, all at once. What one stream does is in test_cuda.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from _cases import QSA, RAGGED, Case, qsa_case, ragged_case
from _checks import assert_all_same_bits, assert_nothing_attended, capture, run_python
from _frameworks import open_framework

import ragged_attention

THREADS = 16
SLOW_CYCLES = 50_000_000  # of torch.cuda._sleep


def mixed_cases(rng: np.random.Generator) -> list[Case]:
    """Both operations, Hopper's kernels and the portable ones, short sequences and long ones."""
    return [
        ragged_case(rng, [130, 5, 70], heads=(4, 2), head_dim=128, dtype="bfloat16"),
        ragged_case(rng, [300, 1, 0, 16], heads=(2, 1), head_dim=64, dtype="float16", mask_str="null"),
        ragged_case(rng, [33, 200], heads=(2, 2), head_dim=40, dtype="bfloat16"),
        ragged_case(rng, [64, 9], heads=(2, 1), head_dim=80, dtype="float32"),
        qsa_case(rng, [4, 1], [700, 90], heads=(12, 1), head_dim=128, dtype="bfloat16", width=130),
        qsa_case(rng, [140, 2], [300, 50], heads=(6, 1), head_dim=64, dtype="float16", width=60),
        qsa_case(rng, [3], [200], heads=(4, 2), head_dim=32, dtype="float32", width=60),
    ]


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The work of so many threads, which start together."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        start.wait(30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# Threads of the CPU backend


def test_many_threads_with_good_and_refused_calls(numpy_cpu, rng):
    """vllm 47069, sglang 24853: other bits in a burst of requests. A refusal in one thread is none in another."""
    cases = mixed_cases(rng)[:3] + mixed_cases(rng)[4:]
    expected = [case.run(numpy_cpu) for case in cases]
    tensors = [case.tensors(numpy_cpu) for case in cases]  # shared by all

    def work(number: int) -> None:
        for i in range(number, number + 2 * len(cases)):
            case, given = cases[i % len(cases)], tensors[i % len(cases)]
            if (i + number) % 3 == 0:
                with pytest.raises(ValueError, match=f"scale.*{'inf' if number % 2 else 'nan'}"):
                    case.call(numpy_cpu, **given, scale=float("inf" if number % 2 else "nan"))
            results = case.call(numpy_cpu, **given, return_lse=True)
            assert_all_same_bits(results, expected[i % len(cases)], f"in thread {number}")

    at_once(THREADS, work)


def test_the_number_of_threads_may_change_during_calls(numpy_cpu, rng):
    case = mixed_cases(rng)[0]
    expected, tensors = case.run(numpy_cpu), case.tensors(numpy_cpu)
    before = ragged_attention.num_threads()

    def work(number: int) -> None:
        for i in range(12):
            if number < 2:
                ragged_attention.set_num_threads(1 + (i + number) % 5)
            assert_all_same_bits(case.call(numpy_cpu, **tensors, return_lse=True), expected)

    try:
        at_once(6, work)
    finally:
        ragged_attention.set_num_threads(before)


SMALL = """
    import os, sys, threading
    import numpy as np
    import ragged_attention as ra
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((333, 2, 64), dtype=np.float32) for _ in range(3))
    offsets = np.array([0, 200, 201, 333], np.int32)
    def cpu(): return ra.ragged_flash_attention(q, k, v, offsets).tobytes()
    def child(work):  # the exit status of the work in a child: 0 where it says True
        pid = os.fork()
        if pid == 0:
            try: os._exit(0 if work() else 3)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(4)
        return os.waitpid(pid, 0)[1]
"""


def test_children_forked_after_the_import_and_after_a_call():
    code = """
    import pickle
    reader, writer = os.pipe()
    def first():
        os.write(writer, __import__("hashlib").sha256(cpu()).digest())
        return True
    assert child(first) == 0  # before any call in the parent
    digest = os.read(reader, 32)
    expected = cpu()
    assert digest == __import__("hashlib").sha256(expected).digest()
    for _ in range(5):
        assert child(lambda: cpu() == expected) == 0
        assert cpu() == expected
    print("done")
    """
    assert run_python(SMALL + code, RAGGED_ATTENTION_NUM_THREADS="4") == "done"


def test_children_forked_while_other_threads_are_in_a_call():
    """Their threads do not exist in the child, but the locks that they held do."""
    code = """
    expected = cpu()
    stop = threading.Event()
    def busy():
        while not stop.is_set(): assert cpu() == expected
    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads: thread.start()
    try:
        for _ in range(20):
            assert child(lambda: cpu() == expected and cpu() == expected) == 0
    finally:
        stop.set()
    for thread in threads: thread.join()
    print("done")
    """
    assert run_python(SMALL + code, RAGGED_ATTENTION_NUM_THREADS="3") == "done"


# References: kept while they are needed, and not after


def test_neither_a_good_call_nor_a_refused_one_keeps_a_reference(framework, rng):
    """nanobind 647, 930, 1165, ANTsPy 666, pytorch 22099: memory that every call leaves behind, or every failed one."""
    for case in (ragged_case(rng, [4, 3]), qsa_case(rng, [4, 3], [6, 2])):
        tensors = case.tensors(framework)
        tensors["out"] = framework.full(case.out_shape, "float32")
        tensors["lse"] = framework.full(case.out_shape[:2], "float32")
        before = {name: sys.getrefcount(tensors[name]) for name in tensors}
        for _ in range(20):
            case.call(framework, **tensors)
            for name, tensor in tensors.items():
                for bad in (None if name not in ("out", "lse") else 3, tensor[None]):
                    with pytest.raises((ValueError, TypeError)):
                        case.call(framework, **{**tensors, name: bad})
            with pytest.raises(ValueError, match="scale"):
                case.call(framework, **tensors, scale=float("nan"))
        del tensor, bad
        framework.synchronize()
        assert {name: sys.getrefcount(tensors[name]) for name in tensors} == before


# Streams


def streams_of(torch: Any, count: int) -> list[Any]:
    return [torch.cuda.Stream() for _ in range(count)]


def host_copies(framework: Any, results: Sequence[Any]) -> list[Any]:
    return [framework.numpy(result) for result in results]


def test_the_first_that_a_thread_does_on_a_gpu(torch_cuda, rng):
    """The driver's own functions want a context in the thread, and the runtime makes one only when it needs it."""
    for case in mixed_cases(rng):
        expected = case.run(torch_cuda)
        tensors = {name: torch_cuda.tensor(case.array(name)) for name in case.operands}
        out, lse = torch_cuda.full(case.out_shape, case.out_dtype), torch_cuda.full(case.out_shape[:2], "float32")
        torch_cuda.xp.cuda.synchronize()
        thread = ThreadPoolExecutor(1)
        with thread:
            thread.submit(
                lambda case=case, tensors=tensors, out=out, lse=lse: case.call(
                    torch_cuda, **tensors, out=out, lse=lse, return_lse=True, stream=0
                )
            ).result()
        torch_cuda.xp.cuda.synchronize()
        assert_all_same_bits(host_copies(torch_cuda, [out, lse]), expected, "in a thread of its own")


@pytest.mark.parametrize("shared", [False, True], ids=["a stream each", "one stream"])
def test_16_threads_on_16_streams(torch_cuda, rng, shared):
    torch = torch_cuda.xp
    cases = mixed_cases(rng)
    expected = [case.run(torch_cuda) for case in cases]
    tensors = [case.tensors(torch_cuda) for case in cases]
    torch.cuda.synchronize()
    streams = streams_of(torch, 1) * THREADS if shared else streams_of(torch, THREADS)

    def work(number: int) -> list[tuple[int, Any]]:
        results = []
        with torch.cuda.stream(streams[number]):
            for i in range(number, number + 4 * len(cases)):
                which = i % len(cases)
                results.append((which, cases[which].call(torch_cuda, **tensors[which], return_lse=True)))
                if i % 5 == 0:  # a refusal between them
                    with pytest.raises(ValueError, match="scale"):
                        cases[which].call(torch_cuda, **tensors[which], scale=float("nan"))
            streams[number].synchronize()
            return [(which, host_copies(torch_cuda, result)) for which, result in results]

    for number, results in enumerate(at_once(THREADS, work)):
        for which, result in results:
            assert_all_same_bits(result, expected[which], f"case {which} in thread {number}")


def test_memory_may_be_freed_before_the_kernel_has_run(torch_cuda, rng):
    """Stream-ordered: what is freed at once is handed out again at once, to work that comes later on the stream."""
    torch = torch_cuda.xp
    cases = mixed_cases(rng)
    expected = [case.run(torch_cuda) for case in cases]
    masters = [case.tensors(torch_cuda) for case in cases]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for case, master, wanted in zip(cases, masters, expected, strict=True):
            torch.cuda._sleep(SLOW_CYCLES)
            kept = []
            for _ in range(10):
                copies = {name: tensor.clone() for name, tensor in master.items()}
                results = case.call(torch_cuda, **copies, return_lse=True)
                sizes = [(tensor.shape, tensor.dtype) for tensor in copies.values()]
                kept.append([result.clone() for result in results])
                del copies, results
                for shape, dtype in sizes:  # the memory of the inputs, most likely
                    torch.empty(shape, dtype=dtype, device="cuda").fill_(-1)
            torch.cuda.current_stream().synchronize()
            for results in kept:
                assert_all_same_bits(host_copies(torch_cuda, results), wanted, "freed early")


CUDA_SMALL = (
    SMALL
    + """
    import torch
    def gpu(device="cuda"):
        tensors = [torch.from_numpy(array).to(device) for array in (q, k, v, offsets)]
        outs = [ra.ragged_flash_attention(*(t.bfloat16() for t in tensors[:3]), tensors[3]) for _ in range(20)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0].float().cpu().numpy().tobytes()
"""
)


def test_with_the_stream_ordered_allocator(torch_cuda):
    """cudaMallocAsync: memory that belongs to a stream's order, not to an address for good."""
    code = """
    expected = gpu()
    for _ in range(20): assert gpu() == expected
    print(torch.cuda.get_allocator_backend())
    """
    assert run_python(CUDA_SMALL + code, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync") == "cudaMallocAsync"


# Forks and CUDA: a child can use the GPU if the parent has not, and the CPU backend in any case


def test_forked_children_use_the_gpu_after_the_import_and_after_a_cpu_call(torch_cuda):
    code = """
    assert child(lambda: bool(gpu())) == 0  # after the import alone
    expected_cpu = cpu()
    assert child(lambda: bool(gpu())) == 0  # after a call on the CPU
    assert not torch.cuda.is_initialized()
    expected = gpu()
    assert child(lambda: cpu() == expected_cpu) == 0  # after a call on the GPU
    assert gpu() == expected
    print("done")
    """
    assert run_python(CUDA_SMALL + code) == "done"


# Graphs


def test_a_graph_of_both_operations_follows_new_values(torch_cuda, rng):
    """SageAttention 392, vllm 44868: with new values in its tensors, a replayed graph gave the old ones' results."""
    torch = torch_cuda.xp
    cases = mixed_cases(rng)
    tensors = [case.tensors(torch_cuda) for case in cases]

    def call_all() -> list[Any]:
        return [case.call(torch_cuda, **given, return_lse=True) for case, given in zip(cases, tensors, strict=True)]

    graph, results = capture(torch, call_all)
    for _ in range(4):
        changed = [other_values(rng, case) for case in cases]
        for case, given in zip(changed, tensors, strict=True):
            for name, tensor in case.tensors(torch_cuda).items():
                given[name].copy_(tensor)
        for result in (tensor for pair in results for tensor in pair):
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for number, (case, pair) in enumerate(zip(changed, results, strict=True)):
            got = host_copies(torch_cuda, pair)
            assert_all_same_bits(got, case.run(torch_cuda), f"case {number} replayed", "eager")
            case.check(*got)


def other_values(rng: np.random.Generator, case: Case) -> Case:
    """The same shapes with other numbers, and other lengths in the ragged operation; NaN stays where it was."""

    def mixed(array: Any) -> Any:
        return (array.astype(np.float32) * -0.5 + 0.25).astype(array.dtype)

    if case.op == QSA:
        return case.replace(q=mixed(case.array("q")), kv_blocks=mixed(case.array("kv_blocks")))
    offsets = case.array("input_row_offsets")
    inner = np.sort(rng.integers(0, offsets[-1] + 1, len(offsets) - 2))
    changed = {name: mixed(case.array(name)) for name in "qkv"}
    return case.replace(**changed, input_row_offsets=np.array([0, *inner, offsets[-1]], offsets.dtype))


def test_a_graph_captured_with_nothing_to_do_works_later(torch_cuda, rng):
    """vllm 42444: what a capture with dummy lengths decided stayed decided."""
    torch = torch_cuda.xp
    for case in mixed_cases(rng):
        tensors = case.tensors(torch_cuda)
        # No sequence has a row; and for QSA no list an entry.
        for name, tensor in tensors.items():
            if name in ("input_row_offsets", "counts", "cache_lengths"):
                tensor.zero_()
        graph, results = capture(torch, lambda c=case, t=tensors: c.call(torch_cuda, **t, return_lse=True))
        graph.replay()
        torch.cuda.synchronize()
        assert_nothing_attended(*host_copies(torch_cuda, results))
        for name, tensor in case.tensors(torch_cuda).items():
            tensors[name].copy_(tensor)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_all_same_bits(host_copies(torch_cuda, results), case.run(torch_cuda), "replayed", "eager")


def test_two_graphs_and_eager_calls_at_once(torch_cuda, rng):
    torch = torch_cuda.xp
    cases = mixed_cases(rng)
    expected = [case.run(torch_cuda) for case in cases]
    tensors = [case.tensors(torch_cuda) for case in cases]

    def call_all() -> list[Any]:
        return [case.call(torch_cuda, **given, return_lse=True) for case, given in zip(cases, tensors, strict=True)]

    graphs = [capture(torch, call_all) for _ in range(2)]
    streams = streams_of(torch, 3)
    for _ in range(10):
        for (graph, results), stream in zip(graphs, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                for result in (tensor for pair in results for tensor in pair):
                    result.fill_(float("nan"))
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = call_all()
        torch.cuda.synchronize()
        for results in (graphs[0][1], graphs[1][1], eager):
            for pair, wanted in zip(results, expected, strict=True):
                assert_all_same_bits(host_copies(torch_cuda, pair), wanted)


# Two GPUs


@pytest.fixture
def two_gpus():
    framework = open_framework("torch", "cuda")
    if framework.xp.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return framework


def on_device(tensors: dict[str, Any], index: int) -> dict[str, Any]:
    return {name: tensor.to(f"cuda:{index}") for name, tensor in tensors.items()}


def test_two_devices_in_turn_from_one_thread(two_gpus, rng):
    """flash-attention 2356, flashinfer 452; TensorRT-LLM 17225: a kernel's attributes set on the first device alone."""
    torch = two_gpus.xp
    for current in (0, 1):
        for case in mixed_cases(rng):
            expected = case.run(two_gpus)
            tensors = [on_device(case.tensors(two_gpus), index) for index in (0, 1)]
            with torch.cuda.device(current):
                pending = [(i, case.call(two_gpus, **tensors[i], return_lse=True)) for i in (1, 0, 1, 1, 0)]
                assert torch.cuda.current_device() == current
            for index, results in pending:
                torch.cuda.synchronize(index)
                assert {result.device.index for result in results} == {index}
                assert_all_same_bits(host_copies(two_gpus, results), expected, f"on cuda:{index}")


def test_threads_on_two_devices(two_gpus, rng):
    torch = two_gpus.xp
    cases = mixed_cases(rng)
    expected = [case.run(two_gpus) for case in cases]
    tensors = [[on_device(case.tensors(two_gpus), index) for case in cases] for index in (0, 1)]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)

    def work(number: int) -> list[tuple[int, Any]]:
        index = number % 2
        results = []
        # Every other pair of threads has the other device as its current one.
        with torch.cuda.device(index if number % 4 < 2 else 1 - index):
            stream = torch.cuda.Stream(index)
            with torch.cuda.stream(stream), torch.cuda.device(index if number % 4 < 2 else 1 - index):
                for i in range(number, number + 3 * len(cases)):
                    which = i % len(cases)
                    results.append(
                        (which, cases[which].call(two_gpus, **tensors[index][which], return_lse=True))
                    )  # fmt: skip
            stream.synchronize()
            torch.cuda.synchronize(index)
        return [(which, host_copies(two_gpus, result)) for which, result in results]

    for number, results in enumerate(at_once(THREADS, work)):
        for which, result in results:
            assert_all_same_bits(result, expected[which], f"case {which} in thread {number}")


@pytest.mark.parametrize("op", [RAGGED, QSA])
def test_a_graph_on_the_other_device(two_gpus, rng, op):
    torch = two_gpus.xp
    case = next(case for case in mixed_cases(rng) if case.op == op)
    expected = case.run(two_gpus)
    tensors = on_device(case.tensors(two_gpus), 1)
    with torch.cuda.device(1):
        graph, results = capture(torch, lambda: case.call(two_gpus, **tensors, return_lse=True))
    for result in results:
        result.fill_(float("nan"))
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        graph.replay()
    torch.cuda.synchronize(1)
    assert_all_same_bits(host_copies(two_gpus, results), expected, "replayed on cuda:1")
