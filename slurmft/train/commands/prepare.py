"""Makes the run directory of the Slurm job that calls it. After a requeue it finds the directory
again. It prints the script that runs the job.

examples (the files in sbatch/ do this; `slurmft examples .` copies them):
  sbatch --nodes=4 --time=30 sbatch/multi_node.sbatch --task emotion --data /gpfs/emotion
  job=$(python3 -P -m slurmft prepare --task emotion) && exec bash <(printf '%s\\n' "$job")
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import next_commands
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

ELSEWHERE = Elsewhere.PLAIN

_OPTIONS = options(JobConfig)
_SBATCH_OPTIONS = [name for name, each in _OPTIONS.items() if each.sbatch]
_JOB_OPTIONS = {
    name
    for name, each in _OPTIONS.items()
    # The cluster is decided, too: the script runs in a job of Slurm.
    if each.at == "job" or name == "cluster"
}
"""Options that decide what the job is: sbatch must have them."""
_SCONTROL = {name: each.scontrol for name, each in _OPTIONS.items() if each.scontrol}
"""Options of a job, and the fields of `scontrol show job` that have their values."""


def parser() -> Parser:
    command = Parser("slurmft prepare", __doc__)
    command.add_options(TrainConfig, "what to train")
    names = _OPTIONS.keys() - _JOB_OPTIONS
    return command.add_options(JobConfig, "how to run it", names).show_usual()


def refuse_sbatch_options(argv: list[str]) -> None:
    """Raises UsageError where a flag is one that sbatch must have."""
    flags = set()
    for name in _JOB_OPTIONS:
        # Flags that are on or off have a form with "no".
        flags |= {flag(name), flag(f"no_{name}")}
    for word in argv:
        name, _, _ = word.partition("=")
        if name in flags:
            raise UsageError(
                f"{word} is an option of the job, which runs already",
                "give it to sbatch, before the name of the file: "
                "sbatch --nodes=4 --time=30 sbatch/multi_node.sbatch --task emotion",
            )


def job_values(
    environment: Mapping[str, str], facts: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the fields of a JobConfig that Slurm knows.

    Args:
        environment: variables of the batch script.
        facts: what `commands.job_facts` returned for the job.
    """
    # Slurm sets it where the job was given --cpus-per-task, and else not.
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    # None first: what the site file says of sbatch options is not true of this job.
    values: dict[str, Any] = dict.fromkeys(_SBATCH_OPTIONS)
    values |= {
        "nodes": int(environment["SLURM_JOB_NUM_NODES"]),
        "job_name": environment.get("SLURM_JOB_NAME", "slurmft"),
        "exclusive": facts.get("OverSubscribe") == "NO",
        "requeue": facts.get("Requeue") == "1",
    }
    if cpus:
        values["cpus_per_task"] = int(cpus)
    for option, name in _SCONTROL.items():
        values[option] = facts.get(name)
    # What no option of ours has, as `slurmft submit --sbatch` would give it.
    others = {"nodelist": facts.get("ReqNodeList"), "exclude": facts.get("ExcNodeList")}
    # "gres/gpu:4", or with a type "gres/gpu:a100:4"; --gpus-per-node has no type.
    gpus = re.search(r"\bgpu:(?:([^:,()]+):)?(\d+)", facts.get("TresPerNode", ""))
    if gpus and gpus[1]:
        others["gpus-per-node"] = f"{gpus[1]}:{gpus[2]}"
    elif gpus:
        values["gpus_per_node"] = int(gpus[2]) or None
    # scontrol shows a list that was not given as empty.
    settings = []
    for key, value in others.items():
        if value:
            settings.append(f"{key}={value}")
    values["sbatch"] = tuple(settings)
    return values


def configure_inside(
    flags: dict[str, Any], environment: Mapping[str, str]
) -> RunConfig:
    """Returns the resolved configuration of the job that this process is in.

    Raises:
        UsageError: the job is not as a run needs it.
    """
    config = configure(flags)
    facts = commands.job_facts(own_job_id(environment))
    job = config.job.replaced(job_values(environment, facts))
    config = dataclasses.replace(config, job=job)
    tasks = environment.get("SLURM_NTASKS", str(config.job.nodes))
    if int(tasks) != config.job.nodes:
        raise UsageError(
            f"the job has {tasks} tasks on {config.job.nodes} node(s): slurmft needs one a node",
            "sbatch --ntasks-per-node=1; the processes of a node are --nproc-per-node",
        )
    container.check(config.job, "slurm")
    hooks.check(config.job, "slurm")
    # Slurm does not say when it will signal: the files in sbatch/ have the default lead.
    lead_s = config.job.stop_lead_s
    if lead_s is None:
        lead_s = LEAD_S
    limit_s = time_limit_min(config.job.time or "unlimited") * 60
    if lead_s * 2 > limit_s:
        raise UsageError(
            f"the time limit {config.job.time} leaves little before the stop signal, which comes "
            f"{lead_s} s before it",
            "sbatch --time=60, or with both of: sbatch --signal=USR2@30 FILE --stop-lead-s 30",
        )
    return config


def find_run(flags: dict[str, Any]) -> RunDir | None:
    """Returns the run directory of a job that was requeued; None for a job that starts."""
    # Slurm sets it from the first requeue on; other jobs need not search the run directories.
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    _, job_config = resolve(flags)
    job_id = own_job_id(os.environ)
    return RunDir.of_job(job_config.runs_dir, job_id, launcher.location("slurm"))


def make_run(flags: dict[str, Any], argv: list[str]) -> RunDir:
    """Creates the run directory of a job that starts for the first time."""
    config = configure_inside(flags, os.environ)
    job_id = own_job_id(os.environ)
    config = dataclasses.replace(config, submission=provenance("prepare", argv))
    run = RunDir.create(config, mark=job_id)
    write_text(run.script, inside_text(config, run))
    launcher.note_job(run, "slurm", job_id, launcher.location("slurm"))
    return run


def main(argv: list[str]) -> int:
    """Finds or makes the run of this job, and prints its script."""
    refuse_sbatch_options(argv)
    arguments = parser().parse(argv)
    if "SLURM_JOB_NUM_NODES" not in os.environ:
        raise UsageError(
            "this is not a Slurm job: there is no SLURM_JOB_NUM_NODES",
            "sbatch sbatch/multi_node.sbatch, or `slurmft submit` on a login node",
        )
    flags = typed_options(arguments, OPTIONS)
    # A requeued job has its run directory: it must not get a second one.
    run = find_run(flags) or make_run(flags, argv)
    # The batch script executes what is on stdout; words for people go to stderr.
    print(f"run directory: {run.path}\n{next_commands(run.path)}", file=sys.stderr)
    # Not the path of the script: where others can rename, theirs could have that by the time that
    # it is executed.
    print(inside_text(run.load_own_config(), run), end="")
    return Exit.OK
