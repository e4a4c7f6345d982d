"""JAX arrays: results, tracing, static parameters, transformations, freshness, errors; and the ABI of XLA."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _cases import QSA, RAGGED, qsa_case, ragged_case
from _checks import assert_all_same_bits, assert_same_bits, importing_from, run_python
from _frameworks import FLOAT_DTYPES, optional

import ragged_attention

ROOT = Path(__file__).parents[2]

each_op = pytest.mark.parametrize("op", [RAGGED, QSA])


@pytest.fixture(scope="module")
def jax():
    module = optional("jax")
    if module is None:
        pytest.skip("jax is not installed")
    return module


@pytest.fixture(scope="module")
def integration(jax):
    return importlib.import_module("ragged_attention.integrations.jax")


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request, jax):
    try:
        return jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"jax finds no {request.param} device: {error}")


def make(rng, op, dtype="float32", **changes):
    if op == RAGGED:
        parameters = {"mask_str": "sliding_window_causal", "local_window_size": 9, "scale": 0.2, **changes}
        return ragged_case(rng, [40, 0, 7], heads=(4, 2), dtype=dtype, before=1, after=2, **parameters)
    parameters = {"scale": 0.2, "max_prompt_length": 4, "group": 2, **changes}
    return qsa_case(rng, [4, 0, 3], [60, 3, 9], heads=(4, 2), dtype=dtype, before=1, after=2, **parameters)


def arrays(jax, device, case):
    return {name: jax.device_put(case.array(name), device) for name in case.operands}


def attend(integration, case, tensors, **changes):
    """(out, lse) as JAX arrays."""
    function = getattr(integration, case.op)
    return function(**tensors, **case.parameters, **{"return_lse": True, **changes})


def to_numpy(results):
    return tuple(map(np.asarray, results))


def test_the_declared_abi_is_that_of_the_installed_jaxlib(jax):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = ROOT / "tests" / "cpp" / "xla_abi.cpp"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'cpp'}", f"-I{jax.ffi.include_dir()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- Results.


@each_op
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_results_are_right_eager_and_compiled(jax, integration, device, rng, op, dtype):
    case = make(rng, op, dtype)
    tensors = arrays(jax, device, case)
    eager = attend(integration, case, tensors)
    assert {str(result.dtype) for result in eager} == {dtype, "float32"}
    assert {result.device for result in eager} == {device}
    case.check(*to_numpy(eager))
    compiled = jax.jit(functools.partial(attend, integration, case))(tensors)
    assert_all_same_bits(to_numpy(compiled), to_numpy(eager), "compiled", "eager")
    (out,) = to_numpy([attend(integration, case, tensors, return_lse=False)])
    assert_same_bits(out, np.asarray(eager[0]), "without the LSE")


@each_op
def test_the_cpu_gives_the_bits_of_the_plain_function(jax, integration, numpy_cpu, rng, op):
    case = make(rng, op, "bfloat16")
    cpu = jax.devices("cpu")[0]
    results = attend(integration, case, arrays(jax, cpu, case))
    assert_all_same_bits(to_numpy(results), case.run(numpy_cpu), "JAX", "NumPy")


@each_op
def test_the_plain_functions_take_jax_arrays(jax, integration, device, rng, op):
    """Traced or not, with NumPy arrays beside q."""
    case = make(rng, op)
    tensors = arrays(jax, device, case)
    plain = getattr(ragged_attention, op)
    expected = to_numpy(attend(integration, case, tensors))
    mixed = {name: tensor if name == "q" else case.array(name) for name, tensor in tensors.items()}
    for given in (tensors, mixed):
        results = plain(**given, **case.parameters, return_lse=True)
        assert all(isinstance(result, jax.Array) for result in results)
        assert_all_same_bits(to_numpy(results), expected)

    def program(tensors):
        out, lse = plain(**{**tensors, "q": tensors["q"] * 2}, **case.parameters, return_lse=True)
        return out + 1, lse

    doubled = case.replace(q=case.array("q") * 2)
    out, lse = attend(integration, doubled, arrays(jax, device, doubled))
    assert_all_same_bits(to_numpy(jax.jit(program)(tensors)), to_numpy((out + 1, lse)))


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_out_dtype(jax, integration, device, rng, out_dtype):
    case = make(rng, QSA, "float16", out_dtype=out_dtype)
    results = attend(integration, case, arrays(jax, device, case))
    assert str(results[0].dtype) == out_dtype
    case.check(*to_numpy(results))
    given = {**case.parameters, "out_dtype": getattr(jax.numpy, out_dtype)}
    again = attend(integration, dataclasses.replace(case, parameters=given), arrays(jax, device, case))
    assert_all_same_bits(to_numpy(again), to_numpy(results), "a JAX dtype", "its name")


@each_op
def test_nothing_to_attend_to(jax, integration, device, rng, op):
    case = ragged_case(rng, [], after=3) if op == RAGGED else qsa_case(rng, [], [], after=3)
    out, lse = to_numpy(attend(integration, case, arrays(jax, device, case)))
    assert not out.any()
    assert np.all(lse == -np.inf)
    empty = ragged_case(rng, [0]) if op == RAGGED else qsa_case(rng, [0], [5])
    assert attend(integration, empty, arrays(jax, device, empty))[0].shape == empty.out_shape


def test_64_bit_offsets_and_numbers(jax, integration, device, rng):
    case = ragged_case(rng, [5, 9], offsets_dtype="int64", scale=0.3, q_max_seq_len=9)
    with jax.enable_x64(True):
        tensors = arrays(jax, device, case)
        assert str(tensors["input_row_offsets"].dtype) == "int64"
        case.check(*to_numpy(attend(integration, case, tensors)))
    case.check(*to_numpy(attend(integration, case, {**tensors, "input_row_offsets": case.array("input_row_offsets")})))


@each_op
def test_operands_are_not_written_and_results_are_fresh(jax, integration, device, rng, op):
    """Even where a caller gives its array away: the result is not put into it while it is read."""
    case = make(rng, op)
    tensors = arrays(jax, device, case)
    first = attend(integration, case, tensors)
    second = attend(integration, case, tensors)
    for name, tensor in tensors.items():
        assert_same_bits(np.asarray(tensor), np.ascontiguousarray(case.array(name)), name)
    pointers = [x.unsafe_buffer_pointer() for x in (*first, *second, *tensors.values())]
    assert len(set(pointers)) == len(pointers)

    program = jax.jit(lambda q, rest: attend(integration, case, {"q": q, **rest}), donate_argnums=0)
    rest = {name: tensor for name, tensor in tensors.items() if name != "q"}
    donated = program(jax.device_put(case.array("q"), device), rest)
    assert_all_same_bits(to_numpy(donated), to_numpy(first), "with q donated")


def test_operands_in_another_layout_are_brought_into_order(jax, integration, device, rng):
    """XLA may keep a transposed product as it is: the call asks for row-major operands."""
    case = make(rng, RAGGED)
    tensors = arrays(jax, device, case)
    heads_first = {name: tensors[name].transpose(1, 0, 2) for name in "qkv"}

    def program(heads_first, offsets):
        given = {name: tensor.transpose(1, 0, 2) for name, tensor in heads_first.items()}
        return attend(integration, case, {**given, "input_row_offsets": offsets})

    results = jax.jit(program)(heads_first, tensors["input_row_offsets"])
    assert_all_same_bits(to_numpy(results), to_numpy(attend(integration, case, tensors)))


# --- Tracing.


@each_op
def test_new_values_compile_nothing_again(jax, integration, device, rng, op):
    traced = []

    def program(tensors):
        traced.append(1)
        return attend(integration, case, tensors)

    compiled = jax.jit(program)
    for lengths in ([40, 0, 7], [1, 45, 1], [0, 0, 47]):
        if op == RAGGED:
            case = ragged_case(rng, lengths, heads=(4, 2), mask_str="chunked", local_window_size=9)
        else:
            case = qsa_case(rng, lengths, [9, 60 - 47, 0], heads=(4, 2), width=7)
            table = np.zeros((3, 4), np.int32)  # as many pages a sequence in every step
            table[:, : case.array("kv_lookup_table").shape[1]] = case.array("kv_lookup_table")
            blocks = np.full((15, *case.array("kv_blocks").shape[1:]), np.nan, np.float32)
            blocks[: len(case.array("kv_blocks"))] = case.array("kv_blocks")
            case = case.replace(kv_lookup_table=table, kv_blocks=blocks)
        case.check(*to_numpy(compiled(arrays(jax, device, case))))
    assert len(traced) == 1


def test_in_a_loop_of_the_program(jax, integration, device, rng):
    case = make(rng, RAGGED, "float16")
    tensors = {name: jax.numpy.nan_to_num(tensor) for name, tensor in arrays(jax, device, case).items()}

    def step(q, _):
        return attend(integration, case, {**tensors, "q": q}, return_lse=False), ()

    looped, _ = jax.lax.scan(step, tensors["q"], length=3)
    one_by_one = tensors["q"]
    for _ in range(3):
        one_by_one, _ = step(one_by_one, None)
    assert_same_bits(np.asarray(looped), np.asarray(one_by_one), "in a scan")


def test_a_traced_host_parameter_is_refused_by_name(jax, integration, device, rng):
    for op, names in (
        (RAGGED, ("local_window_size", "scale", "q_max_seq_len")),
        (QSA, ("layer_idx", "scale", "group", "page_stride", "max_prompt_length", "max_cache_length", "warps")),
    ):
        case = make(rng, op)
        tensors = arrays(jax, device, case)
        for name in names:

            def program(value, name=name, case=case, tensors=tensors):
                given = dataclasses.replace(case, parameters={**case.parameters, name: value})
                return attend(integration, given, tensors)

            with pytest.raises(TypeError, match=rf"^{name}: .*static"):
                jax.jit(program)(1)
            value = case.parameters.get(name, -1 if name == "page_stride" else None if name == "warps" else 1)
            case.check(*to_numpy(jax.jit(program, static_argnums=0)(value)))


def test_host_parameters_as_one_element_arrays(jax, integration, device, rng):
    case = make(rng, RAGGED)
    tensors = arrays(jax, device, case)
    given = {
        **case.parameters,
        "local_window_size": np.array([9]),
        "scale": np.float32(0.2),
        "q_max_seq_len": np.int32(3),
    }
    results = attend(integration, dataclasses.replace(case, parameters=given), tensors)
    expected = attend(integration, case.replace(scale=float(np.float32(0.2))), tensors)
    assert_all_same_bits(to_numpy(results), to_numpy(expected))


# --- Errors.


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_name_the_argument_when_the_call_is_traced(jax, integration, device, rng, compiled):
    import jax.numpy as jnp

    run = jax.jit if compiled else lambda function: function
    for op, expected, name, changes, parameters in (
        (RAGGED, ValueError, "mask_str", {}, {"mask_str": "casual"}),
        (RAGGED, ValueError, "local_window_size", {}, {"local_window_size": 0}),
        (RAGGED, ValueError, "scale", {}, {"scale": float("nan")}),
        (RAGGED, ValueError, "k", {"k": lambda k: k[:-1]}, {}),
        (RAGGED, ValueError, "q", {"q": lambda q: q[0]}, {}),
        (RAGGED, ValueError, "q", {"q": lambda q: q.reshape(1, 1, 1, 1, 1, 1, 1, *q.shape)}, {}),
        (RAGGED, TypeError, "v", {"v": lambda v: v.astype(jnp.float16)}, {}),
        (RAGGED, TypeError, "q", {"q": lambda q: q.astype(jnp.float8_e4m3fn)}, {}),
        (RAGGED, TypeError, "input_row_offsets", {"input_row_offsets": lambda o: o.astype(jnp.int16)}, {}),
        (RAGGED, NotImplementedError, "head_dim", {name: lambda x: x[..., :20] for name in "qkv"}, {}),
        (QSA, ValueError, "layer_idx", {}, {"layer_idx": 2}),
        (QSA, ValueError, "group", {}, {"group": 3}),
        (QSA, ValueError, "counts", {"counts": lambda c: c[1:]}, {}),
        (QSA, ValueError, "page_stride", {}, {"page_stride": 10**6}),
        (QSA, ValueError, "page_stride", {}, {"page_stride": 64}),
        (QSA, TypeError, "token_indices", {"token_indices": lambda t: t.astype(jnp.uint32)}, {}),
        (QSA, TypeError, "out_dtype", {}, {"out_dtype": "float64"}),
    ):
        case = make(rng, op)
        tensors = arrays(jax, device, case)
        tensors.update({name: change(tensors[name]) for name, change in changes.items()})
        case = dataclasses.replace(case, parameters={**case.parameters, **parameters})
        with pytest.raises(expected, match=rf"^{name}\b"):
            run(functools.partial(attend, integration, case))(tensors)


def test_numpy_operands_are_checked_as_they_are(jax, integration, device, rng):
    """Before JAX makes 32-bit numbers of 64-bit ones."""
    case = make(rng, QSA)
    tensors = arrays(jax, device, case)
    for name, dtype in (("token_indices", np.int64), ("counts", np.int64), ("kv_blocks", np.float64)):
        with pytest.raises(TypeError, match=rf"^{name}: "):
            attend(integration, case, {**tensors, name: case.array(name).astype(dtype)})
    for name, given in (("q", case.array("q")), ("counts", [1, 2]), ("kv_blocks", None)):
        with pytest.raises(TypeError, match=rf"^{name}: .*JAX array"):
            attend(integration, case, {**tensors, name: given})


@each_op
def test_what_jax_cannot_have_is_refused(jax, device, rng, op):
    case = make(rng, op)
    tensors = arrays(jax, device, case)
    function = getattr(ragged_attention, op)
    out = np.zeros(case.out_shape, np.float32)
    for name, value in (("out", out), ("lse", out[..., 0].copy()), ("stream", 0), ("check_values", True)):
        with pytest.raises(ValueError, match=rf"^{name}: .*JAX"):
            function(**tensors, **case.parameters, **{name: value})
    function(**tensors, **case.parameters, check_values=False)


def test_what_only_the_device_knows_is_an_error_of_the_run(jax, integration, device, rng):
    case = make(rng, QSA, warps=77)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: warps"):
        jax.block_until_ready(attend(integration, case, arrays(jax, device, case)))


# --- Transformations.


@each_op
def test_vmap_runs_element_by_element(jax, integration, device, rng, op):
    case = make(rng, op)
    tensors = arrays(jax, device, case)
    queries = jax.numpy.stack([tensors["q"], tensors["q"] * 2, tensors["q"] * 3], axis=1)
    batched = jax.vmap(lambda q: attend(integration, case, {**tensors, "q": q}), in_axes=1)(queries)
    for i in range(3):
        expected = attend(integration, case, {**tensors, "q": queries[:, i]})
        assert_all_same_bits(to_numpy(result[i] for result in batched), to_numpy(expected))


@each_op
def test_a_gradient_is_refused_and_a_frozen_part_is_not(jax, integration, device, rng, op):
    case = make(rng, op)
    tensors = {name: jax.numpy.nan_to_num(x) for name, x in arrays(jax, device, case).items()}

    def loss(weight, frozen):
        q = jax.lax.stop_gradient(tensors["q"] * weight) if frozen else tensors["q"] * weight
        out, _ = attend(integration, case, {**tensors, "q": q})
        return (out * weight).sum()

    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss), static_argnums=1)):
        with pytest.raises(NotImplementedError, match=f"{op}.*gradient"):
            transformed(0.5, False)
        halved = {**tensors, "q": tensors["q"] * 0.5}
        expected = float(attend(integration, case, halved)[0].sum())
        np.testing.assert_allclose(float(transformed(0.5, True)), expected, rtol=1e-4)


def test_an_exported_program(jax, integration, device, rng):
    """Saved, loaded and run, with a number of rows and of sequences that it learns at run time."""
    from jax import export

    first, second = (make(rng, RAGGED), ragged_case(rng, [3, 5], heads=(4, 2), **make(rng, RAGGED).parameters))
    rows, entries = export.symbolic_shape("rows, entries")
    shapes = {
        name: (entries,) if name == "input_row_offsets" else (rows, *first.array(name).shape[1:])
        for name in first.operands
    }
    kinds = {name: jax.ShapeDtypeStruct(shape, first.array(name).dtype) for name, shape in shapes.items()}
    allowed = [export.DisabledSafetyCheck.custom_call(f"ragged_attention.{RAGGED}")]
    program = export.export(
        jax.jit(functools.partial(attend, integration, first)),
        platforms=["cpu" if device.platform == "cpu" else "cuda"],
        disabled_checks=allowed,
    )(kinds)
    loaded = export.deserialize(program.serialize()) if optional("flatbuffers") else program
    for case in (first, second):
        tensors = arrays(jax, device, case)
        got, expected = loaded.call(tensors), attend(integration, case, tensors)
        assert_all_same_bits(to_numpy(got), to_numpy(expected), "exported", "eager")


def run_alone(code, **environment):
    """A process of its own: what XLA reads when it starts cannot be changed later."""
    return run_python(code, **importing_from(Path(__file__).parent), **environment)


def test_heads_sharded_over_devices(jax):
    """As under tensor parallelism: each device has its heads, and a call for them."""
    done = run_alone(
        """
        import jax, numpy as np
        import ragged_attention as ra
        from jax.sharding import NamedSharding, PartitionSpec as P

        mesh = jax.make_mesh((2,), ("tensor",))
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((12, heads, 64), np.float32) for heads in (8, 2, 2))
        offsets = np.array([0, 5, 12], np.int32)
        heads, all_rows = P(None, "tensor"), P()
        attend = jax.jit(jax.shard_map(
            lambda q, k, v, offsets: ra.ragged_flash_attention(q, k, v, offsets, return_lse=True),
            mesh=mesh, in_specs=(heads, heads, heads, all_rows), out_specs=(heads, heads)))
        placed = [jax.device_put(x, NamedSharding(mesh, heads)) for x in (q, k, v)]
        offsets_placed = jax.device_put(offsets, NamedSharding(mesh, all_rows))
        out, lse = attend(*placed, offsets_placed)
        expected = ra.ragged_flash_attention(q, k, v, offsets, return_lse=True)
        assert len(out.sharding.device_set) == 2
        assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
        # Without shard_map it is gathered, and right.
        gathered = jax.jit(ra.ragged_flash_attention)(*placed, offsets_placed)
        assert np.array_equal(gathered, expected[0])
        print("same")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert done.split() == ["same"]


COMMAND_BUFFERS = (
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
)


def test_in_a_command_buffer(jax, device, tmp_path):
    """The very first call may already be captured; replays read offsets and data anew."""
    if device.platform == "cpu":
        pytest.skip("the CPU has no command buffers")
    done = run_alone(
        """
        import jax, numpy as np
        import ragged_attention as ra

        rng = np.random.default_rng(0)
        def program(q, k, v, offsets):
            for _ in range(3):  # with other work between the calls, and exact, however XLA fuses it
                q = ra.ragged_flash_attention(q * 0.5, k, v, offsets, mask_str="null")
            return q
        def arrays(lengths):
            q, k, v = (jax.numpy.asarray(rng.standard_normal((512, h, 128)), jax.numpy.bfloat16) for h in (8, 2, 2))
            return q, k, v, jax.numpy.asarray(np.cumsum([0, *lengths]), jax.numpy.int32)
        compiled = jax.jit(program)
        for lengths in ([100, 412, 0], [1, 1, 510], [512, 0, 0], [3, 200, 309]):
            given = arrays(lengths)
            with jax.disable_jit():
                expected = program(*given)
            for _ in range(3):
                got = compiled(*given)
            assert np.array_equal(*(np.asarray(x.astype(np.float32)) for x in (got, expected))), lengths
        print("same")
        """,
        XLA_FLAGS=f"{COMMAND_BUFFERS} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text",
    )
    assert done.split() == ["same"]
    # Not of every file: the flags themselves are dumped too.
    plans = [path for path in tmp_path.rglob("*.txt") if "thunk" in path.name]
    if not plans:
        pytest.skip("the results are right, but this XLA dumps no thunks to see a command buffer in")
    assert any("commandbuffer" in path.read_text(errors="replace").lower().replace("_", "") for path in plans)


# --- Registration.


def test_importing_twice_and_reloading_change_nothing(jax, integration, device, rng):
    case = make(rng, RAGGED)
    tensors = arrays(jax, device, case)
    expected = to_numpy(attend(integration, case, tensors))
    reloaded = importlib.reload(integration)
    assert_all_same_bits(to_numpy(attend(reloaded, case, tensors)), expected)
    kept = sys.modules.pop(integration.__name__)
    try:
        again = importlib.import_module(integration.__name__)
        assert_all_same_bits(to_numpy(attend(again, case, tensors)), expected)
    finally:
        sys.modules[integration.__name__] = kept


@each_op
def test_the_signature_is_that_of_the_function(integration, op):
    import inspect

    left_out = {"out", "lse", "stream", "check_values"}
    theirs = inspect.signature(getattr(ragged_attention, op)).parameters
    ours = inspect.signature(getattr(integration, op)).parameters
    assert list(ours) == [name for name in theirs if name not in left_out]
    for name, parameter in ours.items():
        assert (parameter.default, parameter.kind) == (theirs[name].default, theirs[name].kind)


def test_the_example_of_the_page(jax):
    """docs/jax.md."""
    page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["lse"].shape == (12, 8)
