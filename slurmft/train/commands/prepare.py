"""Makes the run directory of the Slurm job that calls it. After a requeue it finds the directory
again. It prints the path of the script that runs the job.

examples (the files in sbatch/ do this; `slurmft examples .` copies them):
  sbatch --nodes=4 --time=30 sbatch/multi_node.sbatch --task emotion --data /gpfs/emotion
  job=$(python3 -m slurmft prepare --task emotion) && exec bash "$job"
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from slurmft.cli import next_commands
from slurmft.cli.parser import Parser, typed_options
from slurmft.cluster import container, launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.cluster.submit import provenance
from slurmft.core import hooks
from slurmft.core.config import LEAD_S, JobConfig, RunConfig, time_limit_min
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import write_text
from slurmft.core.options import flag, options
from slurmft.runs.job_ids import own_job_id
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import OPTIONS, configure, resolve

_SBATCH = [name for name, each in options(JobConfig).items() if each.sbatch]
_NOT_HERE = {
    name for name, each in options(JobConfig).items() if each.at == "job" or name == "cluster"
}
"""Options that decide what the job is: sbatch must have them."""
_SCONTROL = {name: each.scontrol for name, each in options(JobConfig).items() if each.scontrol}
"""Options of a job, and the fields of `scontrol show job` that have their values."""


def parser() -> Parser:
    command = Parser("slurmft prepare", __doc__).add_options(TrainConfig, "what to train")
    return command.add_options(JobConfig, "how to run it", options(JobConfig).keys() - _NOT_HERE)


def refuse_sbatch_options(argv: list[str]) -> None:
    """Raises UsageError where a flag is one that sbatch must have."""
    theirs = {flag(f"{no}{name}") for name in _NOT_HERE for no in ("", "no_")}
    if word := next((word for word in argv if word.partition("=")[0] in theirs), None):
        raise UsageError(
            f"{word} is an option of the job, which runs already",
            "give it to sbatch, before the name of the file: "
            "sbatch --nodes=4 --time=30 sbatch/multi_node.sbatch --task emotion",
        )


def job_values(environment: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a JobConfig that Slurm knows: by the variables of the batch script, and by what
    `commands.job_facts` returned for the job."""
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    found: dict[str, Any] = dict.fromkeys(_SBATCH) | {
        "nodes": int(environment["SLURM_JOB_NUM_NODES"]),
        "job_name": environment.get("SLURM_JOB_NAME", "slurmft"),
        "cpus_per_task": int(cpus) if cpus else None,
        "exclusive": asked.get("OverSubscribe") == "NO",
        "requeue": asked.get("Requeue") == "1",
    }
    found |= {option: asked.get(name) for option, name in _SCONTROL.items()}
    others = {"nodelist": asked.get("ReqNodeList"), "exclude": asked.get("ExcNodeList")}
    gpus = re.search(r"\bgpu:(?:([^:,()]+):)?(\d+)", asked.get("TresPerNode", ""))
    if gpus and gpus[1]:
        others["gpus-per-node"] = f"{gpus[1]}:{gpus[2]}"
    elif gpus:
        found["gpus_per_node"] = int(gpus[2]) or None
    return found | {"sbatch": tuple(f"{key}={value}" for key, value in others.items() if value)}


def configure_inside(flags: dict[str, Any], environment: Mapping[str, str]) -> RunConfig:
    """The resolved configuration of the job that this process is in."""
    config = configure(flags)
    found = job_values(environment, commands.job_facts(own_job_id(environment)))
    config = dataclasses.replace(config, job=dataclasses.replace(config.job, **found))
    tasks = environment.get("SLURM_NTASKS", str(config.job.nodes))
    if int(tasks) != config.job.nodes:
        raise UsageError(
            f"the job has {tasks} tasks on {config.job.nodes} node(s): slurmft needs one a node",
            "sbatch --ntasks-per-node=1; the processes of a node are --nproc-per-node",
        )
    container.check(config.job, "slurm")
    hooks.check(config.job, "slurm")
    # Slurm does not say when it will signal: the files in sbatch/ have the default lead.
    lead_s = LEAD_S if config.job.stop_lead_s is None else config.job.stop_lead_s
    if lead_s * 2 > time_limit_min(config.job.time or "unlimited") * 60:
        raise UsageError(
            f"the time limit {config.job.time} leaves little before the stop signal, which comes "
            f"{lead_s} s before it",
            "sbatch --time=60, or with both of: sbatch --signal=USR2@30 FILE --stop-lead-s 30",
        )
    return config


def find_run(flags: dict[str, Any]) -> RunDir | None:
    """The run directory of a job that was requeued; None for a job that starts."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    job, where = own_job_id(os.environ), launcher.location("slurm")
    return RunDir.of_job(resolve(flags)[1].runs_dir, job, where)


def make_run(flags: dict[str, Any], argv: list[str]) -> RunDir:
    """The run directory of a job that starts for the first time."""
    config, job = configure_inside(flags, os.environ), own_job_id(os.environ)
    config = dataclasses.replace(config, submission=provenance("prepare", argv))
    run = RunDir.create(config, mark=job)
    write_text(run.script, inside_text(config, run))
    launcher.note_job(run, "slurm", job, launcher.location("slurm"))
    return run


def main(argv: list[str]) -> int:
    """The command: finds or makes the run of this job, and prints the path of its script."""
    refuse_sbatch_options(argv)
    arguments = parser().parse(argv)
    if "SLURM_JOB_NUM_NODES" not in os.environ:
        raise UsageError(
            "this is not a Slurm job: there is no SLURM_JOB_NUM_NODES",
            "sbatch sbatch/multi_node.sbatch, or `slurmft submit` on a login node",
        )
    flags = typed_options(arguments, OPTIONS)
    run = find_run(flags) or make_run(flags, argv)
    print(f"run directory: {run.path}\n{next_commands(run.path)}", file=sys.stderr)
    print(run.script)
    return Exit.OK
