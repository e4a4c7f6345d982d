"""Plots of results, as SVG: the same results give the same files, byte for byte."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import TITLES, by_operation, peers_that_ran
from .results import Case, Document

OURS = "ours"

# Of the Okabe-Ito palette, which the colour-blind can tell apart; markers differ too.
_OURS_COLOUR, _OURS_LIGHT = "#D55E00", "#F2C4A5"
_PEER_STYLES = {
    "fa3": ("#0072B2", "s"),
    "cudnn": ("#009E73", "^"),
    "cudnn_dense": ("#E69F00", "v"),
    "fa2": ("#56B4E9", "D"),
    "vllm": ("#0072B2", "s"),
    "sglang": ("#009E73", "^"),
    "triton": ("#CC79A7", "v"),
    "sdpa": ("#555555", "X"),
}
_OTHER_STYLES = (("#CC79A7", "P"), ("#000000", "*"), ("#999999", "p"))
_GREY, _LIGHT, _STRIPE = "#555555", "#DDDDDD", "#F4F4F4"

_LAST_RESORT = "sdpa"  # so slow on a GPU that it would squeeze everything else: drawn where nothing else ran

_RC = {
    "svg.hashsalt": "ragged-attention",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.axisbelow": True,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": _LIGHT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
_FLOOR_LINE: dict[str, Any] = {"color": "black", "linewidth": 1, "linestyle": "--"}
_OLDER: dict[str, Any] = {"color": "white", "marker": "o", "markersize": 2, "linestyle": "none", "zorder": 5}
_WIDTH = 9.0  # inches: as wide as a page of documentation


@dataclass(frozen=True)
class Plot:
    name: str  # of the file, without its suffix
    caption: str
    draw: Callable[[Document], Any]  # None where the results have nothing for it


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write(merged: Document, folder: Path, suffix: str = "svg") -> list[tuple[Path, str]]:
    """The files and their captions; those plots that the merged results have figures for."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in PLOTS:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # not what the user's matplotlibrc says
            matplotlib.rcParams.update(_RC)
            figure = plot.draw(merged)
            if figure is not None:
                path = folder / f"{plot.name}.{suffix}"
                _save(figure, path)
                written.append((path, plot.caption))
    return written


def _save(figure: Any, path: Path) -> None:
    if path.suffix != ".svg":
        figure.savefig(path, dpi=110, facecolor="white")
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None}, facecolor="white")
    text = re.sub(r"<!--.*?-->", "", drawn.getvalue(), flags=re.DOTALL)
    lines = _numbered(text).splitlines()
    path.write_text("\n".join(line.strip() for line in lines if line.strip()) + "\n", encoding="utf-8")


def _numbered(svg: str) -> str:
    """Numbers for matplotlib's ids, which are hashes of coordinates down to bits that differ from CPU to CPU."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0], f"{found[0][0]}{len(numbers) + 1}")

    return re.sub(r"(?<=[\"#])[mp][0-9a-f]{10}(?=[\")])", number, svg)


# --- Time over floor, case by case.

Rows = dict[str, Case]  # by label

_MASKS = {"null": "full", "causal": "causal"}
_GRID_NAME = re.compile(r"ragged-(?P<layout>[a-z0-9]+)-d(?P<head_dim>\d+)-(?P<mask>[a-z0-9]+)")


def _timed(merged: Document, op: str) -> list[Case]:
    return [case for case in by_operation(merged).get(op, ()) if "ms" in case["ours"]]


def _ragged_grid(merged: Document) -> dict[str, Rows]:
    """By head dim, the cases that differ in nothing else: layouts of sequences times masks."""
    panels: dict[int, Rows] = {}
    for case in _timed(merged, "ragged"):
        if found := _GRID_NAME.fullmatch(case["case"]):
            panels.setdefault(int(found["head_dim"]), {})[f"{found['layout']} {found['mask']}"] = case
    most = max(map(len, panels.values()), default=0)
    full = {head_dim: rows for head_dim, rows in sorted(panels.items()) if len(rows) == most}
    if most < 2 or len(full) < 2:
        return {}
    return {f"D {head_dim}, {_heads(next(iter(rows.values())))}": rows for head_dim, rows in full.items()}


def _draw_ragged_grid(merged: Document) -> Any:
    return _draw_over_floor("ragged_flash_attention: time over the floor, by head dim", _ragged_grid(merged))


def _draw_ragged_rest(merged: Document) -> Any:
    drawn = {case["case"] for rows in _ragged_grid(merged).values() for case in rows.values()}
    rest = {case["case"]: case for case in _timed(merged, "ragged") if case["case"] not in drawn}
    title = "ragged_flash_attention: time over the floor" + (", other workloads" if drawn else "")
    return _draw_over_floor(title, {"": rest})


def _draw_qsa_floor(merged: Document) -> Any:
    rows = {case["case"]: case for case in _timed(merged, "qsa")}
    return _draw_over_floor("qsa_sparse_attention: time over the floor", {"": rows})


def _draw_over_floor(title: str, panels: dict[str, Rows]) -> Any:
    """Panels side by side share their rows."""
    cases = [case for rows in panels.values() for case in rows.values()]
    if not cases:
        return None
    peers = _peers(cases)
    labels = list(dict.fromkeys(label for rows in panels.values() for label in rows))
    height = 0.2 * len(labels) + 1.05 + (0.2 if any(panels) else 0)
    figure, grid = _figure(height, 1, len(panels), sharey=True)
    values = [value for case in cases for name in (OURS, *peers) if (value := _over_floor(case, name)) is not None]
    low, high = min(0.95, 0.95 * min(values)), max(2.2, 1.15 * max(values))
    for axes, (name, rows) in zip(grid[0], panels.items(), strict=True):
        _floor_panel(axes, labels, rows, peers)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        _plain_ticks(axes.xaxis, low, high, "{}x")
        axes.set_title(name, loc="left")
    first = grid[0][0]
    first.set_ylim(len(labels) - 0.5, -0.5)
    first.set_yticks(range(len(labels)), labels, fontsize=8)
    figure.supxlabel(
        "time / floor (log scale), left is faster; 1x is what the ceilings measured in the same run allow", fontsize=9
    )
    _heading(figure, title, height, cases, lines=False)
    return figure


def _floor_panel(axes: Any, labels: list[str], rows: Rows, peers: list[str]) -> None:
    for place, label in enumerate(labels):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color=_STRIPE, linewidth=0, zorder=0)
        ours = _over_floor(rows[label], OURS) if label in rows else None
        theirs = [value for peer in peers if label in rows and (value := _over_floor(rows[label], peer)) is not None]
        if ours is not None and theirs:  # the lead over the fastest peer, or in grey what is missing to it
            colour = _OURS_LIGHT if ours < min(theirs) else "#AAAAAA"
            axes.plot([ours, min(theirs)], [place, place], color=colour, linewidth=3, zorder=2, solid_capstyle="butt")
    axes.axvline(1, color="black", linewidth=1, zorder=1)
    for name in (*peers, OURS):
        colour, marker, size = _style(name)
        points = [
            (value, place)
            for place, label in enumerate(labels)
            if label in rows and (value := _over_floor(rows[label], name)) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker=marker,
                markersize=size,
                color=colour,
                markeredgecolor="white",
                markeredgewidth=0.6,
                zorder=4 if name == OURS else 3,
            )
        if name == OURS:
            _dot(axes, [(value, place) for value, place in points if rows[labels[place]]["older"]])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _over_floor(case: Case, name: str) -> float | None:
    ms = _ms(case, name)
    return None if ms is None else ms / case["floor_ms"]


# --- TFLOP/s over sequence length.


def _draw_lengths(merged: Document) -> Any:
    """A column per head dim, a row per mask."""
    panels: dict[tuple[str, int], dict[int, Case]] = {}
    for case in _timed(merged, "ragged"):
        found = re.fullmatch(r"(?:ragged|cpu)-\d+x(\d+)-d\d+(?:-(?:full|causal|bf16))?", case["case"])
        if found and case["mask"] in _MASKS:
            panels.setdefault((case["mask"], case["head_dim"]), {})[int(found[1])] = case
    panels = {place: points for place, points in panels.items() if len(points) > 1}
    if not panels:
        return None
    masks = [mask for mask in _MASKS if any(mask == panel[0] for panel in panels)]
    head_dims = sorted({head_dim for _, head_dim in panels})
    height = 2.15 * len(masks) + 0.95
    figure, grid = _figure(height, len(masks), len(head_dims), sharey=True)
    cases = [case for panel in panels.values() for case in panel.values()]
    peers = _peers(cases)
    top = max(rate for case in cases for name in (OURS, *peers) if (rate := _tflops(case, name)) is not None)
    for row, mask in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            axes = grid[row][column]
            panel = panels.get((mask, head_dim))
            if panel is None:
                axes.set_axis_off()
                continue
            for name in (*peers, OURS):
                _line(axes, name, panel, _tflops)
            _log2_ticks(axes, panel)
            axes.set_ylim(0, 1.08 * top)
            axes.grid(axis="y")
            axes.set_title(f"D {head_dim}, {_heads(next(iter(panel.values())))}, {_MASKS[mask]}", loc="left")
            if column == 0:
                axes.set_ylabel("TFLOP/s")
            if row == len(masks) - 1:
                axes.set_xlabel("tokens in each sequence")
    _heading(figure, "ragged_flash_attention: rate over the sequence length, up is faster", height, cases)
    return figure


def _tflops(case: Case, name: str) -> float | None:
    ms = _ms(case, name)
    return None if ms is None else case["flops"] / ms / 1e9


# --- QSA: prefill over what neighbours share, decode over the batch.


def _draw_qsa(merged: Document) -> Any:
    prefill: dict[tuple[int, int], dict[float, Case]] = {}
    decode: dict[int, dict[float, Case]] = {}
    for case in _timed(merged, "qsa"):
        if found := re.fullmatch(r"qsa-prefill-(\d+)-at-(\d+)-(?:share[\d.]+|random)", case["case"]):
            if case["share"] is not None:
                prefill.setdefault((int(found[1]), int(found[2])), {})[case["share"]] = case
        elif found := re.fullmatch(r"qsa-decode-(\d+)-at-(\d+)", case["case"]):
            decode.setdefault(int(found[2]), {})[int(found[1])] = case
    prefill = {name: points for name, points in prefill.items() if len(points) > 1}
    decode = {name: points for name, points in decode.items() if len(points) > 1}
    panels = len(prefill) + len(decode)
    if not panels:
        return None
    height = 3.6
    figure, grid = _figure(height, 1, panels)
    cases = [case for points in (*prefill.values(), *decode.values()) for case in points.values()]
    peers = _peers(cases)
    rates = [
        rate
        for points in prefill.values()
        for case in points.values()
        for name in (OURS, *peers)
        if (rate := _tflops(case, name)) is not None
    ]
    for axes, ((rows, context), points) in zip(grid[0], prefill.items(), strict=False):
        _prefill_panel(axes, points, peers)
        axes.set_ylim(0, 1.08 * max(rates))
        axes.set_title(
            f"Prefill, {_thousands(rows)} rows of {_thousands(context)} tokens\nTFLOP/s, up is faster", loc="left"
        )
    for axes, (context, points) in zip(grid[0][len(prefill) :], decode.items(), strict=True):
        _decode_panel(axes, points, peers)
        axes.set_title(f"Decode, contexts of {_thousands(context)} tokens\nµs (log scale), down is faster", loc="left")
    _heading(
        figure, "qsa_sparse_attention: prefill over shared tokens, decode over the batch", height, cases, bool(decode)
    )
    return figure


def _prefill_panel(axes: Any, points: dict[float, Case], peers: list[str]) -> None:
    for name in (*peers, OURS):
        _line(axes, name, points, _tflops)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.grid(axis="y")
    axes.set_xlabel("tokens that the next row lists too")


def _decode_panel(axes: Any, points: dict[float, Case], peers: list[str]) -> None:
    axes.set_yscale("log")
    for name in (*peers, OURS):
        _line(axes, name, points, _microseconds)
    floor = [(x, 1e3 * points[x]["floor_ms"]) for x in sorted(points)]
    axes.plot(*zip(*floor, strict=True), **_FLOOR_LINE, zorder=2)
    _log2_ticks(axes, points)
    low, high = axes.get_ylim()
    _plain_ticks(axes.yaxis, low, high, "{}")
    axes.set_ylim(low, high)
    axes.grid(axis="y")
    axes.set_xlabel("sequences, a row each")


def _microseconds(case: Case, name: str) -> float | None:
    ms = _ms(case, name)
    return None if ms is None else 1e3 * ms


PLOTS = (
    Plot(
        "ragged-head-dims",
        "`ragged_flash_attention`: time over the floor, for layouts of sequences and masks, by head dim.",
        _draw_ragged_grid,
    ),
    Plot("ragged-lengths", "`ragged_flash_attention`: TFLOP/s over the sequence length.", _draw_lengths),
    Plot(
        "ragged-workloads", "`ragged_flash_attention`: time over the floor of the other workloads.", _draw_ragged_rest
    ),
    Plot(
        "qsa-share-and-batch",
        "`qsa_sparse_attention`: prefill over what neighbours share, decode over the batch.",
        _draw_qsa,
    ),
    Plot("qsa-workloads", "`qsa_sparse_attention`: time over the floor.", _draw_qsa_floor),
)


# --- Shared.


def _figure(height: float, rows: int, columns: int, **parameters: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **parameters)


def _heading(
    figure: Any, title: str, height: float, cases: list[Case], floor: bool = False, lines: bool = True
) -> None:
    """The title and the legend above everything, ours first."""
    from matplotlib.lines import Line2D

    names = (OURS, *_peers(cases))
    handles: list[Any] = []
    for name in names:
        colour, marker, size = _style(name)
        width = 0 if not lines else 2.6 if name == OURS else 1.2
        handles.append(
            Line2D([], [], color=colour, marker=marker, markersize=size, markeredgecolor="white", linewidth=width)
        )
    labels = [_title(name) for name in names]
    if floor:
        handles.append(Line2D([], [], **_FLOOR_LINE))
        labels.append("floor")
    if any(case["older"] for case in cases):
        colour, marker, size = _style(OURS)
        handles.append(
            (Line2D([], [], color=colour, marker=marker, markersize=size, linewidth=0), Line2D([], [], **_OLDER))
        )
        labels.append("of an older run")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.58 / height))
    figure.text(0.01, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.3 / height),
        ncols=len(labels),
        handletextpad=0.4,
        columnspacing=1.4,
    )


def _line(axes: Any, name: str, points: dict[Any, Case], value_of: Callable[[Case, str], float | None]) -> None:
    line = [(x, value) for x in sorted(points) if (value := value_of(points[x], name)) is not None]
    if not line:
        return
    colour, marker, size = _style(name)
    axes.plot(
        *zip(*line, strict=True),
        color=colour,
        marker=marker,
        markersize=size,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=2.6 if name == OURS else 1.2,
        zorder=4 if name == OURS else 3,
    )
    if name == OURS:
        _dot(axes, [(x, value) for x, value in line if points[x]["older"]])


def _dot(axes: Any, points: list[tuple[float, float]]) -> None:
    """Mark cases of an older run, on ours alone: the peers' markers are too small, and a case is of one run."""
    if points:
        axes.plot(*zip(*points, strict=True), **_OLDER)


def _peers(cases: Iterable[Case]) -> list[str]:
    """The same order in every plot, whichever of them ran first."""
    known = list(TITLES)
    found = sorted(peers_that_ran(cases), key=lambda name: (known.index(name) if name in known else len(known), name))
    return [name for name in found if name != _LAST_RESORT] or found


def _heads(case: Case) -> str:
    return f"heads {case['num_q_heads']}/{case['num_kv_heads']}"


def _style(name: str) -> tuple[str, str, float]:
    if name == OURS:
        return _OURS_COLOUR, "o", 7
    colour, marker = _PEER_STYLES.get(name) or _OTHER_STYLES[sum(map(ord, name)) % len(_OTHER_STYLES)]
    return colour, marker, 5


def _title(name: str) -> str:
    return "ragged-attention" if name == OURS else TITLES.get(name, name)


def _ms(case: Case, name: str) -> float | None:
    ms = (case["ours"] if name == OURS else case["peers"].get(name, {})).get("ms")
    return None if ms is None else float(ms)


def _plain_ticks(axis: Any, low: float, high: float, form: str) -> None:
    """1, 2, 5, 10 and so on along a logarithmic axis; more where it is short."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    values = [step * 10.0**power for power in range(-3, 6) for step in steps]
    shown = [value for value in values if low <= value <= high]
    axis.set_major_locator(FixedLocator(shown))
    axis.set_major_formatter(FixedFormatter([form.format(f"{value:g}") for value in shown]))
    axis.set_minor_locator(NullLocator())


def _log2_ticks(axes: Any, places: Iterable[float]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    values = sorted(places)
    axes.set_xticks(values, [_thousands(int(value)) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def _thousands(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)
