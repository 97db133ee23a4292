"""Rules about nodes: from their reports to checks. Pure functions.

Of several nodes with the same result there is one check.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmft.core.filesystem import Room
from slurmft.core.text import in_bytes, some
from slurmft.plugins.examine import thresholds
from slurmft.plugins.examine.checks import Check, failure, merged, ok, problems, warning
from slurmft.plugins.examine.comparison import by_value, shares_of_median
from slurmft.plugins.examine.report import FolderReport, NodeReport, System
from slurmft.plugins.examine.thresholds import DEVICE_SPEED

Reports = Mapping[str, NodeReport]
"""By node."""
Systems = Mapping[str, System]
"""By node."""

_EXCLUDE = "exclude it (--sbatch exclude=NODE for runs) and tell the site"
# Purpose of a folder -> the option or variable that chooses another one.
_CHOSEN_BY = {"runs": "--runs-dir", "cache": "HF_HOME", "tmp": "TMPDIR"}


# --- one node by itself: doctor and preflight -----------------------------------------------------


def gpus(reports: Reports) -> list[Check]:
    """Checks that each node has the GPUs that Slurm granted, and no hardware errors."""
    checks = []
    for node, report in reports.items():
        problems = list(report.gpu_errors)
        granted = report.gpus_granted
        visible = report.gpus_visible
        # A GPU that has fallen off the bus has no device file any more.
        if granted is not None and visible < granted:
            few = f"{visible} of the {granted} GPUs that Slurm has granted are there"
            problems.insert(0, few)
        for problem in problems:
            checks.append((node, failure("GPUs", problem, _EXCLUDE)))
    return merged(checks)


def folders(purpose: str, reports: Reports) -> list[Check]:
    """Checks one kind of folder on each node: it can be written, and has free space."""
    checks = []
    free_bytes = []
    paths = set()
    for node, report in reports.items():
        folder = report.folders.get(purpose)
        if folder is None:  # not every node has a /dev/shm
            continue
        checks.append((node, _check_folder(purpose, folder)))
        paths.add(folder.path)
        if folder.room:
            free_bytes.append(folder.room.free_bytes)
    about = f"{purpose} on nodes"
    bad = problems(merged(checks))
    if bad:
        return [replace(check, about=about) for check in bad]
    if not free_bytes:
        return []
    free = in_bytes(min(free_bytes))
    all_paths = "; ".join(sorted(paths))  # TMPDIR may differ between nodes
    return [ok(about, f"{all_paths}: at least {free} free on all nodes")]


def _check_folder(purpose: str, folder: FolderReport) -> Check:
    if folder.room is None:
        text = f"{folder.path}: no answer: {folder.problem}"
        return failure(purpose, text, "is the file system up?")
    return check_room(purpose, f"{folder.path} on {folder.file_system}", folder.room)


def check_room(purpose: str, text: str, room: Room) -> Check:
    """Checks that a folder can be written and has free space.

    Args:
        text: the folder, in words; begins the text of the check.
    """
    figures: dict[str, Any] = {
        "free_bytes": room.free_bytes,
        "free_inodes": room.free_inodes,
    }
    if room.problem:
        hint = "free some space, check your quota, or choose another folder"
        if purpose in _CHOSEN_BY:
            hint += f": {_CHOSEN_BY[purpose]}"
        text += f": cannot be written: {room.problem}"
        return failure(purpose, text, hint, **figures)
    text += f": {in_bytes(room.free_bytes)} free"
    if room.free_inodes is not None:
        text += f", {room.free_inodes:,} files"
    least_bytes = thresholds.FREE_BYTES
    hint = "free some space: a checkpoint has three times the size of its model"
    if purpose == "shm":
        least_bytes = thresholds.FREE_SHM_BYTES
        hint = "tell the site: the processes of a node share memory there"
    # None: a file system that makes inodes as needed, as Btrfs does, has no count of them.
    inodes = room.free_inodes
    has_few_inodes = inodes is not None and inodes < thresholds.FREE_INODES
    if room.free_bytes < least_bytes or has_few_inodes:
        return warning(purpose, text, hint, **figures)
    return ok(purpose, text, **figures)


# --- nodes beside each other: doctor and preflight ------------------------------------------------


def products(rates: Mapping[str, Sequence[float]], precision: str) -> list[Check]:
    """Compares the devices' speeds in matrix products. The last check sums them up.

    Args:
        rates: node -> TFLOP/s of each of its devices or processes.
        precision: in words, for the texts.
    """
    devices = {}
    for node, rates_of_node in rates.items():
        for index, rate in enumerate(rates_of_node):
            devices[node, index] = rate
    if not devices:
        return []
    checks = []
    # All devices of all nodes against each other: a whole node may be slow.
    for (node, index), share in shares_of_median(devices).items():
        if share >= DEVICE_SPEED.warning:
            continue
        rate = devices[node, index]
        text = f"slow in {precision}: {rate:.3g} TFLOP/s, {share:.0%} of the median"
        if len(rates[node]) > 1:
            text = f"process {index} is {text}"
        hint = (
            "exclude it; possible causes: clock speed, cooling, other jobs, fewer cores"
        )
        kind = failure if share < DEVICE_SPEED.failure else warning
        checks.append(kind("matmul", text, hint, hosts=[node], tflop_s=rate))
    # The upper one of two in the middle, as in `shares_of_median`: a rate that some device has.
    median = statistics.median_high(devices.values())
    least = min(devices.values())
    most = max(devices.values())
    text = f"{precision}: {median:.3g} TFLOP/s each (median of {len(devices)}; "
    text += f"least {least:.3g}, most {most:.3g})"
    return [*checks, ok("matmul", text, median_tflop_s=median)]


# --- nodes beside each other: doctor --------------------------------------------------------------


def cores(systems: Systems, requested: int | None) -> Iterator[Check]:
    """Checks that a job gets the cores that it asks for, and that Slurm counts."""
    checks = []
    for node, system in systems.items():
        check = _check_cores(system, requested)
        checks.append((node, check))
    yield from merged(checks)
    counts = {node: system.cores for node, system in systems.items()}
    if len(set(counts.values())) > 1:
        hint = (
            "the node with the fewest cores sets the pace: choose nodes by --constraint"
        )
        yield warning("cores", f"not the same on all nodes: {by_value(counts)}", hint)


def _check_cores(system: System, requested: int | None) -> Check:
    mask = system.cpu_count
    usable: float = mask
    granted = mask
    text = f"{system.cores} core(s) to compute on"
    if system.slurm_cpus is not None:
        granted = system.slurm_cpus
        text += f"; Slurm counts {granted} CPU(s)"
    text += f", the affinity mask has {mask}"
    if system.quota_cpus is not None:
        usable = min(mask, system.quota_cpus)
        text += f", the cgroup's quota is {system.quota_cpus:g}"
    if requested is not None:
        text += f"; {requested} were requested"
    # The mask and the quota decide where threads run, whatever Slurm counts.
    is_usable = usable >= granted
    is_enough = granted >= (requested or 0)
    if is_usable and is_enough:
        return ok("cores", text)
    hint = "tell the site: the node's definition in Slurm or its cgroups do not fit its hardware"
    return warning("cores", text, hint)


def devices(systems: Systems, requested: int | None) -> Iterator[Check]:
    """Checks what computes: the GPUs, or the CPUs and their instruction sets."""
    least = requested or 0
    few = []
    for node, system in systems.items():
        if len(system.gpus) < least:
            few.append(node)
    if few:
        hint = "check the site's GRES, and CUDA_VISIBLE_DEVICES in --setup lines"
        text = f"fewer GPUs than the {requested} requested"
        yield failure("devices", text, hint, hosts=few)
    kinds = {node: _devices_of(system) for node, system in systems.items()}
    if len(set(kinds.values())) > 1:
        hint = "a job is as fast as its slowest node: choose nodes by --constraint"
        yield warning("devices", f"not the same on all nodes: {by_value(kinds)}", hint)
    else:
        yield ok("devices", by_value(kinds))


def _devices_of(system: System) -> str:
    if system.gpus:
        # Each kind once, sorted: nodes compare by this text, whatever the order of their GPUs.
        models = sorted({gpu.model for gpu in system.gpus})
        all_models = ", ".join(models)
        return f"{len(system.gpus)} x {all_models}"
    flags = ", ".join(system.cpu_flags) or "no AVX"
    return f"CPU {system.cpu_model} ({flags})"


def memory(systems: Systems) -> list[Check]:
    """Checks the memory of each node, and finds those with little."""
    total = {node: float(system.memory_mib) for node, system in systems.items()}
    # A share below the median, not an exact size: firmware keeps a little of it on each node.
    little = []
    for node, share in shares_of_median(total).items():
        if share < thresholds.MEMORY:
            text = f"{total[node]:,.0f} MiB, {share:.0%} of the median"
            hint = "tell the site: a memory module may have failed"
            little.append((node, warning("memory", text, hint)))
    if little:
        return merged(little)
    available = {node: system.available_mib for node, system in systems.items()}
    fullest = min(available, key=lambda node: available[node])
    least_mib = min(total.values())
    text = f"at least {least_mib:,.0f} MiB for a job; "
    text += f"available now: at least {available[fullest]:,} MiB ({fullest})"
    return [ok("memory", text)]


def versions(systems: Systems, here: Mapping[str, str | None]) -> list[Check]:
    """Checks that all nodes, and this host, run the same Python with the same packages."""
    different = []
    for name, version in here.items():
        # The login node counts, too: it has resolved the configuration that the nodes read.
        values = {node: system.software.get(name) for node, system in systems.items()}
        values["this host"] = version
        is_different = len(set(values.values())) > 1
        if is_different:
            hint = "use one environment, on a file system that all nodes see"
            text = f"{name} differs: {by_value(values)}"
            different.append(failure("versions", text, hint))
    if different:
        return different
    versions_here = []
    for name, version in here.items():
        versions_here.append(f"{name} {version}")
    same = ", ".join(versions_here)
    return [ok("versions", f"the same on all nodes as on this host: {same}")]


def hub(systems: Systems) -> Check:
    """Checks which nodes reach the hub. If only some do, runs use the caches on the others."""
    without = []
    for node, system in systems.items():
        if not system.reaches_hub:
            without.append(node)
    if not without:
        return ok("hub on nodes", "all nodes reach it")
    if len(without) == len(systems):
        return ok("hub on nodes", "no node reaches it: runs use the caches there")
    hint = (
        "fill the caches from a node that reaches it, or use folders: --model, --data"
    )
    return warning("hub on nodes", f"{some(without)} do not reach it, others do", hint)
