"""Other implementations, where they are installed. Nothing of them is in this repository.

A peer is a function from a case's inputs to a call that returns the output. It raises Unavailable, with the reason,
where it is not installed or cannot compute the case.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from inputs import Call, QsaInputs, RaggedInputs

VLLM_QSA_VARIABLE = "RAGGED_ATTENTION_VLLM_QSA"

# (left, right) of FlashAttention's window; -1 is unbounded.
_FA2_WINDOWS: dict[str, Callable[[int], tuple[int, int]]] = {
    "null": lambda window: (-1, -1),
    "causal": lambda window: (-1, 0),
    "sliding_window_causal": lambda window: (window - 1, 0),
    "sliding_window_noncausal": lambda window: (window - 1, -1),
}


class Unavailable(Exception):
    """Why a peer does not take part."""


def fa2(inputs: RaggedInputs) -> Call:
    """FlashAttention-2 as torch ships it: torch.nn.attention.varlen."""
    case = inputs.case
    if inputs.q.device.type != "cuda":
        raise Unavailable("torch's varlen_attn needs a GPU")
    if case.dtype == "float32":
        raise Unavailable("FlashAttention-2 takes 16-bit dtypes only")
    if case.mask not in _FA2_WINDOWS:
        raise Unavailable(f"FlashAttention-2 has no mask {case.mask}")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.attention.varlen") from error
    group = case.num_q_heads // case.num_kv_heads
    # It wants equal head counts; the copies are made here, outside of what is timed.
    k, v = (tensor.repeat_interleave(group, dim=1) if group > 1 else tensor for tensor in (inputs.k, inputs.v))
    offsets, longest, window = inputs.offsets, inputs.longest, _FA2_WINDOWS[case.mask](case.window)
    return lambda: varlen_attn(inputs.q, k, v, offsets, offsets, longest, longest, window_size=window)


def vllm(inputs: QsaInputs) -> Call:
    """vLLM's Triton kernel, from the file that the environment variable names."""
    case = inputs.case
    path = os.environ.get(VLLM_QSA_VARIABLE)
    if not path:
        raise Unavailable(f"{VLLM_QSA_VARIABLE} does not name vLLM's qsa.py")
    if case.dtype != "bfloat16":
        raise Unavailable("vLLM's kernel takes bfloat16 queries only")
    function = load_vllm_qsa(Path(path)).qsa_sparse_paged_attention
    k, v = (inputs.kv_blocks[:, kv, case.layer_idx] for kv in range(2))
    packed = torch.cat([inputs.indices, inputs.counts[:, None]], dim=1)
    new_rows = torch.tensor([new for _, new in case.sequences])
    sequence_of_row = torch.repeat_interleave(torch.arange(len(new_rows)), new_rows)
    token_to_req = sequence_of_row.to(device=inputs.q.device, dtype=torch.int32)
    out = torch.empty_like(inputs.q)
    gate = torch.full_like(inputs.q, 80.0)  # its output gate is not optional: sigmoid(80) is 1
    return lambda: function(inputs.q, k, v, packed, inputs.table, token_to_req, case.is_prefill, out, output_gate=gate)


PEERS: dict[str, dict[str, Callable[[Any], Call]]] = {"ragged": {"fa2": fa2}, "qsa": {"vllm": vllm}}

NOTES = {
    "fa2": "K/V heads repeated to the number of query heads outside of the timing",
    "vllm": "with its output gate, which is not optional, at 1",
}


def load_vllm_qsa(path: Path) -> Any:
    """The module in vLLM's `models/qwen4_exp/nvidia/ops/qsa.py`, without the rest of vLLM."""
    name = "_ragged_attention_peer_vllm_qsa"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise Unavailable(f"{VLLM_QSA_VARIABLE}: no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{VLLM_QSA_VARIABLE} names no Python file")
    module = importlib.util.module_from_spec(spec)
    with _vllm_stand_ins():
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise Unavailable(f"vLLM's qsa.py cannot be loaded: {error}") from error
    return module


@contextmanager
def _vllm_stand_ins() -> Iterator[None]:
    """The three modules of vLLM that the file imports, for as long as it does."""
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise Unavailable("vLLM's kernel needs Triton") from error
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.warmup": {},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "TritonWarmupTensor": None,  # used by its warm-up alone
            "triton_scalar_specialization_rep": None,
        },
        "vllm.platforms": {"current_platform": _platform()},
        "vllm.triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": triton.language},
    }
    before = {name: sys.modules.get(name) for name in modules}
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def _platform() -> SimpleNamespace:
    def capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

    return SimpleNamespace(
        get_device_capability=capability,
        has_device_capability=lambda wanted: 10 * capability()[0] + capability()[1] >= wanted,
    )
