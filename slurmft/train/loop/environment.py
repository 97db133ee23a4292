"""What a rank and its node are, for the run's records."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import slurmft
from slurmft.core.files import read_json
from slurmft.job import devices
from slurmft.node import copies, hardware, heartbeat, profiles

_PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy",
    "peft", "scikit-learn", "submitit", "filelock", "oneccl-bind-pt", "intel-extension-for-pytorch",
)  # fmt: skip


def import_times(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Seconds from the start of ranks until their imports were done, as `describe_rank` has them:
    of the fastest, the median and the slowest node (a node is as slow as its slowest rank), and the
    slowest's host. None where a rank does not know."""
    nodes: dict[str, tuple[float, str]] = {}
    for rank in ranks:
        if rank["imports_s"] is None:
            return None
        own = (float(rank["imports_s"]), str(rank["host"]))
        nodes[rank["node"]] = max(own, nodes.get(rank["node"], own))
    seconds = [slowest for slowest, _ in nodes.values()]
    return {
        "min": round(min(seconds), 2),
        "median": round(statistics.median(seconds), 2),
        "max": round(max(seconds), 2),
        "slowest": max(nodes.values())[1],
    }


def describe_rank(world: Any, imports_s: float | None) -> dict[str, Any]:
    """What a rank runs on, and how long its imports took."""
    asked = os.environ.get(profiles.CORES)  # None: it is not bound to cores
    if asked is not None:
        own = asked.split(";")[int(os.environ["LOCAL_RANK"])]
        asked = hardware.as_list(hardware.numbers(own))
    return {
        "rank": world.rank,
        "node": os.environ.get("GROUP_RANK", "0"),
        "host": platform.node(),
        "device": devices.name_of(world.device),
        "threads": torch.get_num_threads(),
        "cores": hardware.as_list(os.sched_getaffinity(0)),
        "cores_asked": asked,
        "kernel": platform.release(),
        "prefix": sys.prefix,
        "is_staged": copies.VARIABLE in os.environ,
        "imports_s": imports_s,
    } | (describe_node() if world.local_rank == 0 else {})


def describe_node() -> dict[str, Any]:
    """What the node gives this job: as its task found it, since this rank is bound to its cores."""
    folder = os.environ.get(heartbeat.FOLDER)
    facts = read_json(heartbeat.hardware_file(Path(folder))) if folder else None
    return {"hardware": facts or hardware.detect(os.environ).facts()}


def versions() -> dict[str, str]:
    """Versions of the installed packages that a result depends on."""
    installed = {"slurmft": slurmft.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank ever held: of its GPU, or resident on the CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
