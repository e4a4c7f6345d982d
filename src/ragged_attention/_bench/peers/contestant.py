"""What a peer hands to the benchmark, and what several peers need."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..cases import RaggedCase
    from ..inputs import RaggedInputs


class Unavailable(Exception):
    """Why a contestant does not take part."""


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Contestant:
    call: Callable[[], Any]  # what is timed; returns the output, or (output, lse)
    note: str = ""  # what is not quite the same as ours
    capturable: bool = True  # into a CUDA graph, on torch's current stream
    wait: Callable[[Any], Any] | None = None  # for the result, where it is not on torch's current stream
    as_torch: Callable[[Any], Any] = _same  # the result as torch tensors of the case's shape


@dataclass(frozen=True)
class Masked:
    """A case in the words that every peer knows: lengths and an interval (left, right); None is unbounded."""

    lengths: tuple[int, ...]
    left: int | None  # keys before the query
    right: int | None  # keys after it: 0 or None
    note: str = ""

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


def masked(case: RaggedCase) -> Masked:
    """A chunked mask is that of shorter sequences: every chunk becomes one."""
    window = case.window
    if case.mask in ("chunked", "chunked_causal"):
        pieces = tuple(min(window, length - begin) for length in case.lengths for begin in range(0, length, window))
        return Masked(pieces, None, None if case.mask == "chunked" else 0, "every chunk given as a sequence")
    left = window - 1 if case.mask.startswith("sliding_window") else None
    right = None if case.mask in ("null", "sliding_window_noncausal") else 0
    return Masked(case.lengths, left, right)


def offsets_of(inputs: RaggedInputs, lengths: tuple[int, ...]) -> Any:
    """int32 [sequences + 1] on the device of the inputs."""
    import torch

    if lengths == inputs.case.lengths:
        return inputs.offsets
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(inputs.q.device)


def on_gpu(inputs: Any, name: str) -> None:
    if inputs.q.device.type != "cuda":
        raise Unavailable(f"{name} needs a GPU")


def sixteen_bit(case: Any, name: str) -> None:
    if case.dtype not in ("bfloat16", "float16"):
        raise Unavailable(f"{name} takes 16-bit dtypes only")


def module(name: str, distribution: str = "") -> Any:
    """An imported module; Unavailable where there is none, or it does not work here."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that has it
        found = False
    if not found:
        raise Unavailable(f"{distribution or name} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:  # an installation that does not fit this machine fails in its own way
        raise Unavailable(f"{distribution or name} cannot be imported: {error}") from error


def joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
