"""PEP 517 backend: scikit-build-core, plus the CUTLASS headers where the build will compile CUDA.

scikit-build-core has no condition for "a CUDA compiler is present", and the CUTLASS wheel pulls in SciPy and others, so
a CPU-only build should not ask for it.
"""

import os
import shutil
from pathlib import Path

from scikit_build_core import build as _backend
from scikit_build_core.build import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

CUTLASS = "nvidia-cutlass==4.2.0.0"  # headers only; see third_party/README.md


def _wants_cutlass(config_settings):
    option = str((config_settings or {}).get("cmake.define.RAGGED_ATTENTION_CUDA", "AUTO")).upper()
    if option in ("OFF", "0", "FALSE", "NO") or os.environ.get("CUTLASS_DIR"):
        return False
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))  # where cmake/Cuda.cmake looks too
    return (
        option in ("ON", "1", "TRUE", "YES")
        or bool(os.environ.get("CUDACXX"))
        or shutil.which("nvcc") is not None
        or any(home and Path(home, "bin", "nvcc").exists() for home in homes)
    )


def get_requires_for_build_wheel(config_settings=None):
    needs = list(_backend.get_requires_for_build_wheel(config_settings))
    return needs + ([CUTLASS] if _wants_cutlass(config_settings) else [])


def get_requires_for_build_editable(config_settings=None):
    needs = list(_backend.get_requires_for_build_editable(config_settings))
    return needs + ([CUTLASS] if _wants_cutlass(config_settings) else [])
