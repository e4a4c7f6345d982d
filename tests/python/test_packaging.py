"""One version, one wheel: pyproject.toml alone states the version; scripts/check_wheel sees every fault of a wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ragged_attention

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
EXTENSION = "ragged_attention/_C.abi3.so"
METADATA = f"ragged_attention-{VERSION}.dist-info"
NAME = f"ragged_attention-{VERSION}-cp310-abi3-manylinux_2_34_x86_64.whl"


def test_the_package_and_the_changelog_have_the_version_of_pyproject():
    assert ragged_attention.__version__ == ragged_attention.build_info()["version"] == VERSION
    newest = re.search(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest[1] in (VERSION, "Unreleased")


def test_no_other_file_states_the_version():
    """A second place would be forgotten at a release. Pages and results may say what was measured."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    allowed = re.compile(r"pyproject\.toml|CHANGELOG\.md|\.ci/requirements\.txt|(tests|docs|benchmarks/results)/.*")
    files = [name for name in os.fsdecode(listed.stdout).split("\0") if name and not allowed.fullmatch(name)]
    number = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.]*\d)")
    found = {name for name in files if (ROOT / name).is_file() and number.search((ROOT / name).read_text("utf-8"))}
    assert not found


@pytest.fixture
def wheel_files() -> dict[str, bytes]:
    """What a wheel holds, with the extension that is installed here."""
    return {
        "ragged_attention/__init__.py": b"",
        "ragged_attention/_C.pyi": b"",
        "ragged_attention/py.typed": b"",
        EXTENSION: Path(ragged_attention._C.__file__).read_bytes(),
        f"{METADATA}/METADATA": f"Metadata-Version: 2.4\nName: ragged-attention\nVersion: {VERSION}\n".encode(),
        f"{METADATA}/licenses/LICENSE": b"",
    }


def check(folder: Path, files: dict[str, bytes], name: str = NAME) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("elftools")
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    command = [sys.executable, ROOT / "scripts/check_wheel", folder / name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("platforms", ["manylinux_2_34_x86_64", "manylinux_2_17_aarch64.manylinux2014_aarch64"])
def test_check_wheel_passes_a_sound_wheel(tmp_path, wheel_files, platforms):
    result = check(tmp_path, wheel_files, NAME.replace("manylinux_2_34_x86_64", platforms))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (NAME.replace("manylinux_2_34", "linux"), "got linux_x86_64"),
        (NAME.replace("2_34", "2_35"), "got manylinux_2_35_x86_64"),
        (NAME.replace("x86_64", "x86_64.linux_x86_64"), "got linux_x86_64"),
        (NAME.replace("cp310-abi3", "cp310-cp310"), "got cp310-cp310"),
        (NAME.replace("cp310-abi3", "cp311-abi3"), "got cp311-abi3"),
        (NAME.replace(VERSION, "9.9.9"), "name 9.9.9"),
        ("other-1.0-py3-none-any.whl", "its name"),
    ],
)
def test_check_wheel_reads_the_name(tmp_path, wheel_files, name, complaint):
    result = check(tmp_path, wheel_files, name)
    assert result.returncode == 1
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("path", "data", "complaint"),
    [
        ("ragged_attention/py.typed", None, "lacks ragged_attention/py.typed"),
        ("ragged_attention/_C.pyi", None, "lacks ragged_attention/_C.pyi"),
        (EXTENSION, None, f"lacks {EXTENSION}"),
        (f"{METADATA}/licenses/LICENSE", None, "licence"),
        (f"{METADATA}/METADATA", b"Version: 9.9.9\n", "its metadata 9.9.9"),
        ("tests/test_import.py", b"", "tests/test_import.py is no part"),
        ("ragged_attention/kernel.cu", b"", "kernel.cu is no part"),
        ("ragged_attention_libs/libcudart.so.13", b"", "is no part"),
    ],
)
def test_check_wheel_reads_the_files(tmp_path, wheel_files, path, data, complaint):
    if data is None:
        del wheel_files[path]
    else:
        wheel_files[path] = data
    if path.endswith(".so.13"):
        wheel_files[path] = wheel_files[EXTENSION]
    result = check(tmp_path, wheel_files)
    assert result.returncode == 1
    assert complaint in result.stderr


def test_check_wheel_holds_the_size(tmp_path, wheel_files):
    wheel_files["ragged_attention/data.py"] = bytes(30_000_000)  # stored as they are
    result = check(tmp_path, wheel_files)
    assert result.returncode == 1
    assert "over 30 MB" in result.stderr


@pytest.mark.parametrize("library", ["libcuda.so.1", "libcudart.13", "libnvrtc.so.1", "libpy.so.3.11"])
def test_check_wheel_reads_what_the_extension_needs(tmp_path, wheel_files, library):
    """A name in the extension's table of strings, exchanged for one as long."""
    needed = b"libgcc_s.so.1\0"
    assert wheel_files[EXTENSION].count(needed) == 1
    wheel_files[EXTENSION] = wheel_files[EXTENSION].replace(needed, library.encode().ljust(len(needed), b"\0"))
    result = check(tmp_path, wheel_files)
    assert result.returncode == 1
    assert f"must not need {library}" in result.stderr
