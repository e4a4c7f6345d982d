"""The command line. Each command is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import bench, demo, info

COMMANDS: dict[str, ModuleType] = {"info": info, "demo": demo, "bench": bench}


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables have characters that not every terminal's encoding has
    arguments = _parser().parse_args(argv)
    status, result = arguments.run(arguments)
    if arguments.json is not None and result is not None:
        _write_json(arguments.json, result)
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ragged_attention",
        description="Attention kernels for ragged batches and QSA selections. Without a command: info.",
    )
    _add_json(parser, default=None)
    parser.set_defaults(run=info.run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        # SUPPRESS: a default here would overwrite what was given before the command.
        _add_json(command, default=argparse.SUPPRESS)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _add_json(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", default=default, help="write the result as JSON too")


def _write_json(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
