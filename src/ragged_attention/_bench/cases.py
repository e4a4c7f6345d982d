"""The benchmark's cases as data, for the benchmark, the tests and the documentation. To add one, add a line.

The lengths of `mixed16` and `short256` are what torch gives: `g = torch.Generator().manual_seed(1)`, then
`torch.randint(64, 8192, (16,), generator=g)` and, of the same g, `torch.randint(16, 512, (256,), generator=g)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

# fmt: off
MIXED16 = (
    1701, 5419, 1420, 3848, 3647, 393, 3659, 2053, 1679, 2112, 1808, 5761, 7564, 2823, 7405, 5692,
)
SHORT256 = (
    86, 345, 162, 260, 334, 309, 194, 404, 315, 492, 394, 492, 461, 174, 402, 260, 119, 343, 297, 321, 375, 94,
    16, 262, 493, 393, 313, 215, 159, 285, 374, 425, 81, 240, 220, 401, 264, 168, 269, 323, 511, 106, 425, 488,
    382, 423, 307, 342, 485, 17, 153, 179, 20, 216, 305, 427, 252, 90, 276, 400, 29, 259, 425, 306, 63, 176, 116,
    489, 479, 290, 71, 375, 282, 345, 168, 70, 361, 323, 23, 238, 327, 461, 244, 91, 277, 25, 131, 134, 456, 80,
    418, 58, 199, 79, 207, 71, 473, 391, 147, 252, 202, 190, 206, 336, 88, 311, 23, 81, 305, 365, 275, 208, 216,
    493, 317, 54, 68, 405, 22, 322, 380, 107, 133, 203, 167, 301, 56, 363, 444, 155, 180, 254, 276, 295, 215, 429,
    484, 233, 16, 44, 194, 464, 397, 442, 215, 156, 273, 471, 489, 168, 202, 508, 436, 208, 172, 65, 398, 236,
    473, 504, 66, 99, 369, 210, 140, 364, 135, 178, 442, 230, 48, 153, 306, 406, 486, 386, 199, 391, 96, 182, 383,
    101, 193, 106, 132, 374, 464, 70, 69, 445, 145, 386, 33, 165, 52, 314, 224, 71, 301, 184, 169, 245, 151, 144,
    201, 403, 25, 177, 190, 333, 308, 36, 139, 262, 461, 152, 491, 223, 376, 379, 41, 34, 87, 101, 117, 164, 213,
    296, 405, 200, 477, 139, 81, 433, 223, 413, 312, 62, 445, 423, 320, 76, 330, 157, 259, 468, 258, 478, 270,
    128, 397, 399, 43, 115, 389, 157,
)
# fmt: on


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
    quick: bool = False  # part of the small set
    device: str = "cuda"  # what it is sized for

    op: ClassVar[str] = "ragged"
    function: ClassVar[str] = "ragged_flash_attention"

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def facts(self) -> dict[str, Any]:
        return _facts(self, len(self.lengths), self.mask, self.window if self.window >= 0 else None, None)


@dataclass(frozen=True)
class QsaCase:
    """A layer of Qwen3.8-Flash-Next: blocks of 4 tokens, 512 of them, and a causal tail of up to 3 for every row."""

    name: str
    sequences: tuple[tuple[int, int], ...]  # (cached tokens, new rows)
    correlation: float  # of a block's score from row to row; 0: independent random selections
    num_q_heads: int = 24
    num_kv_heads: int = 2
    head_dim: int = 256
    page_size: int = 128
    num_layers: int = 2
    layer_idx: int = 1
    selected_blocks: int = 512
    dtype: str = "bfloat16"
    short: bool = False
    quick: bool = False
    device: str = "cuda"

    op: ClassVar[str] = "qsa"
    function: ClassVar[str] = "qsa_sparse_attention"

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.sequences)

    @property
    def max_new(self) -> int:
        return max(new for _, new in self.sequences)

    @property
    def is_prefill(self) -> bool:
        return self.max_new > 16

    def facts(self) -> dict[str, Any]:
        return _facts(self, len(self.sequences), None, None, self.page_size)


Case = RaggedCase | QsaCase


def _facts(case: Case, sequences: int, mask: str | None, window: int | None, page_size: int | None) -> dict[str, Any]:
    masked = "" if mask is None else f", {mask}" + ("" if window is None else f" {window}")
    paged = "" if page_size is None else f", pages of {page_size}"
    heads = f"heads {case.num_q_heads}/{case.num_kv_heads}, D {case.head_dim}"
    return {
        "name": case.name,
        "op": case.op,
        "device": case.device,
        "quick": case.quick,
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "mask": mask,
        "window": window,
        "page_size": page_size,
        "sequences": sequences,
        "rows": case.rows,
        "summary": f"{case.rows} rows of {sequences} sequence{'s' * (sequences != 1)}, {heads}, {case.dtype}{masked}"
        + paged,
    }


_LAYOUTS = {
    "1x16384": (16384,),
    "4x4096": (4096,) * 4,
    "32x512": (512,) * 32,
    "mixed16": MIXED16,
    "short256": SHORT256,
}


_QUICK_RAGGED = {
    "1x16384-d128-full",
    "1x16384-d128-causal",
    "mixed16-d128-causal",
    "short256-d128-causal",
    "1x16384-d64-causal",
    "1x16384-d256-causal",
}


def _ragged(layout: str, heads: tuple[int, int], head_dim: int, mask: str, window: int = -1, **more: Any) -> RaggedCase:
    label = {"null": "full", "sliding_window_causal": f"window{window}"}.get(mask, mask)
    dtype = "-fp16" if more.get("dtype") == "float16" else ""
    name = f"{layout}-d{head_dim}-{label}{dtype}"
    more.setdefault("quick", name in _QUICK_RAGGED)
    return RaggedCase(f"ragged-{name}", _LAYOUTS[layout], *heads, head_dim, mask=mask, window=window, **more)


def _grid(head_dim: int, heads: tuple[int, int]) -> tuple[RaggedCase, ...]:
    """Long, several, short and mixed sequences, full and causal, and the windows."""
    plain = [_ragged(layout, heads, head_dim, mask) for layout in _LAYOUTS for mask in ("null", "causal")]
    windows = [_ragged(layout, heads, head_dim, "sliding_window_causal", 1024) for layout in ("1x16384", "mixed16")]
    return (*plain, *windows)


def _few(head_dim: int, heads: tuple[int, int], **more: Any) -> tuple[RaggedCase, ...]:
    chosen = (("1x16384", "null"), ("1x16384", "causal"), ("mixed16", "causal"), ("short256", "causal"))
    return tuple(_ragged(layout, heads, head_dim, mask, **more) for layout, mask in chosen)


# What the operation is called with most: short sequences. And the other masks.
_WORKLOADS = (
    RaggedCase("vision-1024x64-d80-full", (64,) * 1024, 16, 16, 80, mask="null", quick=True),
    RaggedCase("vision-4096x64-d80-full", (64,) * 4096, 16, 16, 80, mask="null"),
    RaggedCase("vision-1024x64-d80-full-fp16", (64,) * 1024, 16, 16, 80, mask="null", dtype="float16"),
    RaggedCase("vision-8x4096-d80-full", (4096,) * 8, 16, 16, 80, mask="null", quick=True),
    RaggedCase("vision-16x1024-d72-full", (1024,) * 16, 16, 16, 72, mask="null", quick=True),
    RaggedCase("embeddings-512x128-d128-causal", (128,) * 512, 32, 8, 128, quick=True),
    RaggedCase("embeddings-1024x40-d128-causal", (40,) * 1024, 32, 8, 128),
    RaggedCase("tokens-4096x1-d128-causal", (1,) * 4096, 32, 8, 128, short=True, quick=True),
    RaggedCase("chunks-2048-of-16384-d128", (16384,), 32, 8, 128, mask="chunked_causal", window=2048),
    RaggedCase("chunks-2048-of-16384-d128-full", (16384,), 32, 8, 128, mask="chunked", window=2048),
    RaggedCase("chunks-8192-of-32768-d128", (32768,), 40, 8, 128, mask="chunked_causal", window=8192),
    RaggedCase("window-128-of-16384-d64", (16384,), 64, 8, 64, mask="sliding_window_causal", window=128, quick=True),
    RaggedCase("window-4096-of-32768-d128", (32768,), 32, 8, 128, mask="sliding_window_causal", window=4096),
    RaggedCase("window-512-of-16384-d256", (16384,), 8, 4, 256, mask="sliding_window_causal", window=512, short=True),
    RaggedCase("lookahead-1024-of-16384-d128", (16384,), 32, 8, 128, mask="sliding_window_noncausal", window=1024),
    # Equal head counts, which not every peer can do without.
    RaggedCase("ragged-1x16384-h32x32-d128-causal", (16384,), 32, 32, 128),
    RaggedCase("ragged-1x131072-h8x1-d128-causal", (131072,), 8, 1, 128),
)


def _prefill(label: str, rows: int, context: int, correlation: float, **more: Any) -> QsaCase:
    """The last `rows` rows of a context of `context` tokens."""
    return QsaCase(f"qsa-prefill-{rows}-at-{context}-{label}", ((context - rows, rows),), correlation, **more)


def _decode(rows: int, context: int = 32768, label: str = "", **more: Any) -> QsaCase:
    name = f"qsa-decode-{rows}-at-{context}{label}"
    return QsaCase(name, ((context - 1, 1),) * rows, 0.98, short=True, **more)


def _mtp(sequences: int, rows: int = 4, context: int = 32768) -> QsaCase:
    name = f"qsa-mtp-{sequences}x{rows}-at-{context}"
    return QsaCase(name, ((context - rows, rows),) * sequences, 0.98, short=True, quick=sequences == 8)


# The correlations give the share (of a row's tokens that the next row lists too) that the name says: of a bivariate
# normal score above the threshold that the row in the middle of the call has.
_QSA = (
    *(_decode(rows, quick=rows in (1, 8, 32)) for rows in (1, 4, 8, 16, 32, 64)),
    _decode(128, 16384),
    _mtp(1),
    _mtp(8),
    _mtp(32),
    _prefill("share1.0", 2048, 2048, 0.98, quick=True),
    _prefill("share0.94", 8192, 8192, 0.98, quick=True),
    _prefill("share0.9", 8192, 8192, 0.951),
    _prefill("share0.7", 8192, 8192, 0.588),
    _prefill("random", 8192, 8192, 0.0, quick=True),  # half of what a row in the middle sees, so a share of 0.5
    _prefill("share0.9", 8192, 16384, 0.986),
    _prefill("share0.94", 8192, 32768, 0.9969),
    _prefill("share0.9", 8192, 32768, 0.9914, quick=True),
    _prefill("share0.7", 8192, 32768, 0.9212),
    _prefill("share0.5", 8192, 32768, 0.7741),
    _prefill("random", 8192, 32768, 0.0),
    _prefill("share0.9", 4096, 65536, 0.9937),
    _prefill("share0.9", 8192, 131072, 0.995),
    _prefill("random", 2048, 131072, 0.0),
    _prefill("share0.9", 2048, 262144, 0.9958),
    # Between decode and prefill. Of few rows an eager call takes some peers' host longer than the device.
    *(_prefill("share0.94", rows, 8192, 0.993, short=rows <= 64) for rows in (20, 64, 283, 512)),
    # Four times as many tokens a row.
    _prefill("share0.9-w8195", 2048, 32768, 0.9779, selected_blocks=2048),
    _decode(8, label="-w8195", selected_blocks=2048),
    # Tensor parallelism by 2, 4 and 8.
    *(
        case
        for heads, kv_heads in ((12, 1), (6, 1), (3, 1))
        for more in ({"num_q_heads": heads, "num_kv_heads": kv_heads},)
        for case in (
            _prefill(f"share0.94-h{heads}x{kv_heads}", 8192, 8192, 0.98, **more),
            _decode(8, label=f"-h{heads}x{kv_heads}", **more),
            _decode(64, label=f"-h{heads}x{kv_heads}", **more),
        )
    ),
    *(
        case
        for size in (16, 64)
        for case in (
            _prefill(f"share0.9-page{size}", 8192, 32768, 0.9914, page_size=size),
            _decode(8, label=f"-page{size}", page_size=size),
        )
    ),
    _prefill("share0.94-d128", 8192, 8192, 0.98, head_dim=128),
    _decode(8, label="-d128", head_dim=128),
    _prefill("share0.94-fp16", 8192, 8192, 0.98, dtype="float16"),
    _decode(8, label="-fp16", dtype="float16"),
)

# Small ones for the CPU backend.
_CPU = tuple(
    RaggedCase(
        f"cpu-{label}-d{head_dim}-{'bf16' if dtype == 'bfloat16' else 'fp32'}",
        lengths,
        8,
        8,
        head_dim,
        dtype=dtype,
        device="cpu",
        quick=head_dim == 64,
    )
    for label, lengths in (("4x512", (512,) * 4), ("1x2048", (2048,)))
    for head_dim in (64, 128)
    for dtype in ("float32", "bfloat16")
)

_ALL: tuple[Case, ...] = (
    *_grid(128, (32, 8)),
    *_grid(64, (32, 32)),
    *_grid(256, (16, 2)),
    *_few(96, (32, 8)),
    *_few(192, (16, 4)),
    *_few(128, (32, 8), dtype="float16"),
    *(_ragged("mixed16", heads, d, "causal", dtype="float16") for d, heads in ((64, (32, 32)), (256, (16, 2)))),
    *_WORKLOADS,
    *_QSA,
    *_CPU,
)
CASES: dict[str, Case] = {case.name: case for case in _ALL}
