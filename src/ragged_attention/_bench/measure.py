"""The benchmark itself: checks everything, then times in turn all that is right."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

try:
    import torch
except ImportError as error:
    raise RuntimeError("the benchmark needs torch") from error

import ragged_attention

from . import ceilings, host
from .cases import Case
from .inputs import make, to_numpy
from .peers import DISTRIBUTIONS, PEERS, Contestant, Unavailable
from .report import matmul_tflops
from .run import OnEvent
from .timing import Call, Timer, Wait, interleaved

# A peer whose call takes this many times as long as ours, and this long, is left out: it says enough.
SLOW_TIMES, SLOW_MS = 50.0, 200.0
LEAST_SECONDS = 0.25  # of timing, for a case


class Run:
    def __init__(self, device: str, rounds: int, samples: int, seconds: float | None, on_event: OnEvent) -> None:
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no usable GPU")
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._rounds, self._samples, self._on_event = rounds, samples, on_event
        self.timer = Timer(device)
        self.result = environment(self.timer.device)

    def cases(self, cases: Sequence[Case]) -> dict[str, Any]:
        result = self.result
        result["ceilings"] = ceilings.measure(self.timer)
        result["host_us"] = {}
        result["cases"] = []
        self._on_event("ceilings_measured", device=result["device"], ceilings=result["ceilings"])
        try:
            result["host_us"] = host.measure(self.timer, {case.op for case in cases})
            for index, case in enumerate(cases):
                self._on_event(
                    "case_started", case=case.name, op=case.op, index=index, total=len(cases), facts=case.facts()
                )
                began = time.monotonic()
                entry = self.case(case, self._seconds_for(len(cases) - index))
                result["cases"].append(entry)
                self._on_event(
                    "case_done",
                    case=case.name,
                    op=case.op,
                    index=index,
                    total=len(cases),
                    result=entry,
                    seconds=time.monotonic() - began,
                )
                self._release()
        except KeyboardInterrupt as interrupt:
            interrupt.partial = result  # type: ignore[attr-defined]
            raise
        return result

    def _seconds_for(self, remaining: int) -> float | None:
        """This case's part of what is left; checking and compiling come out of it too."""
        if self._ends is None:
            return None
        return max(LEAST_SECONDS, (self._ends - time.monotonic()) / remaining)

    def case(self, case: Case, seconds: float | None = None) -> dict[str, Any]:
        """Check ours and every peer on sampled rows, then time in turn all that are right."""
        return _CaseRun(self, case, seconds).result

    def _release(self) -> None:
        gc.collect()
        if self.timer.device.type == "cuda":
            torch.cuda.empty_cache()


class _CaseRun:
    def __init__(self, run: Run, case: Case, seconds: float | None) -> None:
        began = time.monotonic()
        self._timer, self._case, self._on_event = run.timer, case, run._on_event
        inputs = make(case, run.timer.device)
        self._sample = inputs.sample()
        work = inputs.work()
        self.result: dict[str, Any] = {
            "op": case.op,
            "case": case.name,
            "dtype": case.dtype,
            "head_dim": case.head_dim,
            "num_q_heads": case.num_q_heads,
            "num_kv_heads": case.num_kv_heads,
            **inputs.facts(),
            "ours": {},
            "peers": {},
            "floor_ms": _floor_ms(case.dtype, work.flops, work.bytes, run.result["ceilings"]),
            "flops": work.flops,
            "bytes": work.bytes,
            "max_abs_error": None,
        }
        self._calls: dict[str, tuple[Call, Wait | None]] = {}
        self._contestants: list[Contestant] = []  # a graph does not keep the memory alive that its call reads
        self._ours_ms: float | None = None
        self._entries: dict[str, dict[str, Any]] = {"ours": self.result["ours"]}
        self._enter("ours", lambda: Contestant(inputs.ours()))
        self.result["ours"]["path"] = _path(case, run.timer.device)
        for name, prepare in PEERS[case.op].items():
            self._entries[name] = self.result["peers"][name] = {}
            self._enter(name, lambda prepare=prepare: prepare(inputs))
        if seconds is not None:
            seconds = max(LEAST_SECONDS, seconds - (time.monotonic() - began))
        self._time(run._rounds, run._samples, seconds)

    def _enter(self, name: str, prepare: Any) -> None:
        """Check one contestant; it is timed only if it is right."""
        entry = self._entries[name]
        error: float | None = None
        try:
            contestant = prepare()
            if contestant.note:
                entry["note"] = contestant.note
            error = self._check(name, contestant)
            self._ready(name, contestant, entry)
        except Unavailable as reason:
            entry["error"] = f"skipped: {reason}"
        except _Wrong as wrong:
            error = wrong.max_abs_error
            entry["error"] = f"wrong: {wrong}"
        except Exception as problem:  # a peer may fail in any way; the others go on
            message = " ".join(str(problem).split())[:300]
            entry["error"] = f"{type(problem).__name__}: {message}"
        if name == "ours":
            self.result["max_abs_error"] = error
        self._on_event(
            "contestant_checked",
            case=self._case.name,
            contestant=name,
            ok="error" not in entry,
            error=entry.get("error"),
            max_abs_error=error,
        )

    def _check(self, name: str, contestant: Contestant) -> float:
        given = contestant.call()
        if contestant.wait is not None:
            contestant.wait(given)
        given = contestant.as_torch(given)
        out, lse = given if isinstance(given, tuple) else (given, None)
        agreement = self._sample.compare(out, lse, self._case.dtype, to_numpy)
        if not agreement.ok:
            raise _Wrong(str(agreement), agreement.max_abs_error)
        return agreement.max_abs_error

    def _ready(self, name: str, contestant: Contestant, entry: dict[str, Any]) -> None:
        timer, wait = self._timer, contestant.wait
        self._contestants.append(contestant)
        once = timer.once_ms(contestant.call, wait)
        if name == "ours":
            self._ours_ms = once
        elif self._absurd(once):
            once = min(once, timer.once_ms(contestant.call, wait))  # the first may have had something to compile
            if self._absurd(once):
                raise Unavailable(f"one call takes {once:.0f} ms")
        by_graph = self._case.short and contestant.capturable
        call = timer.prepare(contestant.call, by_graph)
        if wait is not None:
            timer.samples_ms(call, 1, wait)  # the profiler works, and is warm
            if timer.device.type == "cuda":
                entry["timing"] = "kernels, as the profiler saw them"
        elif by_graph and timer.device.type == "cuda":
            entry["timing"] = "graph replay"
        if self._case.short:
            entry["host_us"] = timer.host_us(contestant.call)
        self._calls[name] = (call, wait)

    def _absurd(self, ms: float) -> bool:
        return ms > SLOW_MS and self._ours_ms is not None and ms > SLOW_TIMES * self._ours_ms

    def _time(self, rounds: int, samples: int, seconds: float | None) -> None:
        def on_round(name: str, number: int, times: list[float]) -> None:
            self._on_event(
                "contestant_timed",
                case=self._case.name,
                contestant=name,
                ms=statistics.median(times),
                round=number,
                rounds=rounds,
            )

        for name, times in interleaved(self._timer, self._calls, rounds, samples, seconds, on_round).items():
            self._entries[name].update(ms=statistics.median(times), samples_ms=times)


class _Wrong(Exception):
    def __init__(self, text: str, max_abs_error: float) -> None:
        super().__init__(text)
        self.max_abs_error = max_abs_error


def environment(device: torch.device) -> dict[str, Any]:
    build = ragged_attention.build_info()
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "CPU",
        "driver": _driver() if on_gpu else None,
        "versions": {
            "ragged_attention": build["version"],
            "ragged_attention_cuda": build["cuda_version"],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if on_gpu else None,
            **{name.replace("-", "_"): _version(name) for name in DISTRIBUTIONS},
        },
        "commit": build["commit"].removesuffix("-dirty"),
        "dirty": build["commit"].endswith("-dirty"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _floor_ms(dtype: str, flops: int, size: int, rates: dict[str, Any]) -> float:
    matmul, copy = matmul_tflops(dtype, rates), float(rates["copy_tbps"])
    return 1e3 * max(flops / (matmul * 1e12), size / (copy * 1e12))


def _path(case: Case, device: torch.device) -> str:
    try:
        answer = ragged_attention.supports(
            case.function,
            device=device,
            dtype=case.dtype,
            head_dim=case.head_dim,
            group=case.num_q_heads // case.num_kv_heads,
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
