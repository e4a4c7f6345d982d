"""The tensors of a case: unit normals, and for QSA a randomly paged cache and a selection."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ragged_attention

from .._cli import selection
from .._cli.agreement import Sample, qsa_sample, ragged_sample, sample_rows
from .._cli.work import Work, qsa_work, ragged_work
from .cases import Case, QsaCase, RaggedCase

Call = Callable[[], Any]


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """float32 holds every value of the 16-bit dtypes; integers stay what they are."""
    return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy())


@dataclass
class RaggedInputs:
    case: RaggedCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: torch.Tensor

    @property
    def longest(self) -> int:
        return max(self.case.lengths)

    def ours(self) -> Call:
        out = torch.empty_like(self.q)
        lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)
        return lambda: ragged_attention.ragged_flash_attention(
            self.q,
            self.k,
            self.v,
            self.offsets,
            self.longest,
            mask_str=self.case.mask,
            local_window_size=self.case.window,
            out=out,
            lse=lse,
        )

    def sample(self) -> Sample:
        chosen = sample_rows(self.case.lengths, np.random.default_rng(5))
        masks: dict[str, Any] = {"mask_str": self.case.mask, "local_window_size": self.case.window}
        return ragged_sample(self.q, self.k, self.v, self.case.lengths, chosen, to_numpy, **masks)

    def work(self) -> Work:
        case = self.case
        heads = (case.num_q_heads, case.num_kv_heads)
        return ragged_work(case.lengths, *heads, case.head_dim, self.q.element_size(), case.mask, case.window)

    def facts(self) -> dict[str, Any]:
        return {"mask": self.case.mask, "window": self.case.window, "share": None, "page_size": None}


@dataclass
class QsaInputs:
    case: QsaCase
    q: torch.Tensor
    offsets: torch.Tensor
    kv_blocks: torch.Tensor
    cache_lengths: torch.Tensor
    table: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor

    def ours(self) -> Call:
        out = torch.empty_like(self.q)
        lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)
        return lambda: ragged_attention.qsa_sparse_attention(
            self.q,
            self.offsets,
            self.kv_blocks,
            self.cache_lengths,
            self.table,
            self.case.layer_idx,
            self.indices,
            self.counts,
            out=out,
            lse=lse,
        )

    def sequence_of_row(self) -> torch.Tensor:
        """int32 [rows]."""
        new_rows = torch.tensor([new for _, new in self.case.sequences])
        sequences = torch.repeat_interleave(torch.arange(len(new_rows)), new_rows)
        return sequences.to(device=self.q.device, dtype=torch.int32)

    def sample(self) -> Sample:
        sequences = self.case.sequences
        chosen = sample_rows([new for _, new in sequences], np.random.default_rng(5))
        return qsa_sample(
            self.q,
            self.kv_blocks,
            self.case.layer_idx,
            sequences,
            to_numpy(self.table),
            self.indices,
            self.counts,
            chosen,
            to_numpy,
            to_numpy,
        )

    def work(self) -> Work:
        case = self.case
        return qsa_work(
            len(self.q),
            int(self.counts.sum()),
            selection.distinct_tokens(case.sequences, to_numpy(self.indices), to_numpy(self.counts)),
            case.num_q_heads,
            case.num_kv_heads,
            case.head_dim,
            self.q.element_size(),
        )

    def _pairs(self) -> list[int]:
        """Up to 20 rows in the middle that have a next row in their sequence."""
        lasts = {end - 1 for end in itertools.accumulate(new for _, new in self.case.sequences)}
        rows = [row for row in range(len(self.q)) if row not in lasts]
        middle = len(rows) // 2
        return rows[max(0, middle - 10) : middle + 10]

    def facts(self) -> dict[str, Any]:
        share = None
        if self.case.max_new > 1:
            share = selection.neighbour_share(to_numpy(self.indices), to_numpy(self.counts), self._pairs())
        return {"mask": None, "window": None, "share": share, "page_size": self.case.page_size}


Inputs = RaggedInputs | QsaInputs


def make(case: Case, device: torch.device | str, seed: int = 1) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=getattr(torch, case.dtype), device=device, generator=generator)

    def integers(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    if isinstance(case, RaggedCase):
        total = sum(case.lengths)
        q = normal(total, case.num_q_heads, case.head_dim)
        k, v = (normal(total, case.num_kv_heads, case.head_dim) for _ in range(2))
        return RaggedInputs(case, q, k, v, integers([0, *itertools.accumulate(case.lengths)]))

    new_rows = [new for _, new in case.sequences]
    max_pages = max(-(-(cached + new) // case.page_size) for cached, new in case.sequences)
    num_pages = max_pages * len(case.sequences)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    indices, counts = selection.select(
        case.sequences, case.correlation, np.random.default_rng(seed), case.selected_blocks
    )
    return QsaInputs(
        case,
        normal(sum(new_rows), case.num_q_heads, case.head_dim),
        integers([0, *itertools.accumulate(new_rows)]),
        normal(num_pages, 2, case.num_layers, case.page_size, case.num_kv_heads, case.head_dim),
        integers([cached for cached, _ in case.sequences]),
        integers(pages.reshape(len(case.sequences), max_pages)),
        integers(indices),
        integers(counts),
    )
