"""A result document: reading and writing it, and its tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._cli.tables import Table
from .results import Case, Document, merge, runs_of

OPERATIONS = {"ragged": "ragged_flash_attention", "qsa": "qsa_sparse_attention"}

# What the names of the peers stand for, in the order in which they are shown.
TITLES = {
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN, ragged",
    "cudnn_dense": "cuDNN, dense",
    "fa2": "FlashAttention-2",
    "sdpa": "torch SDPA loop",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "triton": "plain Triton",
}

NUMBERS = ("ms", "rate", "of floor")  # columns beside those of the peers
SHARED = "shared"  # and where neighbouring rows share tokens: what part of its list the next row lists too
RUN = "run"  # and where rows are of different runs: the number of a row's own


class NotAResult(ValueError):
    """A file that is no result of the benchmark, in words."""


def load(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotAResult(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NotAResult(f"{path} is not JSON: {error}") from error
    wanted = {"device", "versions", "ceilings", "cases"}
    if not isinstance(document, dict) or not wanted <= document.keys():
        raise NotAResult(f"{path} is not a result of this benchmark: it lacks one of {', '.join(sorted(wanted))}")
    return document


def dumps(document: Document) -> str:
    """Indented JSON with every list of numbers on one line."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def by_operation(document: Document) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in document["cases"]:
        cases.setdefault(case["op"], []).append(case)
    return cases


def peers_that_ran(cases: Iterable[Case]) -> list[str]:
    """Those with a time in at least one case, in the order in which they first appear."""
    return list(dict.fromkeys(name for case in cases for name, peer in case["peers"].items() if "ms" in peer))


def absent_peers(cases: list[Case]) -> list[str]:
    """A sentence for each peer and reason it was not timed for, however many cases that was in."""
    skipped: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, peer in case["peers"].items():
            if "ms" not in peer:
                skipped.setdefault((name, str(peer.get("error", "not run"))), []).append(case["case"])
    sentences = []
    for (name, error), where in skipped.items():
        taking_part = sum(name in case["peers"] for case in cases)
        places = "everywhere" if len(where) == taking_part else where[0] if len(where) == 1 else f"{len(where)} cases"
        sentences.append(f"{name}, {places}: {error.rstrip('.')}.")
    return sentences


def notes_of_peers(cases: list[Case]) -> list[str]:
    notes: dict[tuple[str, str], None] = {}
    for case in cases:
        for name, peer in case["peers"].items():
            if "ms" in peer and peer.get("note"):
                notes[name, str(peer["note"])] = None
    return [f"{name}: {note.rstrip('.')}." for name, note in notes]


def matmul_tflops(dtype: str, ceilings: dict[str, Any]) -> float:
    """The rate of the matrix product that a case of this dtype is held against."""
    return float(ceilings.get(f"matmul_{dtype}_tflops") or ceilings["matmul_tflops"])


def is_bound_by_arithmetic(case: Case) -> bool:
    """Which of the two gives the floor of a merged case."""
    ceilings = case["run"]["ceilings"]
    return bool(case["flops"] / matmul_tflops(case["dtype"], ceilings) >= case["bytes"] / ceilings["copy_tbps"])


def describe_rate(case: Case) -> str:
    """Of what the floor is made of: operations or bytes."""
    ms = case["ours"]["ms"]
    if is_bound_by_arithmetic(case):
        return f"{significant(case['flops'] / ms / 1e9, 3)} TFLOP/s"
    return f"{significant(case['bytes'] / ms / 1e9, 3)} TB/s"


def significant(value: float, digits: int) -> str:
    """A plain decimal, never 1e-05."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def percent(value: float) -> str:
    return f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"


def title(document: Document) -> str:
    version = document["versions"].get("ragged_attention", "")
    commit = str(document.get("commit") or "unknown commit")[:12]
    changed = " with changes" if document.get("dirty") else ""
    return f"ragged-attention {version} ({commit}{changed}) on {document['device']}"


def describe_ceilings(document: Document) -> str:
    names = {
        "matmul_tflops": ("matrix product", "TFLOP/s"),
        "matmul_float32_tflops": ("in float32", "TFLOP/s"),
        "copy_tbps": ("copy", "TB/s"),
        "gather_tbps": ("gather", "TB/s"),
    }
    parts = []
    for name, rate in document["ceilings"].items():
        what, unit = names.get(name, (name, ""))
        parts.append(f"{what} " + ("not measured" if rate is None else f"{significant(rate, 3)} {unit}".rstrip()))
    return ", ".join(parts)


def operation_table(op: str, cases: list[Case]) -> Table:
    """Of merged cases: ours, and of each peer that ran how many times as long it takes. Every run has its own means."""
    peers, runs = peers_that_ran(cases), runs_of(cases)
    extra: list[tuple[str, Callable[[Case], str]]] = []
    if len(runs) > 1:
        extra.append((RUN, _run))
    if shares_tokens(cases):
        extra.append((SHARED, _share))
    rows = [(case["case"], *(tell(case) for _, tell in extra), *_row(case, peers)) for case in cases]
    for run in runs:
        timed = [case for case in cases if case["run"] is run and "ms" in case["ours"]]
        if len(timed) > 1:
            name = "geometric mean" + (f" of run {run['number']}" if len(runs) > 1 else "")
            means = (_mean_of_floor(timed), *(_mean_ratio(timed, peer) for peer in peers))
            rows.append((name, *("" for _ in extra), "", "", "", *means))
    added = [name for name, _ in extra]
    numbers = (*NUMBERS, *peers)
    return Table(OPERATIONS.get(op, op), ("case", *added, "path", *numbers), rows, right=frozenset((*added, *numbers)))


def _run(case: Case) -> str:
    return str(case["run"]["number"])


def shares_tokens(cases: Iterable[Case]) -> bool:
    return any(case.get("share") is not None for case in cases)


def _share(case: Case) -> str:
    return "" if case.get("share") is None else percent(case["share"])


def host_tables(merged: Document) -> list[Table]:
    """What an eager call costs the host: by framework, of a call of one row, and beside the peers, of short calls."""
    return [table for table in (_host_by_framework(merged), _host_by_case(merged)) if table is not None]


def _host_by_framework(merged: Document) -> Table | None:
    costs = merged["host_us"]
    frameworks = sorted({name for of_op in costs.values() for name in of_op})
    measured = [op for op in OPERATIONS if any(not isinstance(cost, str) for cost in costs.get(op, {}).values())]
    if not measured:
        return None
    rows = [(name, *(_microseconds(costs[op].get(name)) for op in measured)) for name in frameworks]
    several = len(merged["runs"]) > 1
    numbers = {op: str(merged["host_runs"][op]["number"]) for op in measured} if several else {}
    if several:
        rows.insert(0, (RUN, *numbers.values()))
    columns = tuple(OPERATIONS[op] for op in measured)
    reasons = dict.fromkeys(
        f"Not measured{f' in run {numbers[op]}' if several else ''}: {name}: {cost.partition('. ')[0].rstrip('.')}."
        for op in measured
        for name, cost in costs[op].items()
        if isinstance(cost, str)
    )
    title = "Host cost of an eager call of one row, µs"
    return Table(title, ("tensors", *columns), rows, right=frozenset(columns), note="\n".join(reasons))


def _host_by_case(merged: Document) -> Table | None:
    cases = [case for case in merged["cases"] if "host_us" in case["ours"]]
    if not cases:
        return None
    peers = dict.fromkeys(name for case in cases for name, peer in case["peers"].items() if "host_us" in peer)
    several = len(merged["runs"]) > 1
    columns = (*((RUN,) if several else ()), "ours", *peers)
    rows = [
        (
            case["case"],
            *((_run(case),) if several else ()),
            _microseconds(case["ours"]["host_us"]),
            *(_microseconds(case["peers"].get(name, {}).get("host_us")) for name in peers),
        )
        for case in cases
    ]
    return Table(
        "Host cost of an eager call of the short cases, µs", ("case", *columns), rows, right=frozenset(columns)
    )


def _microseconds(cost: float | str | None) -> str:
    return "-" if cost is None or isinstance(cost, str) else significant(cost, 3)


def result_tables(document: Document) -> list[Table]:
    """For a terminal: one per operation, and what calls cost the host."""
    tables = []
    merged = merge([document])
    for op, cases in by_operation(merged).items():
        table = operation_table(op, cases)
        if peers_that_ran(cases):
            notes = ["Under a peer's name: its time over ours, so above 1 ours is faster."]
        else:
            notes = ["No peer ran."]
        if shares_tokens(cases):
            notes.append(f"Under {SHARED}: the part of a row's tokens that the next row lists too, as measured.")
        notes += [f"{case['case']} failed: {case['ours'].get('error')}." for case in cases if "ms" not in case["ours"]]
        table.note = "\n".join([*notes, *notes_of_peers(cases), *(f"Not timed: {s}" for s in absent_peers(cases))])
        tables.append(table)
    if tables:
        tables[0].title = f"{title(document)}\nCeilings of this run: {describe_ceilings(document)}\n\n{tables[0].title}"
    return tables + host_tables(merged)


def ratio(case: Case, peer: str) -> float | None:
    """The peer's time over ours."""
    ours, theirs = case["ours"].get("ms"), case["peers"].get(peer, {}).get("ms")
    return theirs / ours if ours and theirs else None


def _row(case: Case, peers: list[str]) -> tuple[str, ...]:
    path = case["ours"].get("path", "")
    if "ms" not in case["ours"]:
        return (path, "failed", "", "", *("" for _ in peers))
    ms = case["ours"]["ms"]
    return (
        path,
        significant(ms, 4),
        describe_rate(case),
        percent(case["floor_ms"] / ms),
        *(_versus(case, peer) for peer in peers),
    )


def _versus(case: Case, peer: str) -> str:
    value = ratio(case, peer)
    if value is not None:
        return f"{value:.2f}"
    error = str(case["peers"].get(peer, {}).get("error", ""))
    return "wrong" if error.startswith("wrong") else "-"


def _mean_of_floor(cases: list[Case]) -> str:
    return percent(_geometric_mean([case["floor_ms"] / case["ours"]["ms"] for case in cases]))


def _mean_ratio(cases: list[Case], peer: str) -> str:
    ratios = [value for case in cases if (value := ratio(case, peer)) is not None]
    return f"{_geometric_mean(ratios):.2f}" if ratios else "-"


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
