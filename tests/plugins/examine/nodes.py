"""Reports of good nodes, for tests to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slurmft.core.filesystem import FileSystem, Room
from slurmft.node.hardware import Gpu
from slurmft.plugins.examine.report import FolderReport, NodeReport, System

GIB = 2**30
ROOM = Room(free_bytes=50 * GIB, free_inodes=10**6, problem=None)
DISK = FileSystem(type="ext4", source="/dev/sda", mount="/")
H100 = Gpu(name="0", model="H100")


def system(**changes: Any) -> System:
    """A good node of 8 cores."""
    good = System(
        cpu_model="CPU",
        cpu_flags=("avx2",),
        cpus="0-7",
        cpu_count=8,
        slurm_cpus=8,
        quota_cpus=None,
        cores=8,
        memory_mib=1000,
        available_mib=900,
        gpus=(),
        networks=(),
        software={"Python": "3.11.7 (/env/bin/python)", "torch": "2.13.0"},
        reaches_hub=True,
        profile="cpu",
    )
    return replace(good, **changes)


def node(host: str = "n1", **changes: Any) -> NodeReport:
    """A good node, without what only doctor compares."""
    folder = FolderReport(path="/tmp", file_system=DISK, room=ROOM)
    good = NodeReport(
        host=host,
        time_s=1000.0,
        gpus_granted=None,
        gpus_visible=0,
        gpu_errors=(),
        folders={"tmp": folder},
        tflop_s=2.0,
    )
    return replace(good, **changes)
