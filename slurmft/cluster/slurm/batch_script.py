"""The batch script of a job. The commands that it runs on the job's first node are in `first_node`,
which a submission need not import."""

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.cluster import container
from slurmft.cluster.slurm import commands, srun_log
from slurmft.cluster.slurm.sbatch_options import all_options, directives
from slurmft.core import bash, hooks, interpreter, ownership, permissions
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit
from slurmft.node.rendezvous import HOSTS, NODE_COUNT
from slurmft.runs.rundir import RunDir

# EX_CONFIG of sysexits.h, which none of slurmft's own exit codes is.
_BROKEN = 78
"""Exit code where slurmft cannot be imported, and of the script then."""

# In an upgrade, any module may be missing for a moment: then the script tries again. `run` is
# outside of the `try`, as its own errors are no broken installation.
_RUN = f"""\
import sys
try:
    from slurmft.cluster.slurm import first_node
except Exception as error:
    print(f"slurmft cannot be imported: {{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit({_BROKEN})
first_node.run()"""

INODE = "SLURMFT_RUN_INODE"
"""Variable of the script: the number of the run directory that `first_node begin` has examined."""
_TEMPLATE = Path(__file__).with_name("job.sh.template")
_PLACE = re.compile(r"\{\{ (\w+) \}\}")


def sbatch_text(config: RunConfig, run: RunDir) -> str:
    """Returns the batch script of a run that submitit submits."""
    return inside_text(config, run, options=directives(all_options(config, run)))


def inside_text(
    config: RunConfig, run: RunDir, job: str = "%j", options: Sequence[str] = ()
) -> str:
    """Returns the script of a job; without options, of one that another script runs, which has
    them.

    The names of its logs begin with `job`, a pattern of Slurm's.
    """
    log = f"{run.submitit}/{job}_%t_log"
    # One failed task ends the step: the others would wait for it in a collective.
    # --export=ALL: where sbatch had --export=NONE, srun would hand on no variable of this script.
    srun = ["srun", "--export=ALL", "--unbuffered", "--kill-on-bad-exit=1", "--wait=60"]
    if config.job.min_nodes is not None:
        srun.append("--ntasks-per-node=1")
    # Appended: a requeued job keeps its id, and so the names of its logs.
    srun += ["--open-mode=append", "--output", f"{log}.out", "--error", f"{log}.err"]
    in_container = container.srun_options(config, run)
    task = [*in_container, *container.node_task(config, run)]
    chosen_nodes = []
    watch_head = ""
    if config.job.outlives_nodes:
        watch_head = _watch_head(run, log)
        # Not all of the allocation: `first_node begin` chooses.
        chosen_nodes = [
            f'--nodes="${NODE_COUNT}"',
            f'--ntasks="${NODE_COUNT}"',
            f'--nodelist="${HOSTS}"',
        ]
    blocks = _optional_blocks(config, run, in_srun=bool(in_container))
    lines = _filled(
        _TEMPLATE.read_text(encoding="utf-8"),
        blocks
        | {
            "umask": f"{permissions.umask(config.job.share_with_group):04o}",
            "python": shlex.quote(interpreter.PYTHON),
            "path": shlex.quote(str(run.path)),
            "is_same": bash.functions(ownership.BASH),
            "inode": f"${INODE}",
            "start": shlex.join(interpreter.code(_RUN)),
            "task": " ".join([shlex.join(srun), *chosen_nodes, shlex.join(task)]),
            "watch_head": watch_head,
            "note": commands.NOTE,
            "broken": str(_BROKEN),
            "again": str(commands.AGAIN),
            "stopped": str(int(Exit.STOPPED)),
            "gave_up": shlex.quote(f"^{srun_log.GAVE_UP}"),
            "killed": str(128 + signal.SIGTERM),
        },
    )
    return "\n".join(["#!/bin/bash", *options, "", lines])


def _watch_head(run: RunDir, log: str) -> str:
    """Returns the lines that have another node watch the first one.

    Args:
        run: the run.
        log: how the names of the tasks' logs begin.
    """
    # --no-kill: the death of the first node would end the step.
    srun = ["srun", "--export=ALL", "--overlap", "--no-kill", "--nodes=1"]
    srun += ["--ntasks=1", "--cpus-per-task=1", "--open-mode=append"]
    srun += ["--output=/dev/null", "--error", f"{log}.err"]
    module = "slurmft.cluster.slurm.head_watch"
    watch = shlex.join(interpreter.module(module, str(run.path)))
    host = f'--nodelist="${commands.WATCHER}"'
    # Not into the log of srun: this step is not that of the tasks.
    return (
        f'[ -z "${commands.WATCHER}" ] || '
        f"{shlex.join(srun)} {host} {watch} </dev/null >/dev/null 2>&1 9<&- &"
    )


def _optional_blocks(config: RunConfig, run: RunDir, in_srun: bool) -> dict[str, str]:
    """Returns the lines of the script that not every job needs, by their place in the template; ""
    for those that this one does without.

    Args:
        in_srun: srun itself runs the container.
    """
    job = config.job
    blocks = dict.fromkeys(
        ("setup", "cores_of_srun", "make_folders", "check_pyxis", "requeue_broken"), ""
    )
    if job.setup:
        # A line that fails ends the job before anything runs without it. Behind them no error may
        # end the script, whose last lines decide what becomes of the run.
        blocks["setup"] = "\n".join(["set -e", *job.setup, "set +e"])
    if job.cpus_per_task:
        blocks["cores_of_srun"] = (
            "# srun takes no --cpus-per-task from sbatch since Slurm 22.05\n"
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
        )
    folders = container.folders_to_make(config, run)
    if folders:
        blocks["make_folders"] = f"mkdir -p {shlex.join(folders)}"
    if in_srun:
        without_pyxis = interpreter.module(
            "slurmft.node.container", str(run.path), "Pyxis"
        )
        blocks["check_pyxis"] = (
            "srun --help 2>&1 | grep -q -e --container-image || "
            + shlex.join(without_pyxis)
        )
    if job.requeue:
        blocks["requeue_broken"] = (
            "# what is saved is not lost to a broken upgrade\n"
            f'[ "$code$ended" = {_BROKEN}{int(Exit.STOPPED)} ] && scontrol requeue "$job"'
        )
    of_plugins = hooks.script_lines(config, run)
    blocks["before_task"] = of_plugins.before
    blocks["after_task"] = of_plugins.after
    return blocks


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Returns a text with values in the place of their names, written as `{{ name }}`. A line that
    has nothing but empty values is left out."""
    # Not Jinja: these values need neither loops nor filters, and its import with the compilation
    # took a quarter of the time of a dry run.
    lines = []
    for line in template.splitlines():
        filled_line = _PLACE.sub(lambda place: values[place[1]], line)
        if filled_line.strip() or not line:
            lines.append(filled_line)
    return "\n".join(lines) + "\n"
