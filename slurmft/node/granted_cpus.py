"""Tells that Slurm gives a job fewer CPUs than its nodes have: by default it gives a task one."""

from collections.abc import Mapping

from slurmft.core.config import JobConfig
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import LOCAL_NODE


def shortage(granted: int, present: int, where: str) -> str:
    """Returns the warning about a job that has some of the CPUs of its nodes."""
    return (
        f"Slurm gives this job {granted} of the {present} CPUs of {where}, because it does not say "
        "how many it needs: --exclusive takes whole nodes, --cpus-per-task a part of each"
    )


def warning(profile: Profile, job: JobConfig, environment: Mapping[str, str]) -> str:
    """Returns the warning for a job that runs on this node; "" where it has all CPUs, or as many as
    it asked for."""
    hardware = profile.hardware
    is_part = LOCAL_NODE in environment
    is_choice = job.chooses_cpus or "SLURM_CPUS_PER_TASK" in environment
    if hardware.slurm_cpus is None or is_part or is_choice:
        return ""
    # Who asks for some GPUs of a node leaves the others, and their CPUs, to other jobs.
    has_enough = profile.name == "gpu" and len(hardware.cores) >= profile.nproc
    granted = min(hardware.slurm_cpus, len(hardware.cpus))
    if has_enough or granted >= hardware.machine_cpus:
        return ""
    return shortage(granted, hardware.machine_cpus, hardware.host)
