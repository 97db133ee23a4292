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
import os
import subprocess
import sys

from slurmft.cli.parser import Parser, Part, given, run_part
from slurmft.cluster.slurm import allocation, commands, sbatch_options
from slurmft.core.config import JobConfig, build
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import write_text
from slurmft.core.filesystem import absolute
from slurmft.core.site import site_defaults
from slurmft.core.text import aligned
from slurmft.node import ccl, hardware, profiles
from slurmft.node.profiles import Profile
from slurmft.plugins.examine import locks
from slurmft.plugins.examine.examination import examine_cluster
from slurmft.plugins.examine.nodes import open_site
from slurmft.train.login.configure import OPTIONS

_WHERE = ("partition", "account", "qos", "reservation", "constraint", "time")
"""Flags of `submit` that say on which nodes."""
_USE = ("profile", "nproc_per_node", "backend")
"""Flags of `submit` that say how a node is used."""
_JOB = (
    "nodes", "cluster", "runs_dir", *_WHERE, "gpus_per_node", "cpus_per_task", "mem", *_USE,
    "host_suffix", "interface",
)  # fmt: skip
_CHECKUP_WAIT_S, _LOCKS_WAIT_S = 300.0, 3600.0
_WAIT = "how long to wait in the queue for nodes (%(default)g)"


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        return run_part("slurmft doctor", PARTS, argv, "")
    arguments = parser().parse(argv)
    job = _job(arguments, _JOB)
    if job.cluster == "mpirun":
        raise UsageError("--cluster mpirun has no nodes to examine", "use slurm, local or auto")
    shows_steps = sys.stderr.isatty() and not arguments.json
    report = examine_cluster(
        job, nodes_asked=hasattr(arguments, "nodes"), limit_s=arguments.within,
        wait_s=arguments.wait, quick=arguments.quick,
        say=_say if shows_steps else lambda _: None,
    )  # fmt: skip
    print(report.json() if arguments.json else report.text(), flush=True)
    if arguments.output is not None:
        path = absolute(arguments.output)
        write_text(path, report.for_support())
        print(f"report: {path}", file=sys.stderr)
    return report.exit_code


def parser() -> Parser:
    made = Parser("slurmft doctor", __doc__).add_json("print the findings as JSON")
    add = made.add_argument
    add("--output", metavar="FILE", help="write a report for support: text and JSON, no secrets")
    add("--quick", action="store_true", help="skip devices and collectives: torch is not loaded")
    limit = "time limit for the nodes' part; measurements beyond it are skipped (%(default)s)"
    add("--within", type=float, default=40, metavar="SECONDS", help=limit)
    add("--wait", type=float, default=_CHECKUP_WAIT_S, metavar="SECONDS", help=_WAIT)
    return made.add_options(JobConfig, "Where", _JOB)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _job(arguments: argparse.Namespace, names: tuple[str, ...]) -> JobConfig:
    """The job that the flags and the site file ask for."""
    site = {k: v for k, v in site_defaults(OPTIONS).items() if k in names}
    return build(JobConfig, site | given(arguments, names))


# --- slurmft doctor node --------------------------------------------------------------------------


def node_parser() -> Parser:
    made = Parser("slurmft doctor node", node_main.__doc__)
    made.add_argument("--nodes", type=int, metavar="N", help="default: the allocation's, or 1")
    made.add_argument("--here", action="store_true", help="this machine, even with Slurm")
    return made.add_options(JobConfig, "Where", (*_WHERE, *_USE))


def node_main(argv: list[str]) -> int:
    """Shows what a node is, what of it a job gets, and how a run would use that: processes, cores,
    and every variable that is set, with its reason. With Slurm on a compute node, by srun; else
    here.

    examples:
      slurmft doctor node --partition gpu
      slurmft doctor node --here --profile xeon --nproc-per-node 2
    """
    arguments = node_parser().parse(argv)
    if arguments.here or not commands.available():
        here, job = hardware.detect(os.environ), build(JobConfig, given(arguments, _USE))
        binding = ccl.choose(job.backend, profiles.name_of(here, job) == "gpu")
        profile = profiles.choose(here, job, uses_ccl=binding is not None)
        lines = [*_facts(profile), "", *profiles.describe(profile, os.environ)]
        print("\n".join(lines), flush=True)
        return Exit.OK
    nodes = arguments.nodes or allocation.allocated_nodes() or 1
    wanted = sbatch_options.of_fields(_job(arguments, _WHERE), _WHERE)
    options = sbatch_options.arguments(wanted.items())
    again = [sys.executable, "-m", "slurmft", "doctor", "node", "--here", *argv]
    command = allocation.srun_command(nodes, options, again, whole=True)
    return subprocess.run(command, check=False).returncode


def _facts(profile: Profile) -> list[str]:
    """A node, what of it this job has, and how a run uses that."""
    here = profile.hardware
    cores = {core.core for core in here.cpus}
    granted = {
        "affinity mask": hardware.as_list(cpu.number for cpu in here.cpus),
        "Slurm": here.slurm_cpus and f"{here.slurm_cpus} CPUs",
        "cgroup": here.quota_cpus and f"{here.quota_cpus:g} CPUs",
    }
    gpus = [f"{g.name}: {g.vendor} {g.model}, {g.precision}" for g in here.gpus]
    processes = [
        hardware.as_list(own) + (f" and {hardware.as_list(comm)} for communication" if comm else "")
        for own, comm in zip(profile.cores, profile.comm_cores, strict=True)
    ]
    return aligned(
        [
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
    )


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
        raise UsageError(f"no such folder: {str(folder)!r}", "give one that the nodes see, too")
    job = locks.probe_job(_job(arguments, _WHERE), arguments.nodes)
    with open_site(job, arguments.wait, commands.available(), _say) as site:
        found = locks.measure(site, job.nodes, folder)
    if not arguments.json:  # before an error that nothing holds
        print("\n".join(locks.table(found)))
    conclusion = locks.conclude(found)
    print(json.dumps(found.as_dict()) if arguments.json else "\n".join(conclusion))
    return Exit.OK


def locks_parser() -> Parser:
    made = Parser("slurmft doctor locks", locks_main.__doc__)
    add = made.add_json("print the findings as JSON").add_argument
    add("dir", metavar="DIR", help="a folder on the file system in question")
    add("--nodes", type=int, metavar="N", help="default: the allocation's, or 2")
    add("--wait", type=float, default=_LOCKS_WAIT_S, metavar="SECONDS", help=_WAIT)
    return made.add_options(JobConfig, "Where, outside of an allocation", _WHERE)


PARTS = {"locks": Part(locks_parser, locks_main), "node": Part(node_parser, node_main)}
