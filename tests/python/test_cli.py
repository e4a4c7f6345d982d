"""`python -m ragged_attention`: what it prints, what it writes, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ragged_attention
from ragged_attention._cli import agreement, info, work

needs_rich = pytest.mark.skipif(not info.tables.has_rich(), reason="rich is not installed")

WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; import ragged_attention._cli as c; sys.exit(c.main(sys.argv[1:]))"
)


def command_line(*arguments, program=("-m", "ragged_attention")):
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    path = tmp_path_factory.mktemp("info") / "info.json"
    result = command_line("--json", path)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text()), result.stdout


def test_info_names_the_build(facts):
    written, printed = facts
    assert written["build"] == ragged_attention.build_info()
    assert ragged_attention.__version__ in printed
    assert ragged_attention.build_info()["commit"] in printed
    assert "R580" in printed
    assert written["cpu"]["threads"] >= 1


def test_info_lists_devices_or_says_why_there_is_none(facts):
    written, printed = facts
    devices = written["cuda"]["devices"]
    if devices:
        assert all(device["name"] in printed for device in devices)
    else:
        assert written["cuda"]["problem"]
        reasons = [answer["reason"] for answer in written["supports"] if answer["device"] == "cuda"]
        assert reasons
        assert all(reasons)


def test_info_agrees_with_supports_for_every_head_dim(facts):
    written, _ = facts
    seen = set()
    for answer in written["supports"]:
        if answer["device"] != "cpu":
            continue
        for dtype in answer["dtypes"]:
            for head_dim in answer["head_dims"]:
                expected = ragged_attention.supports(
                    answer["op"], device="cpu", dtype=dtype, head_dim=head_dim, group=answer["group"]
                )
                assert (answer["ok"], answer["path"], answer["reason"]) == expected
                assert (answer["op"], dtype, head_dim) not in seen
                seen.add((answer["op"], dtype, head_dim))
    assert len(seen) == 2 * 3 * 32


def test_info_imports_no_framework():
    code = """
import sys
from ragged_attention import _cli
_cli.main([])
print([name for name in ("torch", "cupy", "jax") if name in sys.modules])
"""
    result = command_line(program=("-c", code))
    assert result.stdout.strip().splitlines()[-1] == "[]", result.stderr


def test_info_without_rich_is_plain_text_that_names_the_extra():
    result = command_line(program=("-c", WITHOUT_RICH))
    assert result.returncode == 0, result.stderr
    assert ragged_attention.__version__ in result.stdout
    assert "ragged-attention[cli]" in result.stdout
    assert "qsa_sparse_attention" in result.stdout


def test_demo_without_rich_names_the_extra():
    result = command_line("demo", program=("-c", WITHOUT_RICH))
    assert result.returncode == 2
    assert "ragged-attention[cli]" in result.stderr


@needs_rich
def test_demo_on_the_cpu(tmp_path):
    path = tmp_path / "demo.json"
    result = command_line("demo", "--device", "cpu", "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(path.read_text())
    assert written["ok"]
    assert [case["op"] for case in written["cases"]] == ["ragged_flash_attention"] * 2 + ["qsa_sparse_attention"] * 2
    for case in written["cases"]:
        assert case["ok"]
        assert case["path"] == "cpu"
        assert case["ms"] == np.median(case["samples_ms"]) > 0
        assert case["flops"] > 0
        assert 0 < case["max_abs_error"] < 1e-4
        assert case["case"] in result.stdout
    assert result.stdout.count("✓") == 4


@needs_rich
@pytest.mark.skipif(bool(ragged_attention._C.cuda_devices()["devices"]), reason="there is a GPU")
def test_demo_on_a_missing_gpu_says_why():
    result = command_line("demo", "--device", "cuda")
    assert result.returncode == 2
    assert "cannot run" in result.stderr
    assert ragged_attention._C.cuda_devices()["problem"] in result.stderr


@needs_rich
def test_demo_with_a_framework_that_is_not_there_says_so():
    result = command_line("demo", "--device", "cpu", "--framework", "cupy")
    assert result.returncode == 2
    assert "cupy has no tensors on cpu" in result.stderr


@needs_rich
def test_demo_fails_when_a_result_is_wrong():
    code = """
import sys
from ragged_attention import _cli
from ragged_attention._cli import demo
right = demo.ragged_flash_attention
def wrong(*arguments, **parameters):
    out, lse = right(*arguments, **parameters)
    return out * 1.01, lse
demo.ragged_flash_attention = wrong
demo.demos_for = lambda arrays: [demo.RaggedDemo("windows", "4 x 16", (16,) * 4, 2, 1, 16, "null")]
sys.exit(_cli.main(["demo", "--device", "cpu", "--framework", "numpy"]))
"""
    result = command_line(program=("-c", code))
    assert result.returncode == 1, result.stderr
    assert "✗" in result.stdout


def test_an_unknown_command_is_refused():
    result = command_line("sing")
    assert result.returncode == 2
    assert "info" in result.stderr
    assert "demo" in result.stderr


@pytest.mark.parametrize(
    ("head_dims", "text"),
    [
        (list(range(8, 257, 8)), "8 to 256"),
        ([64], "64"),
        ([64, 72, 80, 96, 128], "64 to 80, 96, 128"),
        ([8, 16, 256], "8, 16, 256"),
    ],
)
def test_head_dims_are_described_as_ranges(head_dims, text):
    assert info.describe_head_dims(head_dims) == text


def test_agreement_finds_zeros_nan_and_a_wrong_lse():
    rng = np.random.default_rng(1)
    exact = 0.01 * rng.standard_normal((5, 2, 8))
    lse = rng.standard_normal((5, 2))
    sample = agreement.Sample([0, 1, 2, 3, 4], exact, lse)
    assert sample.compare(exact, lse, "bfloat16", np.asarray).ok
    assert sample.compare(exact, None, "bfloat16", np.asarray).lse_error is None
    assert not sample.compare(np.zeros_like(exact), lse, "bfloat16", np.asarray).ok
    assert not sample.compare(exact, lse + 1e-3, "bfloat16", np.asarray).ok
    spoilt = exact.copy()
    spoilt[3, 1, 4] = np.nan
    assert not sample.compare(spoilt, lse, "bfloat16", np.asarray).ok


def test_work_of_known_cases():
    assert work.visible_pairs([4, 4, 0], "null") == 32
    assert work.visible_pairs([4], "causal") == 10
    assert work.visible_pairs([10], "sliding_window_causal", 3) == 27
    assert work.ragged_work([4], 6, 2, 8, 2, "causal") == work.Work(4 * 10 * 8 * 6, 4 * 2 * 8 * 8 * 2)
