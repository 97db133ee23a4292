"""Checks the cluster and its nodes. Examines Slurm, packages, hub, caches and free space here and,
with --nodes or within an allocation, its nodes: cores, devices, names, ports, clocks, links, locks,
matmul throughput, all-reduce. Each finding is ok, a WARNING or a FAILURE, with a hint what to do.
With a failure, the exit code is 1.

examples:
  slurmft doctor
  slurmft doctor --nodes 4 --partition gpu --gpus-per-node 4 --output report.txt
  salloc --nodes 4 slurmft doctor
  slurmft doctor --cluster local --nodes 2         simulated nodes on this machine

parts of it, which have a --help of their own:
  slurmft doctor locks DIR    which kinds of file locks hold between nodes
  slurmft doctor node         what a node is, and how a run would use it
"""

import argparse
import json
import sys
from collections.abc import Callable

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, Part, above_zero, count, run_part, typed_options
from slurmft.cluster.slurm import allocation, commands
from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import check_place, named_by_user, write_text
from slurmft.core.filesystem import absolute
from slurmft.core.launchers import starts_ranks
from slurmft.core.options import Command, build, options
from slurmft.core.site import site_defaults
from slurmft.plugins.examine import locks, node_use
from slurmft.plugins.examine.agents import AgentError, Agents
from slurmft.plugins.examine.checks import ReportFacts
from slurmft.plugins.examine.examination import examine_cluster
from slurmft.plugins.examine.site import Site, open_site
from slurmft.train.login.configure import OPTIONS

ELSEWHERE = Elsewhere.SEVERAL

# A checkup is not worth a long wait. Its parts answer one question, for which people come back.
_CLUSTER_WAIT_S = 300.0
_PART_WAIT_S = 3600.0
# How long a node may take to describe itself; its agent starts in that time.
_NODE_S = 60.0
_WAIT = "how long to wait in the queue for nodes (%(default)g)"


def _flags_of(command: Command) -> list[str]:
    """Returns the names of the job's options that are flags of a command, too."""
    names = []
    for name, each in options(JobConfig).items():
        if command in each.commands:
            names.append(name)
    return names


def main(argv: list[str]) -> int:
    # A word that is no flag names a part: `doctor node`, `doctor locks DIR`.
    if argv and not argv[0].startswith("-"):
        return run_part("slurmft doctor", PARTS, argv, "")
    arguments = parser().parse(argv)
    job = _job(arguments, "doctor")
    # Such a launcher starts ranks without the task of a node, which an agent would take the place
    # of.
    if starts_ranks(job.cluster):
        raise UsageError(
            f"--cluster {job.cluster} has no nodes to examine",
            "use slurm, local or auto",
        )
    if arguments.output is not None:
        # Before nodes are waited for: where it cannot be written, the report would be lost.
        check_place(absolute(arguments.output), "--output")
    # Progress is for people who watch.
    say: Callable[[str], None] = _say
    if arguments.json or not sys.stderr.isatty():
        say = _say_nothing
    report = examine_cluster(
        job,
        # a flag that is not given leaves no attribute
        with_nodes=hasattr(arguments, "nodes"),
        limit_s=arguments.within,
        wait_s=arguments.wait,
        quick=arguments.quick,
        say=say,
    )
    print(report.json() if arguments.json else report.text(), flush=True)
    if arguments.output is not None:
        path = absolute(arguments.output)
        write_text(named_by_user(path), report.for_support())
        # stdout has the report itself, which may be JSON.
        print(f"report: {path}", file=sys.stderr)
    return report.exit_code


def parser() -> Parser:
    parser = Parser("slurmft doctor", __doc__)
    parser.add_json("print the findings as JSON", ReportFacts)
    add = parser.add_argument
    add(
        "--output",
        metavar="FILE",
        help="write a report for support: text and JSON, no secrets",
    )
    add(
        "--quick",
        action="store_true",
        help="skip devices and collectives: torch is not loaded",
    )
    limit = "time limit for the nodes' part; measurements beyond it are skipped (%(default)s)"
    add("--within", type=above_zero, default=40, metavar="SECONDS", help=limit)
    add(
        "--wait",
        type=above_zero,
        default=_CLUSTER_WAIT_S,
        metavar="SECONDS",
        help=_WAIT,
    )
    return parser.add_options(JobConfig, "Where", _flags_of("doctor"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass


def _job(
    arguments: argparse.Namespace,
    command: Command,
    **fields: object,
) -> JobConfig:
    """Returns the job that the flags and the site file ask for."""
    names = _flags_of(command)
    # Of the site file only what this command has a flag for, too: the rest is of runs.
    defaults = site_defaults(OPTIONS)
    site = {}
    for name in names:
        if name in defaults:
            site[name] = defaults[name]
    return build(JobConfig, site | typed_options(arguments, names) | fields)


# --- slurmft doctor node --------------------------------------------------------------------------


def node_parser() -> Parser:
    parser = Parser("slurmft doctor node", node_main.__doc__)
    add = parser.add_argument
    add("--nodes", type=count, metavar="N", help="default: the allocation's, or 1")
    add("--here", action="store_true", help="this machine, even with Slurm")
    return parser.add_options(JobConfig, "Where", _flags_of("doctor node"))


def node_main(argv: list[str]) -> int:
    """Shows what a node is, what of it a job gets, and how a run would use that: processes, cores,
    and every variable that is set, with its reason. With Slurm it shows compute nodes, else this
    machine.

    examples:
      slurmft doctor node --partition gpu
      slurmft doctor node --here --profile xeon --nproc-per-node 2
    """
    arguments = node_parser().parse(argv)
    if arguments.here or not commands.available():
        job = build(JobConfig, typed_options(arguments, _flags_of("doctor node")))
        print("\n".join(node_use.describe(job)), flush=True)
        return Exit.OK
    nodes = arguments.nodes or allocation.allocated_nodes() or 1
    job = _job(arguments, "doctor node", nodes=nodes)
    with open_site(job, _PART_WAIT_S, True, _say) as site:
        return _describe_nodes(site, job)


def _describe_nodes(site: Site, job: JobConfig) -> int:
    """Prints what the first nodes of a site say; returns the exit code."""
    names = list(site.hosts)[: job.nodes]
    commands_of = {name: site.commands[name] for name in names}
    code = Exit.OK
    with Agents(commands_of, site.env) as agents:
        question = {"job": job}
        answers = agents.ask("describe", dict.fromkeys(names, question), _NODE_S)
    for name in names:
        answer = answers[name]
        if isinstance(answer, AgentError):
            print(f"error: {name}: {answer.message}", file=sys.stderr, flush=True)
            code = Exit.FAILED  # the other nodes are shown all the same
        else:
            lines = [*answer, ""]
            print("\n".join(lines), flush=True)
    return code


# --- slurmft doctor locks -------------------------------------------------------------------------


def locks_main(argv: list[str]) -> int:
    """Measures on two or more nodes which kinds of file locks hold between them in a folder, and
    records the choice for its file system; runs use the record. In an allocation (salloc, sbatch)
    these are its nodes; otherwise salloc requests some.

    examples:
      slurmft doctor locks ~/.cache/huggingface
      slurmft doctor locks /gpfs/proj42/hf --nodes 2 --partition debug
      salloc --nodes 2 slurmft doctor locks /lustre/hf
    """
    arguments = locks_parser().parse(argv)
    folder = absolute(arguments.dir)
    if not folder.is_dir():
        problem = f"no such folder: {str(folder)!r}"
        raise UsageError(problem, "give one that the nodes see, too")
    job = locks.probe_job(_job(arguments, "doctor locks"), arguments.nodes)
    with open_site(job, arguments.wait, commands.available(), _say) as site:
        measurement = locks.measure(site, job.nodes, folder)
    if not arguments.json:  # before `conclude`, which fails where no lock holds
        print("\n".join(locks.table(measurement)))
    conclusion = locks.conclude(measurement)
    if arguments.json:
        print(json.dumps(measurement.as_dict()))
    else:
        print("\n".join(conclusion))
    return Exit.OK


def locks_parser() -> Parser:
    parser = Parser("slurmft doctor locks", locks_main.__doc__)
    parser.add_json("print the findings as JSON", locks.MeasurementFacts)
    add = parser.add_argument
    add("dir", metavar="DIR", help="a folder on the file system in question")
    add("--nodes", type=count, metavar="N", help="default: the allocation's, or 2")
    add("--wait", type=above_zero, default=_PART_WAIT_S, metavar="SECONDS", help=_WAIT)
    return parser.add_options(
        JobConfig,
        "Where, outside of an allocation",
        _flags_of("doctor locks"),
    )


PARTS = {"locks": Part(locks_parser, locks_main), "node": Part(node_parser, node_main)}
