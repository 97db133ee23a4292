"""Measures every cell of a study file, several times, and shows the progress.

  slurmft study run FILE       submit what is missing; repeat it as often as you like
  slurmft study status FILE    which runs have finished, run, wait, failed or are missing
  slurmft study cancel FILE    end all its jobs

FILE may also be the study's folder, studies/NAME.

a study file:
  name = "scaling"
  scaling = "strong"          # the work is fixed: samples and epochs
  repeats = 3                 # runs of every cell, with different seeds
  at_most = 1                 # jobs at a time
  [fixed]                     # any flag of slurmft submit
  recipe = "mn4-emotion"
  [grid]                      # every combination of these
  nodes = [1, 2, 4]

a program of one's own in place of a training:
  [program]                   # and the options of slurmft run
  command = "train.py --lr {lr} --seed {seed}"
  [grid]
  lr = [1e-4, 1e-3]

examples:
  slurmft study run scaling.toml --dry-run
  slurmft study run scaling.toml --partition gpu --data /gpfs/emotion --model /gpfs/distilbert
  slurmft study run results/studies/lab-train.toml --cluster local
  slurmft study status scaling.toml --json
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.cli import study_view
from slurmft.cli.parser import Parser, Part, add_options, confirmed, given, run_part
from slurmft.cluster import status as cluster_status
from slurmft.cluster.status import RunStatus
from slurmft.core.config import JobConfig, options
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import to_json
from slurmft.core.text import duration
from slurmft.runs.rundir import RunDir
from slurmft.studies import folder as study_folder
from slurmft.studies import runner, spec
from slurmft.studies.progress import STATES, Repeat, find_runs, status_json, study_status
from slurmft.studies.runner import Submission
from slurmft.studies.spec import Study
from slurmft.train.config import TrainConfig

ASK_ABOVE = 1000
"""Runs that are submitted without a question."""


def run_parser() -> Parser:
    """The command line of `slurmft study run`."""
    parser = Parser("slurmft study run", run_main.__doc__)
    parser.epilog = __doc__[__doc__.index("a study file:") :]
    _add_study(parser)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="show cells and jobs; submit nothing")
    yes = f"submit more than {ASK_ABOVE:,} runs, and count runs with other settings as the same"
    add("--yes", action="store_true", help=yes)
    add_options(parser, TrainConfig, "what to train")
    add_options(parser, JobConfig, "where to run it", set(options(JobConfig)) - {"runs_dir"})
    return parser


def _add_study(parser: Parser) -> None:
    parser.add_argument("study", help="study file, or the folder of a study")
    place = "folder of the studies' folders, shared by all nodes (default: studies)"
    parser.add_argument("--studies-dir", default="studies", metavar="DIR", help=place)


def _read_study(arguments: argparse.Namespace) -> tuple[Study, Path]:
    study = spec.read_study(arguments.study)
    return study, study_folder.folder_of(study, arguments.studies_dir)


# --- study run ------------------------------------------------------------------------------------


def run_main(argv: list[str]) -> int:
    """Submits the runs of a study that are missing, or failed and may be tried again. Flags
    override the file's [fixed]."""
    arguments = run_parser().parse(argv)
    study, folder = _read_study(arguments)
    flags = given(arguments, [*options(TrainConfig), *options(JobConfig)])
    study = runner.with_flags(study, flags)
    configs = runner.configurations(study, folder, make=not arguments.dry_run)
    if arguments.dry_run:
        todo = Submission(study, folder, configs, study_status(study, folder), argv)
        runner.check_settings(todo, arguments.yes)
        print(study_view.dry_run(todo))
        return Exit.OK
    share = any(config.job.share_with_group for config in configs.values())
    with study_folder.exclusive(folder, share):
        study_folder.check_name(study, folder)
        study_folder.discard_cut_off(folder)
        todo = Submission(study, folder, configs, study_status(study, folder), argv)
        _warn(runner.check_settings(todo, arguments.yes))
        due = len(todo.due())
        if due > ASK_ABOVE and not arguments.yes and not confirmed(f"submit {due:,} runs?"):
            print("nothing was submitted")
            return Exit.OK
        study_folder.keep_copies(study, folder)
        return _submit(todo)


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _submit(todo: Submission) -> int:
    """Submits or runs what is due; returns the exit code."""
    _warn(study_view.warnings(todo.status))
    due, status = todo.due(), todo.status
    given_up = [r for r in status.repeats if todo.given_up(r)]
    code: int = Exit.FAILED if given_up else Exit.OK
    if due and todo.cluster != "slurm":
        code = max(_run_here(todo, due), code)
        status = study_status(todo.study, todo.folder)
        print(study_view.status_table(todo.study, status))
    else:
        print(study_view.repeats_table(todo, runner.submit_arrays(todo, due) if due else {}))
    for repeat in given_up:
        print(study_view.given_up_text(repeat, todo.study))
    print(f"study folder: {todo.folder}")
    print(study_view.next_commands(todo, status))
    return code


def _run_here(todo: Submission, due: Sequence[Repeat]) -> int:
    """Runs one repeat after another; returns the exit code. Ctrl-C leaves no partial run."""
    code = int(Exit.OK)
    for each in todo.status.alive():
        print(f"waiting for the end of {each.run.path}, which was started before", flush=True)
        runner.wait_for_end(RunDir(each.run.path))
    for number, repeat in enumerate(due, start=1):
        what = f"{number}/{len(due)} {spec.label(repeat.cell)}, repeat {repeat.number}"
        state = _run_one(todo, repeat, what)
        if state == "cancelled":
            print("cancelled by another command: no further runs")
            return Exit.CANCELLED
        code = code if state == "finished" else Exit.FAILED
    return code


def _run_one(todo: Submission, repeat: Repeat, what: str) -> str:
    """Runs one repeat; returns its state."""
    start = time.monotonic()
    print(f"{what}: begins", flush=True)
    try:
        run = runner.run_one(todo, repeat)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted: the run of {spec.label(repeat.cell)} was removed, finished ones stay. "
            f"To continue: {shlex.join(['slurmft', 'study', 'run', *todo.argv])}"
        )
        raise
    state = run.get_state()
    if state["state"] == "finished":
        print(f"{what}: finished in {duration(time.monotonic() - start)}")
    else:
        print(f"{what}: {state['state']}: {state['reason']}\n  look into {run.path}")
    return str(state["state"])


# --- study status, study cancel -------------------------------------------------------------------


def status_parser() -> Parser:
    """The command line of `slurmft study status`."""
    parser = Parser("slurmft study status", status_main.__doc__)
    _add_study(parser)
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    return parser


def status_main(argv: list[str]) -> int:
    """The progress of a study: for every cell, the repeats that have finished, run, wait, failed or
    are missing, and why."""
    arguments = status_parser().parse(argv)
    study, folder = _read_study(arguments)
    status = study_status(study, folder)
    if arguments.json:
        print(to_json(status_json(study, folder, status), indent=2))
        return Exit.OK
    _warn(study_view.warnings(status))
    totals = (f"{count} {state}" for state in STATES if (count := status.count(state)))
    print(f"{study.title} ({folder})")
    print(study_view.status_table(study, status))
    print(f"{len(status.repeats)} runs: {', '.join(totals)}")
    print(study_view.next_command(study, folder, status))
    return Exit.OK


def cancel_parser() -> Parser:
    """The command line of `slurmft study cancel`."""
    parser = Parser("slurmft study cancel", cancel_main.__doc__)
    _add_study(parser)
    return parser


def cancel_main(argv: list[str]) -> int:
    """Ends all jobs of a study that wait or run."""
    study, folder = _read_study(cancel_parser().parse(argv))
    if not folder.is_dir():
        print(f"there is no study folder {str(folder)!r}: nothing to cancel")
        return Exit.OK
    try:
        with study_folder.exclusive(folder, study_folder.is_shared(folder)):
            _cancel(study, _alive_runs(folder))
    except study_folder.HeldError:
        # Without Slurm, `study run` holds the folder as long as it runs, and ends with a run.
        local = [t for t in _alive_runs(folder) if t.cluster != "slurm"]
        if not local:
            raise
        _cancel(study, local)
    return Exit.OK


def _alive_runs(folder: Path) -> list[RunStatus]:
    """The runs of a study that wait or run; warns of what cannot be read."""
    runs, problems = find_runs(folder)
    _warn([f"warning: {p}; its job, if it has one, is not cancelled" for p in problems])
    unfinished = (run for run in runs if not run.is_finished)
    return [t for t in cluster_status.run_statuses(unfinished) if t.is_alive]


def _cancel(study: Study, alive: Sequence[RunStatus]) -> None:
    here = [t for t in alive if not t.elsewhere]
    runner.cancel(here)
    print(f"{len(here)} run(s) of {study.name} are being cancelled")
    if elsewhere := [t for t in alive if t.elsewhere]:
        raise UsageError(
            f"{len(elsewhere)} run(s) of {study.name} are {elsewhere[0].elsewhere}",
            "run slurmft study cancel there, too",
        )


PARTS = {
    "run": Part(run_parser, run_main),
    "status": Part(status_parser, status_main),
    "cancel": Part(cancel_parser, cancel_main),
}


def main(argv: list[str]) -> int:
    """`slurmft study COMMAND ...`"""
    return run_part("slurmft study", PARTS, argv, __doc__)
