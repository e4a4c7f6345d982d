"""Peers that are one file of a large package: loaded from a path, with what the file imports stood in for."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .contestant import Unavailable


def load(variable: str, what: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> Any:
    """The module in the file that the environment variable names. `stand_ins` are there while it is imported."""
    path = os.environ.get(variable)
    if not path:
        raise Unavailable(f"{variable} does not name {what}")
    if not Path(path).is_file():
        raise Unavailable(f"{variable}: no such file")
    name = f"_ragged_attention_peer_{variable.lower()}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{variable} names no Python file")
    module = importlib.util.module_from_spec(spec)
    with _present(stand_ins):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise Unavailable(f"{what} cannot be loaded: {error}") from error
    return module


@contextmanager
def _present(stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules of these names and attributes, and the packages above them."""
    modules: dict[str, Mapping[str, Any]] = {}
    for name, attributes in stand_ins.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            modules.setdefault(".".join(parts[:depth]), {})
        modules[name] = attributes
    before = {name: sys.modules.get(name) for name in modules}
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
