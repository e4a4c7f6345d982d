"""What a call costs the host inside a program of XLA: through the compiled handler, and through a Python callback.

    python scripts/jax_call_cost.py [cpu|cuda]

The second way, jax.experimental.buffer_callback, is the one that ragged_attention.integrations.jax did not take; see
docs/jax.md. The tensors are tiny, so that what is left is the way in. On CUDA each is timed once more where command
buffers (CUDA graphs) are allowed to hold the call.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GRAPHS = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
CALLS = 50  # in one program


def measure(platform: str, graphs: str) -> None:
    import jax
    import numpy as np
    from jax.experimental.buffer_callback import buffer_callback

    import ragged_attention

    ragged_attention.set_num_threads(1)
    device = jax.devices(platform)[0]
    rng = np.random.default_rng(0)
    q, k, v = (jax.device_put(rng.standard_normal((2, 2, 64)).astype(np.float16), device) for _ in range(3))
    offsets = jax.device_put(np.array([0, 1, 2], np.int32), device)

    def through_python(context: Any, out: Any, *operands: Any) -> None:
        if platform == "cpu":
            ragged_attention.ragged_flash_attention(*map(np.asarray, operands), out=np.asarray(out))
        else:
            cupy = sys.modules.get("cupy") or __import__("cupy")
            with cupy.cuda.ExternalStream(context.stream):
                ragged_attention.ragged_flash_attention(*map(cupy.asarray, operands), out=cupy.asarray(out))

    callback = buffer_callback(through_python, jax.ShapeDtypeStruct(q.shape, q.dtype), command_buffer_compatible=True)

    def program(attend: Callable[..., Any], calls: int) -> Callable[..., Any]:
        def run(q: Any, *rest: Any) -> Any:
            for _ in range(calls):
                q = attend(q, *rest)
            return q

        return jax.jit(run)

    def seconds(function: Callable[..., Any], repeats: int) -> float:
        samples = []
        for _ in range(9):
            begin = time.perf_counter()
            for _ in range(repeats):
                result = function(q, k, v, offsets)
            result.block_until_ready()
            samples.append((time.perf_counter() - begin) / repeats)
        return statistics.median(samples[2:])

    for name, attend in (("handler", ragged_attention.ragged_flash_attention), ("callback", callback)):
        try:
            one, many = seconds(program(attend, 1), 500), seconds(program(attend, 1 + CALLS), 20)
        except Exception as error:
            print(f"{platform:<9} {graphs:<7} {name:<9} {type(error).__name__}: {str(error)[:150]}")
            continue
        print(f"{platform:<9} {graphs:<7} {name:<9} {1e6 * one:16.1f} {1e6 * (many - one) / CALLS:16.2f}")


def main() -> int:
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
        return 0
    platform = sys.argv[1] if len(sys.argv) == 2 else "cpu"
    print(f"{'platform':<9} {'graphs':<7} {'way':<9} {'us, one call':>16} {'us, one more':>16}", flush=True)
    for graphs, setting in (("no", NO_GRAPHS), ("yes", GRAPHS)) if platform == "cuda" else (("-", ""),):
        environment = {**os.environ, "XLA_FLAGS": setting, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run([sys.executable, __file__, platform, graphs], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
