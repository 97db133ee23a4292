"""What a rank and its node are, for the run's records."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import slurmft
from slurmft.core.credentials import redact
from slurmft.core.files import read_json
from slurmft.core.text import numbers
from slurmft.job import devices
from slurmft.job.process_group import World
from slurmft.node import copies, hardware, heartbeat, profiles

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "tokenizers",
    "numpy",
    "peft",
    "scikit-learn",
    "submitit",
    "filelock",
    "oneccl-bind-pt",
    "intel-extension-for-pytorch",
)

_VARIABLES = ("OMP_", "KMP_", "GOMP_", "CCL_", "FI_", "I_MPI_", "LD_PRELOAD")
"""How the names of variables begin that decide how threads compute and ranks communicate."""


def import_times(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the seconds from the start of ranks until their imports were done, as `describe_rank`
    has them: of the fastest, the median and the slowest node, and the slowest's host. None where a
    rank does not know."""
    slowest: dict[str, tuple[float, str]] = {}
    for rank in ranks:
        if rank["imports_s"] is None:
            return None
        # A node is as slow as its slowest rank.
        time_and_host = (float(rank["imports_s"]), str(rank["host"]))
        slowest_so_far = slowest.get(rank["node"], time_and_host)
        slowest[rank["node"]] = max(time_and_host, slowest_so_far)
    seconds = [node_s for node_s, _ in slowest.values()]
    # Pairs compare by the time, which stands first.
    _, slowest_host = max(slowest.values())
    return {
        "min": round(min(seconds), 2),
        "median": round(statistics.median(seconds), 2),
        "max": round(max(seconds), 2),
        "slowest": slowest_host,
    }


def describe_rank(world: World, imports_s: float | None) -> dict[str, Any]:
    """Returns what a rank runs on, and how long its imports took."""
    facts = {
        "rank": world.rank,
        # torchrun's number of the node; a program that is started without it has one.
        "node": os.environ.get("GROUP_RANK", "0"),
        "host": platform.node(),
        "device": devices.name_of(world.device),
        "threads": torch.get_num_threads(),
        # What the kernel lets it use: `Reporter` warns where that is more than its share.
        "cores": hardware.as_list(os.sched_getaffinity(0)),
        "allotted_cores": _allotted_cores(),
        "kernel": platform.release(),
        "prefix": sys.prefix,
        "is_staged": copies.VARIABLE in os.environ,
        "variables": recorded_variables(os.environ),
        "imports_s": imports_s,
    }
    if world.local_rank == 0:
        facts |= describe_node()
    return facts


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of threads, libraries and fabrics: the profile's and the user's, as
    this rank has them."""
    variables = {}
    for name in sorted(environment):
        if name.startswith(_VARIABLES):
            variables[name] = redact(environment[name])
    return variables


def take_common_variables(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Removes from what ranks said of themselves the variables that all have alike, and returns
    these: a record of a thousand ranks has them once."""
    first = ranks[0]["variables"]
    common = {}
    for name, value in first.items():
        if all(rank["variables"].get(name) == value for rank in ranks):
            common[name] = value
    for rank in ranks:
        others = rank["variables"].items() - common.items()
        rank["variables"] = dict(sorted(others))
    return common


def _allotted_cores() -> str | None:
    """Returns the cores that this rank is to be bound to; None: to none in particular."""
    cores_of_ranks = os.environ.get(profiles.CORES)  # with ";" between ranks
    if cores_of_ranks is None:
        return None
    cores = cores_of_ranks.split(";")[int(os.environ["LOCAL_RANK"])]
    return hardware.as_list(numbers(cores))


def describe_node() -> dict[str, Any]:
    """Returns what the node gives this job."""
    # Its task saw the whole node; this rank is bound to its cores.
    folder = os.environ.get(heartbeat.FOLDER)
    facts = None
    if folder:
        facts = read_json(heartbeat.hardware_file(Path(folder)))
    return {"hardware": facts or hardware.detect(os.environ).facts()}


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that a result depends on."""
    installed = {"slurmft": slurmft.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this rank ever held: of its GPU, or resident on the CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
