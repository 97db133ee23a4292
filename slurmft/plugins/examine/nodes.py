"""The nodes that are examined: of an allocation, of a new one, or simulated on this machine."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from slurmft.cluster.slurm import allocation, sbatch_options
from slurmft.cluster.slurm.commands import hostnames
from slurmft.core.config import JobConfig
from slurmft.node import rendezvous

_SALLOC = (
    "nodes", "partition", "account", "qos", "reservation", "constraint", "gpus_per_node",
    "cpus_per_task", "mem", "time",
)  # fmt: skip
"""Options of the job that salloc takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The nodes, and how their agents are started."""

    hosts: dict[str, str]
    """Node -> the name by which the others reach it: the fabric's."""
    commands: dict[str, list[str]]
    env: dict[str, str]
    job_id: str

    simulated: bool
    """All of them are this machine."""

    queued_s: float = 0.0
    """How long the allocation waited in the queue."""


@contextlib.contextmanager
def open_site(
    job: JobConfig, wait_s: float, with_slurm: bool, say: Callable[[str], None]
) -> Iterator[Site]:
    """The nodes of the allocation that this runs in, else of a new one, for which the job says what
    to ask for, and `wait_s` how long it may wait in the queue; simulated without Slurm.
    SlurmftError where there are none in time."""
    if not with_slurm:
        yield simulated(job.nodes)
        return
    if allocation.allocated_nodes() is not None:
        inside = {k: v for k, v in os.environ.items() if k.startswith("SLURM_")}
        yield allocated(inside, job.host_suffix)
        return
    wanted = {"time": "5"} | sbatch_options.of_fields(job, _SALLOC)
    # Speeds are those of whole nodes.
    wanted |= {"exclusive": None} if job.cpus_per_task is None else {"ntasks-per-node": "1"}
    say(f"waiting for {job.nodes} node(s) ...")
    began = time.monotonic()
    with allocation.allocation(sbatch_options.arguments(wanted.items()), wait_s) as variables:
        site = allocated(variables, job.host_suffix)
        yield dataclasses.replace(site, queued_s=time.monotonic() - began)


def agent_command() -> list[str]:
    return [sys.executable, "-m", "slurmft.plugins.examine.agent"]


def allocated(environment: Mapping[str, str], host_suffix: str) -> Site:
    """The nodes of an allocation, by Slurm's variables."""
    hosts = hostnames(environment["SLURM_JOB_NODELIST"])
    return Site(
        hosts={host: host + host_suffix for host in hosts},
        commands={host: allocation.on_host(host, agent_command()) for host in hosts},
        env=dict(environment),
        job_id=environment["SLURM_JOB_ID"],
        simulated=False,
    )


def simulated(nodes: int) -> Site:
    """Simulated nodes, as `--cluster local` has them."""
    hosts = [rendezvous.simulated_host(number) for number in range(nodes)]
    commands = {host: [*agent_command(), str(number)] for number, host in enumerate(hosts)}
    own = {host: host for host in hosts}
    return Site(hosts=own, commands=commands, env={}, job_id=str(os.getpid()), simulated=True)
