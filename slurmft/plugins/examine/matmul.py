"""The speed of this node's devices in matrix products: `python -m slurmft.plugins.examine.matmul
[gpu]` prints `report.Products` as a line of JSON.

It is a process of its own: a broken GPU may take it down. It imports little: every node of a
preflight starts it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS_CPU = 0.05
_WIDTH_CPU = 384
_SECONDS_GPU = 0.2
_WIDTH_GPU = 8192


def main(argv: list[str]) -> None:
    problems: list[str] = []
    if argv == ["gpu"]:
        speeds, problems = _gpus()
    else:
        speeds = [_core()]
    print(json.dumps({"tflop_s": speeds, "problems": problems}))


def _core() -> float:
    # Before the import: the BLAS library of numpy reads them once, when it is loaded.
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    import numpy as np  # imported in a tenth of the time of torch

    generator = np.random.default_rng(0)
    left, right = generator.random((2, _WIDTH_CPU, _WIDTH_CPU), np.float32)
    # CPU time, not the clock's: what else the node computes must not count.
    return best_tflop_s(
        lambda: left @ right,
        _WIDTH_CPU,
        _SECONDS_CPU,
        time.process_time,
    )


def _gpus() -> tuple[list[float], list[str]]:
    """Returns the speed of each GPU, and the errors of those that fail."""
    import torch

    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    module = torch.get_device_module(kind)
    speeds = []
    problems = []
    for index in range(torch.accelerator.device_count()):
        try:
            module.set_device(index)
            numbers = torch.randn(2, _WIDTH_GPU, _WIDTH_GPU, device=kind)
            left, right = numbers.bfloat16()

            def multiply(left: Any = left, right: Any = right) -> None:
                left @ right
                module.synchronize()

            speeds.append(best_tflop_s(multiply, _WIDTH_GPU, _SECONDS_GPU))
        except RuntimeError as error:
            problems.append(f"GPU {index}: {error}".partition("\n")[0])
    return speeds, problems


def best_tflop_s(
    multiply: Callable[[], object],
    width: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Repeats a product of two square matrices for some time; returns the speed of the fastest."""
    # prepares the library: the first call starts threads, and chooses kernels
    multiply()
    times = []
    end = clock() + seconds
    while clock() < end:
        began = clock()
        multiply()
        times.append(clock() - began)
    # Each number of the product is a sum of `width` products of two numbers.
    operations = 2 * width**3
    return operations / min(times) / 1e12


if __name__ == "__main__":
    main(sys.argv[1:])
