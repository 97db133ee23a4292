"""Microbenchmarks of a job's devices and network:
`python -m slurmft.plugins.examine.microbench FOLDER`, under torchrun.

The ranks start, are bound and join a process group as those of a run do. Each writes its RankReport
into a folder of its node: the matmuls first, in case the ranks cannot connect.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as distributed

from slurmft.core import process
from slurmft.core.files import write_json
from slurmft.job import devices, process_group
from slurmft.node.profiles import bind_rank
from slurmft.plugins.examine.agent import REQUEST
from slurmft.plugins.examine.matmul import best_tflop_s
from slurmft.plugins.examine.measurements import AllReduce, RankReport

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MATMUL_S = 0.5
_WIDTH_CPU = 1024
_WIDTH_GPU = 8192
_MIB = 2**20
SIZES_BYTES = (
    8,
    64 * 2**10,
    _MIB,
    16 * _MIB,
    64 * _MIB,
    256 * _MIB,
)
_MOST_BYTES_CPU = 64 * _MIB
_MOST_ROUNDS = 20
# How long one size is measured at most.
_MOST_SIZE_S = 0.5
# A larger size takes at most so many times longer. A small one is all latency.
_MOST_GROWTH = 16.0


def main(argv: list[str]) -> None:
    """Measures as one rank."""
    # Where torchrun is killed at the time limit, no rank goes on measuring.
    process.die_with_parent()
    folder = Path(argv[0])
    file = folder / f"rank-{os.environ['RANK']}.json"
    request = json.loads((folder / REQUEST).read_text())
    bind_rank(os.environ)
    device = torch.device("cpu")
    if request["backend"] in ("auto", "nccl") and devices.usable()[0]:
        device = devices.take(int(os.environ["LOCAL_RANK"]))
    speeds = {}
    for name, kind in _PRECISIONS.items():
        speeds[name] = matmul_tflop_s(device, kind)
    report = RankReport(
        device=devices.name_of(device),
        threads=torch.get_num_threads(),
        tflop_s=speeds,
    )
    write_json(file, asdict(report))

    def note(backend: str) -> None:
        # Before the first collective, which may hang.
        write_json(file, asdict(replace(report, backend=backend)))

    world = process_group.init(request["backend"], note)
    report = replace(report, backend=world.backend)
    for row in all_reduces(world, request["seconds"]):
        report = replace(report, all_reduce=(*report.all_reduce, row))
        write_json(file, asdict(report))  # at once: the next size may hang
    process_group.leave()


def matmul_tflop_s(device: torch.device, kind: torch.dtype) -> float:
    """Returns the speed of a product of two square matrices: the best in half a second."""
    width = _WIDTH_CPU
    if device.type != "cpu":
        width = _WIDTH_GPU
    left = torch.randn(width, width, device=device).to(kind)
    right = torch.randn(width, width, device=device).to(kind)

    def multiply() -> None:
        _timed(device, lambda: left @ right)  # waits for the device

    return best_tflop_s(multiply, width, _MATMUL_S)


def all_reduces(world: process_group.World, limit_s: float) -> Iterator[AllReduce]:
    """Measures sums of fp32 tensors over all ranks, the small ones first, as long as there is
    time."""
    deadline = time.monotonic() + limit_s
    last: AllReduce | None = None
    for size in SIZES_BYTES:
        expected_s = 0.0
        if last is not None:
            expected_s = last.seconds * min(_MOST_GROWTH, size / last.size_bytes)
        # Three times: one to connect, one to estimate, one at least to measure.
        has_time = time.monotonic() + 3 * expected_s < deadline
        is_too_large = size > _MOST_BYTES_CPU and world.device.type == "cpu"
        # The main rank's clock decides for all.
        if not world.share_object(has_time and not is_too_large):
            return
        last = _measure(world, size, deadline)
        yield last


def _measure(world: process_group.World, size: int, deadline: float) -> AllReduce:
    element_count = max(1, size // 4)  # of fp32
    tensor = torch.zeros(element_count, device=world.device)
    reduce = partial(distributed.all_reduce, tensor)
    _timed(world.device, reduce)  # connects the ranks
    second_s = _timed(world.device, reduce)
    # A quarter of the time that is left: the larger sizes take longer.
    left_s = max(0.0, deadline - time.monotonic())
    size_s = min(_MOST_SIZE_S, left_s / 4)
    rounds = int(size_s / max(second_s, 1e-6))
    rounds = max(1, min(_MOST_ROUNDS, rounds))
    # All ranks must call it equally often.
    rounds = world.share_object(rounds)
    times = [_timed(world.device, reduce) for _ in range(rounds)]
    seconds = statistics.median(times)
    # In a ring, each rank sends all but its own part twice.
    sent_bytes = 2 * (world.size - 1) / world.size * size
    bus_bytes_s = sent_bytes / seconds
    return AllReduce(size_bytes=size, seconds=seconds, bus_bytes_s=bus_bytes_s)


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    # on a GPU the call above only queued it
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the process group's threads may wait for ranks that are gone
