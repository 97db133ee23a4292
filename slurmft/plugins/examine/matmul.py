"""The speed of this node's devices: `python -m slurmft.plugins.examine.matmul [gpu]`.

It prints a line of JSON, with TFLOP/s of each GPU, or of one core, and with GPUs that fail.

A process of its own: a broken GPU may take it down.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS_CPU, _WIDTH_CPU = 0.05, 384
_SECONDS_GPU, _WIDTH_GPU = 0.2, 8192


def main(argv: list[str]) -> None:
    found = _gpus() if argv == ["gpu"] else {"tflop_s": [_core()], "problems": []}
    print(json.dumps(found))


def _core() -> float:
    # By the time of the CPU, not of a clock: what else the node computes is not to count.
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    import numpy as np  # in a tenth of the time of torch

    left, right = np.random.default_rng(0).random((2, _WIDTH_CPU, _WIDTH_CPU), np.float32)
    return best_tflop_s(lambda: left @ right, _WIDTH_CPU, _SECONDS_CPU, time.process_time)


def _gpus() -> dict[str, Any]:
    import torch

    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    module = torch.get_device_module(kind)
    speeds, problems = [], []
    for index in range(torch.accelerator.device_count()):
        try:
            module.set_device(index)
            left, right = torch.randn(2, _WIDTH_GPU, _WIDTH_GPU, device=kind).bfloat16()

            def multiply(left: Any = left, right: Any = right) -> None:
                left @ right
                module.synchronize()

            speeds.append(best_tflop_s(multiply, _WIDTH_GPU, _SECONDS_GPU))
        except RuntimeError as error:
            problems.append(f"GPU {index}: {error}".partition("\n")[0])
    return {"tflop_s": speeds, "problems": problems}


def best_tflop_s(
    multiply: Callable[[], object],
    width: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """That of the fastest of the products of some time."""
    multiply()  # prepares the library
    times, until = list[float](), clock() + seconds
    while clock() < until:
        began = clock()
        multiply()
        times.append(clock() - began)
    return 2 * width**3 / min(times) / 1e12


if __name__ == "__main__":
    main(sys.argv[1:])
