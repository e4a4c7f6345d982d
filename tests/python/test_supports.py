"""supports() answers what the calls then do, without running anything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from _cases import QSA, RAGGED, qsa_case, ragged_case
from _frameworks import FLOAT_DTYPES, has_gpu, open_framework

from ragged_attention import CudaError, __version__, build_info, reference, supports

each_op = pytest.mark.parametrize("op", [RAGGED, QSA])


def ask(op, device="cpu", dtype="float32", head_dim=64, group=1, **more):
    return supports(op, device=device, dtype=dtype, head_dim=head_dim, group=group, **more)


def reason_why_not(op, errors=(ValueError, TypeError), **question):
    """The reason against it, whether it is answered or, for a question that makes no sense, raised."""
    try:
        answer = ask(op, **question)
    except errors as error:
        return str(error)
    assert not answer.ok
    return answer.reason


@each_op
def test_every_head_dim_group_and_dtype_of_the_contract_is_supported(backend, op):
    for dtype, head_dim, group in itertools.product(FLOAT_DTYPES, range(8, 257, 8), (1, 2, 3, 5, 12, 16, 100)):
        answer = ask(op, backend.device, dtype, head_dim, group)
        assert answer.ok, (dtype, head_dim, group, answer)
        assert isinstance(answer.path, str)
        assert answer.path
        assert isinstance(answer.reason, str)


@each_op
@pytest.mark.parametrize("head_dim", [0, 1, 4, 20, 250, 260, 264, 1024, -8])
def test_other_head_dims_are_not_and_the_reason_says_so(backend, op, head_dim):
    answer = ask(op, backend.device, head_dim=head_dim)
    assert not answer.ok
    assert str(head_dim) in answer.reason
    assert "256" in answer.reason


@each_op
def test_the_answer_is_what_the_call_does(backend, rng, op):
    for head_dim in (8, 12, 20, 64, 72, 256, 264):
        make = (ragged_case, {"lengths": [3]}) if op == RAGGED else (qsa_case, {"lengths": [3], "cached": [9]})
        case = make[0](rng, **make[1], head_dim=head_dim, heads=(2, 1))
        answer = ask(op, backend.device, head_dim=head_dim, group=2)
        if answer.ok:
            case.run_and_check(backend)
        else:
            with pytest.raises(NotImplementedError) as refusal:
                case.call(backend)
            assert answer.reason in str(refusal.value)


@each_op
def test_dtypes_may_be_strings_numpy_dtypes_or_a_frameworks(framework, op):
    for name in FLOAT_DTYPES:
        expected = ask(op, framework.device, name)
        for form in (framework.dtype(name), *([np.dtype(name), np.dtype(name).type] if name != "bfloat16" else [])):
            assert ask(op, framework.device, form) == expected


@each_op
@pytest.mark.parametrize("dtype", ["float64", "int32", np.int8, "float8_e4m3fn"])
def test_other_dtypes_are_not(op, dtype):
    assert "bfloat16" in reason_why_not(op, dtype=dtype)


def test_every_mask_is_supported_and_others_are_refused_with_the_six(backend):
    for mask_str in reference.MASKS:
        assert ask(RAGGED, backend.device, mask_str=mask_str).ok
    with pytest.raises(ValueError, match=r"mask_str.*null.*sliding_window_noncausal.*alibi"):
        ask(RAGGED, backend.device, mask_str="alibi")


@each_op
def test_a_device_that_is_not_there_is_no_crash(op):
    assert reason_why_not(op, (ValueError, CudaError), device="cuda:77")


@each_op
def test_cuda_without_a_gpu_says_why_not(op):
    if has_gpu():
        pytest.skip("there is a GPU here")
    assert reason_why_not(op, CudaError, device="cuda")


@each_op
def test_devices_may_be_named_cuda_cuda_0_or_0(op):
    open_framework("torch", "cuda")
    assert ask(op, "cuda") == ask(op, "cuda:0") == ask(op, 0)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "mps", None, 1.5])
def test_unknown_devices_are_refused_by_name(device):
    assert "device" in reason_why_not(RAGGED, device=device)


def test_unknown_operations_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\bop\b.*ragged_flash_attention.*qsa_sparse_attention.*'flash'"):
        ask("flash")


@each_op
def test_a_group_below_1_is_not_supported(op):
    assert "group" in reason_why_not(op, group=0)


def test_build_info_and_version():
    info = build_info()
    assert isinstance(info, dict)
    assert __version__ in str(info)
