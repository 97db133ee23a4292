"""The options of sbatch that a run needs: for #SBATCH lines, and for the command line."""

import shlex
from collections.abc import Callable, Iterable

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.options import options
from slurmft.runs.rundir import RunDir

_MEMORY_KEYS = {"mem", "mem-per-cpu", "mem-per-gpu"}
"""sbatch options for memory, of which a job has at most one."""
DEPENDENCIES = {"after": "afterok", "after_any": "afterany"}
"""Option that names runs to wait for -> Slurm's name of the dependency."""


def all_options(config: RunConfig, run: RunDir) -> list[tuple[str, str | None]]:
    """Returns all sbatch options of a run: its request, and where its output goes."""
    log = f"{run.submitit}/%j_0_log"
    outputs = [("output", f"{log}.out"), ("error", f"{log}.err")]
    return [*request(config).items(), *outputs]


def request(config: RunConfig) -> dict[str, str | None]:
    """Returns the sbatch options that do not depend on the run: the user's, and those that slurmft
    needs. None is the value of an option that takes none."""
    job = config.job
    of_user: dict[str, str | None] = {}  # --sbatch NAME=VALUE
    for pair in job.sbatch:
        name, equals, value = pair.lstrip("-").partition("=")
        of_user[name] = None
        if equals:
            of_user[name] = value
    dependency = config.submission.dependency
    if dependency:
        conditions = [of_user.get("dependency"), dependency]
        of_user["dependency"] = ",".join(filter(None, conditions))
        # many sites let such a job wait for ever
        of_user["kill-on-invalid-dep"] = "yes"
    names = [name for name, option in options(JobConfig).items() if option.sbatch]
    fields = of_fields(job, names)
    # Nobody else can use the memory of a whole node, of which Slurm gives a part by default.
    if job.exclusive and _MEMORY_KEYS.isdisjoint(fields.keys() | of_user.keys()):
        fields["mem"] = "0"
    # Slurm itself does it when a node dies.
    requeue = "no-requeue"
    if job.requeue:
        requeue = "requeue"
    # For a range of nodes, Slurm would give no more nodes than the fewest have tasks: there srun
    # says it.
    tasks: dict[str, str | None] = {}
    if job.min_nodes is None:
        tasks["ntasks-per-node"] = "1"
    if job.outlives_nodes:
        tasks["no-kill"] = None
    return {
        **fields,
        "job-name": job.project,
        # Behind the fields, which it overrides; before what slurmft cannot do without.
        **of_user,
        requeue: of_user.get(requeue),
        # Before the time limit; to the processes of the step, not to the batch script.
        "signal": f"USR2@{job.lead_s}",
        **tasks,
        "open-mode": "append",
    }


def of_fields(job: JobConfig, names: Iterable[str]) -> dict[str, str | None]:
    """Returns fields of a job as options of sbatch, salloc and srun: option -> value, None for
    options that take none."""
    declared = options(JobConfig)
    values = job.values()
    arguments: dict[str, str | None] = {}
    for name in names:
        value = values.get(name)
        key = str(declared[name].sbatch)
        if value is True:
            arguments[key] = None
        elif value is not None and value is not False:
            arguments[key] = str(value)
    if "nodes" in arguments:
        arguments["nodes"] = job.allocation
    return arguments


def directives(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Returns options as lines of a batch script."""
    return [f"#SBATCH {_option(name, value, _quoted)}" for name, value in options]


def _quoted(value: str) -> str:
    """Returns a value as sbatch reads it in a line: like a shell, but for backslashes, which escape
    the next character within single quotes, too."""
    return shlex.quote(value).replace("\\", "\\\\")


def arguments(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Returns options for sbatch's command line, where they take precedence over SBATCH_*
    variables."""
    return [_option(name, value) for name, value in options]


def _option(name: str, value: str | None, quote: Callable[[str], str] = str) -> str:
    if value is None:
        return f"--{name}"
    return f"--{name}={quote(value)}"
