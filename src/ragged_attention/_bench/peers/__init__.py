"""Other implementations, where they are installed. Nothing of them is in this repository.

One module a peer, with `prepare(inputs) -> Contestant`. It raises Unavailable, with the reason, where the peer is not
installed or cannot compute the case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    cudnn_dense,
    cudnn_ragged,
    flash_attention_2,
    flash_attention_3,
    sdpa_loop,
    sglang_qsa,
    triton_qsa,
    vllm_qsa,
)
from .contestant import Contestant, Unavailable

Prepare = Callable[[Any], Contestant]

# By operation; the names are those of the JSON. What they stand for is in report.py, which imports no framework.
PEERS: dict[str, dict[str, Prepare]] = {
    "ragged": {
        "fa3": flash_attention_3.prepare,
        "cudnn": cudnn_ragged.prepare,
        "cudnn_dense": cudnn_dense.prepare,
        "fa2": flash_attention_2.prepare,
        "sdpa": sdpa_loop.prepare,
    },
    "qsa": {
        "vllm": vllm_qsa.prepare,
        "sglang": sglang_qsa.prepare,
        "triton": triton_qsa.prepare,
    },
}

# Distributions whose versions belong to a result.
DISTRIBUTIONS = ("triton", "jax", "flash-attn3-jax", "nvidia-cudnn-frontend")

__all__ = ["DISTRIBUTIONS", "PEERS", "Contestant", "Prepare", "Unavailable"]
