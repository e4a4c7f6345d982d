"""What the documentation shows runs, is drawn by the code it comes with, and links to something.

That its pages build, without a warning, is a step of .ci/run. The blocks of docs/torch.md are tested with the
integration that they are about.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import _frameworks
import pytest

import ragged_attention
import ragged_attention.integrations

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "framework", "device"),
    [
        ("README.md", "torch", "cpu"),
        ("docs/get_started.md", "torch", "cpu"),
        ("docs/numpy.md", "numpy", "cpu"),
        ("docs/cupy.md", "cupy", "cuda"),
    ],
)
def test_the_examples_of_a_page_run_from_top_to_bottom(page, framework, device):
    """In a process of their own. The pages of torch take the GPU where there is one."""
    if reason := _frameworks.why_not(framework, device):
        pytest.skip(reason)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL))
    assert "ragged_attention" in code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_the_pictures_are_what_the_code_draws(tmp_path):
    script = [sys.executable, ROOT / "scripts/contract_pictures"]
    subprocess.run([*script, "--check"], timeout=60, check=True)
    subprocess.run([*script, "--out", tmp_path], timeout=60, check=True)
    picture = tmp_path / "masks.svg"
    assert picture.read_text(encoding="utf-8") == read("docs/pictures/masks.svg")
    picture.write_text("<svg/>", encoding="utf-8")
    stale = subprocess.run([*script, "--check", "--out", tmp_path], capture_output=True, text=True, timeout=60)
    assert stale.returncode == 1
    assert str(picture) in stale.stderr


PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_of_the_repository(page):
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|#", target):
            assert ((ROOT / page).parent / target.partition("#")[0]).exists(), f"{page}: {target}"


def test_the_api_page_has_every_public_name():
    page = read("docs/api.md")
    names = [f"ragged_attention.{name}" for name in ragged_attention.__all__]
    names += [
        module.name
        for module in pkgutil.iter_modules(ragged_attention.integrations.__path__, "ragged_attention.integrations.")
    ]
    missing = [name for name in names if not re.search(rf":: {re.escape(name)}$", page, re.MULTILINE)]
    assert not missing


@pytest.mark.parametrize("operation", ["ragged_flash_attention", "qsa_sparse_attention"])
def test_a_contract_page_shows_the_signature(operation):
    shown = re.search(rf"^{operation}\((.*?)^\)", read(f"docs/{operation}.md"), re.MULTILINE | re.DOTALL)[1]
    parameters = inspect.signature(getattr(ragged_attention, operation)).parameters.values()
    expected, keyword = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            expected.append("*")
            keyword = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}".replace("'", '"')
        expected.append(parameter.name + default)
    assert [text.strip() for text in shown.strip().strip(",").split(",")] == expected


PEERS = {
    "fa3": "FlashAttention-3",
    "cudnn": "ragged cuDNN",
    "cudnn_dense": "dense cuDNN",
    "fa2": "FlashAttention-2",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "triton": "plain Triton",
}


@pytest.mark.parametrize("operation", ["ragged_flash_attention", "qsa_sparse_attention"])
def test_the_readme_has_the_means_of_the_performance_page(operation):
    section = read("docs/performance.md").split(f"\n## {operation}\n")[1].split("\n## ")[0]
    head, mean = (
        [cell.strip() for cell in re.search(rf"^\| {first} \|.*$", section, re.MULTILINE)[0].strip("|").split("|")]
        for first in ("case", "geometric mean[^|]*")  # the first is the newest run's
    )
    means = ", ".join(f"{PEERS[name]} {value}" for name, value in zip(head, mean, strict=True) if name in PEERS)
    assert f"* `{operation}`: {means}" in re.sub(r"\n  ", " ", read("README.md"))


def test_troubleshooting_quotes_what_the_code_says():
    """Its headings are what a user searches for: those of our own messages must be ours, word for word."""
    foreign = (
        "No module named",
        "GLIBC",
        "undefined symbol",
        "libcu",
        "CUDA driver version",
        "no kernel image",
        "torch.compile",
    )
    sources = [*ROOT.glob("cpp/**/*.cpp"), *ROOT.glob("cmake/*"), ROOT / "third_party/cutlass.cmake"]
    sources += ROOT.glob("src/**/*.py")
    # String literals that a compiler joins, and lines that are wrapped inside of them.
    joined = re.sub(r'"\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    quotes = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^### .*$", read("docs/troubleshooting.md"), re.MULTILINE)))
    ours = [quote for quote in quotes if not quote.startswith(foreign)]
    assert len(ours) >= 5
    for quote in ours:
        for part in re.split(r"\.\.\.|cuda:0|sm_|\(|\)", quote):
            assert part.strip(" ,") in joined, quote
