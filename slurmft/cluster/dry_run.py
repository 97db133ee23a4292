"""The text of a dry run: what `slurmft submit` would submit."""

import re
import shlex
from pathlib import Path

from slurmft.cluster import dependency, shared_outputs
from slurmft.cluster import launcher as cluster_launcher
from slurmft.core.config import JobConfig, RunConfig, time_limit_min
from slurmft.core.options import options
from slurmft.core.program import OWN, kind_of
from slurmft.core.site import origins
from slurmft.core.text import duration, hanging, in_bytes
from slurmft.node import start
from slurmft.node.rendezvous import Rendezvous
from slurmft.runs.rundir import RunDir


def text(config: RunConfig, cluster: str, run: RunDir | None = None) -> str:
    """Returns the text of a dry run: the job, and the command of the first node; the whole
    configuration; the data that it reads; at the end, where the eye is when the command has
    printed it all, what would run, in a few lines. `run`: the one that resumes."""
    config = dependency.settled(config, cluster, config.job.runs_dir)
    shared_outputs.check(config, run)
    if run is None:
        name = f"{config.name}-<time>-<random>"
        run = RunDir(Path(config.job.runs_dir) / name)
    launcher = cluster_launcher.get(cluster)
    lines = [launcher.plan(config, run)]
    # Where a launcher starts the ranks, its plan is the whole command.
    if not launcher.STARTS_RANKS:
        lines += node_command(config, run, cluster)
    lines += ["", f"# configuration, written to {run.config}", config.to_json()]
    lines += _site_lines(config)
    if config.program.inputs:
        lines.append("# what it reads, as it is now")
        for path, facts in config.program.inputs.items():
            size = in_bytes(facts["bytes"])
            lines.append(hanging("", f"{path}: {facts['what']}, {size}"))
        lines.append("")
    lines += _summary(config, cluster, run)
    lines += ["", "dry run: nothing was submitted"]
    return "\n".join(lines)


def _summary(config: RunConfig, cluster: str, run: RunDir) -> list[str]:
    """Returns what would run, where and how long, on how much, and where its results will be."""
    job = config.job
    destination = cluster_launcher.destination(cluster, job)
    where = [destination.removeprefix("to ")]
    if cluster == "slurm":
        partition = "the default partition"
        if job.partition:
            partition = f"partition {job.partition}"
        where.append(partition)
    if cluster == "slurm" and job.account:
        where.append(f"account {job.account}")
    rows = (
        ("what", _what(config)),
        ("where", ", ".join(where)),
        ("time", _time(job, cluster)),
        ("a node", _share_of_node(config, cluster)),
        ("results", _results(config, run)),
    )
    lines = ["# what would be submitted"]
    for name, value in rows:
        head = f"  {name:<8} "
        lines.append(hanging(head, value, len(head)))
    return lines


def _what(config: RunConfig) -> str:
    program = config.program
    if program.kind == OWN:
        return shlex.join(program.settings["argv"])
    parts = (program.name, program.settings.get("data"), program.settings.get("model"))
    return ", ".join(part for part in parts if part)


def _time(job: JobConfig, cluster: str) -> str:
    if job.time is not None:
        limit = duration(60 * time_limit_min(job.time))
        return f"{limit} at most; it is to stop and save {duration(job.lead_s)} before"
    if cluster == "slurm":
        return "the limit of the partition (--time)"
    return "no limit"


def _share_of_node(config: RunConfig, cluster: str) -> str:
    """Returns what the job gets of a node, as far as it is known before it starts."""
    job = config.job
    parts = []
    if cluster == "slurm":
        if job.gpus_per_node:
            parts.append(f"{job.gpus_per_node} GPU(s)")
        if job.exclusive:
            parts.append("all CPUs")
        elif job.cpus_per_task:
            parts.append(f"{job.cpus_per_task} CPU(s)")
        elif not job.chooses_cpus:
            parts.append("CPUs as the site gives them, often one (--cpus-per-task)")
        if job.mem:
            parts.append(f"{job.mem} of memory")
    if kind_of(config.program).per == "node":
        parts.append("the program once")
    elif job.nproc_per_node:
        parts.append(f"{job.nproc_per_node} process(es)")
    else:
        parts.append("a process for each GPU, else for each CPU socket")
    return "; ".join(parts)


def _results(config: RunConfig, run: RunDir) -> str:
    program = config.program
    if program.kind == OWN:
        return f"where the program writes them; its log: {run.path}"
    return str(program.settings.get("output") or run.path)


def _site_lines(config: RunConfig) -> list[str]:
    """Returns which options come from which site file."""
    names = [*options(JobConfig), *config.program.settings]
    lines = []
    for file, keys in origins(names).items():
        lines.append(f"{file}: {', '.join(keys) or 'nothing for this job'}")
    if lines:
        return ["# site files; later ones and flags have precedence", *lines, ""]
    return []


def node_command(config: RunConfig, run: RunDir, cluster: str) -> list[str]:
    """The torchrun command of the first node, with its title."""
    # The rendezvous, as far as it is known before the job has nodes.
    head = "127.0.0.1"
    job_id = "$JOB_ID"
    if cluster == "slurm":
        head = "$HEAD"
        job_id = "$SLURM_JOB_ID.1"
    hosts = (head,) * config.job.nodes
    nproc = str(config.job.nproc_per_node or "$NPROC")
    meeting = Rendezvous(
        hosts=hosts, node_rank=0, port="$PORT", check_port=0, id=job_id
    )
    count = None
    explained = "NPROC: its GPUs or CPU sockets"
    if config.job.min_nodes is not None and cluster == "slurm":
        count = "$NNODES"
        explained = f"NNODES: {config.job.node_range}, what is free; {explained}"
    arguments = start.node_command(config, run.path, meeting, nproc, count)
    command = shlex.join(arguments)
    lines = [
        f"# the task of each node then runs (here: of the first; {explained})",
        # our variables, and no path
        re.sub(r"'([\w.:]*\$[\w.:$]+)'", r'"\1"', command),
    ]
    if config.program.kind == OWN:
        from slurmft.programs import submission  # 8 ms: no other program needs it here

        lines += submission.description(config)
    return lines
