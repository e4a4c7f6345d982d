"""Results of several runs as one: of every case the newest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Document = dict[str, Any]
Case = dict[str, Any]
Run = dict[str, Any]


class NotComparable(ValueError):
    """Why results cannot be held against each other."""


def merge(documents: Sequence[Document]) -> Document:
    """What counts of results of the same device: of each case, and of each operation's host costs, the newest.

    An entry comes as a whole: our time, the peers', and the floor by the ceilings of its own run. The outcome has
    `device`, `cases` and `host_us` as a result has them, and besides

    - `runs`: the heads (all but cases and host costs) of those results that something still counts of, newest first,
      each with its `number`, from 1;
    - in each case its `run`, one of these, and `older`: whether a newer run has cases of the same operation;
    - `host_runs`: the run of each operation in `host_us`.

    Raises NotComparable for results of different devices.
    """
    devices = list(dict.fromkeys(str(document["device"]) for document in documents))
    if len(devices) > 1:
        raise NotComparable(f"the results are of different devices: {', '.join(devices)}")
    runs: list[Run] = []
    cases: dict[str, Case] = {}
    host_us: dict[str, Any] = {}
    host_runs: dict[str, Run] = {}
    for document in sorted(documents, key=_date):
        run = {key: value for key, value in document.items() if key not in ("cases", "host_us")}
        runs.insert(0, run)
        cases.update({case["case"]: {**case, "run": run} for case in document["cases"]})
        costs = document.get("host_us") or {}
        host_us.update(costs)
        host_runs.update(dict.fromkeys(costs, run))
    counting = {id(case["run"]) for case in cases.values()} | {id(run) for run in host_runs.values()}
    runs = [run for run in runs if id(run) in counting]
    for number, run in enumerate(runs, 1):
        run["number"] = number
    newest: dict[str, int] = {}
    for case in cases.values():
        number = case["run"]["number"]
        newest[case["op"]] = min(number, newest.get(case["op"], number))
    for case in cases.values():
        case["older"] = case["run"]["number"] > newest[case["op"]]
    return {
        "device": devices[0],
        "runs": runs,
        "cases": list(cases.values()),
        "host_us": host_us,
        "host_runs": host_runs,
    }


def runs_of(cases: Iterable[Case]) -> list[Run]:
    """The runs that merged cases come from, newest first."""
    runs = {case["run"]["number"]: case["run"] for case in cases}
    return [runs[number] for number in sorted(runs)]


def _date(document: Document) -> str:
    """Orders results: dates are written in UTC and in one form. One without a date is the oldest."""
    return str(document.get("date") or "")
