"""SGLang's Triton kernels, from the one file of it that the environment variable names.

Its caches are pools of token slots, K and V apart. Ours is read in place: seen as one pool, the tokens of a layer are
slots a fixed number apart, and K's and V's start at different slots.
"""

from __future__ import annotations

from typing import Any

from ..inputs import QsaInputs
from . import files
from .contestant import Contestant, Unavailable, module

VARIABLE = "RAGGED_ATTENTION_SGLANG_QSA"


def prepare(inputs: QsaInputs) -> Contestant:
    case = inputs.case
    if case.head_dim & (case.head_dim - 1):
        raise Unavailable("SGLang's kernel takes head dims that are powers of two")
    kernels = load()
    return _decode(inputs, kernels) if case.max_new == 1 else _paged(inputs, kernels)


def load() -> Any:
    """The module in SGLang's `srt/layers/attention/qsa/sparse_attn.py`, without the rest of SGLang."""
    module("triton")
    batch_invariance = {"is_batch_invariant_mode_enabled": lambda: False}
    return files.load(VARIABLE, "SGLang's sparse_attn.py", {"sglang.srt.batch_invariant_ops": batch_invariance})


def _pools(inputs: QsaInputs) -> tuple[Any, Any, Any]:
    """K's slots, V's slots, and the slot of every position of every sequence."""
    import torch

    case = inputs.case
    slots = inputs.kv_blocks.view(-1, case.num_kv_heads, case.head_dim)
    k, v = (slots[(kv * case.num_layers + case.layer_idx) * case.page_size :] for kv in range(2))
    first = inputs.table * (2 * case.num_layers * case.page_size)
    within = torch.arange(case.page_size, dtype=torch.int32, device=first.device)
    return k, v, (first[:, :, None] + within).flatten(1).contiguous()


def _paged(inputs: QsaInputs, kernels: Any) -> Contestant:
    import torch

    case = inputs.case
    k, v, slots = _pools(inputs)
    lengths = torch.tensor([cached + new for cached, new in case.sequences], dtype=torch.int32, device=inputs.q.device)
    scale, longest = case.head_dim**-0.5, case.max_new

    def call() -> Any:
        return kernels.sparse_gqa_paged_prefill_triton(
            inputs.q, k, v, slots, inputs.indices, inputs.offsets, lengths, scale, max_q=longest
        )

    return Contestant(call)


def _decode(inputs: QsaInputs, kernels: Any) -> Contestant:
    """One row a sequence: what the lists name is packed, and the packed tokens attended to, as SGLang does it."""
    import torch

    case = inputs.case
    k, v, slots = _pools(inputs)
    rows, width = inputs.indices.shape
    device = inputs.q.device

    def integers(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int32, device=device)

    lengths = torch.tensor([cached + new for cached, new in case.sequences], dtype=torch.int32, device=device)
    requests = torch.arange(rows, dtype=torch.int32, device=device)
    counts, starts = integers(rows), integers(rows + 1)
    packed_k, packed_v = (
        torch.empty((rows * width, case.num_kv_heads, case.head_dim), dtype=inputs.q.dtype, device=device)
        for _ in range(2)
    )
    places = torch.arange(width, dtype=torch.int32, device=device)
    places = torch.where(places[None] < inputs.counts[:, None], places[None], -1)
    scale = case.head_dim**-0.5

    def call() -> Any:
        kernels.qwen_sparse_fa2_cu_seqlens_triton(lengths, inputs.indices, counts, starts, rows, width)
        kernels.qwen_sparse_kv_extraction_compact_triton(
            k, v, slots, requests, inputs.indices, lengths, starts, packed_k, packed_v, rows, width
        )
        return kernels.sparse_gqa_packed_decode_triton(
            inputs.q, packed_k, packed_v, places, inputs.offsets, starts, counts, scale
        )

    return Contestant(call, note="packs the listed tokens, then attends to them; the packing is timed")
