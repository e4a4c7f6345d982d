"""QSA selections as a model makes them: neighbouring rows choose mostly the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 4  # tokens that are selected together
BLOCKS = 512  # most blocks of a row
TAIL = BLOCK - 1  # the row's own block while it is incomplete
WIDTH = BLOCKS * BLOCK + TAIL

_CHUNK = 512  # rows whose scores are held at once


def select(
    sequences: Sequence[tuple[int, int]], correlation: float, device: torch.device | str, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_indices [rows, WIDTH] and counts [rows], int32; `sequences` has (cached tokens, new rows) of each.

    Every block has a score that follows an AR(1) process along the rows, `x = rho * x + sqrt(1 - rho^2) * normal`.
    A row lists the 512 best of the complete blocks that it sees, best first (unsorted by position, as top-k gives
    them), and then the up to 3 tokens of its own block. Rows that see at most WIDTH tokens list them all. Entries past
    the count are -1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = sum(new for _, new in sequences)
    indices = torch.full((rows, WIDTH), -1, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    row = 0
    for cached, new in sequences:
        num_blocks = (cached + new) // BLOCK
        score = torch.randn(num_blocks, generator=generator, device=device)
        for begin in range(0, new, _CHUNK):
            size = min(_CHUNK, new - begin)
            scores = torch.randn((size, num_blocks), generator=generator, device=device)
            scores *= (1 - correlation**2) ** 0.5
            for step in scores:
                step.add_(score, alpha=correlation)
                score = step
            seen = cached + begin + 1 + torch.arange(size, device=device)  # a row sees itself
            counts[row : row + size] = _fill(indices[row : row + size], scores, seen)
            row += size
    return indices, counts


def _fill(lists: torch.Tensor, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Write the lists of some rows that see `seen` tokens each; returns the counts."""
    device = lists.device
    complete = seen // BLOCK
    chosen = complete.clamp(max=BLOCKS)
    most = min(BLOCKS, scores.shape[1])
    hidden = torch.arange(scores.shape[1], device=device) >= complete[:, None]
    best = scores.masked_fill(hidden, -torch.inf).topk(most, dim=1).indices  # hidden ones come last
    tokens = (best[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    listed = torch.arange(most * BLOCK, device=device) < chosen[:, None] * BLOCK
    lists[:, : most * BLOCK] = torch.where(listed, tokens, -1).to(torch.int32)
    for offset in range(TAIL):
        rows = torch.nonzero(offset < seen % BLOCK).flatten()
        lists[rows, chosen[rows] * BLOCK + offset] = (complete[rows] * BLOCK + offset).to(torch.int32)
    return (chosen * BLOCK + seen % BLOCK).to(torch.int32)


def neighbour_share(indices: torch.Tensor, counts: torch.Tensor, rows: Sequence[int] | None = None) -> float:
    """The fraction of row r's tokens that row r + 1 lists too; averaged over `rows`, by default 20 in the middle.

    Rows r and r + 1 must be of one sequence.
    """
    if rows is None:
        middle = len(counts) // 2
        rows = range(max(0, middle - 10), min(len(counts) - 1, middle + 10))
    shares = [
        torch.isin(indices[row, : counts[row]], indices[row + 1, : counts[row + 1]]).float().mean().item()
        for row in rows
    ]
    return sum(shares) / len(shares) if shares else 0.0


def distinct_tokens(sequences: Sequence[tuple[int, int]], indices: torch.Tensor, counts: torch.Tensor) -> int:
    """How many different tokens the lists name."""
    listed = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    distinct = row = 0
    for cached, new in sequences:
        named = torch.zeros(cached + new, dtype=torch.bool, device=indices.device)
        named[indices[row : row + new][listed[row : row + new]].long()] = True
        distinct += int(named.sum())
        row += new
    return distinct
