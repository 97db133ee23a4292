"""`slurmft doctor`: is the cluster well? Seen from here, and on nodes of a short allocation."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slurmft
from slurmft.cli.parser import Parser, add_options, given
from slurmft.cluster.slurm import allocation, commands
from slurmft.core import credentials
from slurmft.core.config import JobConfig, build
from slurmft.core.errors import Exit, SlurmftError, UsageError, run_main, unknown
from slurmft.core.files import to_json, write_text
from slurmft.core.filesystem import absolute
from slurmft.core.site import sbatch_flags, site_defaults
from slurmft.doctor import checks, login
from slurmft.doctor import nodes as doctor_nodes
from slurmft.doctor.checks import Check, failure
from slurmft.doctor.examination import Examination
from slurmft.doctor.locks import examine
from slurmft.doctor.nodes import Nodes, Site
from slurmft.locks import probe
from slurmft.locks.probe import Ask, Talk
from slurmft.node import ccl, hardware, profiles
from slurmft.node.profiles import Profile
from slurmft.train.configure import OPTIONS

_JOB = (
    "nodes", "cluster", "runs_dir", "partition", "account", "qos", "reservation", "constraint",
    "time", "gpus_per_node", "cpus_per_task", "mem", "profile", "nproc_per_node", "comm_cores",
    "backend",     "host_suffix", "interface",
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


def checkup_main(argv: list[str]) -> int:
    """`slurmft doctor [--nodes N] ...`."""
    began = time.monotonic()
    arguments = _checkup_parser().parse(argv)
    defaults = {k: v for k, v in site_defaults(OPTIONS).items() if k in _JOB}
    job = build(JobConfig, defaults | given(arguments, _JOB))
    if job.cluster == "mpirun":
        raise UsageError("--cluster mpirun has no nodes to ask", "use slurm, local or auto")
    found: dict[str, Any] = {}
    waited_s = 0.0
    _say(arguments, "looking at this host ...")
    results = login.examine(job)
    with_slurm = commands.available() and job.cluster != "local"
    possible = with_slurm or job.cluster != "slurm"  # else said by the first line
    if possible and (hasattr(arguments, "nodes") or (with_slurm and allocation.allocated_nodes())):
        try:
            with _site(arguments, job, with_slurm) as (site, waited_s):
                _say(arguments, f"looking at {len(site.hosts)} node(s) ...")
                results += _examine(site, job, arguments, found)
        except SlurmftError as error:
            results.append(failure("allocation", error.message, error.hint))
    seconds = time.monotonic() - began - waited_s
    _report(arguments, results, found, seconds, waited_s)
    return checks.exit_code(results)


def _checkup_parser() -> Parser:
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
        yield doctor_nodes.simulated(job.nodes), 0.0
        return
    if allocation.allocated_nodes() is not None:
        inside = {k: v for k, v in os.environ.items() if k.startswith("SLURM_")}
        yield doctor_nodes.allocated(inside, job.host_suffix), 0.0
        return
    wanted = {name: getattr(job, name) for name in _ASKED} | {"time": job.time or _TIME}
    options = sbatch_flags(wanted)
    if job.cpus_per_task is None:
        options.append("--exclusive")  # speeds are those of whole nodes
    else:
        options.append("--ntasks-per-node=1")
    _say(arguments, f"waiting for {job.nodes} node(s) ...")
    asked = time.monotonic()
    with allocation.allocation(options, arguments.wait) as variables:
        waited_s = time.monotonic() - asked
        yield doctor_nodes.allocated(variables, job.host_suffix), waited_s


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
            folders=login.folders(job.runs_dir),
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
    print(credentials.redact(shown), flush=True)
    if arguments.output is None:
        return
    facts |= {"measured": found, "environment": checks.told_environment(os.environ)}
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    head = f"slurmft doctor {slurmft.__version__} on {platform.node()}, {when}"
    whole = "\n".join([head, "", *text, "", "--- JSON ---", to_json(facts, indent=1), ""])
    path = absolute(arguments.output)
    write_text(path, credentials.redact(whole))
    print(f"report: {path}", file=sys.stderr)


_WHERE = ("partition", "account", "qos", "reservation", "constraint", "time")
"""Flags of `submit` that say on which nodes."""

_USE = ("profile", "nproc_per_node", "comm_cores", "backend")
"""Flags of `submit` that say how a node is used."""

_ANSWER_S = 30
_QUEUE_S = 3600
"""How long the first answer may take: the nodes may have to be waited for."""

_LOCKS_HELP = """\
Measures on two nodes or more which kind of file lock holds between them in a folder, and records
the choice for its file system; runs use the record. In an allocation (salloc, sbatch) the nodes are
its own; without one, srun asks for some.

  slurmft doctor locks ~/.cache/huggingface
  slurmft doctor locks /gpfs/proj42/hf --nodes 2 --partition debug
  salloc --nodes 2 slurmft doctor locks /lustre/hf
"""


_NODE_HELP = """\
Shows what a node is, what of it a job gets, and how a run would use that: processes, cores, and
every variable that is set, with its reason. With Slurm on a compute node, by srun; else here.

  slurmft doctor node --partition gpu
  slurmft doctor node --here --profile xeon --nproc-per-node 2
"""


def main(argv: list[str]) -> int:
    """`slurmft doctor [SUBJECT] ...`."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            print(f"{_LOCKS_HELP}\n{_NODE_HELP}")
        return checkup_main(argv)
    if argv[0] not in COMMANDS:
        raise unknown("subject", argv[0], list(COMMANDS))
    return COMMANDS[argv[0]](argv[1:])


# --- slurmft doctor node --------------------------------------------------------------------------


def node_main(argv: list[str]) -> int:
    """`slurmft doctor node`."""
    parser = Parser(prog="slurmft doctor node", description=_NODE_HELP)
    parser.add_argument("--nodes", type=int, metavar="N", help="default: the allocation's, or 1")
    parser.add_argument("--here", action="store_true", help="this machine, whatever Slurm has")
    add_options(parser, JobConfig, "Where", only=(*_WHERE, *_USE))
    arguments = parser.parse(argv)
    if not arguments.here and commands.available():
        nodes = arguments.nodes or allocation.allocated_nodes() or 1
        again = [sys.executable, "-m", "slurmft.cli.doctor", "node", "--here", *argv]
        command = allocation.srun_command(nodes, _where(arguments), again, whole=True)
        return subprocess.run(command, check=False).returncode
    here = hardware.detect(os.environ)
    job = build(JobConfig, given(arguments, _USE))
    binding = ccl.choose(job.backend, bool(here.gpus))
    profile = profiles.choose(here, job, uses_ccl=binding is not None)
    print(
        "\n".join([*describe_node(profile), "", *profiles.describe(profile, os.environ)]),
        flush=True,
    )
    return Exit.OK


def describe_node(profile: Profile) -> list[str]:
    """A node, what of it this job has, and what a run would make of that."""
    here = profile.hardware
    cores = {core.core for core in here.cpus}
    granted = {
        "affinity mask": hardware.as_list(cpu.number for cpu in here.cpus),
        "Slurm": here.slurm_cpus and f"{here.slurm_cpus} CPUs",
        "cgroup": here.quota_cpus and f"{here.quota_cpus:g} CPUs",
    }
    gpus = [f"{g.name}: {g.model}, {g.precision}" for g in here.gpus]
    processes = [
        hardware.as_list(own) + (f" and {hardware.as_list(comm)} for communication" if comm else "")
        for own, comm in zip(profile.cores, profile.comm_cores, strict=True)
    ]
    rows = [
        ("host", here.host),
        ("CPU", f"{here.model}; {', '.join(here.flags) or 'no AVX'}"),
        ("sockets", f"{len(here.places('socket'))}, NUMA nodes: {len(here.places('numa'))}"),
        ("cores", f"{len(here.cores)} of {len(cores)}, {here.threads_per_core} thread(s) each"),
        ("granted by", ", ".join(f"{k}: {v}" for k, v in granted.items() if v)),
        ("memory", f"{here.memory_mib:,} MiB"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("networks", ", ".join(here.interfaces) or "none"),
        ("profile", f"{profile.name}: {profile.nproc} process(es); {profile.pinning}"),
        ("compute on", "; ".join(processes)),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


# --- slurmft doctor locks -------------------------------------------------------------------------


def locks_main(argv: list[str]) -> int:
    """`slurmft doctor locks DIR`."""
    parser = Parser(prog="slurmft doctor locks", description=_LOCKS_HELP)
    parser.add_argument("dir", metavar="DIR", help="a folder on the file system in question")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: the allocation's, or 2")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_options(parser, JobConfig, "Where, outside of an allocation", only=_WHERE)
    arguments = parser.parse(argv)
    folder = absolute(arguments.dir)
    if not folder.is_dir():
        raise UsageError(f"no such folder: {str(folder)!r}", "give one that the nodes see, too")
    nodes = _nodes(arguments)
    with _agents(folder, nodes, arguments) as ask:
        return examine(ask, nodes, arguments.json)


def _nodes(arguments: argparse.Namespace) -> int:
    if not commands.available():
        if arguments.nodes not in (None, 1):
            raise UsageError(f"--nodes {arguments.nodes}, but there is no Slurm here")
        return 1
    nodes = arguments.nodes or allocation.allocated_nodes() or 2
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} must be at least 1")
    return int(nodes)


@contextlib.contextmanager
def _agents(folder: Path, nodes: int, arguments: argparse.Namespace) -> Iterator[Ask]:
    """An agent on every node; without Slurm, on this machine."""
    command = probe.agent_command(folder)
    if commands.available():
        command = allocation.srun_command(nodes, _where(arguments), command)
        if allocation.allocated_nodes() is None:
            print(f"waiting for {nodes} nodes ...", file=sys.stderr)
    with Talk(command, _QUEUE_S) as talk:
        hint, talk.late = talk.late, "no nodes in an hour: try another --partition, or --time 2"
        talk.ask(0, "place")  # all tasks of a step start together
        talk.timeout_s, talk.late = _ANSWER_S, hint
        yield talk.ask


def _where(arguments: argparse.Namespace) -> list[str]:
    """srun's flags for the nodes asked for, and the site's own."""
    where = {k: v for k, v in site_defaults(OPTIONS).items() if k in _WHERE}
    where |= given(arguments, _WHERE)
    return sbatch_flags(where)


def _console() -> int:
    return run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)


COMMANDS = {"locks": locks_main, "node": node_main}


if __name__ == "__main__":
    raise SystemExit(_console())
