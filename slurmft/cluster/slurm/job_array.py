"""Job arrays: many runs with the same request, submitted by one sbatch.

A task of the array is a job of its own, ARRAY_INDEX, which runs the script of its run directory. It
is followed, cancelled, requeued and resumed as any run.
"""

import contextlib
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurmft.cluster import launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.cluster.slurm.sbatch_options import arguments, directives, request
from slurmft.core import bash, ownership, removal
from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_text
from slurmft.core.job_variables import outside_of_jobs
from slurmft.runs.job_ids import array_task_id
from slurmft.runs.rundir import RunDir

JOB = "%A_%a"
"""An array task's id, as Slurm writes it in file names."""

# In the place of a run's folder others may have put theirs, or another of this user's. So it is
# opened once: where they can write, there may be links in the place of logs. What is compared is
# what runs: the text is read once. "." keeps the line ends that $() would drop. A FIFO is no
# folder with "/." behind it, and not waited for.
_TASK = """\
folder=${runs[$SLURM_ARRAY_TASK_ID]}
exec 4<"$folder"/. || exit
is_own() { [ -O /dev/fd/4/ ] && slurmft_mount_is_trusted /dev/fd/4/; }
if ! is_own || (( 8#$(stat -Lc %a /dev/fd/4) & 8#22 )); then
  echo "refused: $folder is another user's, or others can write it" >&2
  exit 1
fi
log="/dev/fd/4/${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log"
text=$(cat /dev/fd/4/job.sh && echo .) || exit
text=${text%.}
sum=$(printf %s "$text" | sha256sum) || exit
if [ "${sum%% *}" != "${sums[$SLURM_ARRAY_TASK_ID]}" ]; then
  echo "refused: $folder/job.sh is not the script that was submitted" >&2
  exit 1
fi
exec 3< <(printf %s "$text")
exec bash /dev/fd/3 >>"$log.out" 2>>"$log.err" 4<&-
"""

Options = list[tuple[str, str | None]]


def groups(configs: Sequence[RunConfig], largest: int) -> list[list[int]]:
    """Returns the indexes of jobs that can be one array: with the same request, at most `largest`
    of them."""
    by_request: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        key = repr(sorted(request(config).items()))  # as text: a dictionary is no key
        by_request.setdefault(key, []).append(index)
    arrays = []
    for group in by_request.values():
        for begin in range(0, len(group), largest):
            arrays.append(group[begin : begin + largest])
    return arrays


def array_options(
    config: RunConfig, tasks: int, at_most: int, after: Sequence[str], logs: Path
) -> Options:
    """Returns the sbatch options of an array that waits until other jobs have ended, however they
    end."""
    options = request(config)
    conditions = []
    dependency = options.pop("dependency", None)
    if dependency:
        conditions.append(dependency)
    if after:
        conditions.append(":".join(["afterany", *after]))
    log = str(logs / f"{JOB}.log")
    array = [
        *options.items(),
        # Behind the %: how many of the tasks may run at a time.
        ("array", f"0-{tasks - 1}%{at_most}"),
        ("output", log),
        ("error", log),
    ]
    if conditions:
        array.append(("dependency", ",".join(conditions)))
    return array


def script_text(options: Options, scripts: Mapping[RunDir, str]) -> str:
    """Returns the sbatch script of an array: every task becomes the script of its own run.

    Args:
        scripts: run -> text of its script, in the order of the tasks.
    """
    lines = ["#!/bin/bash", "", *directives(options), "", "runs=("]
    for run in scripts:
        folder = shlex.quote(str(run.submitit))
        lines.append(f"  {folder}")
    lines += [")", "sums=("]
    for text in scripts.values():
        lines.append(f"  {hashlib.sha256(text.encode()).hexdigest()}")
    lines += [")", bash.functions(ownership.BASH), _TASK]
    return "\n".join(lines)


def submit(
    runs: Sequence[RunDir], at_most: int, after: Sequence[str], script: Path
) -> str:
    """Submits runs with the same request as an array, and records their jobs; returns its id.

    Args:
        runs: new run directories; they are removed where it is refused, or would wait forever.
        at_most: tasks that may run at a time.
        after: jobs that must have ended before it starts.
        script: where its script is written; its own output goes to the same folder.
    """
    # Before sbatch: see `launcher.note_job`.
    where = launcher.location("slurm")
    with _discarded_on_error(runs, script):
        scripts = {}
        for run in runs:
            # Only the request is shared: each task runs the script of its own run.
            scripts[run] = inside_text(run.load_own_config(), run, JOB)
            write_text(run.script, scripts[run])
        first = runs[0].load_own_config()  # the requests of all are the same
        options = array_options(first, len(runs), at_most, after, script.parent)
        write_text(script, script_text(options, scripts))
        with outside_of_jobs():
            array = commands.sbatch(
                arguments(options), commands.script_argument(script)
            )
    # Outside of the block above: once sbatch has taken the array, its run directories must stay.
    for index, run in enumerate(runs):
        launcher.note_job(run, "slurm", array_task_id(array, index), where)
    with _discarded_on_error(runs, script):
        commands.check_starts(array)
    return array


@contextlib.contextmanager
def _discarded_on_error(runs: Sequence[RunDir], script: Path) -> Iterator[None]:
    try:
        yield
    except (SlurmftError, OSError):
        for run in runs:
            run.discard()
        removal.discard(script, removal.exactly(script.name))
        raise
