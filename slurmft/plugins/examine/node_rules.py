"""Rules about nodes: from their reports to checks. Pure functions.

Of several nodes with the same result there is one check.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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


# --- one node by itself: doctor and preflight -----------------------------------------------------


def gpus(reports: Reports) -> list[Check]:
    """Checks that each node has the GPUs that Slurm granted, and no hardware errors."""
    checks = []
    for node, report in reports.items():
        granted = report.gpus_granted
        if granted is not None and report.gpus_visible < granted:
            text = f"{report.gpus_visible} of the {granted} GPUs that Slurm has granted are there"
            checks.append((node, failure("GPUs", text, _EXCLUDE)))
        for error in report.gpu_errors:
            checks.append((node, failure("GPUs", error, _EXCLUDE)))
    return merged(checks)


def folders(purpose: str, reports: Reports) -> list[Check]:
    """Checks one kind of folder on each node: it can be written, and has free space."""
    reported = {n: r.folders[purpose] for n, r in reports.items() if purpose in r.folders}
    about = f"{purpose} on nodes"
    checks = [(node, _check_folder(purpose, folder)) for node, folder in reported.items()]
    bad = problems(merged(checks))
    if bad:
        return [replace(check, about=about) for check in bad]
    free_bytes = [folder.room.free_bytes for folder in reported.values() if folder.room]
    if not free_bytes:
        return []
    paths = "; ".join(dict.fromkeys(folder.path for folder in reported.values()))
    return [ok(about, f"{paths}: at least {in_bytes(min(free_bytes))} free on all nodes")]


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
    figures = {"free_bytes": room.free_bytes, "free_inodes": room.free_inodes}
    if room.problem:
        hint = "free some space, check your quota, or choose another folder"
        hint += {"runs": ": --runs-dir", "cache": ": HF_HOME", "tmp": ": TMPDIR"}.get(purpose, "")
        return failure(purpose, f"{text}: cannot be written: {room.problem}", hint, **figures)
    text += f": {in_bytes(room.free_bytes)} free"
    if room.free_inodes is not None:
        text += f", {room.free_inodes:,} files"
    is_shm = purpose == "shm"
    least_bytes = thresholds.FREE_SHM_BYTES if is_shm else thresholds.FREE_BYTES
    has_few_inodes = room.free_inodes is not None and room.free_inodes < thresholds.FREE_INODES
    if room.free_bytes >= least_bytes and not has_few_inodes:
        return ok(purpose, text, **figures)
    hint = "free some space: a checkpoint has three times the size of its model"
    if is_shm:
        hint = "tell the site: the processes of a node share memory there"
    return warning(purpose, text, hint, **figures)


# --- nodes beside each other: doctor and preflight ------------------------------------------------


def products(rates: Mapping[str, Sequence[float]], precision: str) -> list[Check]:
    """Compares the devices' speeds in matrix products. The last check sums them up.

    Args:
        rates: node -> TFLOP/s of each of its devices or processes.
        precision: in words, for the texts.
    """
    devices = {(node, i): rate for node, all_ in rates.items() for i, rate in enumerate(all_)}
    if not devices:
        return []
    slow = []
    for (node, index), share in shares_of_median(devices).items():
        if share >= DEVICE_SPEED.warning:
            continue
        rate = devices[node, index]
        text = f"slow in {precision}: {rate:.3g} TFLOP/s, {share:.0%} of the median"
        if len(rates[node]) > 1:
            text = f"process {index} is {text}"
        kind = failure if share < DEVICE_SPEED.failure else warning
        hint = "exclude it; possible causes: clock speed, cooling, other jobs, fewer cores"
        slow.append(replace(kind("matmul", text, hint, tflop_s=rate), hosts=(node,)))
    speeds = sorted(devices.values())
    median = speeds[len(speeds) // 2]
    text = f"{precision}: {median:.3g} TFLOP/s each (median of {len(speeds)}; "
    text += f"least {speeds[0]:.3g}, most {speeds[-1]:.3g})"
    return [*slow, ok("matmul", text, median_tflop_s=median)]


# --- nodes beside each other: doctor --------------------------------------------------------------


def cores(systems: Systems, requested: int | None) -> Iterator[Check]:
    """Checks that a job gets the cores that it asks for, and that Slurm counts."""
    yield from merged((node, _check_cores(system, requested)) for node, system in systems.items())
    counts = {node: system.cores for node, system in systems.items()}
    if len(set(counts.values())) > 1:
        hint = "the node with the fewest cores sets the pace: choose nodes by --constraint"
        yield warning("cores", f"not the same on all nodes: {by_value(counts)}", hint)


def _check_cores(system: System, requested: int | None) -> Check:
    mask = system.cpu_count
    usable: float = mask
    text = f"{system.cores} core(s) to compute on"
    if system.slurm_cpus is not None:
        text += f"; Slurm counts {system.slurm_cpus} CPU(s)"
    text += f", the affinity mask has {mask}"
    if system.quota_cpus is not None:
        text += f", the cgroup's quota is {system.quota_cpus:g}"
        usable = min(mask, system.quota_cpus)
    if requested is not None:
        text += f"; {requested} were requested"
    lacks_slurm_cpus = usable < (system.slurm_cpus or 0)
    lacks_requested = (system.slurm_cpus or mask) < (requested or 0)
    if lacks_slurm_cpus or lacks_requested:
        hint = (
            "tell the site: the node's definition in Slurm or its cgroups do not fit its hardware"
        )
        return warning("cores", text, hint)
    return ok("cores", text)


def devices(systems: Systems, requested: int | None) -> Iterator[Check]:
    """Checks what computes: the GPUs, or the CPUs and their instruction sets."""
    few = [node for node, system in systems.items() if len(system.gpus) < (requested or 0)]
    if few:
        hint = "check the site's GRES, and CUDA_VISIBLE_DEVICES in --setup lines"
        text = f"fewer GPUs than the {requested} requested"
        yield replace(failure("devices", text, hint), hosts=tuple(few))
    kinds = {node: _devices_of(system) for node, system in systems.items()}
    if len(set(kinds.values())) > 1:
        hint = "a job is as fast as its slowest node: choose nodes by --constraint"
        yield warning("devices", f"not the same on all nodes: {by_value(kinds)}", hint)
    else:
        yield ok("devices", by_value(kinds))


def _devices_of(system: System) -> str:
    if system.gpus:
        models = sorted({gpu.model for gpu in system.gpus})
        return f"{len(system.gpus)} x {', '.join(models)}"
    return f"CPU {system.cpu_model} ({', '.join(system.cpu_flags) or 'no AVX'})"


def memory(systems: Systems) -> list[Check]:
    """Checks the memory of each node, and finds those with little."""
    total = {node: float(system.memory_mib) for node, system in systems.items()}
    little = []
    for node, share in shares_of_median(total).items():
        if share < thresholds.MEMORY:
            text = f"{total[node]:,.0f} MiB, {share:.0%} of the median"
            hint = "tell the site: a memory module may have failed"
            little.append((node, warning("memory", text, hint)))
    if little:
        return merged(little)
    fullest = min(systems, key=lambda node: systems[node].available_mib)
    text = f"at least {min(total.values()):,.0f} MiB for a job; available now: at least "
    text += f"{systems[fullest].available_mib:,} MiB ({fullest})"
    return [ok("memory", text)]


def versions(systems: Systems, here: Mapping[str, str | None]) -> list[Check]:
    """Checks that all nodes, and this host, run the same Python with the same packages."""
    different = []
    for name, version in here.items():
        values = {node: system.software.get(name) for node, system in systems.items()}
        values["this host"] = version
        if len(set(values.values())) > 1:
            hint = "use one environment, on a file system that all nodes see"
            different.append(failure("versions", f"{name} differs: {by_value(values)}", hint))
    if different:
        return different
    same = ", ".join(f"{name} {version}" for name, version in here.items())
    return [ok("versions", f"the same on all nodes as on this host: {same}")]


def hub(systems: Systems) -> Check:
    """Checks which nodes reach the hub. If only some do, runs use the caches on the others."""
    without = [node for node, system in systems.items() if not system.reaches_hub]
    if not without:
        return ok("hub on nodes", "all nodes reach it")
    if len(without) == len(systems):
        return ok("hub on nodes", "no node reaches it: runs use the caches there")
    hint = "fill the caches from a node that reaches it, or use folders: --model, --data"
    return warning("hub on nodes", f"{some(without)} do not reach it, others do", hint)
