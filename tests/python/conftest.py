"""Devices, frameworks, random numbers, and which tests a machine can run.

Three fixtures give the place to run: `backend`, one framework for each device, for everything about arithmetic; `path`,
the same and the portable CUDA kernels where a GPU would take its own; and `framework`, every framework on every device,
for what the way in and out could change.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import _frameworks
import _record
import numpy as np
import pytest

import ragged_attention

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU that tests share

SEED_VARIABLE = "RAGGED_ATTENTION_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the tests marked large on the CPU too")
    parser.addoption("--record", type=Path, metavar="FILE.json", help="write what the run came to (tests/results)")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_record.Recorder(file))
    # In the environment, so that the workers of pytest-xdist share it. A failure is repeated by setting it.
    os.environ.setdefault(SEED_VARIABLE, str(int.from_bytes(os.urandom(4), "little")))


def pytest_report_header() -> str:
    usable = [f"{name}-{device}" for name, device in _frameworks.ALL if _frameworks.why_not(name, device) is None]
    return f"ragged-attention: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}, frameworks: {', '.join(usable)}"


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties.append(("on", _record.where(item)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--large"):
        return
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.get_closest_marker("large") and parameters.get("backend", parameters.get("path", "cpu")) == "cpu":
            item.add_marker(pytest.mark.skip(reason="large: runs on a GPU, and on the CPU only with --large"))


@pytest.fixture(scope="session")
def hopper() -> _frameworks.Framework:
    """torch on a GPU that the Hopper kernels run on."""
    framework = _frameworks.open_framework("torch", "cuda")
    major, minor = framework.xp.cuda.get_device_capability()
    if not _frameworks.is_hopper(framework):
        pytest.skip(f"the Hopper kernels need compute capability 9.0; the GPU here has {major}.{minor}")
    architectures = ragged_attention.build_info()["cuda_architectures"]
    if "90a-real" not in architectures.split(";"):
        pytest.skip(f"this build has no Hopper kernels, only kernels for {architectures or 'the CPU'}")
    return framework


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> _frameworks.Framework:
    return _frameworks.first_framework(request.param)


@pytest.fixture(scope="session", params=_frameworks.PATHS)
def path(request: pytest.FixtureRequest) -> _frameworks.Framework:
    """`backend`, and the portable CUDA kernels by themselves where a GPU has kernels of its own."""
    return _frameworks.open_path(request.param)


@pytest.fixture(scope="session", params=_frameworks.ALL, ids="-".join)
def framework(request: pytest.FixtureRequest) -> _frameworks.Framework:
    return _frameworks.open_framework(*request.param)


@pytest.fixture(scope="session")
def numpy_cpu() -> _frameworks.Framework:
    return _frameworks.open_framework("numpy", "cpu")


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def torch_device(request: pytest.FixtureRequest) -> _frameworks.Framework:
    return _frameworks.open_framework("torch", request.param)


@pytest.fixture(scope="session")
def torch_cuda() -> _frameworks.Framework:
    return _frameworks.open_framework("torch", "cuda")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh numbers in every run, the same in a repeat with the same seed, others in every test."""
    return np.random.default_rng([int(os.environ[SEED_VARIABLE]), zlib.crc32(request.node.nodeid.encode())])
