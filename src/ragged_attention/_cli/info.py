"""What is installed here, and which operation runs where and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _C
from .._support import build_info, supports
from . import tables

# What DLPack tensors may come from, and what their dtypes need; by distribution, so that nothing is imported.
FRAMEWORKS = ("numpy", "torch", "cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "jax", "jaxlib", "ml-dtypes")

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = range(8, 257, 8)

# The operations with the grouped heads that the table asks about.
OPERATIONS = {"ragged_flash_attention": 4, "qsa_sparse_attention": 12}

DRIVER_NOTE = "A build with CUDA 13 needs an NVIDIA driver R580 or newer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None beyond those of every command."""


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    facts = gather()
    tables.show(as_tables(facts))
    return 0, facts


def gather() -> dict[str, Any]:
    """Everything that the tables show, as JSON takes it."""
    cuda = _C.cuda_devices()
    for device in cuda["devices"]:
        device["compute_capability"] = list(device["compute_capability"])
    return {
        "build": build_info(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "frameworks": installed_frameworks(),
        "cpu": {"isa": build_info()["cpu_isa"], "threads": _C.num_threads(), "cpus": os.cpu_count()},
        "cuda": cuda,
        "supports": list(_what_runs_where(len(cuda["devices"]))),
    }


def installed_frameworks() -> dict[str, str]:
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.setdefault("numpy", np.__version__)  # one that was put on the path without its metadata
    return found


def _what_runs_where(num_cuda_devices: int) -> Iterator[dict[str, Any]]:
    """One answer for each operation, device and path: the dtypes and head dims that get it."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(num_cuda_devices))]
    if num_cuda_devices == 0:
        devices.append("cuda")  # to say why not
    for op, group in OPERATIONS.items():
        for device in devices:
            # Dtypes with the same answer at every head dim share a line.
            dtypes: dict[tuple[tuple[bool, str, str], ...], list[str]] = {}
            for dtype in DTYPES:
                answers = tuple(_ask(op, device, dtype, head_dim, group) for head_dim in HEAD_DIMS)
                dtypes.setdefault(answers, []).append(dtype)
            for answers, names in dtypes.items():
                for answer in dict.fromkeys(answers):
                    ok, path, reason = answer
                    yield {
                        "op": op,
                        "group": group,
                        "device": device,
                        "dtypes": names,
                        "head_dims": [d for d, given in zip(HEAD_DIMS, answers, strict=True) if given == answer],
                        "ok": ok,
                        "path": path,
                        "reason": reason,
                    }


def _ask(op: str, device: str, dtype: str, head_dim: int, group: int) -> tuple[bool, str, str]:
    try:
        answer = supports(op, device=device, dtype=dtype, head_dim=head_dim, group=group)
    except (_C.CudaError, ValueError) as error:  # no driver, no device
        return False, "none", str(error)
    return answer.ok, answer.path, answer.reason


def as_tables(facts: dict[str, Any]) -> list[tables.Table]:
    build = facts["build"]
    versions = [("ragged-attention", build["version"]), ("Python", f"{facts['python']} on {facts['platform']}")]
    versions += [*facts["frameworks"].items()]
    return [
        tables.Table("Installed (frameworks are looked up, not imported)", ("", ""), versions),
        tables.Table("Build", ("", ""), _build_rows(build)),
        tables.Table("CPU", ("", ""), _cpu_rows(facts["cpu"])),
        _cuda_table(facts["cuda"]),
        _support_table(facts["supports"]),
    ]


def _build_rows(build: dict[str, str]) -> list[tuple[str, str]]:
    rows = [("commit", build["commit"]), ("compiler", build["compiler"])]
    if not build["cuda_version"]:
        return [*rows, ("CUDA", "none: this build has no CUDA kernels")]
    return [
        *rows,
        ("CUDA", build["cuda_version"]),
        ("CUDA architectures", build["cuda_architectures"].replace(";", ", ")),
        ("CUTLASS headers", build["cutlass_version"]),
    ]


def _cpu_rows(cpu: dict[str, Any]) -> list[tuple[str, str]]:
    threads = f"{cpu['threads']} on {cpu['cpus']} CPUs (RAGGED_ATTENTION_NUM_THREADS or set_num_threads() changes it)"
    return [("instruction set", f"{cpu['isa']} (RAGGED_ATTENTION_CPU_ISA changes it)"), ("threads", threads)]


def _cuda_table(cuda: dict[str, Any]) -> tables.Table:
    if not cuda["devices"]:
        problem = cuda["problem"] or "no device found"
        return tables.Table("CUDA devices", ("", ""), [("none", problem)], note=DRIVER_NOTE)
    rows = [
        (
            str(index),
            device["name"],
            "{}.{}".format(*device["compute_capability"]),
            str(device["num_multiprocessors"]),
            f"{device['memory_bytes'] / 2**30:.0f} GiB",
            f"{device['l2_bytes'] / 2**20:.0f} MiB",
        )
        for index, device in enumerate(cuda["devices"])
    ]
    columns = ("", "name", "compute capability", "SMs", "memory", "L2")
    return tables.Table("CUDA devices", columns, rows, right=frozenset(columns[2:]), note=DRIVER_NOTE)


def _support_table(answers: list[dict[str, Any]]) -> tables.Table:
    rows = [
        (
            answer["op"],
            str(answer["group"]),
            answer["device"],
            ", ".join(answer["dtypes"]),
            describe_head_dims(answer["head_dims"]),
            "yes" if answer["ok"] else "no",
            answer["path"],
            answer["reason"],
        )
        for answer in answers
    ]
    return tables.Table(
        "What runs where",
        ("operation", "group", "device", "dtypes", "head dims", "runs", "path", "why"),
        rows,
        note="Group: query heads per key/value head; supports() answers for any. Head dims go up to 256 in steps of 8.",
    )


def describe_head_dims(head_dims: list[int]) -> str:
    """Runs of multiples of 8 as ranges: '8 to 56, 88, 104 to 120'."""
    parts: list[list[int]] = []
    for head_dim in head_dims:
        if parts and head_dim == parts[-1][-1] + HEAD_DIMS.step:
            parts[-1].append(head_dim)
        else:
            parts.append([head_dim])
    text = (f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
    return ", ".join(text)
