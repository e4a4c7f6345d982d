"""What the command line calls: which cases there are, and a run of some of them.

Importing this imports no framework; `run` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cases import CASES

ROUNDS = 3
SAMPLES = 10
SECONDS = {"quick": 110.0, "full": 460.0}  # what a run may take on an H200, with its imports and compilations

# on_event(kind, **facts). The kinds, in order:
#   "ceilings_measured"   device, ceilings: those of the JSON
#   and for every case
#   "case_started"        case, op, index (from 0), total, facts: what `list_cases` says of it
#   "contestant_checked"  case, contestant ("ours" or a peer), ok, and error: a string where not ok, else None,
#                         max_abs_error: None where nothing was compared
#   "contestant_timed"    case, contestant, ms: the median so far, round (from 1), rounds
#   "case_done"           case, op, index, total, result: the case's entry in the JSON, seconds
OnEvent = Callable[..., None]


def list_cases(device: str | None = None, *, quick: bool = False, op: str | None = None) -> list[dict[str, Any]]:
    """Facts of each case: name, op, device ("cuda" or "cpu", what it is sized for), quick (a bool), dtype, head_dim,
    num_q_heads, num_kv_heads, mask, window, page_size, sequences, rows, summary (a line for people).

    With `device`, those of that device; with `quick`, those that `--quick` runs; with `op`, those of one operation:
    "ragged" or "qsa".
    """
    return [
        case.facts()
        for case in CASES.values()
        if (device is None or case.device == device) and (case.quick or not quick) and (op is None or case.op == op)
    ]


def run(
    case_names: Sequence[str],
    *,
    device: str = "cuda",
    rounds: int = ROUNDS,
    samples: int = SAMPLES,
    seconds: float | None = None,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Check and time the cases beside their peers; returns the result in the form of benchmarks/README.md.

    In each of `rounds` rounds ours and every peer take turns, `samples` timed calls each. `seconds` is what the run
    should take in all: where it gets short, each case gets fewer samples (at least 5 of ours) and peers that take very
    long are left out, by name. KeyError for an unknown case, RuntimeError where the device or torch is missing. After
    KeyboardInterrupt the result so far is in the exception's `partial` attribute.
    """
    unknown = [name for name in case_names if name not in CASES]
    if unknown:
        raise KeyError(f"no such case: {', '.join(unknown)}")
    from .measure import Run

    return Run(device, rounds, samples, seconds, on_event or _ignore).cases([CASES[name] for name in case_names])


def _ignore(kind: str, **facts: Any) -> None:
    pass
