"""Tensors of every framework, and of several in one call."""

from __future__ import annotations

import re

import numpy as np
import pytest
from _cases import QSA, RAGGED, packed_qkv, qsa_case, ragged_case
from _checks import assert_all_same_bits
from _frameworks import ALL, FLOAT_DTYPES, OnlyDlpack, open_framework, optional, why_not


def make(rng, op, dtype="float32", **changes):
    if op == RAGGED:
        return ragged_case(rng, [40, 0, 7], heads=(4, 2), dtype=dtype, before=1, after=2, **changes)
    return qsa_case(rng, [4, 0, 3], [60, 3, 9], heads=(4, 2), dtype=dtype, before=1, after=2, **changes)


each_op = pytest.mark.parametrize("op", [RAGGED, QSA])


@each_op
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_framework_gives_the_same_right_bits(framework, rng, op, dtype):
    case = make(rng, op, dtype)
    out, lse = case.run_and_check(framework)
    first = next(name for name, device in ALL if device == framework.device and why_not(name, device) is None)
    assert_all_same_bits((out, lse), case.run(open_framework(first, framework.device)), str(framework), first)


@each_op
def test_results_are_of_qs_framework_and_on_its_device(framework, rng, op):
    case = make(rng, op)
    q = framework.tensor(case.operands["q"])
    for result in case.call(framework, q=q, return_lse=True):
        assert type(result) is type(q)
        assert result.__dlpack_device__() == q.__dlpack_device__()
        if framework.name == "torch":
            assert result.device == q.device
            assert not result.requires_grad


@each_op
@pytest.mark.parametrize("other", ALL, ids="-".join)
def test_operands_may_be_of_any_framework_on_the_same_device(framework, rng, op, other):
    """q's framework decides what the result is."""
    if other[1] != framework.device:
        pytest.skip("another device is refused: test_validation.py")
    guest = open_framework(*other)
    case = make(rng, op)
    mixed = {name: guest.tensor(operand) for name, operand in case.operands.items() if name != "q"}
    guest.synchronize()
    results = case.call(framework, **mixed, return_lse=True)
    framework.synchronize()
    assert_all_same_bits(map(framework.numpy, results), case.run(framework), f"operands of {guest}")
    assert isinstance(results[0], type(framework.full((1,), "float32")))


@each_op
def test_outputs_may_be_of_another_framework(framework, rng, op):
    case = make(rng, op)
    for name, device in ALL:
        if device != framework.device or why_not(name, device) is not None:
            continue
        guest = open_framework(name, device)
        out, lse = guest.full(case.out_shape, "float32"), guest.full(case.out_shape[:2], "float32")
        guest.synchronize()
        given = case.call(framework, out=out, lse=lse, return_lse=True)
        assert given[0] is out
        assert given[1] is lse
        framework.synchronize()
        assert_all_same_bits(map(guest.numpy, given), case.run(framework), f"outputs of {guest}")


@each_op
def test_operands_known_only_by_dlpack(framework, rng, op):
    case = make(rng, op)
    wrapped = {name: OnlyDlpack(tensor) for name, tensor in case.tensors(framework).items() if name != "q"}
    results = case.call(framework, **wrapped, return_lse=True)
    assert_all_same_bits(map(framework.numpy, results), case.run(framework), "through DLPack alone")


@each_op
def test_jax_operands_beside_another_query(rng, op):
    jax = optional("jax")
    if jax is None:
        pytest.skip("jax is not installed")
    backend = open_framework("numpy", "cpu")
    case = make(rng, op)
    cpu = jax.devices("cpu")[0]
    operands = {name: jax.device_put(case.array(name), cpu) for name in case.operands if name != "q"}
    results = case.call(backend, **operands, return_lse=True)
    assert_all_same_bits(results, case.run(backend), "jax operands")


def test_torch_parameters_views_and_transposes(torch_device, rng):
    torch = torch_device.xp
    case = make(rng, RAGGED)
    expected = case.run(torch_device)
    q = torch_device.tensor(case.array("q"))
    k = torch_device.tensor(case.array("k").transpose(1, 0, 2).copy()).transpose(0, 1)
    results = case.call(torch_device, q=torch.nn.Parameter(q, requires_grad=False), k=k, return_lse=True)
    got = tuple(map(torch_device.numpy, results))
    case.check(*got)
    if torch_device.on_cpu:
        assert_all_same_bits(got, expected)


def test_torch_lazy_conjugate_and_negative_views_are_right_or_refused(torch_device, rng):
    """A view with the negative bit set shares memory that holds the other sign."""
    torch = torch_device.xp
    case = make(rng, RAGGED)
    q = torch_device.tensor(case.array("q"))
    negative = torch._neg_view(q)
    assert negative.is_neg()
    try:
        results = case.call(torch_device, q=negative, return_lse=True)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
    else:
        case.replace(q=-case.array("q")).check(*map(torch_device.numpy, results))
        return
    assert re.search(r"\bq\b", text)


def test_packed_qkv_of_every_framework(framework, rng):
    for dtype in ("float32", "float16"):
        packed_qkv(make(rng, RAGGED, dtype)).run_and_check(framework)


def test_numpy_slices_and_subclasses(numpy_cpu, rng):
    case = make(rng, RAGGED)
    wide = np.zeros((50, 8, 128), np.float32)
    wide[:, ::2, :64] = case.array("q")
    assert_all_same_bits(
        case.call(numpy_cpu, q=wide[:, ::2, :64], return_lse=True), case.run(numpy_cpu), "a slice of a slice"
    )
