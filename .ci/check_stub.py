"""Compares src/ragged_attention/_C.pyi with the installed extension, through nanobind's stub generator.

The written stub may be more exact where the extension only says `object` or `dict`; names, order, kinds and defaults of
parameters, and every other type, must agree.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

import ragged_attention._C

STUB = Path(__file__).resolve().parent.parent / "src" / "ragged_attention" / "_C.pyi"

VAGUE = {"object", "object | None", "dict", "list"}  # what nanobind says of nb::handle, nb::dict and nb::list


def functions(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def text_of(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """(kind and name, annotation, default) of each."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    found = [
        (arg.arg, text_of(arg.annotation), text_of(value)) for arg, value in zip(positional, defaults, strict=True)
    ]
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return found + [(f"*, {arg.arg}", text_of(arg.annotation), text_of(value)) for arg, value in keywords]


def difference(name: str, written: ast.FunctionDef, actual: ast.FunctionDef) -> str | None:
    ours, theirs = parameters(written), parameters(actual)
    if [(a, c) for a, _, c in ours] != [(a, c) for a, _, c in theirs]:
        return f"{name}: parameters {[a for a, _, _ in ours]}, the extension has {[a for a, _, _ in theirs]}"
    ours.append(("return", text_of(written.returns), ""))
    theirs.append(("return", text_of(actual.returns), ""))
    for (parameter, a, _), (_, b, _) in zip(ours, theirs, strict=True):
        if a != b and b not in VAGUE:
            return f"{name}: {parameter} is {a!r}, in the extension {b!r}"
    return None


def main() -> int:
    generator = StubGen(module=ragged_attention._C)
    generator.put(ragged_attention._C)
    written, actual = functions(STUB.read_text()), functions(generator.get())
    problems = [f"{name}: only in {STUB.name}" for name in sorted(written.keys() - actual.keys())]
    problems += [f"{name}: only in the extension" for name in sorted(actual.keys() - written.keys())]
    for name in sorted(written.keys() & actual.keys()):
        if problem := difference(name, written[name], actual[name]):
            problems.append(problem)
    for problem in problems:
        print(f"check_stub: {problem}", file=sys.stderr)
    if not actual:
        print("check_stub: the extension shows no function: has nanobind's stub generator changed?", file=sys.stderr)
        return 1
    print(f"check_stub: {len(actual)} functions, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
