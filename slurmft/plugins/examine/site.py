"""The nodes that are examined: of an allocation, of a new one, or simulated on this machine."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from slurmft.cluster.slurm import allocation, sbatch_options
from slurmft.cluster.slurm.commands import hostnames
from slurmft.core import interpreter
from slurmft.core.config import JobConfig
from slurmft.core.options import options
from slurmft.node import rendezvous

# Time limit of a new allocation, if the user sets none.
_MINUTES = "5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The nodes, and how their agents are started."""

    hosts: dict[str, str]
    """Node -> the name by which the others reach it: the fabric's."""
    commands: dict[str, list[str]]
    """Node -> the command that starts its agent."""
    env: dict[str, str]
    job_id: str
    simulated: bool
    """True if all nodes are this machine."""
    queued_s: float = 0.0
    """How long the allocation waited in the queue."""


@contextlib.contextmanager
def open_site(
    job: JobConfig,
    wait_s: float,
    with_slurm: bool,
    say: Callable[[str], None],
) -> Iterator[Site]:
    """Gets the nodes: those of the allocation that this runs in, else of a new one; without Slurm,
    simulated ones.

    Args:
        job: what to ask of Slurm.
        wait_s: how long a new allocation may wait in the queue.

    Raises:
        SlurmftError: there are no nodes in time.
    """
    if not with_slurm:
        yield simulated(job.nodes)
        return
    if allocation.allocated_nodes() is not None:
        # Agents get all of these: srun reads its defaults from them.
        inside = {}
        for name, v in os.environ.items():
            if name.startswith("SLURM_"):
                inside[name] = v
        yield allocated(inside, job.host_suffix)
        return
    # The flags of the user take precedence over the default.
    requests: dict[str, str | None] = {"time": _MINUTES}
    requests |= sbatch_options.of_fields(job, _salloc_options())
    if job.cpus_per_task is None:
        requests["exclusive"] = None  # speeds are those of whole nodes
    else:
        requests["ntasks-per-node"] = "1"
    say(f"waiting for {job.nodes} node(s) ...")
    began = time.monotonic()
    arguments = sbatch_options.arguments(requests.items())
    with allocation.allocation(arguments, wait_s) as variables:
        site = allocated(variables, job.host_suffix)
        yield replace(site, queued_s=time.monotonic() - began)


def _salloc_options() -> list[str]:
    """Returns the names of doctor's options that salloc takes."""
    names = []
    for name, each in options(JobConfig).items():
        if each.sbatch and "doctor" in each.commands:
            names.append(name)
    return names


def agent_command() -> list[str]:
    return interpreter.module("slurmft.plugins.examine.agent")


def allocated(environment: Mapping[str, str], host_suffix: str) -> Site:
    """Returns the nodes of an allocation, by Slurm's variables."""
    hosts = hostnames(environment["SLURM_JOB_NODELIST"])
    return Site(
        hosts={host: host + host_suffix for host in hosts},
        commands={host: allocation.on_host(host, agent_command()) for host in hosts},
        env=dict(environment),
        job_id=environment["SLURM_JOB_ID"],
        simulated=False,
    )


def simulated(nodes: int) -> Site:
    """Returns simulated nodes, as `--cluster local` has them."""
    hosts = [rendezvous.simulated_host(number) for number in range(nodes)]
    commands = {}
    for number, host in enumerate(hosts):
        commands[host] = [*agent_command(), str(number)]
    return Site(
        hosts={host: host for host in hosts},
        commands=commands,
        env={},
        job_id=str(os.getpid()),
        simulated=True,
    )
