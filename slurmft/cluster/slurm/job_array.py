"""Job arrays: many runs with the same request, submitted by one sbatch.

A task of the array is a job of its own, ARRAY_INDEX, which runs the script of its run directory. It
is followed, cancelled, requeued and resumed as any run.
"""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmft.cluster import launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.cluster.slurm.sbatch_options import arguments, directives, request
from slurmft.core import removal
from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_text
from slurmft.core.job_variables import outside_of_jobs
from slurmft.runs.job_ids import array_task_id
from slurmft.runs.rundir import RunDir

JOB = "%A_%a"
"""An array task's id, as Slurm writes it in file names."""

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


def script_text(options: Options, runs: Sequence[RunDir]) -> str:
    """Returns the sbatch script of an array: every task becomes the script of its own run."""
    lines = ["#!/bin/bash", "", *directives(options), "", "runs=("]
    for run in runs:
        folder = shlex.quote(str(run.submitit))
        lines.append(f"  {folder}")
    lines += [")", "folder=${runs[$SLURM_ARRAY_TASK_ID]}"]
    lines += ['log="$folder/${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log"']
    # In the place of a run's folder others may have put theirs. What was opened is what runs.
    lines += [f'exec 3<"$folder/{runs[0].script.name}" || exit']
    refusal = 'echo "refused: $folder is another user\'s" >&2'
    lines += [f"[ -O /dev/fd/3 ] || {{ {refusal}; exit 1; }}"]
    refusal = 'echo "refused: others can write $folder" >&2'
    lines += [
        '[ -z "$(find -L "$folder" /dev/fd/3 -maxdepth 0 -perm /022)" ] || '
        f"{{ {refusal}; exit 1; }}"
    ]
    lines += ['exec bash /dev/fd/3 >>"$log.out" 2>>"$log.err"', ""]
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
        for run in runs:
            # Only the request is shared: each task runs the script of its own run.
            text = inside_text(run.load_config(), run, JOB)
            write_text(run.script, text)
        first = runs[0].load_config()  # the requests of all are the same
        options = array_options(first, len(runs), at_most, after, script.parent)
        write_text(script, script_text(options, runs))
        with outside_of_jobs():
            array = commands.sbatch(arguments(options), str(script))
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
