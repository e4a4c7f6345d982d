"""The operators of torch: results, fake tensors, compilation, export, mutation, gradients; and the drop-ins."""

from __future__ import annotations

import dataclasses
import importlib
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from _cases import QSA, RAGGED, packed_qkv, padded_rows, qsa_case, ragged_case
from _checks import assert_all_same_bits, assert_same_bits
from _frameworks import FLOAT_DTYPES, optional

each_op = pytest.mark.parametrize("op", [RAGGED, QSA])
each_form = pytest.mark.parametrize("form", ["", "_lse", "_out", "_lse_out"])


@pytest.fixture(scope="module", autouse=True)
def integration():
    if optional("torch") is None:
        pytest.skip("torch is not installed")
    return importlib.import_module("ragged_attention.integrations.torch")


@pytest.fixture(autouse=True)
def fresh_compiler(integration):
    yield
    integration.torch.compiler.reset()


def make(rng, op, dtype="float32", **changes):
    if op == RAGGED:
        parameters = {"mask_str": "sliding_window_causal", "local_window_size": 9, "scale": 0.2, **changes}
        return ragged_case(rng, [40, 0, 7], heads=(4, 2), dtype=dtype, before=1, after=2, **parameters)
    parameters = {"scale": 0.2, "max_prompt_length": 4, "group": 2, **changes}
    return qsa_case(rng, [4, 0, 3], [60, 3, 9], heads=(4, 2), dtype=dtype, before=1, after=2, **parameters)


def operator(torch, op, form=""):
    return getattr(torch.ops.ragged_attention, op + form)


def call_form(torch_device, case, form, tensors=None):
    """(out, lse) or (out,) through one form of the operator; the given tensors of the out forms start as NaN."""
    function = operator(torch_device.xp, case.op, form)
    arguments = {**(tensors or case.tensors(torch_device)), **case.parameters}
    if not form.endswith("_out"):
        results = function(**arguments)
        return results if form else (results,)
    results = {"out": torch_device.full(case.out_shape, case.out_dtype)}
    if form == "_lse_out":
        results["lse"] = torch_device.full(case.out_shape[:2], "float32")
    assert function(**arguments, **results) is None
    return tuple(results.values())


# --- Registration.


def test_importing_twice_and_reloading_change_nothing(torch_device, rng, integration):
    case = make(rng, RAGGED)
    expected = case.run(torch_device)
    importlib.reload(integration)
    name = integration.__name__
    kept = sys.modules.pop(name)
    try:
        importlib.import_module(name)
        assert_all_same_bits(map(torch_device.numpy, call_form(torch_device, case, "_lse")), expected)
    finally:
        sys.modules[name] = kept
    assert_all_same_bits(map(torch_device.numpy, call_form(torch_device, case, "_lse")), expected)


@each_op
def test_a_schema_has_the_arguments_of_the_function(integration, op):
    """In its order, but for what an operator does not take."""
    import inspect

    import ragged_attention

    left_out = {"out", "lse", "return_lse", "stream", "check_values"}
    function = inspect.signature(getattr(ragged_attention, op)).parameters
    expected = [name for name in function if name not in left_out]
    schemas = {form: operator(integration.torch, op, form).default._schema for form in ("", "_lse", "_out", "_lse_out")}
    for form, schema in schemas.items():
        names = [argument.name for argument in schema.arguments]
        written = [argument.name for argument in schema.arguments if argument.is_write]
        results = {"": [], "_lse": [], "_out": ["out"], "_lse_out": ["out", "lse"]}[form]
        assert written == results
        taken = [name for name in expected if not (results and name == "out_dtype")]
        assert names == taken + results
        for argument in schema.arguments:
            default = function[argument.name].default
            if argument.has_default_value():
                assert argument.default_value == default
            else:
                assert argument.name in results or default is inspect.Parameter.empty


# --- Results.


@each_op
@each_form
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_form_gives_the_functions_bits(torch_device, rng, op, form, dtype):
    case = make(rng, op, dtype)
    expected = case.run_and_check(torch_device)
    results = call_form(torch_device, case, form)
    assert_all_same_bits(map(torch_device.numpy, results), expected[: len(results)], f"{op}{form}", "the function")


@each_form
def test_arguments_by_position(torch_device, rng, form):
    torch = torch_device.xp
    case = make(rng, QSA)
    values = {**case.tensors(torch_device), **case.parameters}
    names = [argument.name for argument in operator(torch, QSA).default._schema.arguments]
    positional = [values.get(name, {"page_stride": -1}.get(name)) for name in names if name != "out_dtype"]
    out, lse = torch_device.full(case.out_shape, "float32"), torch_device.full(case.out_shape[:2], "float32")
    given = {"_out": {"out": out}, "_lse_out": {"out": out, "lse": lse}}.get(form, {})
    returned = operator(torch, QSA, form)(*positional, **given)
    out = given.get("out", returned[0] if form == "_lse" else returned)
    assert_same_bits(torch_device.numpy(out), case.run(torch_device)[0])


def test_out_dtype_is_a_torch_dtype(torch_device, rng):
    torch = torch_device.xp
    case = make(rng, QSA, "float16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, None):
        out, lse = operator(torch, QSA, "_lse")(**case.tensors(torch_device), **case.parameters, out_dtype=dtype)
        assert out.dtype == (dtype or torch.float16)
        assert lse.dtype == torch.float32
    given = torch_device.full(case.out_shape, "float32")
    operator(torch, QSA, "_out")(**case.tensors(torch_device), **case.parameters, out=given)
    expected = case.replace(out_dtype="float32").run_and_check(torch_device)[0]
    assert_same_bits(torch_device.numpy(given), expected)


def test_views_are_read_and_written_where_they_lie(torch_device, rng):
    torch = torch_device.xp
    case = packed_qkv(make(rng, RAGGED))
    wide = torch_device.full((case.out_shape[0], 2 * case.out_shape[1], case.out_shape[2]), "float32", 7.0)
    operator(torch, RAGGED, "_out")(**case.tensors(torch_device), **case.parameters, out=wide[:, ::2])
    assert_same_bits(torch_device.numpy(wide[:, ::2]), case.run(torch_device)[0])
    assert bool((wide[:, 1::2] == 7).all())


def test_lazily_negated_operands_are_materialised(torch_device, rng):
    """torch's dispatcher does it for an operator; the function refuses them."""
    torch = torch_device.xp
    case = make(rng, RAGGED)
    tensors = case.tensors(torch_device)
    tensors["q"] = torch._neg_view(tensors["q"])
    results = call_form(torch_device, case, "_lse", tensors)
    assert_all_same_bits(map(torch_device.numpy, results), case.replace(q=-case.array("q")).run(torch_device))


@pytest.mark.parametrize("form", ["_out", "_lse_out"])
@each_op
def test_a_write_counts_as_a_new_version(torch_device, rng, op, form):
    """What autograd has saved is then refused in backward, not used with other values."""
    torch = torch_device.xp
    case = make(rng, op)
    out, lse = torch_device.full(case.out_shape, "float32", 1.0), torch_device.full(case.out_shape[:2], "float32", 1.0)
    weight = torch.ones((), device=torch_device.device, requires_grad=True)
    loss = (weight * out).sum() + (weight * lse).sum()
    given = {"out": out} if form == "_out" else {"out": out, "lse": lse}
    operator(torch, op, form)(**case.tensors(torch_device), **case.parameters, **given)
    assert [tensor._version for tensor in given.values()] == [1] * len(given)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    with torch.inference_mode():  # such tensors have no version
        call_form(torch_device, case, form)


def test_errors_name_the_argument(torch_device, rng):
    torch = torch_device.xp
    case = make(rng, RAGGED)
    for expected, name, changes in (
        (ValueError, "mask_str", {"mask_str": "casual"}),
        (ValueError, "local_window_size", {"local_window_size": 0}),
        (ValueError, "k", {"k": torch_device.tensor(case.array("k")[:-1])}),
        (TypeError, "v", {"v": torch_device.tensor(case.array("v").astype(np.float16))}),
    ):
        with pytest.raises(expected, match=rf"\b{name}\b"):
            operator(torch, RAGGED)(**{**case.tensors(torch_device), **case.parameters, **changes})


def test_a_page_stride_that_leaves_the_storage_is_refused(torch_device, rng):
    """A compiler may hand over a copy of the view, with nothing behind it."""
    case = make(rng, QSA)
    pages = len(case.array("kv_blocks"))
    page = case.array("kv_blocks")[0].size
    tensors = case.tensors(torch_device)
    pool = torch_device.full((pages, page + 64), "float32")
    pool[:, :page] = tensors["kv_blocks"].reshape(pages, page)
    view = pool.as_strided(tensors["kv_blocks"].shape, tensors["kv_blocks"].stride())
    tensors["kv_blocks"] = view
    case = case.replace(page_stride=page + 64)
    results = call_form(torch_device, case, "_lse", tensors)
    assert_all_same_bits(map(torch_device.numpy, results), case.replace(page_stride=-1).run_and_check(torch_device))
    with pytest.raises(ValueError, match=r"page_stride.*storage"):
        call_form(torch_device, case, "_lse", {**tensors, "kv_blocks": view.clone()})
    with pytest.raises(ValueError, match=r"page_stride.*storage"):  # the last page ends 64 elements further on
        call_form(torch_device, case.replace(page_stride=page + 64 + 64), "_lse", tensors)


# --- Fake tensors.


@each_op
@each_form
def test_opcheck(torch_device, rng, op, form):
    torch = torch_device.xp
    case = make(rng, op)
    strided = case.replace(q=padded_rows(case.array("q")))
    empty = ragged_case(rng, []) if op == RAGGED else qsa_case(rng, [], [])
    for sample in (case, strided, empty):
        results = {}
        if form.endswith("_out"):
            results["out"] = torch_device.full(sample.out_shape, "float32", 0.0)
        if form == "_lse_out":
            results["lse"] = torch_device.full(sample.out_shape[:2], "float32", 0.0)
        tensors = sample.tensors(torch_device)
        # opcheck compares with allclose, to which NaN is not close.
        for name in sample.operands:
            tensors[name] = tensors[name].nan_to_num() if tensors[name].is_floating_point() else tensors[name]
        torch.library.opcheck(operator(torch, op, form).default, (), {**tensors, **sample.parameters, **results})


@each_op
@pytest.mark.parametrize("form", ["", "_lse"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fake_and_meta_results_look_like_real_ones(torch_device, rng, op, form, dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch = torch_device.xp
    case = make(rng, op, dtype, **({"out_dtype": torch.float16} if op == QSA else {}))
    case = case.replace(q=padded_rows(case.array("q")))
    tensors = case.tensors(torch_device)
    real = operator(torch, op, form)(**tensors, **case.parameters)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        faked = operator(torch, op, form)(**fake, **case.parameters)
    meta = operator(torch, op, form)(**{name: tensor.to("meta") for name, tensor in tensors.items()}, **case.parameters)
    for got, device in ((faked, real[0].device), (meta, torch.device("meta"))):
        for tensor, like in zip(*((r if form else (r,)) for r in (got, real)), strict=True):
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
            assert tensor.device == device


def test_unbacked_sizes_are_not_guarded_on(torch_device, rng):
    """The number of rows comes from the data, and no comparison of sizes may ask for it."""
    torch = torch_device.xp
    case = make(rng, RAGGED)
    attend = operator(torch, RAGGED, "_lse")

    def selected(q, k, v, keep, input_row_offsets):
        rows = keep.nonzero().squeeze(1)
        return attend(q[rows], k[rows], v[rows], input_row_offsets)

    tensors = case.tensors(torch_device)
    keep = torch.arange(case.out_shape[0], device=torch_device.device) % 3 > 0
    arguments = (*(tensors[name] for name in "qkv"), keep, tensors["input_row_offsets"].clamp(max=int(keep.sum())))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(selected, backend="aot_eager", fullgraph=True)(*arguments)
    for got, expected in zip(compiled, selected(*arguments), strict=True):
        assert_same_bits(torch_device.numpy(got), torch_device.numpy(expected))


# --- Compilation and export.


def steps(rng, op):
    """Calls that differ in rows, batch, hints, and whatever else changes from step to step.

    No 0 and no 1, of which torch makes constants, and no two sizes that are equal in the first call alone: torch would
    take them for one.
    """
    if op == RAGGED:
        return [
            ragged_case(rng, lengths, heads=(4, 2), after=2, q_max_seq_len=max(lengths), mask_str="chunked", **window)
            for lengths, window in (
                ([40, 7], {"local_window_size": 9}),
                ([3, 5, 70], {"local_window_size": 9}),
                ([2, 2, 2, 2, 20], {"local_window_size": 5}),
                ([11, 0], {"local_window_size": 130}),
            )
        ]
    return [
        qsa_case(
            rng,
            lengths,
            cached,
            heads=(4, 2),
            width=width,
            num_layers=4,
            layer_idx=layer,
            max_prompt_length=max(lengths),
            max_cache_length=max(cached),
        )
        for lengths, cached, width, layer in (
            ([4, 3, 6, 2, 5], [120, 9, 0, 4, 33], 24, 3),
            ([2, 1, 5], [33, 200, 7], 31, 2),
            ([1, 1, 1, 1, 2], [10, 20, 30, 40, 50], 9, 3),
        )
    ]


def module_of(torch, op, form):
    attend = operator(torch, op, form)

    class Attention(torch.nn.Module):
        def forward(self, q, **arguments):
            if form != "_lse_out":
                out, lse = attend(q * 0.5, **arguments)
            else:
                out, lse = torch.empty_like(q), q.new_full(q.shape[:2], float("nan"), dtype=torch.float32)
                attend(q * 0.5, **arguments, out=out, lse=lse)
            return out + 1, lse * 2

    return Attention()


@each_op
@pytest.mark.parametrize("form", ["_lse", "_lse_out"])
def test_compiled_once_for_all_sizes_and_bit_for_bit_eager(torch_device, rng, op, form):
    torch = torch_device.xp
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    module = module_of(torch, op, form)
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for case in steps(rng, op):
        arguments = {**case.tensors(torch_device), **case.parameters}
        with torch.no_grad():
            expected = module(**arguments)
            got = compiled(**arguments)
        assert_all_same_bits(*([torch_device.numpy(tensor) for tensor in results] for results in (got, expected)))
    assert counter.frame_count == 1


def test_inductor(torch_device, rng):
    """Once: it compiles C++ or Triton code around the operator."""
    torch = torch_device.xp
    module = module_of(torch, RAGGED, "_lse_out")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for case in steps(rng, RAGGED)[:2]:
        arguments = {**case.tensors(torch_device), **case.parameters}
        try:
            got = compiled(**arguments)
        except Exception as error:
            if any(reason in repr(error) for reason in ("InvalidCxxCompiler", "find C compiler", "TritonMissing")):
                pytest.skip(f"inductor finds no compiler: {error}")
            raise
        expected = module(**arguments)
        assert_all_same_bits(*([torch_device.numpy(tensor) for tensor in results] for results in (got, expected)))


@each_op
def test_exported_with_dynamic_shapes(torch_device, rng, op):
    torch = torch_device.xp
    attend = operator(torch, op, "_lse")
    first, *later = steps(rng, op)
    fixed = {name: value for name, value in first.parameters.items() if "max" not in name}

    class Attention(torch.nn.Module):
        def forward(self, tensors):
            return attend(**tensors, **fixed)

    rows, batch = torch.export.Dim("rows", max=4096), torch.export.Dim("batch", max=64)
    shapes = {
        "q": {0: rows},
        "k": {0: rows},
        "v": {0: rows},
        "input_row_offsets": {0: batch + 1},
        "kv_blocks": {0: torch.export.Dim("pages")},
        "cache_lengths": {0: batch},
        "kv_lookup_table": {0: batch, 1: torch.export.Dim("max_pages")},
        "token_indices": {0: rows, 1: torch.export.Dim("width")},
        "counts": {0: rows},
    }
    dynamic = ({name: shapes[name] for name in first.operands},)
    program = torch.export.export(Attention(), (first.tensors(torch_device),), dynamic_shapes=dynamic)
    saved = io.BytesIO()
    torch.export.save(program.run_decompositions(), saved)
    saved.seek(0)
    exported = torch.export.load(saved).module()
    for case in (first, *later):
        case = dataclasses.replace(case, parameters=fixed)
        got = exported(case.tensors(torch_device))
        assert_all_same_bits(map(torch_device.numpy, got), case.run(torch_device), "exported", "eager")


@each_op
def test_functionalisation_sees_every_write(torch_device, rng, op):
    """Two writes to one tensor with a read between them, of a tensor of the graph and of an input."""
    torch = torch_device.xp
    case = make(rng, op)
    write = operator(torch, op, "_out")

    def twice(given, q, **arguments):
        inner = torch.full_like(q, float("nan"))
        copies = []
        for out in (inner, given):
            write(q, **arguments, out=out)
            copies.append(out.clone())
            write(q * 2, **arguments, out=out)
        return inner, *copies

    arguments = {**case.tensors(torch_device), **case.parameters}
    given = torch_device.full(case.out_shape, "float32")
    inner, *copies = torch.compile(twice, backend="aot_eager", fullgraph=True)(given, **arguments)
    once, doubled = (case.replace(q=case.array("q") * factor).run(torch_device)[0] for factor in (1, 2))
    for tensor, expected in ((inner, doubled), (given, doubled), (copies[0], once), (copies[1], once)):
        assert_same_bits(torch_device.numpy(tensor), expected)


def test_a_cache_that_the_graph_writes_to_is_read_after_the_write(torch_device, rng):
    torch = torch_device.xp
    case = make(rng, QSA)
    attend = operator(torch, QSA)

    def step(kv_blocks, fresh, **arguments):
        kv_blocks.copy_(fresh)
        return attend(kv_blocks=kv_blocks, **arguments)

    tensors = case.tensors(torch_device)
    fresh = tensors.pop("kv_blocks")
    cache = torch.zeros_like(fresh)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out = compiled(cache, fresh, **tensors, **case.parameters)
    assert_same_bits(torch_device.numpy(out), case.run(torch_device)[0])
    assert_same_bits(torch_device.numpy(cache), case.array("kv_blocks"))


def test_a_mask_that_does_not_exist_is_refused_when_the_graph_is_traced(torch_device, rng):
    torch = torch_device.xp
    tensors = {name: tensor.to("meta") for name, tensor in make(rng, RAGGED).tensors(torch_device).items()}
    with pytest.raises(ValueError, match="mask_str"):
        operator(torch, RAGGED)(**tensors, mask_str="casual")
    with pytest.raises(ValueError, match="q: expected 3 dimensions"):
        operator(torch, RAGGED)(**{**tensors, "q": tensors["q"][0]})


@each_op
@each_form
def test_an_operator_in_a_cuda_graph(torch_cuda, rng, op, form):
    torch = torch_cuda.xp
    case = ragged_case(rng, [130, 5, 70, 0], heads=(4, 2), head_dim=128, dtype="bfloat16")
    if op == QSA:
        case = qsa_case(rng, [4, 1, 3], [60, 200, 9], heads=(4, 2), head_dim=128, dtype="bfloat16")
    tensors = case.tensors(torch_cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call_form(torch_cuda, case, form, tensors)
    torch.cuda.current_stream().wait_stream(side)
    out = torch_cuda.full(case.out_shape, "bfloat16"), torch_cuda.full(case.out_shape[:2], "float32")
    given = {"_out": {"out": out[0]}, "_lse_out": {"out": out[0], "lse": out[1]}}.get(form, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = operator(torch, op, form)(**tensors, **case.parameters, **given)
    results = tuple(given.values()) or (returned if form == "_lse" else (returned,))
    offsets = [0, 1, 2, 3, 205] if op == RAGGED else [0, 2, 2, 8]
    for changed in (case, case.replace(input_row_offsets=np.array(offsets, np.int32))):
        tensors["input_row_offsets"].copy_(torch_cuda.tensor(changed.array("input_row_offsets")))
        graph.replay()
        torch.cuda.synchronize()
        expected = changed.run(torch_cuda)[: len(results)]
        assert_all_same_bits(map(torch_cuda.numpy, results), expected, "replayed", "eager")


def test_compiled_into_cuda_graphs(torch_cuda, rng):
    """mode="reduce-overhead": inductor's own graphs, replayed from the third call on."""
    torch = torch_cuda.xp
    module = module_of(torch, RAGGED, "_lse")
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for lengths in ([40, 7, 17], [1, 62, 1], [20, 20, 24], [64, 0, 0]):
        case = ragged_case(rng, lengths, heads=(4, 2), dtype="bfloat16", mask_str="causal")
        arguments = {**case.tensors(torch_cuda), **case.parameters}
        with torch.no_grad():
            got, expected = compiled(**arguments), module(**arguments)
            assert_all_same_bits(*([torch_cuda.numpy(tensor) for tensor in results] for results in (got, expected)))


@each_op
@each_form
def test_nothing_is_waited_for(torch_cuda, rng, op, form):
    """torch says so of its own synchronisations; in a capture, anyone's would be an error."""
    torch = torch_cuda.xp
    case = make(rng, op, "bfloat16")
    tensors = case.tensors(torch_cuda)
    given = {"out": torch_cuda.full(case.out_shape, "bfloat16"), "lse": torch_cuda.full(case.out_shape[:2], "float32")}
    given = {"_out": {"out": given["out"]}, "_lse_out": given}.get(form, {})
    operator(torch, op, form)(**tensors, **case.parameters, **given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator(torch, op, form)(**tensors, **case.parameters, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- Gradients.


@each_op
@each_form
def test_a_tensor_that_requires_grad_is_refused_while_grad_mode_is_on(torch_device, rng, op, form):
    torch = torch_device.xp
    case = make(rng, op)
    tensors = case.tensors(torch_device)
    expected = case.run(torch_device)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        leaf = {**tensors, name: tensor.clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=rf"{name}\b.*grad"):
            call_form(torch_device, case, form, leaf)
        for accepting in (torch.no_grad, torch.inference_mode):
            with accepting():
                results = call_form(torch_device, case, form, leaf)
            assert_all_same_bits(map(torch_device.numpy, results), expected[: len(results)])
            assert not any(result.requires_grad for result in results)
    if form.endswith("_out"):
        given = {"out": torch_device.full(case.out_shape, "float32").requires_grad_()}
        if form == "_lse_out":
            given["lse"] = torch_device.full(case.out_shape[:2], "float32")
        with pytest.raises(NotImplementedError, match=r"out\b.*grad"):
            operator(torch, op, form)(**tensors, **case.parameters, **given)


@each_op
@pytest.mark.parametrize("form", ["_lse", "_lse_out"])
def test_a_graph_is_not_compiled_past_the_refusal(torch_device, rng, op, form):
    torch = torch_device.xp
    case = make(rng, op)
    arguments = {**case.tensors(torch_device), **case.parameters}
    arguments["q"].requires_grad_()
    module = module_of(torch, op, form)
    whole = torch.compile(module, backend="aot_eager", fullgraph=True)
    # fullgraph=True wraps what stops it in an error of torch's own; the message stays.
    with pytest.raises(RuntimeError, match="does not require grad"):
        whole(**arguments)
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="does not require grad"):
        torch.compile(module, backend="aot_eager")(**arguments)
    torch.compiler.reset()
    with pytest.raises((RuntimeError, NotImplementedError), match="does not require grad"):
        torch.export.export(module, (), arguments)
    torch.compiler.reset()
    with torch.no_grad():
        got, expected = whole(**arguments), module(**arguments)
    assert_all_same_bits(*([torch_device.numpy(tensor) for tensor in results] for results in (got, expected)))


def test_compiled_beside_what_is_trained(torch_device, rng):
    """A frozen part, detached or under no_grad, in a graph with a backward."""
    torch = torch_device.xp
    case = make(rng, RAGGED)
    attend = operator(torch, RAGGED)
    tensors = case.tensors(torch_device)
    tensors = {name: tensor.nan_to_num() if name in "qkv" else tensor for name, tensor in tensors.items()}

    def detached(weight, q, **arguments):
        return attend((q * weight).detach(), **arguments) * weight

    def without_grad(weight, q, **arguments):
        with torch.no_grad():
            frozen = attend(q * weight, **arguments)
        return frozen * weight

    for function in (detached, without_grad):
        weight = torch.full((), 0.5, device=torch_device.device, requires_grad=True)
        expected = function(weight, **tensors, **case.parameters)
        (expected_grad,) = torch.autograd.grad(expected.sum(), weight)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        got = compiled(weight, **tensors, **case.parameters)
        (grad,) = torch.autograd.grad(got.sum(), weight)
        assert_same_bits(torch_device.numpy(got), torch_device.numpy(expected))
        assert float(grad) == float(expected_grad)


# --- Drop-ins.

# (left, right), causal: the mask of this package, or None where the drop-ins refuse.
WINDOWS = {
    ((-1, -1), False): ("null", -1),
    ((-1, 0), False): ("causal", -1),
    ((-1, -1), True): ("causal", -1),
    ((-1, 5), True): ("causal", -1),
    ((0, 0), False): ("sliding_window_causal", 1),
    ((8, 0), False): ("sliding_window_causal", 9),
    ((8, -1), True): ("sliding_window_causal", 9),
    ((8, 3), True): ("sliding_window_causal", 9),
    ((500, 0), False): ("sliding_window_causal", 501),
    ((8, -1), False): ("sliding_window_noncausal", 9),
    ((8, 3), False): None,
    ((8, 8), False): None,
    ((-1, 3), False): None,
}


class AuxRequest(NamedTuple):
    """As in torch.nn.attention.varlen, which an older torch lacks."""

    lse: bool = False


def varlen_arguments(torch_device, case):
    tensors = case.tensors(torch_device)
    offsets = tensors["input_row_offsets"]
    return [tensors["q"], tensors["k"], tensors["v"], offsets, offsets, 40, 40]


def varlen_attn(integration, arguments, *, causal, scale, window_size, want_lse):
    if causal:
        window_size = (window_size[0], 0)
    aux = AuxRequest(lse=want_lse)
    return integration.varlen_attn(
        *arguments, scale=scale, window_size=window_size, enable_gqa=True, return_aux=aux, num_splits=1
    )


def flash_attn_varlen_func(integration, arguments, *, causal, scale, window_size, want_lse):
    results = integration.flash_attn_varlen_func(
        *arguments, softmax_scale=scale, causal=causal, window_size=window_size, return_attn_probs=want_lse
    )
    if want_lse:
        out, lse, probabilities = results
        assert probabilities.numel() == 0
        return out, lse
    return results


each_drop_in = pytest.mark.parametrize("drop_in", [varlen_attn, flash_attn_varlen_func])


@each_drop_in
@pytest.mark.parametrize(("asked", "expected"), WINDOWS.items(), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drop_ins_match_the_reference(torch_device, rng, integration, drop_in, asked, expected, dtype):
    window_size, causal = asked
    mask_str, window = expected or ("null", -1)
    case = make(rng, RAGGED, dtype, mask_str=mask_str, local_window_size=window, scale=0.3)
    call = {"causal": causal, "scale": 0.3, "window_size": window_size}
    arguments = varlen_arguments(torch_device, case)
    if expected is None:
        with pytest.raises(NotImplementedError, match="window_size"):
            drop_in(integration, arguments, **call, want_lse=True)
        return
    out, lse = drop_in(integration, arguments, **call, want_lse=True)
    assert lse.shape == (case.out_shape[1], case.out_shape[0])
    results = torch_device.numpy(out), torch_device.numpy(lse.T)
    case.check(*results)
    assert_all_same_bits(results, case.run(torch_device))
    alone = drop_in(integration, arguments, **call, want_lse=False)
    assert_same_bits(torch_device.numpy(alone), results[0])


def test_drop_ins_by_their_defaults(torch_device, rng, integration):
    """Full attention at the default scale, and the output alone."""
    case = ragged_case(rng, [40, 0, 7], mask_str="null", heads=(3, 3))
    expected = case.run_and_check(torch_device)[0]
    for function in (integration.varlen_attn, integration.flash_attn_varlen_func):
        assert_same_bits(torch_device.numpy(function(*varlen_arguments(torch_device, case))), expected)


def test_the_signatures_are_those_of_torch_and_flash_attn(integration):
    import inspect

    ours = inspect.signature(integration.varlen_attn).parameters
    varlen = optional("torch.nn.attention.varlen")
    if varlen is not None:  # what the installed torch has too, in its order
        theirs = inspect.signature(varlen.varlen_attn).parameters
        common = [name for name in theirs if name in ours]
        assert common[:7] == list(ours)[:7]
        for name in common:
            assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind), name
        if "num_splits" in theirs:
            assert set(ours) <= set(theirs)
    flash = inspect.signature(integration.flash_attn_varlen_func).parameters
    assert [(name, parameter.default) for name, parameter in flash.items()][7:] == [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
        ("block_table", None),
    ]


def test_drop_ins_refuse_by_name(torch_device, rng, integration):
    torch = torch_device.xp
    case = ragged_case(rng, [5, 4], heads=(2, 2))
    arguments = varlen_arguments(torch_device, case)
    other = [*arguments[:4], arguments[4].clone(), *arguments[5:]]
    missing = [*arguments[:4], None, *arguments[5:]]
    some = torch.zeros(2, dtype=torch.int32, device=torch_device.device)
    flash, varlen = integration.flash_attn_varlen_func, integration.varlen_attn
    for function, name, given, keywords in (
        (flash, "cu_seqlens_k", other, {}),
        (flash, "dropout_p", arguments, {"dropout_p": 0.1}),
        (flash, "softcap", arguments, {"softcap": 30.0}),
        (flash, "alibi_slopes", arguments, {"alibi_slopes": some.float()}),
        (flash, "block_table", arguments, {"block_table": some[None]}),
        (flash, "window_size", arguments, {"window_size": (4, 4)}),
        (varlen, "cu_seq_k", other, {}),
        (varlen, "cu_seq_k", missing, {}),
        (varlen, "seqused_k", arguments, {"seqused_k": some}),
        (varlen, "block_table", arguments, {"block_table": some[None]}),
        (varlen, "num_splits", arguments, {"num_splits": 4}),
        (varlen, "window_size", arguments, {"window_size": (4, 4)}),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name}: "):
            function(*given, **keywords)
    for function in (flash, varlen):
        with pytest.raises(ValueError, match="window_size"):
            function(*arguments, window_size=(4,))
        with pytest.raises(NotImplementedError, match="grad"):
            function(arguments[0].clone().requires_grad_(), *arguments[1:])
    with pytest.raises(ValueError, match="enable_gqa"):
        varlen(arguments[0], *(tensor[:, :1] for tensor in arguments[1:3]), *arguments[3:])


@each_drop_in
def test_drop_ins_read_no_tensor_on_the_host(torch_device, rng, integration, drop_in):
    """On meta tensors there is nothing to read; a maximum in a tensor is passed over."""
    torch = torch_device.xp
    case = make(rng, RAGGED)
    arguments = [*(tensor.to("meta") for tensor in varlen_arguments(torch_device, case)[:4])]
    longest = torch.zeros((), dtype=torch.int32, device="meta")
    arguments += [arguments[3], longest, longest]
    out, lse = drop_in(integration, arguments, causal=True, scale=None, window_size=(4, 0), want_lse=True)
    assert out.shape == case.out_shape
    assert lse.shape == case.out_shape[1::-1]


@each_drop_in
def test_compiled_drop_ins(torch_device, rng, integration, drop_in):
    torch = torch_device.xp
    from torch._dynamo.testing import CompileCounterWithBackend

    def layer(q, k, v, offsets, longest):
        arguments = (q * 0.5, k, v, offsets, offsets, longest, longest)
        return drop_in(integration, arguments, causal=True, scale=0.2, window_size=(6, 0), want_lse=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for lengths in ([40, 7], [3, 5, 70], [2, 2, 2, 2, 20]):
        case = ragged_case(rng, lengths, heads=(4, 2), after=2)
        tensors = case.tensors(torch_device).values()
        got, expected = compiled(*tensors, max(lengths)), layer(*tensors, max(lengths))
        assert_all_same_bits(*([torch_device.numpy(tensor) for tensor in results] for results in (got, expected)))
        counts.append(counter.frame_count)
    # Not 1: to find that the default of dropout_p is a constant, torch starts over and counts an empty graph.
    assert counts == counts[:1] * 3


def test_the_examples_of_the_page(torch_device, rng):
    """docs/torch.md: the operator under torch.compile, and the drop-ins."""
    page = (Path(__file__).parents[2] / "docs" / "torch.md").read_text(encoding="utf-8")
    operators, _, drop_ins = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    if torch_device.on_cpu:
        exec(operators, {})
    case = ragged_case(rng, [5, 7], heads=(4, 2))
    names = {**case.tensors(torch_device), "torch": torch_device.xp, "longest": 7}
    names["offsets"] = names["input_row_offsets"]
    exec(drop_ins, names)
    assert_same_bits(torch_device.numpy(names["out"]), case.run_and_check(torch_device)[0])
