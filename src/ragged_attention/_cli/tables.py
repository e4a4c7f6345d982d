"""Tables for people: with rich where it is installed, as plain text where it is not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

RICH_MISSING = (
    "rich is not installed: install the extra [cli] (pip install 'ragged-attention[cli]') for tables and progress bars"
)

_WIDTH_OF_A_FILE = 140  # rich takes 80 columns where there is no terminal to ask, too few for a table of reasons


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()  # columns of numbers
    note: str = ""


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, highlight=False)


def show(tables: Iterable[Table]) -> None:
    if has_rich():
        _show_rich(tables, console())
    else:
        for table in tables:
            print(_plain(table))
        print(RICH_MISSING)


def _show_rich(tables: Iterable[Table], console: Console) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables:
        drawn = RichTable(
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_header=any(table.columns),
        )
        for column in table.columns:
            drawn.add_column(column, justify="right" if column in table.right else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        console.print(drawn)
        if table.note:
            console.print(Text(table.note, style="dim"))


def _style(cell: str) -> str:
    if cell in ("✓", "yes"):
        return "bold green"
    return "bold red" if cell in ("✗", "no") else ""


def _plain(table: Table) -> str:
    """Columns padded to their widest cell; the last one is wrapped to the terminal."""
    lines = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(table.columns))]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1]) + 2
    room = max(24, shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns - indent)
    text = [table.title]
    for line in lines:
        start = "  " + "".join(cell.ljust(width + 2) for cell, width in zip(line[:-1], widths, strict=False))
        for part in textwrap.wrap(line[-1], room) or [""]:
            text.append((start + part).rstrip())
            start = " " * indent
    if table.note:
        text.append("  " + table.note)
    return "\n".join(text) + "\n"
