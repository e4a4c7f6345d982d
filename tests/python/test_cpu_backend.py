"""What is special to the CPU backend: its threads, and that bits do not depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _cases import qsa_case, ragged_case
from _checks import assert_all_same_bits, run_python

import ragged_attention

THREADS_VARIABLE = "RAGGED_ATTENTION_NUM_THREADS"


# Several sequences and rows, so that the work is split differently by every number of threads.
DIGEST = """
    import hashlib, os
    import numpy as np
    import ragged_attention as ra
    rng = np.random.default_rng(7)
    def normal(*shape): return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)
    offsets = np.array([0, 200, 201, 300, 300, 333], np.int32)
    q, k, v = normal(333, 4, 64), normal(333, 2, 64), normal(333, 2, 64)
    blocks = normal(40, 2, 1, 16, 2, 64)
    table = rng.integers(0, 40, (5, 30)).astype(np.int32)
    lengths = np.full(5, 100, np.int32)
    lists = rng.integers(0, 250, (333, 70)).astype(np.int32)
    counts = rng.integers(0, 71, 333).astype(np.int32)
    def digest():
        results = [
            *ra.ragged_flash_attention(q, k, v, offsets, return_lse=True),
            *ra.qsa_sparse_attention(q, offsets, blocks, lengths, table, 0, lists, counts, return_lse=True),
        ]
        return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    """Neither as the environment sets it, nor as set_num_threads does, nor by default."""
    report = "\n    print(ra.num_threads(), digest())"
    seen = {}
    for threads in ("1", "2", "3", "8", ""):
        environment = {THREADS_VARIABLE: threads} if threads else {}
        count, seen[threads] = run_python(DIGEST + report, **environment).split()
        assert not threads or count == threads
    in_process = """
    for n in (1, 5, 2, 1, 3):
        ra.set_num_threads(n)
        assert ra.num_threads() == n
        print(digest())
    """
    seen["set"] = set(run_python(DIGEST + in_process).split())
    assert len(seen["set"]) == 1
    assert {digest for digest in seen.values() if isinstance(digest, str)} == seen["set"]


def test_the_default_number_of_threads_is_that_of_the_affinity_mask():
    code = "import ragged_attention; print(ragged_attention.num_threads())"
    environment = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    command = [sys.executable, "-c", code]
    mask = sorted(os.sched_getaffinity(0))
    for cpus in (mask[:1], mask[:2]):
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            preexec_fn=lambda cpus=cpus: os.sched_setaffinity(0, cpus),
        )
        assert int(result.stdout) == len(cpus)


@pytest.mark.parametrize("value", [0, -1, 1025, 2**31, 2**70, True, 2.5, "4", None])
def test_bad_thread_counts_are_refused(value):
    before = ragged_attention.num_threads()
    number = isinstance(value, int) and not isinstance(value, bool)
    with pytest.raises(ValueError if number else TypeError, match=r"^n: expected"):
        ragged_attention.set_num_threads(value)
    assert ragged_attention.num_threads() == before


@pytest.mark.parametrize("value", ["many", "-3", "0"])
def test_a_bad_environment_setting_is_no_crash(value):
    """An error that names the variable, or the default; never another number of threads."""
    code = f"""
    import ragged_attention as ra
    try:
        n = ra.num_threads()
    except ValueError as error:
        assert "{THREADS_VARIABLE}" in str(error), error
    else:
        assert n >= 1
    """
    run_python(code, **{THREADS_VARIABLE: value})


def test_a_child_forked_after_a_call_can_call():
    code = """
    expected = digest()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if digest() == expected else 3)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert digest() == expected
    print("done")
    """
    assert run_python(DIGEST + code, **{THREADS_VARIABLE: "4"}) == "done"


def test_a_grandchild_and_multiprocessing_with_fork_can_call():
    code = """
    import multiprocessing
    expected = digest()
    def work(_):
        ra.set_num_threads(2)
        return digest()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert set(pool.map(work, range(4))) == {expected}
    print("done")
    """
    assert run_python(DIGEST + code, **{THREADS_VARIABLE: "3"}) == "done"


def test_several_python_threads_may_call_at_once(numpy_cpu, rng):
    cases = [ragged_case(rng, [70, 5]), qsa_case(rng, [4, 2], [90, 30]), ragged_case(rng, [33], head_dim=128)]
    expected = [case.run(numpy_cpu) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for i, results in pool.map(lambda i: (i % 3, cases[i % 3].run(numpy_cpu)), range(24)):
            assert_all_same_bits(results, expected[i], "a result beside other threads")


def test_other_threads_run_during_a_call(numpy_cpu, rng):
    """The interpreter lock is released while the library computes."""
    case = ragged_case(rng, [1500], heads=(8, 8), head_dim=128, mask_str="null")
    tensors = case.tensors(numpy_cpu)
    ticks = 0
    stop = threading.Event()

    def tick():
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    case.call(numpy_cpu, **tensors)
    during = ticks - before
    stop.set()
    thread.join()
    assert during > 0


def test_bits_do_not_depend_on_alignment(numpy_cpu, rng):
    """Whatever vectors the backend uses, the sums run in one order."""
    case = ragged_case(rng, [70], heads=(1, 1), head_dim=72)
    expected = case.run(numpy_cpu)
    for offset in (1, 3, 5, 7):
        shifted = {}
        for name in "qkv":
            source = case.array(name)
            buffer = np.zeros(source.size + offset, source.dtype)
            buffer[offset:] = source.ravel()
            shifted[name] = buffer[offset:].reshape(source.shape)
        assert_all_same_bits(case.call(numpy_cpu, **shifted, return_lse=True), expected, f"{offset} floats off")
