#!/usr/bin/env python3
"""Time both operations and their peers on one GPU, in one run, and write the results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ceilings
import torch
from cases import CASES, Case
from inputs import Call, make, to_numpy
from peers import NOTES, PEERS, Unavailable
from timing import Timer, interleaved

import ragged_attention
from ragged_attention._cli import tables

ROUNDS, SAMPLES = 3, 10


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.list:
        print("\n".join(CASES))
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no usable GPU", file=sys.stderr)
        return 2
    timer = Timer(arguments.device)
    result = environment(arguments.device)
    # The sizes are a GPU's: a CPU measures its ceilings on smaller ones.
    result["ceilings"] = ceilings.measure(timer, scale=1 if arguments.device == "cuda" else 32)
    result["cases"] = []
    for name in arguments.cases:
        print(name, flush=True)
        result["cases"].append(run_case(CASES[name], timer, result["ceilings"], arguments.rounds, arguments.samples))
        _write(arguments.out, result)  # after each, so that a run that is stopped leaves what it has
        _release(arguments.device)
    tables.show(as_tables(result))
    return 0 if all("ms" in case["ours"] for case in result["cases"]) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.json", default=Path("benchmark.json"))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each, ours and every peer take turns")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser.parse_args(argv)


def environment(device: str) -> dict[str, Any]:
    build = ragged_attention.build_info()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "driver": _driver() if device == "cuda" else None,
        "versions": {
            "ragged_attention": build["version"],
            "ragged_attention_cuda": build["cuda_version"],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "triton": _version("triton"),
        },
        "commit": build["commit"].removesuffix("-dirty"),
        "dirty": build["commit"].endswith("-dirty"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run_case(
    case: Case, timer: Timer, ceiling: dict[str, float | None], rounds: int = ROUNDS, samples: int = SAMPLES
) -> dict[str, Any]:
    """Check ours and every peer on sampled rows, then time in turn all that are right."""
    inputs = make(case, timer.device)
    sample = inputs.sample()
    work = inputs.work()
    result: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "dtype": case.dtype,
        "head_dim": case.head_dim,
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        **inputs.facts(),
        "ours": {},
        "peers": {},
        "floor_ms": _floor_ms(work.flops, work.bytes, ceiling),
        "flops": work.flops,
        "bytes": work.bytes,
        "max_abs_error": None,
    }
    calls: dict[str, Call] = {}
    entries: dict[str, dict[str, Any]] = {"ours": result["ours"]}

    def enter(name: str, make_call: Any) -> Any:
        """Check one contestant; it is timed only if it is right."""
        entry = entries.setdefault(name, {})
        try:
            call = make_call()
            given = call()
            out, lse = given if isinstance(given, tuple) else (given, None)
            agreement = sample.compare(out, lse, case.dtype, to_numpy)
            if not agreement.ok:
                entry["error"] = f"wrong: {agreement}"
                return agreement
            calls[name] = timer.prepare(call, by_graph=case.short)
            if case.short:
                entry["host_us"] = timer.host_us(call)
        except Unavailable as reason:
            entry["error"] = f"skipped: {reason}"
            return None
        except Exception as error:  # a peer may fail in any way; the others go on
            entry["error"] = f"{type(error).__name__}: {error}"
            return None
        return agreement

    agreement = enter("ours", inputs.ours)
    if agreement is not None:
        result["max_abs_error"] = agreement.max_abs_error
    result["ours"]["path"] = _path(case, timer)
    for name, peer in PEERS[case.op].items():
        result["peers"][name] = entries[name] = {"note": NOTES[name]}
        enter(name, lambda peer=peer: peer(inputs))

    for name, times in interleaved(timer, calls, rounds, samples).items():
        entries[name].update(ms=statistics.median(times), samples_ms=times)
    return result


def _floor_ms(flops: int, size: int, ceiling: dict[str, float | None]) -> float:
    matmul, copy = ceiling["matmul_tflops"], ceiling["copy_tbps"]
    assert matmul is not None
    assert copy is not None
    return 1e3 * max(flops / (matmul * 1e12), size / (copy * 1e12))


def _path(case: Case, timer: Timer) -> str:
    group = case.num_q_heads // case.num_kv_heads
    try:
        answer = ragged_attention.supports(
            case.function, device=timer.device, dtype=case.dtype, head_dim=case.head_dim, group=group
        )
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"
    return answer.path


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return answer[0] if answer else None
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def as_tables(result: dict[str, Any]) -> list[tables.Table]:
    limits = [(name, "not measured" if rate is None else f"{rate:.3g}") for name, rate in result["ceilings"].items()]
    rows = []
    for case in result["cases"]:
        ours = case["ours"].get("ms")
        rows.append(
            (
                case["case"],
                case["ours"]["path"],
                "" if ours is None else f"{ours:.4f}",
                "" if ours is None else f"{case['flops'] / ours / 1e9:.3g}",
                "" if ours is None else f"{case['bytes'] / ours / 1e9:.3g}",
                f"{case['floor_ms']:.4f}",
                "" if ours is None else f"{case['floor_ms'] / ours:.2f}",
                "; ".join(_versus(name, peer, ours) for name, peer in case["peers"].items()),
                case["ours"].get("error", f"{case['max_abs_error'] or 0:.1e}"),
            )
        )
    numbers = ("ms", "TFLOP/s", "TB/s", "floor ms", "of floor")
    return [
        tables.Table(f"Ceilings of this run on {result['device']}", ("ceiling", "rate"), limits, frozenset(("rate",))),
        tables.Table(
            f"ragged-attention {result['versions']['ragged_attention']}, {result['commit'][:12]}"
            + (" with changes" if result["dirty"] else ""),
            ("case", "path", *numbers, "peers", "error"),
            rows,
            right=frozenset(numbers),
            note="Peers: their time, and in brackets how many times longer it is than ours.",
        ),
    ]


def _versus(name: str, peer: dict[str, Any], ours: float | None) -> str:
    if "ms" not in peer:
        return f"{name}: {peer['error']}"
    return f"{name} {peer['ms']:.4f}" + ("" if ours is None else f" ({peer['ms'] / ours:.2f})")


if __name__ == "__main__":
    sys.exit(main())
