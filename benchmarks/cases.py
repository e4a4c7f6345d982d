"""The benchmark's cases as data. To add one, add a line to CASES."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RaggedCase:
    name: str
    lengths: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str = "causal"
    window: int = -1
    dtype: str = "bfloat16"
    short: bool = False  # a call so short that it is timed by graph replay

    op: ClassVar[str] = "ragged"
    function: ClassVar[str] = "ragged_flash_attention"


@dataclass(frozen=True)
class QsaCase:
    """A layer of Qwen3.8-Flash-Next: 512 blocks of 4 tokens and a causal tail of up to 3 for every row."""

    name: str
    sequences: tuple[tuple[int, int], ...]  # (cached tokens, new rows)
    correlation: float  # of a block's score from row to row; 0: independent random selections
    num_q_heads: int = 24
    num_kv_heads: int = 2
    head_dim: int = 256
    page_size: int = 128
    num_layers: int = 2
    layer_idx: int = 1
    dtype: str = "bfloat16"
    short: bool = False

    op: ClassVar[str] = "qsa"
    function: ClassVar[str] = "qsa_sparse_attention"

    @property
    def is_prefill(self) -> bool:
        return max(new for _, new in self.sequences) > 16


Case = RaggedCase | QsaCase


def _prefill(rows: int, context: int) -> tuple[tuple[int, int], ...]:
    """The last `rows` rows of a context of `context` tokens."""
    return ((context - rows, rows),)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        # One long sequence: the arithmetic rate. Equal head counts too, since not every peer takes grouped heads.
        RaggedCase("ragged-1x16384-d128-h32x8-causal", (16384,), 32, 8, 128),
        RaggedCase("ragged-1x16384-d128-h32x8-full", (16384,), 32, 8, 128, mask="null"),
        RaggedCase("ragged-1x16384-d128-h32x32-causal", (16384,), 32, 32, 128),
        RaggedCase("ragged-1x16384-d128-h32x32-full", (16384,), 32, 32, 128, mask="null"),
        # Many short ones: what vision encoders and embedding servers call with.
        RaggedCase("vision-1024x64-d80-h16x16-full", (64,) * 1024, 16, 16, 80, mask="null"),
        RaggedCase("embeddings-512x128-d128-h32x8-causal", (128,) * 512, 32, 8, 128),
        # QSA: rows that share most of their lists, as a model's do, and independent random lists.
        QsaCase("qsa-prefill-8192-at-8192", _prefill(8192, 8192), correlation=0.98),
        QsaCase("qsa-prefill-8192-at-8192-random", _prefill(8192, 8192), correlation=0.0),
        QsaCase("qsa-decode-8-at-32768", ((32767, 1),) * 8, correlation=0.98, short=True),
    )
}
