"""`slurmft doctor`: is the cluster well? Seen from here, and on nodes of a short allocation."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

import slurmft
from slurmft import checks, login_checks, nodeprobe, slurm
from slurmft.checks import Check, failure
from slurmft.cli import Parser, add_options, given
from slurmft.config import JobConfig, TrainConfig, build
from slurmft.errors import SlurmftError, UsageError
from slurmft.filesystem import absolute
from slurmft.node_checks import Examination
from slurmft.nodeprobe import Nodes, Site
from slurmft.rundir import to_json, write_text
from slurmft.site import sbatch_flags, site_defaults

_JOB = (
    "nodes", "cluster", "runs_dir", "partition", "account", "qos", "reservation", "constraint",
    "time", "gpus_per_node", "cpus_per_task", "mem", "profile", "nproc_per_node", "comm_cores",
    "host_suffix", "interface",
)  # fmt: skip
_ASKED = (
    "nodes", "partition", "account", "qos", "reservation", "constraint", "time", "gpus_per_node",
    "cpus_per_task", "mem",
)  # fmt: skip
"""Those of them that salloc is told."""
_TIME = "5"

HELP = """\
Is the cluster well? Looks at Slurm, packages, hub, caches and room from here and, with --nodes or
within an allocation, at its nodes: cores, devices, names, ports, clocks, links, locks, all-reduce,
products. Every finding is ok, a WARNING or a FAILURE, with what to do; failures end it with 1.

  slurmft doctor
  slurmft doctor --nodes 4 --partition gpu --gpus-per-node 4 --output report.txt
  salloc --nodes 4 slurmft doctor
  slurmft doctor --cluster local --nodes 2         simulated nodes on this machine
"""


def main(argv: list[str]) -> int:
    """`slurmft doctor [--nodes N] ...`."""
    began = time.monotonic()
    arguments = _parser().parse(argv)
    defaults = {k: v for k, v in site_defaults().items() if k in _JOB}
    job = build(JobConfig, defaults | given(arguments, _JOB))
    if job.cluster == "mpirun":
        raise UsageError("--cluster mpirun has no nodes to ask", "use slurm, local or auto")
    found: dict[str, Any] = {}
    waited_s = 0.0
    _say(arguments, "looking at this host ...")
    results = login_checks.examine(job)
    with_slurm = slurm.available() and job.cluster != "local"
    possible = with_slurm or job.cluster != "slurm"  # else said by the first line
    if possible and (hasattr(arguments, "nodes") or (with_slurm and slurm.allocated_nodes())):
        try:
            with _site(arguments, job, with_slurm) as (site, waited_s):
                _say(arguments, f"looking at {len(site.hosts)} node(s) ...")
                results += _examine(site, job, arguments, found)
        except SlurmftError as error:
            results.append(failure("allocation", error.message, error.hint))
    seconds = time.monotonic() - began - waited_s
    _report(arguments, results, found, seconds, waited_s)
    return checks.exit_code(results)


def _parser() -> Parser:
    parser = Parser(prog="slurmft doctor", description=HELP)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--output", metavar="FILE", help="a report to send to support: text and JSON, no secrets"
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave devices and collectives out: no torch is loaded"
    )
    parser.add_argument(
        "--within", type=float, default=40, metavar="SECONDS",
        help="time for the nodes' part; what is not measured by then is not (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=300, metavar="SECONDS",
        help="how long the nodes may be waited for (%(default)s)",
    )  # fmt: skip
    add_options(parser, TrainConfig, "What runs use", only=("backend",))
    add_options(parser, JobConfig, "Where", only=_JOB)
    return parser


def _say(arguments: argparse.Namespace, text: str) -> None:
    if sys.stderr.isatty() and not arguments.json:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _site(
    arguments: argparse.Namespace, job: JobConfig, with_slurm: bool
) -> Iterator[tuple[Site, float]]:
    """The nodes, and how long they were waited for, in s."""
    if not with_slurm:
        yield nodeprobe.simulated(job.nodes), 0.0
        return
    if slurm.allocated_nodes() is not None:
        inside = {k: v for k, v in os.environ.items() if k.startswith("SLURM_")}
        yield nodeprobe.allocated(inside, job.host_suffix), 0.0
        return
    wanted = {name: getattr(job, name) for name in _ASKED} | {"time": job.time or _TIME}
    options = sbatch_flags(wanted)
    if job.cpus_per_task is None:
        options.append("--exclusive")  # speeds are those of whole nodes
    else:
        options.append("--ntasks-per-node=1")
    _say(arguments, f"waiting for {job.nodes} node(s) ...")
    asked = time.monotonic()
    with slurm.allocation(options, arguments.wait) as variables:
        waited_s = time.monotonic() - asked
        yield nodeprobe.allocated(variables, job.host_suffix), waited_s


def _examine(
    site: Site,
    job: JobConfig,
    arguments: argparse.Namespace,
    found: dict[str, Any],
) -> list[Check]:
    """What the nodes show; `found` gets the measurements."""
    deadline = time.monotonic() + arguments.within
    with Nodes(site.commands, site.env) as nodes:
        examination = Examination(
            site=site,
            nodes=nodes,
            job=job,
            backend=getattr(arguments, "backend", "auto"),
            folders=login_checks.folders(job.runs_dir),
            deadline=deadline,
            quick=arguments.quick,
        )
        examination.run()
    found |= examination.found
    return examination.checks


def _report(
    arguments: argparse.Namespace,
    results: list[Check],
    found: dict[str, Any],
    seconds: float,
    waited_s: float,
) -> None:
    """Prints the findings, and writes them to a file."""
    queued = f", after {waited_s:.1f} s in the queue" if waited_s else ""
    text = [*checks.lines(results), "", checks.summary(results, seconds) + queued]
    facts = {
        "slurmft": slurmft.__version__,
        "time": time.time(),
        "host": platform.node(),
        "command": sys.argv[1:],
        "seconds": seconds,
        "waited_s": waited_s,
        "exit_code": checks.exit_code(results),
        "checks": checks.as_dict(results),
    }
    shown = to_json(facts) if arguments.json else "\n".join(text)
    print(checks.without_secrets(shown, os.environ), flush=True)
    if arguments.output is None:
        return
    facts |= {"measured": found, "environment": checks.told(os.environ)}
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    head = f"slurmft doctor {slurmft.__version__} on {platform.node()}, {when}"
    whole = "\n".join([head, "", *text, "", "--- JSON ---", to_json(facts, indent=1), ""])
    path = absolute(arguments.output)
    write_text(path, checks.without_secrets(whole, os.environ))
    print(f"report: {path}", file=sys.stderr)
