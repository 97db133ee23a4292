"""A node's look at itself: its folders, its GPUs and their errors, its hardware and software.

A preflight runs this in every task of a job: what only doctor needs is imported where it is used.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slurmft.core import filesystem
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import one_line
from slurmft.core.program import Program
from slurmft.node.hardware import as_list, detect, host_name, networks, visible_gpus
from slurmft.plugins.examine import gpu_errors
from slurmft.plugins.examine.host import call_all, software
from slurmft.plugins.examine.report import FolderReport, NodeReport, System

# How long a look may take: nvidia-smi starts the driver where nothing else has.
_LIMIT_S = 12.0
_HUB_S = 4.0

MICROBENCHMARKS = Program(
    kind="doctor",
    name="doctor",
    module="slurmft.plugins.examine.microbench",
)


def inspect(folders: Mapping[str, Path], job: JobConfig | None = None) -> NodeReport:
    """Reports on this node.

    Args:
        folders: the folders in question, by purpose; "tmp" and "shm" are added.
        job: how a run would use the node. None leaves out what only doctor compares.
    """
    places = {**folders, "tmp": Path(tempfile.gettempdir())}
    # Some containers have none.
    if os.path.isdir("/dev/shm"):
        places["shm"] = Path("/dev/shm")
    calls: list[Callable[[], Any]] = []
    for path in places.values():
        calls.append(partial(_look_at_folder, path))
    calls.append(_gpu_errors)
    if job is not None:
        calls += [partial(_inspect_system, job), _reaches_hub]
    # All at once, and none is awaited for ever: a dead file system answers nothing.
    answers = call_all(_LIMIT_S, calls)
    folder_reports = {}
    # Not strict: behind those of the folders, the other answers follow.
    for (purpose, path), answer in zip(places.items(), answers, strict=False):
        if isinstance(answer, Exception):
            answer = FolderReport(path=str(path), problem=one_line(answer))
        folder_reports[purpose] = answer
    gpu_answer, *system_answers = answers[len(places) :]
    if isinstance(gpu_answer, Exception):
        gpu_answer = (one_line(gpu_answer),)
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    gpus_granted = None
    if granted.isdigit():
        gpus_granted = int(granted)
    system = None
    if system_answers:
        system = _system(*system_answers)
    return NodeReport(
        host=host_name(),
        time_s=time.time(),
        gpus_granted=gpus_granted,
        gpus_visible=len(visible_gpus(os.environ)),
        gpu_errors=gpu_answer,
        folders=folder_reports,
        system=system,
    )


def _system(system: System | Exception, reaches_hub: bool | Exception) -> System:
    if isinstance(system, Exception):
        raise system
    return replace(system, reaches_hub=reaches_hub is True)


def _look_at_folder(path: Path) -> FolderReport:
    file_system = filesystem.of(path)
    return FolderReport(
        path=str(path),
        file_system=file_system,
        room=filesystem.room(path),
    )


def _gpu_errors() -> tuple[str, ...]:
    gpus = visible_gpus(os.environ)
    # Other vendors' tools are not asked.
    if not gpus or gpus[0].vendor != "NVIDIA":
        return ()
    return gpu_errors.find()


def _reaches_hub() -> bool:
    from slurmft.core.hub import hub_in_reach

    return hub_in_reach(_HUB_S)


def _inspect_system(job: JobConfig) -> System:
    import psutil

    from slurmft.node import preparation, rendezvous

    hardware = detect(os.environ)
    interfaces = rendezvous.interfaces()
    return System(
        cpu_model=hardware.model,
        cpu_flags=hardware.flags,
        cpus=as_list(cpu.number for cpu in hardware.cpus),
        cpu_count=len(hardware.cpus),
        slurm_cpus=hardware.slurm_cpus,
        quota_cpus=hardware.quota_cpus,
        cores=len(hardware.cores),
        memory_mib=hardware.memory_mib,
        available_mib=psutil.virtual_memory().available // 2**20,
        gpus=hardware.gpus,
        # sysfs may show interfaces of another network namespace.
        networks=tuple(n for n in networks() if n.name in interfaces),
        software=software(),
        reaches_hub=False,
        profile=preparation.use_of_node(config(job), os.environ).name,
    )


def config(job: JobConfig) -> RunConfig:
    """Returns the configuration of a run of the microbenchmarks."""
    # No restarts: torchrun would measure again, beyond the time limit.
    return RunConfig(program=MICROBENCHMARKS, job=replace(job, max_restarts=0))
