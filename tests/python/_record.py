"""`--record=FILE.json`: what a run of the tests came to, in the form that scripts/reliability_page reads."""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import _frameworks
import pytest

import ragged_attention

COUNTS = ("examples", "bad_values")  # properties of tests that count what happened inside them


def where(item: pytest.Item) -> str:
    """On what a test ran: "cpu", "cuda", "cuda_portable", or "host" for one that computes nothing on a device."""
    for value in getattr(item, "funcargs", {}).values():
        value = getattr(value, "framework", value)
        if isinstance(value, _frameworks.PortableTorch):
            return "cuda_portable"
        if isinstance(value, _frameworks.Framework):
            return value.device
    return "host"


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.began = time.monotonic()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.counts: dict[str, dict[str, int]] = collections.defaultdict(dict)
        self.skipped: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and (report.when != "setup" or report.passed):
            if report.failed:  # in its end
                self.outcomes["failed"] += 1
            elif report.when == "teardown":  # by now a test has counted what it has to count
                self.count(report)
            return
        self.outcomes[report.outcome] += 1
        properties = dict(report.user_properties)
        name = report.nodeid.partition("::")[0].rpartition("/")[2]
        self.files[name][properties.get("on", "host") if report.passed else report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def count(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        for kind in COUNTS:
            if kind in properties:
                test = report.nodeid.rpartition("::")[2]
                self.counts[kind][test] = self.counts[kind].get(test, 0) + properties[kind]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        build = ragged_attention.build_info()
        device = f"{platform.machine()}, {build['cpu_isa']}"
        if _frameworks.why_not("torch", "cuda") is None:
            torch = _frameworks.open_framework("torch", "cuda").xp
            device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        record: dict[str, Any] = {
            "kind": "tests",
            "passed": exitstatus == 0,  # an interrupted run has not passed
            "outcomes": dict(sorted(self.outcomes.items())),
            "files": {name: dict(sorted(counts.items())) for name, counts in sorted(self.files.items())},
            "counts": {kind: dict(sorted(counts.items())) for kind, counts in sorted(self.counts.items())},
            "skipped": dict(self.skipped.most_common()),
            "profile": os.environ.get("HYPOTHESIS_PROFILE", "ci"),
            "seconds": round(time.monotonic() - self.began, 1),
            "device": device,
            "commit": build["commit"].removesuffix("-dirty"),
            "dirty": build["commit"].endswith("-dirty"),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        self.file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
