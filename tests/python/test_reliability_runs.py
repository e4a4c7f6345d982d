"""The scripts whose long runs docs/reliability.md tells of, in short; and that page."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _checks import importing_from
from _frameworks import has_gpu, optional

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # other tests run beside it
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False)


def pytest_in(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a run of pytest in this folder, with the recorder of these tests, wrote down."""
    tests = ROOT / "tests" / "python"
    (folder / "conftest.py").write_text(
        "from pathlib import Path\n"
        "import _record\n"
        "def pytest_addoption(parser): parser.addoption('--record', type=Path)\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(_record.Recorder(config.getoption('--record')))\n"
        "def pytest_runtest_setup(item): item.user_properties.append(('on', 'host'))\n"
    )
    record = folder / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--record={record}", *arguments]
    environment = {**os.environ, **importing_from(tests)}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=100, check=False)
    return json.loads(record.read_text())  # type: ignore[no-any-return]


def test_a_run_of_tests_is_recorded(tmp_path):
    (tmp_path / "test_them.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('examples', 12)\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_skipped(n): pytest.skip('no such thing here')\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\n"
        "def broken(): yield; raise RuntimeError\n"
        "def test_bad_at_its_end(broken): pass\n"
        "def test_interrupted(): raise KeyboardInterrupt\n"
    )
    good = pytest_in(tmp_path, "-k", "good or skipped")
    assert good["passed"]
    assert good["outcomes"] == {"passed": 1, "skipped": 2}
    assert good["files"] == {"test_them.py": {"host": 1, "skipped": 2}}
    assert good["counts"] == {"examples": {"test_good": 12}}
    assert good["skipped"] == {"no such thing here": 2}
    for name in ("test_bad", "test_bad_at_its_end", "test_interrupted"):
        assert not pytest_in(tmp_path, "-k", f"good or {name}")["passed"], name


def module(name: str) -> Any:
    """A script as a module: most have no suffix."""
    path = ROOT / "scripts" / name
    loader = importlib.machinery.SourceFileLoader(name.removesuffix(".py"), str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = found  # where dataclasses look for it
    loader.exec_module(found)
    return found


needs_torch = pytest.mark.skipif(optional("torch") is None, reason="torch is not installed")


# The page


def test_the_page_is_made_from_the_records():
    done = script("reliability_page", "--check")
    assert done.returncode == 0, done.stderr


COMMON = {"device": "some device", "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02T03:04:05+00:00"}
RECORDS: dict[str, dict[str, Any]] = {
    "tests-cpu": {
        "kind": "tests",
        "outcomes": {"passed": 1234, "skipped": 7},
        "files": {"test_x.py": {"cpu": 1200, "host": 34, "skipped": 7}},
        "counts": {"examples": {"test_a_b[cpu]": 4321}, "bad_values": {"test_every[numpy-cpu-op]": 567}},
    },
    "fuzz-cpu-sanitised": {
        "kind": "fuzz",
        "calls": 7654321,
        "arguments_replaced": 8888888,
        "outcomes": {"ValueError": 654321, "returned": 7000000},
        "good_calls_repeated": 300,
        "sanitised": True,
    },
    "cpp-sanitised": {"kind": "cpp", "cases": 31, "assertions": 4000},
    "endurance-h200": {
        "kind": "endurance",
        "calls": 1000256,
        "shapes": 256,
        "us_early_and_late": [10.5, 10.6],
        "growth": {"host_bytes": 4096, "device_bytes": 0},
        "problems": [],
    },
    "sanitizer-racecheck-h200-1of2": {
        "kind": "sanitizer",
        "tool": "racecheck",
        "shard": "1/2",
        "cases": 150,
        "cases_chosen": 150,
        "reports": 2,
        "reports_by_kind": {"Hazard": 2},
        "passed": False,
    },
    "quality-h200": {
        "kind": "quality",
        "margin": 1.1,
        "cases_chosen": 1,
        "cases": [
            {
                "op": "ragged_flash_attention",
                "case": "mixed",
                "inputs": "normal",
                "dtype": "bfloat16",
                "ours": {"rms": 0.00125},
                "peers": {"fa3": {"rms": 0.0013}},
                "left_out": {"cudnn": "not installed"},
                "ratio": 0.96,
            }
        ],
    },
}


def write_records(folder: Path, records: dict[str, dict[str, Any]]) -> None:
    folder.mkdir()
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps({"passed": True, **COMMON, **record}))


def page_of(tmp_path: Path, records: dict[str, dict[str, Any]]) -> str:
    write_records(tmp_path / "results", records)
    done = script("reliability_page", "--results", str(tmp_path / "results"), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    return (tmp_path / "reliability.md").read_text(encoding="utf-8")


def test_a_page_of_every_kind_of_record(tmp_path):
    text = page_of(tmp_path, RECORDS)
    for told in ("1,234 passed", "4,321", "567", "7,654,321 calls", "31 cases", "1,000,256", "2 Hazard", "0.96"):
        assert told in text, told
    assert "**failed**" in text  # racecheck reported something, and nobody has said what it is
    absent = text.partition("No record yet")[2].partition("## ")[0].splitlines()
    for run in module("reliability_page").RUNS:
        recorded = any(re.sub(r"-\d+of\d+$", "", name) == run.name for name in RECORDS)
        assert (f"* {run.what}" in absent) == (not recorded), run.name
        assert f"tests/results/{run.name}.json" in text.partition("## Repeating")[2]
    assert "`cudnn`: not installed" in text


def test_a_page_without_records_claims_nothing(tmp_path):
    text = page_of(tmp_path, {})
    assert "There is no record yet." in text
    assert "passed" not in text
    for run in module("reliability_page").RUNS:
        assert f"* {run.what}\n" in text


def test_an_explained_report_is_not_a_failure_but_stays_on_the_page(tmp_path):
    name = "sanitizer-racecheck-h200-1of2"
    text = page_of(tmp_path, {name: {**RECORDS[name], "explanation": "a TMA copy, which the tool does not follow"}})
    assert "**failed**" not in text
    assert "explained" in text
    assert "which the tool does not follow" in text


def test_a_record_of_no_run_is_refused(tmp_path):
    write_records(tmp_path / "results", {"tests-of-something": RECORDS["tests-cpu"]})
    done = script("reliability_page", "--results", str(tmp_path / "results"), "--docs", str(tmp_path))
    assert done.returncode == 2
    assert "tests-of-something.json" in done.stderr


def test_what_the_page_names_exists():
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`(test_\w+\.py)`", text)):
        assert (ROOT / "tests/python" / name).exists(), name
    for name in set(re.findall(r"\bscripts/[\w.]+", text)):
        assert (ROOT / name).exists(), name


# Endurance


def test_endurance(tmp_path):
    device = "cuda" if has_gpu() and optional("torch") else "cpu"
    out = tmp_path / "record.json"
    # On a GPU so many that its queue fills up between two waits.
    calls = 100_000 if device == "cuda" else 5_000
    done = script("endurance", "--device", device, "--calls", str(calls), "--out", str(out))
    record = json.loads(out.read_text())
    # A few thousand calls of a process that has just started, beside other tests: bits and objects tell, time does not,
    # nor the memory of a GPU on which others are.
    problems = [what for what in record["problems"] if not re.match("a call took|device memory", what)]
    assert not problems, problems
    assert done.returncode == bool(record["problems"]), done.stderr
    assert record["calls"] >= calls


# The memory checker's cases


@needs_torch
def test_the_memory_checkers_cases_are_right_on_the_cpu():
    done = script("sanitizer_cases.py", "--device", "cpu", "--shard", "3/12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^(\d+) of \1 cases, 0 wrong$", done.stdout, re.MULTILINE)


@needs_torch
def test_shards_are_all_cases():
    sanitizer_cases = module("sanitizer_cases.py")
    names = [name for name, _ in sanitizer_cases.Cases("cpu", compare=False).list()]
    assert len(names) == len(set(names))
    assert sorted(name for i in range(7) for name in names[i::7]) == sorted(names)
    for text in ("0/3", "4/3"):
        with pytest.raises(Exception, match="I/N"):
            sanitizer_cases.shard(text)


LOGS = {
    ("memcheck", "========= ERROR SUMMARY: 0 errors\n5 of 5 cases, 0 wrong\n", 0): (True, 0),
    ("memcheck", "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 3 errors\n", 9): (
        False,
        3,
    ),
    ("memcheck", "5 of 5 cases, 1 wrong\n========= ERROR SUMMARY: 0 errors\n", 1): (False, 0),
    ("memcheck", "4 of 5 cases, 0 wrong\n========= ERROR SUMMARY: 0 errors\n", 0): (False, 0),
    (
        "racecheck",
        "5 of 5 cases, 0 wrong\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        0,
    ): (
        True,
        0,
    ),
    (
        "racecheck",
        "5 of 5 cases, 0 wrong\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
        9,
    ): (
        False,
        1,
    ),
    ("synccheck", "  1 ragged float32: ok\n", -9): (False, None),  # killed before it came to its end
}


@pytest.mark.parametrize("log", LOGS)
def test_what_the_tools_say_is_read(log):
    tool, text, status = log
    record = module("sanitize").judge(tool, text.splitlines(), status)
    assert (record["passed"], record["reports"]) == LOGS[log]


def race(kernel: str, cases: str = "5 of 5 cases, 0 wrong") -> list[str]:
    at = f"void ragged_attention::sm90::{kernel}(ragged_attention::sm90::Params)+0x10"
    return [
        f"========= Error: Race reported between Write access at {at}",
        f"=========     and Read access at {at} [8 hazards]",
        cases,
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]


def test_a_report_is_explained_for_the_kernels_that_were_looked_into_alone():
    judge = module("sanitize").judge
    known = "ragged_kernel<ragged_attention::sm90::RaggedTraits<cutlass::half_t, (int)192, (bool)1>>"
    other = "ragged_kernel<ragged_attention::sm90::RaggedTraits<cutlass::half_t, (int)64, (bool)1>>"
    record = judge("racecheck", race(known), 9)
    assert not record["passed"]
    assert "named barrier" in record["explanation"]
    assert "explanation" not in judge("racecheck", race(other), 9)
    assert "explanation" not in judge("racecheck", [*race(known), *race(other)], 9)
    assert "explanation" not in judge("synccheck", race(known), 9)
    assert "explanation" not in judge("racecheck", race(known, "4 of 5 cases, 0 wrong"), 9)


# Numerical quality


@needs_torch
def test_numerical_quality_on_the_cpu(tmp_path):
    out = tmp_path / "record.json"
    done = script("numerical_quality", "--device", "cpu", "--out", str(out), "--seconds", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["passed"]
    assert {case["inputs"] for case in record["cases"]} == set(module("numerical_quality").INPUTS)
    assert {case["op"] for case in record["cases"]} == {"ragged_flash_attention", "qsa_sparse_attention"}
    assert all("sdpa" in case["peers"] for case in record["cases"] if case["op"] == "ragged_flash_attention")


@needs_torch
def test_its_float64_is_the_references(rng):
    quality = module("numerical_quality")
    for kind, case in quality.cases("cpu"):
        inputs = quality.make(case, "cpu")
        quality.shape_inputs(kind, inputs)
        sample = inputs.sample()
        error = quality.exact(inputs, sample.rows).numpy() - sample.out
        assert abs(error).max() < 1e-9, (kind, case.name)
