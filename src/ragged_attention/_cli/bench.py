"""Time both operations beside their peers and their floor, plot the results, and compare them with older ones."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tables

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from .._bench.compare import Comparison

_OUT = Path("benchmark.json")


class _Unusable(Exception):
    """Why the command cannot do what it was asked for, in words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to run")
    only = what.add_mutually_exclusive_group()
    only.add_argument("--cases", nargs="+", metavar="NAME", help="these cases only")
    only.add_argument("--op", choices=("ragged", "qsa"), help="the cases of this operation only")
    what.add_argument("--quick", action="store_true", help="a small set of cases, in under two minutes on a GPU")
    what.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the cases differ (default: cuda)")
    what.add_argument("--list", action="store_true", help="show the cases and stop")
    what.add_argument("--load", type=Path, metavar="FILE.json", help="take the results from FILE instead of running")
    results = parser.add_argument_group("what to do with the results")
    results.add_argument("--out", type=Path, metavar="FILE.json", help=f"where a run is written (default: {_OUT})")
    results.add_argument("--plots", type=Path, metavar="DIR", help="draw them, as SVG files in DIR")
    results.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="OLD.json",
        help="say what got slower or faster since OLD, beyond noise; the status is 1 if something got slower. "
        "A second file is compared with it instead of a run, as with --load",
    )
    results.add_argument(
        "--tolerance", type=float, metavar="PERCENT", help="what --compare forgives at least (default: 3)"
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """The status is 0; 1 where a case failed or got slower; 2 where the command cannot be carried out."""
    from .._bench.report import NotAResult
    from .._bench.results import NotComparable

    try:
        return _run(arguments)
    except (_Unusable, NotAResult, NotComparable) as problem:
        print(f"The benchmark cannot run as asked: {problem}.", file=sys.stderr)
        return 2, None


def _run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from .._bench import plots, report, results

    if arguments.list:
        tables.show([_table_of_cases(_chosen(arguments))])
        return 0, None
    if arguments.compare is not None and len(arguments.compare) > 2:
        raise _Unusable("--compare takes an old result and at most one new one")
    old = None if arguments.compare is None else report.load(arguments.compare[0])
    given = arguments.compare[1] if old is not None and len(arguments.compare) == 2 else arguments.load
    if arguments.plots is not None and not plots.has_matplotlib():
        raise _Unusable(_missing("matplotlib"))
    document = _measure(arguments) if given is None else report.load(given)
    comparison = None if old is None else _compare(old, document, arguments.tolerance)

    shown = report.result_tables(document) if given is None or given == arguments.load else []
    if comparison is not None:
        from .._bench.compare import as_table

        shown.append(as_table(comparison))
    tables.show(shown)
    if arguments.plots is not None:
        for path, caption in plots.write(results.merge([document]), arguments.plots):
            print(f"{path}: {caption}")
    failed = given is None and any("ms" not in case["ours"] for case in document["cases"])
    got_slower = comparison is not None and comparison.got_slower
    return (1 if failed or got_slower else 0), document


def _compare(old: dict[str, Any], new: dict[str, Any], percent: float | None) -> Comparison:
    from .._bench.compare import TOLERANCE, compare

    return compare(old, new, TOLERANCE if percent is None else percent / 100)


def _chosen(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from .._bench.run import list_cases

    if arguments.cases is None:
        if chosen := list_cases(arguments.device, quick=arguments.quick, op=arguments.op):
            return chosen
        raise _Unusable(f"no case of {arguments.op} is sized for {arguments.device}")
    facts = {case["name"]: case for case in list_cases()}
    if unknown := [name for name in arguments.cases if name not in facts]:
        raise _Unusable(f"no such case: {', '.join(unknown)}; --list shows them")
    return [facts[name] for name in arguments.cases]


def _table_of_cases(cases: list[dict[str, Any]]) -> tables.Table:
    rows = [(case["name"], "yes" if case["quick"] else "", case["summary"]) for case in cases]
    return tables.Table(f"{len(cases)} cases", ("case", "quick", "what"), rows)


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run with a progress bar, and write what came out of it, even of a run that was stopped."""
    for package in ("rich", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise _Unusable(_missing(package))
    if importlib.util.find_spec("torch") is None:
        raise _Unusable("torch is not installed, and the extra [bench] leaves the choice of its build to you")
    from .._bench import report
    from .._bench import run as bench

    names = [case["name"] for case in _chosen(arguments)]
    out = arguments.out or _OUT
    if not out.parent.is_dir():
        raise _Unusable(f"there is no folder {out.parent} to write {out.name} to")
    with _Live() as live:
        try:
            document = bench.run(
                names,
                device=arguments.device,
                seconds=bench.SECONDS["quick" if arguments.quick else "full"] if arguments.cases is None else None,
                on_event=live.on_event,
            )
        except RuntimeError as problem:
            raise _Unusable(str(problem)) from problem
        except KeyboardInterrupt as interrupt:
            partial = getattr(interrupt, "partial", None)
            if not partial or not partial["cases"]:
                raise
            live.say(f"Stopped after {len(partial['cases'])} of {len(names)} cases.")
            document = partial
    out.write_text(report.dumps(document), encoding="utf-8")
    print(f"Written to {out}\n")
    return document


def _missing(package: str) -> str:
    return f"{package} is not installed: install the extra [bench] (pip install 'ragged-attention[bench]')"


class _Live:
    """A progress bar over the cases, with what the current one is at and how the last one came out."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=tables.console(),
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("measuring the ceilings", total=None)
        self._times: dict[str, float] = {}

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def on_event(self, kind: str, **facts: Any) -> None:
        if kind == "case_started":
            self._times = {}
            self._progress.update(
                self._task,
                total=facts["total"],
                completed=facts["index"],
                description=f"{facts['case']}: inputs and reference",
            )
        elif kind == "contestant_checked":
            self._describe(facts["case"], f"checking, {facts['contestant']} {'is right' if facts['ok'] else 'is out'}")
        elif kind == "contestant_timed":
            self._times[facts["contestant"]] = facts["ms"]
            times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self._times.items())
            self._describe(facts["case"], f"round {facts['round']} of {facts['rounds']}: {times}")
        elif kind == "case_done":
            self._progress.update(self._task, total=facts["total"], completed=facts["index"] + 1)
            self.say(_line(facts["case"], facts["result"]))

    def _describe(self, case: str, doing: str) -> None:
        self._progress.update(self._task, description=f"{case}: {doing}")


def _line(name: str, case: dict[str, Any]) -> str:
    from .._bench.report import percent, ratio, significant

    ours = case["ours"]
    if "ms" not in ours:
        return f"{name}: {ours.get('error', 'failed')}"
    ratios = [f"{peer} {value:.2f}" for peer in case["peers"] if (value := ratio(case, peer)) is not None]
    of_floor = percent(case["floor_ms"] / ours["ms"])
    return f"{name}: {significant(ours['ms'], 4)} ms, {of_floor} of the floor" + "".join(f", {text}" for text in ratios)
