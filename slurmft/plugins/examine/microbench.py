"""Microbenchmarks of a job's devices and network.

`python -m slurmft.plugins.examine.microbench FOLDER`, under torchrun.

The ranks start, are bound and join a process group as those of a run do. Each writes what it
measured into a folder of its node: the matmuls first, in case the ranks cannot connect.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from slurmft.core import process
from slurmft.core.files import write_json
from slurmft.job import devices, process_group
from slurmft.node.profiles import bind_rank
from slurmft.plugins.examine.agent import REQUEST
from slurmft.plugins.examine.matmul import best_tflop_s

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MATMUL_S = 0.5
_WIDTH_CPU, _WIDTH_GPU = 1024, 8192
_MIB = 2**20
SIZES_BYTES = (8, 64 * 2**10, _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB)
_MOST_BYTES_CPU = 64 * _MIB
_ROUNDS, _SIZE_S = 20, 0.5
"""The most times, and the longest time, for one size."""


def main(argv: list[str]) -> None:
    """Measures as one rank."""
    process.die_with_parent()
    folder, rank = Path(argv[0]), os.environ["RANK"]
    request = json.loads((folder / REQUEST).read_text())
    bind_rank(os.environ)
    on_gpu = request["backend"] in ("auto", "nccl") and devices.usable()[0]
    device = devices.take(int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    found: dict[str, Any] = {"device": devices.name_of(device), "threads": torch.get_num_threads()}
    found["tflop_s"] = {name: matmul_tflop_s(device, kind) for name, kind in _PRECISIONS.items()}
    write_json(folder / f"rank-{rank}.json", found)
    world = process_group.init(request["backend"])
    found["backend"] = world.backend
    for times in all_reduces(world, request["seconds"]):
        found["all_reduce"] = times
        write_json(folder / f"rank-{rank}.json", found)  # at once: the next one may hang
    process_group.leave()


def matmul_tflop_s(device: torch.device, kind: torch.dtype) -> float:
    """The throughput of a matmul of two square matrices: the best in half a second, in TFLOP/s."""
    width = _WIDTH_CPU if device.type == "cpu" else _WIDTH_GPU
    left, right = (torch.randn(width, width, device=device).to(kind) for _ in range(2))
    return best_tflop_s(lambda: _timed(device, lambda: left @ right), width, _MATMUL_S)


def all_reduces(world: process_group.World, limit_s: float) -> Iterator[list[dict[str, float]]]:
    """Sums of fp32 tensors over all ranks, the small ones first, as long as there is time.

    Yields after each size what is known: bytes; seconds, the median on this rank; bus_bytes_s, what
    each rank sends and receives of it in a second if it goes around in a ring.
    """
    deadline = time.monotonic() + limit_s
    found: list[dict[str, float]] = []
    last_s = 0.0
    for size in SIZES_BYTES:
        grows = min(16.0, size / found[-1]["bytes"]) if found else 1.0  # a small one is all latency
        fits = time.monotonic() + 3 * last_s * grows < deadline
        fits &= size <= _MOST_BYTES_CPU or world.device.type != "cpu"
        if not world.share_object(fits):  # the main rank's clock decides for all
            break
        tensor = torch.zeros(max(1, size // 4), device=world.device)
        second_s = [_timed(world.device, partial(distributed.all_reduce, tensor)) for _ in "12"][1]
        left_s = min(_SIZE_S, max(0.0, deadline - time.monotonic()) / 4)
        rounds = world.share_object(max(1, min(_ROUNDS, int(left_s / max(second_s, 1e-6)))))
        times = [
            _timed(world.device, partial(distributed.all_reduce, tensor)) for _ in range(rounds)
        ]
        last_s = statistics.median(times)
        bus = 2 * (world.size - 1) / world.size * size / last_s
        found.append({"bytes": size, "seconds": last_s, "bus_bytes_s": bus})
        yield found


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    torch.get_device_module(device).synchronize()  # on a GPU the call above only queued it
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the process group's threads may wait for ranks that are gone
