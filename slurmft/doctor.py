"""`slurmft doctor`: what a cluster is like, measured on its nodes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft import ccl, checkup, hardware, lockprobe, profiles, slurm
from slurmft.cli import Parser, add_options, aligned, given
from slurmft.config import JobConfig, TrainConfig, build
from slurmft.errors import Exit, UsageError, run_main, unknown
from slurmft.filesystem import FileSystem, absolute
from slurmft.lockprobe import Ask, Finding, Findings, Talk
from slurmft.profiles import Profile
from slurmft.site import sbatch_flags, site_defaults

_WHERE = ("partition", "account", "qos", "reservation", "constraint", "time")
"""Flags of `submit` that say on which nodes."""

_USE = ("profile", "nproc_per_node", "comm_cores")
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
        return checkup.main(argv)
    if argv[0] not in COMMANDS:
        raise unknown("subject", argv[0], list(COMMANDS))
    return COMMANDS[argv[0]](argv[1:])


# --- slurmft doctor node --------------------------------------------------------------------------


def node_main(argv: list[str]) -> int:
    """`slurmft doctor node`."""
    parser = Parser(prog="slurmft doctor node", description=_NODE_HELP)
    parser.add_argument("--nodes", type=int, metavar="N", help="default: the allocation's, or 1")
    parser.add_argument("--here", action="store_true", help="this machine, whatever Slurm has")
    add_options(parser, TrainConfig, "What to run", only=("backend",))
    add_options(parser, JobConfig, "Where", only=(*_WHERE, *_USE))
    arguments = parser.parse(argv)
    if not arguments.here and slurm.available():
        nodes = arguments.nodes or slurm.allocated_nodes() or 1
        again = [sys.executable, "-m", "slurmft.doctor", "node", "--here", *argv]
        command = slurm.srun_command(nodes, _where(arguments), again, whole=True)
        return subprocess.run(command, check=False).returncode
    here = hardware.detect(os.environ)
    job = build(JobConfig, given(arguments, _USE))
    binding = ccl.choose(getattr(arguments, "backend", "auto"), bool(here.gpus))
    profile = profiles.choose(here, job, uses_ccl=binding is not None)
    print("\n".join([*describe(profile), "", *profiles.describe(profile, os.environ)]), flush=True)
    return Exit.OK


def describe(profile: Profile) -> list[str]:
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
    if not slurm.available():
        if arguments.nodes not in (None, 1):
            raise UsageError(f"--nodes {arguments.nodes}, but there is no Slurm here")
        return 1
    nodes = arguments.nodes or slurm.allocated_nodes() or 2
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} must be at least 1")
    return int(nodes)


@contextlib.contextmanager
def _agents(folder: Path, nodes: int, arguments: argparse.Namespace) -> Iterator[Ask]:
    """An agent on every node; without Slurm, on this machine."""
    command = lockprobe.agent_command(folder)
    if slurm.available():
        command = slurm.srun_command(nodes, _where(arguments), command)
        if slurm.allocated_nodes() is None:
            print(f"waiting for {nodes} nodes ...", file=sys.stderr)
    with Talk(command, _QUEUE_S) as talk:
        hint, talk.late = talk.late, "no nodes in an hour: try another --partition, or --time 2"
        talk.ask(0, "place")  # all tasks of a step start together
        talk.timeout_s, talk.late = _ANSWER_S, hint
        yield talk.ask


def _where(arguments: argparse.Namespace) -> list[str]:
    """srun's flags for the nodes asked for, and the site's own."""
    where = {k: v for k, v in site_defaults().items() if k in _WHERE}
    where |= given(arguments, _WHERE)
    return sbatch_flags(where)


def examine(ask: Ask, nodes: int, as_json: bool = False) -> int:
    """Measures, records and prints.

    Raises:
        ProbeError: no kind of lock holds, or an agent gives no answer.
    """
    places = [json.loads(ask(agent, "place")) for agent in range(nodes)]
    hosts, here = [place[0] for place in places], FileSystem.of_fields(places[0][1:])
    found = lockprobe.probe(ask, nodes, here)
    facts: dict[str, Any] = {"hosts": hosts, "file_system": str(here), "one_folder": bool(found)}
    if found is None:
        lines = [
            f"not one folder: {', '.join(hosts)} each have their own there ({here})",
            "locks need not hold between nodes; nothing is recorded",
        ]
    else:
        if not as_json:  # before an error that nothing holds
            print(f"{here}, seen from {', '.join(hosts)}\n\n{table(found)}\n")
        choice = lockprobe.choose(found, here)
        findings = {name: dataclasses.asdict(finding) for name, finding in found.items()}
        facts |= {"choice": choice, "findings": findings}
        lines = conclusion(here, found, nodes, choice)
    print(json.dumps(facts) if as_json else "\n".join(lines))
    return Exit.OK


def conclusion(here: FileSystem, found: Findings, nodes: int, choice: str) -> list[str]:
    """What follows from the findings; records them if nodes were compared."""
    if nodes == 1:
        return [
            f"one node cannot know what holds between nodes; default here: {choice}",
            "measure it in an allocation of two: salloc --nodes 2 slurmft doctor locks DIR",
        ]
    lines = [f"choice: {choice}"]
    try:
        path = lockprobe.record(here, found, nodes)
        lines.append(f"recorded for {here}, and used by your runs: {path}")
    except (OSError, RuntimeError) as error:
        lines.append(f"not recorded ({error}): give --file-locks {choice} to runs")
    if choice == "soft":
        lines.append("warning: a process that is killed leaves its soft locks on other nodes")
    return lines


def table(found: Findings) -> str:
    """The findings, a line for each primitive."""
    titles = ("", "this node", "other nodes", "unlock", "exit", "SIGKILL", "cost")
    return "\n".join(aligned([titles, *(_row(name, finding) for name, finding in found.items())]))


def _row(name: str, finding: Finding) -> tuple[str, ...]:
    if finding.error:
        return (name, finding.error, *[""] * 5)

    def cell(value: bool | None, yes: str, no: str) -> str:
        return "unknown" if value is None else yes if value else no

    excludes = ("excludes", "DOES NOT EXCLUDE")
    released = ("releases", "STAYS LOCKED")
    return (
        name,
        cell(finding.on_node, *excludes),
        cell(finding.between_nodes, *excludes),
        *(cell(v, *released) for v in (finding.on_unlock, finding.on_exit, finding.on_kill)),
        "" if finding.cost_us is None else f"{finding.cost_us:.0f} us",
    )


def _console() -> int:
    return run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)


COMMANDS = {"locks": locks_main, "node": node_main}


if __name__ == "__main__":
    raise SystemExit(_console())
