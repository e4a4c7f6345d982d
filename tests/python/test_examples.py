"""Every example runs, as a user runs it: in a process of its own. Each checks its own results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _frameworks import optional, why_not

EXAMPLES = Path(__file__).parents[2] / "examples"

# What each needs: a package, or a package and a device.
NEEDS = {
    "cupy_sparse_decode.py": [("cupy", "cuda")],
    "jax_layer.py": ["jax"],
    "numpy_encoder.py": [],
    "numpy_sparse_decode.py": ["ml_dtypes"],
    "transformers_models.py": ["torch", "transformers"],
}


def test_every_example_is_here():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_the_example_runs(name):
    for need in NEEDS[name]:
        reason = why_not(*need) if isinstance(need, tuple) else None if optional(need) else f"{need} is not installed"
        if reason is not None:
            pytest.skip(reason)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment)
    print(done.stdout)  # the times of both, in a test's captured output
    assert done.returncode == 0, done.stderr[-4000:]
