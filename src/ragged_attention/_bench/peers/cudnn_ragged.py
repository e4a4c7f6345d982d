"""cuDNN's attention on packed sequences (ragged offsets), through nvidia-cudnn-frontend."""

from __future__ import annotations

import functools
from typing import Any

from ..inputs import RaggedInputs
from .contestant import Contestant, Unavailable, joined, masked, module, offsets_of, on_gpu, sixteen_bit


def prepare(inputs: RaggedInputs) -> Contestant:
    case, mask = inputs.case, masked(inputs.case)
    on_gpu(inputs, "cuDNN")
    sixteen_bit(case, "cuDNN")
    if mask.left is not None and mask.right is None:
        raise Unavailable("cuDNN has no window without an end at the query")
    return contest(inputs, module("cudnn", "nvidia-cudnn-frontend"))


@functools.cache
def _handle(cudnn: Any) -> Any:
    return cudnn.create_handle()


def contest(inputs: RaggedInputs, cudnn: Any) -> Contestant:
    import torch

    case, mask = inputs.case, masked(inputs.case)
    batch, longest = len(mask.lengths), max(mask.lengths)
    handle = _handle(cudnn)
    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16 if case.dtype == "bfloat16" else types.HALF,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )

    def per_sequence(name: str, size: int, kind: Any) -> Any:
        return graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)

    def layout(heads: int) -> dict[str, list[int]]:
        # [batch, heads, rows, head dim]; the ragged offsets replace the stride between sequences.
        row = heads * case.head_dim
        return {"dim": [batch, heads, longest, case.head_dim], "stride": [longest * row, case.head_dim, row, 1]}

    heads = {"q": case.num_q_heads, "k": case.num_kv_heads, "v": case.num_kv_heads, "o": case.num_q_heads}
    starts = {name: per_sequence(f"offsets_{name}", batch + 1, types.INT64) for name in heads}
    q, k, v = (graph.tensor(name=name, **layout(heads[name])) for name in "qkv")
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        tensor.set_ragged_offset(starts[name])
    lengths_q, lengths_kv = (per_sequence(f"lengths_{name}", batch, types.INT32) for name in ("q", "kv"))
    # Its left bound counts the keys up to the query, itself included.
    window = {} if mask.left is None else {"diagonal_band_left_bound": mask.left + 1}
    o, _ = graph.sdpa(
        name="attention",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=case.head_dim**-0.5,
        use_padding_mask=True,
        seq_len_q=lengths_q,
        seq_len_kv=lengths_kv,
        **({} if mask.right is None else {"diagonal_band_right_bound": 0}),
        **window,
    )
    place = layout(case.num_q_heads)
    o.set_output(True).set_dim(place["dim"]).set_stride(place["stride"])
    o.set_ragged_offset(starts["o"])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    out = torch.empty_like(inputs.q)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=inputs.q.device)
    rows = offsets_of(inputs, mask.lengths).long()
    lengths = torch.tensor(mask.lengths, dtype=torch.int32, device=inputs.q.device)
    data = {q: inputs.q, k: inputs.k, v: inputs.v, o: out, lengths_q: lengths, lengths_kv: lengths}
    data |= {starts[name]: rows * (heads[name] * case.head_dim) for name in heads}

    def call() -> Any:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(data, workspace, handle=handle)
        return out

    return Contestant(call, note=joined(mask.note))
