"""`slurmft doctor`: an examination of the cluster from this host, and on its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmft.cluster.slurm import allocation, commands
from slurmft.core.agents import Agents
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError
from slurmft.doctor import login
from slurmft.doctor.checks import failure
from slurmft.doctor.examination import Examination
from slurmft.doctor.nodes import Site, open_site
from slurmft.doctor.report import Report


def examine_cluster(
    job: JobConfig,
    *,
    nodes_asked: bool,
    limit_s: float,
    wait_s: float,
    quick: bool,
    say: Callable[[str], None],
) -> Report:
    """Examines this host; and nodes, where they are asked for or an allocation has them.

    Args:
        job: how a run would use the cluster.
        limit_s: for the nodes' part; what is not measured by then is left out.
        wait_s: how long a new allocation may wait in the queue.
        quick: without devices and collectives.
        say: is told what is under way.
    """
    began, report = time.monotonic(), Report()
    say("examining this host ...")
    report.checks += login.examine_this_host(job)
    with_slurm = commands.available() and job.cluster != "local"
    can_have_nodes = with_slurm or job.cluster != "slurm"  # else the first check says why not
    if can_have_nodes and (nodes_asked or (with_slurm and allocation.allocated_nodes())):
        try:
            with open_site(job, wait_s, with_slurm, say) as site:
                report.queued_s = site.queued_s
                say(f"examining {len(site.hosts)} node(s) ...")
                _examine_nodes(site, job, limit_s, quick, report)
        except SlurmftError as error:
            report.checks.append(failure("allocation", error.message, error.hint))
    report.seconds = time.monotonic() - began - report.queued_s
    return report


def _examine_nodes(site: Site, job: JobConfig, limit_s: float, quick: bool, report: Report) -> None:
    deadline = time.monotonic() + limit_s
    with Agents(site.commands, site.env) as agents:
        examination = Examination(
            site=site,
            agents=agents,
            job=job,
            folders=login.folders(job.runs_dir),
            deadline=deadline,
            quick=quick,
        )
        examination.run()
    report.checks += examination.checks
    report.measured |= examination.found
