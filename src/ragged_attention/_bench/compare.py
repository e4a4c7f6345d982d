"""What got slower or faster between two results of the benchmark, beyond noise.

Two kinds of noise are told apart from a change. The spread of the samples: the ratio of the two medians comes with an
interval, by bootstrap. And clocks, temperature and power, which move whole runs: a case counts as slower only if it is
so both in milliseconds and as a multiple of its floor, which the ceilings measured in the same run give. Where only one
of the two says so, either the device or the measured ceilings changed, and the case is called unclear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._cli.tables import Table
from .report import significant
from .results import Case, Document, NotComparable

TOLERANCE = 0.03  # a margin for what differs between whole runs, which the samples of one run cannot show
FEWEST_SAMPLES = 5
_CONFIDENCE = 0.99
_RESAMPLES = 2000

SLOWER, FASTER, SAME, UNCLEAR, BROKEN = "slower", "faster", "same", "unclear", "broken"
_ORDER = (BROKEN, SLOWER, FASTER, UNCLEAR, SAME)


@dataclass(frozen=True)
class Interval:
    """New over old: above 1 is slower."""

    ratio: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(self.ratio * factor, self.low * factor, self.high * factor)

    def verdict(self, tolerance: float) -> str:
        if self.low > 1 + tolerance:
            return SLOWER
        return FASTER if self.high < 1 / (1 + tolerance) else SAME


@dataclass(frozen=True)
class Change:
    case: str
    verdict: str
    old_ms: float | None
    new_ms: float | None
    time: Interval | None = None  # of milliseconds
    over_floor: Interval | None = None  # of time over floor
    why: str = ""


@dataclass
class Comparison:
    changes: list[Change]
    tolerance: float
    notes: list[str] = field(default_factory=list)

    def of(self, *verdicts: str) -> list[Change]:
        return [change for change in self.changes if change.verdict in verdicts]

    @property
    def got_slower(self) -> bool:
        return bool(self.of(SLOWER, BROKEN))


def compare(old: Document, new: Document, tolerance: float = TOLERANCE) -> Comparison:
    """Raises NotComparable for results of different devices."""
    if old["device"] != new["device"]:
        raise NotComparable(f"one result is of {old['device']}, the other of {new['device']}")
    before = {case["case"]: case for case in old["cases"]}
    after = {case["case"]: case for case in new["cases"]}
    shared = [name for name in after if name in before]
    if not shared:
        raise NotComparable("the two results have no case in common")
    comparison = Comparison([_change(before[name], after[name], tolerance) for name in shared], tolerance)
    for what, names in (
        ("only in the old result", [name for name in before if name not in after]),
        ("only in the new one", [name for name in after if name not in before]),
    ):
        if names:
            comparison.notes.append(f"{len(names)} {what}: {', '.join(names)}.")
    comparison.notes += _drift(old, new)
    return comparison


def interval(old: Sequence[float], new: Sequence[float]) -> Interval:
    """The ratio of the medians, with what resampling makes of it. The same samples always give the same interval."""
    rng = np.random.default_rng(0)
    ratios = _medians(np.asarray(new, float), rng) / _medians(np.asarray(old, float), rng)
    low, high = np.quantile(ratios, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    ratio = float(np.median(new) / np.median(old))
    return Interval(ratio, min(float(low), ratio), max(float(high), ratio))


def _medians(samples: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Medians of resampled runs, made of blocks: samples taken one after the other resemble each other."""
    length = math.isqrt(len(samples))
    blocks = -(-len(samples) // length)
    starts = rng.integers(0, len(samples), (_RESAMPLES, blocks, 1))
    places = ((starts + np.arange(length)) % len(samples)).reshape(_RESAMPLES, -1)[:, : len(samples)]
    medians: NDArray[np.float64] = np.median(samples[places], axis=1)
    return medians


def _change(old: Case, new: Case, tolerance: float) -> Change:
    name, old_ms, new_ms = new["case"], old["ours"].get("ms"), new["ours"].get("ms")
    if new_ms is None:
        error = str(new["ours"].get("error", "no time"))
        return Change(name, UNCLEAR if old_ms is None else BROKEN, old_ms, None, why=error)
    if old_ms is None:
        return Change(name, UNCLEAR, None, new_ms, why="the old result has no time")
    if not all(math.isclose(old[key], new[key], rel_tol=1e-3) for key in ("flops", "bytes")):
        return Change(name, UNCLEAR, old_ms, new_ms, why="the case itself has changed")
    samples = old["ours"]["samples_ms"], new["ours"]["samples_ms"]
    if min(map(len, samples)) < FEWEST_SAMPLES:
        return Change(name, UNCLEAR, old_ms, new_ms, why=f"fewer than {FEWEST_SAMPLES} samples")
    time = interval(*samples)
    over_floor = time.scaled(old["floor_ms"] / new["floor_ms"])
    verdicts = time.verdict(tolerance), over_floor.verdict(tolerance)
    if verdicts[0] == verdicts[1]:
        return Change(name, verdicts[0], old_ms, new_ms, time, over_floor)
    why = f"{verdicts[0]} in ms, {verdicts[1]} over its floor"
    return Change(name, UNCLEAR, old_ms, new_ms, time, over_floor, why)


def _drift(old: Document, new: Document) -> list[str]:
    moved = []
    for name, rate in old["ceilings"].items():
        now = new["ceilings"].get(name)
        if rate and now:
            moved.append(f"{name} {significant(rate, 3)} to {significant(now, 3)} ({now / rate - 1:+.1%})")
    return [f"Ceilings, old to new: {', '.join(moved)}."] if moved else []


def as_table(comparison: Comparison) -> Table:
    """Everything but what stayed the same, worst first."""
    changes = sorted(
        (change for change in comparison.changes if change.verdict != SAME),
        key=lambda change: (_ORDER.index(change.verdict), -_magnitude(change)),
    )
    rows = [
        (
            change.case,
            change.verdict,
            "" if change.old_ms is None else significant(change.old_ms, 4),
            "" if change.new_ms is None else significant(change.new_ms, 4),
            _describe(change.time),
            _describe(change.over_floor),
            change.why,
        )
        for change in changes
    ]
    same = len(comparison.of(SAME))
    counts = [f"{len(found)} {verdict}" for verdict in _ORDER[:-1] if (found := comparison.of(verdict))]
    heading = ", ".join([*counts, f"{same} the same within noise"])
    columns = ("case", "", "old ms", "new ms", "change in ms", "change over floor", "why")
    explanation = (
        f"Changes with their {_CONFIDENCE:.0%} interval. Slower or faster: both intervals are beyond "
        f"{comparison.tolerance:.0%}. Unclear cases do not count."
    )
    notes = [explanation, *comparison.notes] if rows else comparison.notes
    return Table(
        f"Against the old result: {heading}",
        columns if rows else ("", ""),
        rows,
        right=frozenset(columns[2:6]),
        note="\n".join(notes),
    )


def _magnitude(change: Change) -> float:
    return 0.0 if change.time is None else abs(math.log(change.time.ratio))


def _describe(change: Interval | None) -> str:
    if change is None:
        return ""
    return f"{change.ratio - 1:+.1%} [{change.low - 1:+.1%}, {change.high - 1:+.1%}]"
