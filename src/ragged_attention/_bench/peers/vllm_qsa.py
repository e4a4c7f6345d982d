"""vLLM's Triton kernel, from the one file of it that the environment variable names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..inputs import QsaInputs
from . import files
from .contestant import Contestant, Unavailable, module

VARIABLE = "RAGGED_ATTENTION_VLLM_QSA"


def prepare(inputs: QsaInputs) -> Contestant:
    import torch

    case = inputs.case
    if case.dtype != "bfloat16":
        raise Unavailable("vLLM's kernel takes bfloat16 queries only")
    function = load().qsa_sparse_paged_attention
    k, v = (inputs.kv_blocks[:, kv, case.layer_idx] for kv in range(2))
    packed = torch.cat([inputs.indices, inputs.counts[:, None]], dim=1)
    sequence_of_row = inputs.sequence_of_row()
    out = torch.empty_like(inputs.q)
    gate = torch.full_like(inputs.q, 80.0)  # sigmoid(80) is 1

    def call() -> Any:
        return function(inputs.q, k, v, packed, inputs.table, sequence_of_row, case.is_prefill, out, output_gate=gate)

    return Contestant(call, note="with its output gate, which is not optional, at 1")


def load() -> Any:
    """The module in vLLM's `models/qwen4_exp/nvidia/ops/qsa.py`, without the rest of vLLM."""
    return files.load(VARIABLE, "vLLM's qsa.py", _stand_ins())


def _stand_ins() -> dict[str, dict[str, Any]]:
    """The three modules of vLLM that the file imports."""
    triton = module("triton")
    return {
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "TritonWarmupTensor": None,  # used by its warm-up alone
            "triton_scalar_specialization_rep": None,
        },
        "vllm.platforms": {"current_platform": _platform()},
        "vllm.triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": module("triton.language", "triton")},
    }


def _platform() -> SimpleNamespace:
    import torch

    def capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

    return SimpleNamespace(
        get_device_capability=capability,
        has_device_capability=lambda wanted: 10 * capability()[0] + capability()[1] >= wanted,
    )
