"""What a hang is judged by, on a device: steps that it has done, and NCCL's recorder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from slurmft.core.decode import decode
from slurmft.core.run_files import Calls
from slurmft.job.device_steps import DeviceSteps
from slurmft.node import flight_recorder

CYCLES = 2_000_000_000
"""About a second."""


def test_steps_count_when_the_device_has_done_them(device: torch.device) -> None:
    torch.ones(1, device=device)  # as of any program that uses it
    steps = DeviceSteps()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    assert steps.last_done(1) is None
    torch.cuda.synchronize()
    assert steps.last_done(2) in (1, 2)


def test_calls_of_nccl_are_recorded(device: torch.device, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=place, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1000, device=device))
        calls = decode(flight_recorder.recorded(), Calls)
    finally:
        dist.destroy_process_group()
    call = calls.calls[-1]
    assert (call.group, call.operation, call.bytes) == ("nccl:0", "all_reduce", 4000)
