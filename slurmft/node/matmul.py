"""The speed of this node's devices: `python -m slurmft.node.matmul [gpu]` prints a line of JSON,
with TFLOP/s of each GPU, or of the CPUs together, and with GPUs that fail.

A process of its own: a broken GPU may take it down.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS, _WIDTH_CPU, _WIDTH_GPU = 0.2, 768, 8192


def main(argv: list[str]) -> None:
    found = _gpus() if argv == ["gpu"] else {"tflop_s": [_cpus()], "problems": []}
    print(json.dumps(found))


def _cpus() -> float:
    import numpy as np  # in a tenth of the time of torch

    left, right = np.random.default_rng(0).random((2, _WIDTH_CPU, _WIDTH_CPU), np.float32)
    return best_tflop_s(lambda: left @ right, _WIDTH_CPU)


def _gpus() -> dict[str, Any]:
    import torch

    module = torch.get_device_module(torch.accelerator.current_accelerator())
    speeds, problems = [], []
    for index in range(torch.accelerator.device_count()):
        try:
            module.set_device(index)
            device = torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
            left, right = torch.randn(2, _WIDTH_GPU, _WIDTH_GPU, device=device).bfloat16()

            def multiply(left: Any = left, right: Any = right) -> None:
                left @ right
                module.synchronize()

            speeds.append(best_tflop_s(multiply, _WIDTH_GPU))
        except RuntimeError as error:
            problems.append(f"GPU {index}: {error}".partition("\n")[0])
    return {"tflop_s": speeds, "problems": problems}


def best_tflop_s(multiply: Callable[[], object], width: int) -> float:
    """That of the fastest product: what else the node does slows down some, not all."""
    multiply()  # prepares the library
    times, until = list[float](), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - began)
    return 2 * width**3 / min(times) / 1e12


if __name__ == "__main__":
    main(sys.argv[1:])
