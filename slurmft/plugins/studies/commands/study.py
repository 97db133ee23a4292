"""Runs a grid of settings. It measures every cell of a study file, several times, and shows the
progress.

  slurmft study run FILE       submit what is missing; repeat it as often as you like
  slurmft study status FILE    which runs have finished, run, wait, failed or are missing
  slurmft study cancel FILE    end all its jobs

FILE may also be the study's folder, studies/NAME, its NAME alone, or that of a study that comes
along (`slurmft examples`).

a study file:
  name = "scaling"
  scaling = "strong"          # the work is fixed: samples and epochs
  repeats = 3                 # runs of every cell, with different seeds
  at_most = 1                 # jobs at a time: they disturb each other
  retries = 2                 # new tries of a run that failed
  published = "x.json"        # figures to compare with
  [fixed]                     # any flag of slurmft submit
  recipe = "mn4-emotion"
  [grid]                      # every combination of these ...
  nodes = [1, 2, 4]
  [[cells]]                   # ... with each of these
  batch_size = 64

a program of one's own in place of a training:
  [program]                   # and the options of slurmft run
  command = "train.py --lr {lr} --seed {seed}"
  [grid]
  lr = [1e-4, 1e-3]

examples:
  slurmft study run scaling.toml --dry-run
  slurmft study run scaling.toml --partition gpu --data /gpfs/emotion --model /gpfs/distilbert
  slurmft study run lab-train --cluster local
  slurmft study status scaling.toml --json
"""

import argparse
import contextlib
import shlex
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import command, next_lines, pasted
from slurmft.cli.parser import (
    Parser,
    Part,
    confirmed,
    input_file,
    print_json,
    run_part,
    typed_options,
)
from slurmft.cluster import status as cluster_status
from slurmft.cluster.slurm import job_array
from slurmft.cluster.slurm import launcher as slurm
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.cluster.status import RunStatus
from slurmft.core import interruption
from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit, UsageError
from slurmft.core.filesystem import absolute
from slurmft.core.options import options
from slurmft.core.run_files import Provenance
from slurmft.core.text import counted, duration, shown, with_reason
from slurmft.plugins.studies import folder as study_folder
from slurmft.plugins.studies import runner, spec
from slurmft.plugins.studies.folder import STATES, Repeat, StudyStatus, study_status
from slurmft.plugins.studies.report.measures import group_by_study, measures_of, rows_of
from slurmft.plugins.studies.runner import Submission
from slurmft.plugins.studies.spec import Study
from slurmft.plugins.studies.table import lines_of_cells
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig

ELSEWHERE = Elsewhere.SENDS_FOLDER

ASK_ABOVE = 1000
"""As many runs are submitted without a question: a grid is easily larger than meant."""


def run_parser() -> Parser:
    parser = _parser("run", run_main)
    # How a study file is written, and the examples: the rest is a list of the parts, like this one.
    parser.explain(__doc__[__doc__.index("a study file:") :])
    add = parser.add_argument
    add("--dry-run", action="store_true", help="show cells and jobs; submit nothing")
    yes = f"submit more than {ASK_ABOVE:,} runs, and count runs with other settings as the same"
    add("--yes", action="store_true", help=yes)
    # A study says itself where its runs are, and what they are called.
    where = []
    for name, each in options(JobConfig).items():
        if not each.identifies:
            where.append(name)
    parser.add_options(TrainConfig, "what to train")
    return parser.add_options(JobConfig, "where to run it", where).show_usual()


def _parser(part: str, main: Callable[[list[str]], int]) -> Parser:
    parser = Parser(f"slurmft study {part}", main.__doc__)
    parser.add_argument(
        "study",
        metavar="STUDY",
        type=input_file,
        help="study file, the folder of a study, or its name in --studies-dir",
    )
    place = "folder of the studies' folders, shared by all nodes (default: studies)"
    parser.add_argument("--studies-dir", default="studies", metavar="DIR", help=place)
    return parser


def _read_study(arguments: argparse.Namespace, is_acted_on: bool) -> tuple[Study, Path]:
    source = arguments.study
    in_studies = Path(arguments.studies_dir, source)
    # By its name alone, as it stands in tables and in `studies/`: what was begun there goes before
    # the study of that name that comes along, whose cells and repeats may be others.
    if not absolute(source).exists() and (in_studies / spec.FILE).is_file():
        source = in_studies
    study = spec.read_study(source, is_acted_on=is_acted_on)
    return study, study_folder.folder_of(study, arguments.studies_dir)


# --- study run ------------------------------------------------------------------------------------


def run_main(argv: list[str]) -> int:
    """Submits the runs of a study that are missing, or failed and may be tried again. Flags
    override the file's [fixed]."""
    arguments = run_parser().parse(argv)
    study, folder = _read_study(arguments, is_acted_on=True)
    names = [*options(TrainConfig), *options(JobConfig)]
    flags = typed_options(arguments, names)
    study = runner.with_flags(study, flags)
    configs = runner.configurations(study, folder, make=not arguments.dry_run)
    if arguments.dry_run:
        # Without the lock and its folder: a dry run writes nothing.
        todo = Submission(study, folder, configs, study_status(study, folder), argv)
        runner.check_settings(todo, arguments.yes)
        print(dry_run(todo))
        return Exit.OK
    # One folder holds all runs: it is as open as the most open one.
    share = any(config.job.share_with_group for config in configs.values())
    with study_folder.exclusive(folder, share):
        study_folder.check_name(study, folder)
        # Before the status is read: what a killed submission left would count as a try.
        study_folder.discard_cut_off(folder)
        todo = Submission(study, folder, configs, study_status(study, folder), argv)
        _warn(runner.check_settings(todo, arguments.yes))
        due_count = len(todo.due())
        must_ask = due_count > ASK_ABOVE and not arguments.yes
        if must_ask and not confirmed(f"submit {due_count:,} runs?"):
            print("nothing was submitted")
            return Exit.OK
        study_folder.keep_copies(study, folder)
        return _submit(todo)


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _submit(todo: Submission) -> int:
    """Submits or runs what is due; returns the exit code."""
    _warn(warnings(todo.status))
    due = todo.due()
    status = todo.status
    given_up = [repeat for repeat in status.repeats if todo.given_up(repeat)]
    code: int = Exit.FAILED if given_up else Exit.OK
    if due and todo.cluster != "slurm":
        code_of_runs = _run_here(todo, due)
        code = max(code_of_runs, code)  # the worse of the two
        # What was read before the runs does not have them.
        status = study_status(todo.study, todo.folder)
        print(status_table(todo.study, status))
    else:
        jobs: dict[tuple[str, int], str] = {}
        if due:
            jobs = runner.submit_arrays(todo, due)
        print(repeats_table(todo, jobs))
    for repeat in given_up:
        assert repeat.best is not None  # a repeat is given up after failed runs
        cell = spec.label(repeat.cell)
        name = f"{cell}, repeat {repeat.number}"
        reason = shown(repeat.best.reason)
        print(
            f"given up after {repeat.failures} failed run(s): {name}: {reason}\n"
            f"  look into {repeat.best.run.path}, "
            f"or raise retries = {todo.study.retries} in the study file"
        )
    print(f"study folder: {todo.folder}")
    print(next_commands(todo, status))
    return code


def _run_here(todo: Submission, due: Sequence[Repeat]) -> int:
    """Runs one repeat after another; returns the exit code. Ctrl-C leaves no partial run; another
    signal lets the current one go on."""
    code = int(Exit.OK)
    # Two runs at a time on one machine would measure each other.
    for each in todo.status.alive():
        print(
            f"waiting for the end of {each.run.path}, which was started before",
            flush=True,
        )
        runner.wait_for_end(RunDir(each.run.path))
    for number, repeat in enumerate(due, start=1):
        cell = spec.label(repeat.cell)
        title = f"{number}/{len(due)} {cell}, repeat {repeat.number}"
        start = time.monotonic()
        print(f"{title}: begins", flush=True)
        try:
            run = runner.run_one(todo, repeat)
        except KeyboardInterrupt as interrupt:
            _say_interrupted(todo, cell, interrupt)
            raise
        state = run.get_state()
        if state.state == "finished":
            seconds = time.monotonic() - start
            print(f"{title}: finished in {duration(seconds)}")
            continue
        print(f"{title}: {with_reason(state.state, state.reason)}")
        print(f"  look into {run.path}")
        # `study cancel` of another terminal means the whole study, not only the run at hand.
        if state.state == "cancelled":
            print("cancelled by another command: no further runs")
            return Exit.CANCELLED
        code = Exit.FAILED
    return code


def _say_interrupted(todo: Submission, cell: str, interrupt: KeyboardInterrupt) -> None:
    again = command("study", "run", *todo.argv)
    became = "was removed"
    if isinstance(interrupt, interruption.Interruption):
        became = (
            f"goes on ({interruption.signal_of(interrupt).name} is not meant for it)"
        )
    # A terminal that has closed shows nothing any more.
    with contextlib.suppress(OSError):
        print(
            f"\ninterrupted: the run of {cell} {became}, finished ones stay. "
            f"To continue: {again}",
            flush=True,
        )


# --- study status, study cancel -------------------------------------------------------------------


def status_parser() -> Parser:
    return _parser("status", status_main).add_json(
        "all that is known, as JSON", study_folder.StudyFacts
    )


def status_main(argv: list[str]) -> int:
    """Prints the progress of a study: for every cell, the repeats that have finished, run, wait,
    failed or are missing, and why."""
    arguments = status_parser().parse(argv)
    study, folder = _read_study(arguments, is_acted_on=False)
    status = study_status(study, folder)
    if arguments.json:
        return print_json(study_folder.status_json(study, folder, status))
    _warn(warnings(status))
    print(f"{study.title} ({folder})")
    print(status_table(study, status))
    totals = []
    for state in STATES:
        count = status.count(state)
        if count:
            totals.append(f"{count} {state}")
    all_totals = ", ".join(totals)
    print(f"{counted(len(status.repeats), 'run')}: {all_totals}")
    print(next_command(study, folder, status))
    return Exit.OK


def cancel_parser() -> Parser:
    return _parser("cancel", cancel_main)


def cancel_main(argv: list[str]) -> int:
    """Ends all jobs of a study that wait or run."""
    arguments = cancel_parser().parse(argv)
    study, folder = _read_study(arguments, is_acted_on=True)
    if not folder.is_dir():
        print(f"there is no study folder {str(folder)!r}: nothing to cancel")
        return Exit.OK
    try:
        # No flag says it here: the folder stays as readable as `study run` made it.
        share = bool(folder.stat().st_mode & stat.S_IRGRP)
        # By a descriptor: where others can rename, theirs would say which jobs end.
        with study_folder.exclusive(folder, share):
            _cancel(study, _alive_runs(folder))
    except study_folder.HeldError:
        # Without Slurm, `study run` holds the folder as long as it runs, and ends with a run that
        # is cancelled. With Slurm, the other command ends soon, and the user can wait for it.
        with study_folder.held(folder), study_folder.held(folder / study_folder.RUNS):
            runs = _alive_runs(folder)
            alive = [run for run in runs if run.cluster != "slurm"]
            if not alive:
                raise
            _cancel(study, alive)
    return Exit.OK


def _alive_runs(folder: Path) -> list[RunStatus]:
    """Returns the runs of a study that wait or run; warns of what cannot be read, or is another
    user's."""
    runs, problems = study_folder.own_runs(folder)
    lines = []
    for problem in problems:
        lines.append(f"warning: {problem}; its job, if it has one, is not cancelled")
    _warn(lines)
    unfinished = [run for run in runs if not run.is_finished]
    statuses = cluster_status.run_statuses(unfinished)
    return [status for status in statuses if status.is_alive]


def _cancel(study: Study, alive: Sequence[RunStatus]) -> None:
    here = [run for run in alive if not run.elsewhere]
    elsewhere = [run for run in alive if run.elsewhere]
    runner.cancel(here)
    print(f"{len(here)} run(s) of {study.name} are being cancelled")
    if elsewhere:
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
    return run_part("slurmft study", PARTS, argv, __doc__)


# --- cells ----------------------------------------------------------------------------------------


def status_table(study: Study, status: StudyStatus) -> str:
    """Returns a line for every cell: its repeats by state, what they measured, and a note."""
    results: dict[str, dict[str, str]] = {}
    if study.program:
        results = _results(status)
    # What a program of the user's own measures is only known from its runs. A dictionary, because
    # a set would not keep the order.
    names: dict[str, None] = {}
    for medians in results.values():
        names |= dict.fromkeys(medians)
    cells = []
    rows = []
    for cell, repeats in status.by_cell():
        counts = Counter(repeat.state for repeat in repeats)
        # Zeros would hide the other numbers.
        row = [str(counts[state] or "-") for state in STATES]
        medians = results.get(spec.key_of(cell), {})
        row += [medians.get(name, "-") for name in names]
        row.append(_note(repeats))
        cells.append(cell)
        rows.append(row)
    heading = [*STATES, *names, " "]
    return lines_of_cells(cells, study.varied, heading, rows)


def _results(status: StudyStatus) -> dict[str, dict[str, str]]:
    """Returns key of a cell -> name -> the median of what its finished repeats measured."""
    finished = []
    for repeat in status.repeats:
        if repeat.best and repeat.state == "finished":
            finished.append(repeat.best.run)
    results: dict[str, dict[str, str]] = {}
    # All of these are of one study: it is one set, of which reports know the measures.
    for runset in group_by_study(finished):
        measures = measures_of(runset)
        for row in rows_of(runset):
            medians = {}
            for measure in measures:
                median = row.median(measure.key)
                if median is not None:
                    medians[measure.label] = f"{median:.5g}"
            results[spec.key_of(row.cell)] = medians
    return results


def _note(repeats: list[Repeat]) -> str:
    """Returns why a repeat of a cell failed, else how far one is, else what one waits for."""
    # There is room for one note: that of the state that a user can do most about.
    for state in ("failed", "running", "pending"):
        for repeat in repeats:
            if repeat.best is None or repeat.state != state:
                continue
            steps = study_folder.last_step(repeat)
            if steps:
                return f"step {steps['done']}/{steps['total']}"
            if repeat.best.reason:
                return shown(repeat.best.reason)
    return ""


def repeats_table(
    todo: Submission,
    jobs: Mapping[tuple[str, int], str],
    word: str = "submitted",
) -> str:
    """Returns a line for every cell: the states of its repeats.

    Args:
        jobs: key of a repeat that was submitted -> its job, or "".
        word: the state of those.
    """

    def state_of(repeat: Repeat) -> str:
        if repeat.key in jobs:
            return word
        if todo.given_up(repeat):
            return "given up"
        return repeat.state

    cells = []
    rows = []
    for cell, repeats in todo.status.by_cell():
        counts = Counter(state_of(repeat) for repeat in repeats)
        states = []
        for state, count in counts.items():
            states.append(f"{count} {state}")
        text = ", ".join(states)
        # A dry run has no jobs.
        jobs_of_cell = [jobs.get(repeat.key, "") for repeat in repeats]
        ids = [job for job in jobs_of_cell if job]
        if ids:
            all_ids = ", ".join(ids)
            text += f" ({all_ids})"
        cells.append(cell)
        rows.append([text])
    return lines_of_cells(cells, todo.study.varied, ["repeats"], rows)


def warnings(status: StudyStatus) -> list[str]:
    """Returns what is in the folder and does not count, as warnings."""
    paths_of: dict[str, list[Path]] = {}
    for other in status.others:
        entry = other.run.study
        name = "no cell, repeat -"
        if entry is not None:
            repeat = "-" if entry.repeat is None else entry.repeat
            cell = spec.label(entry.cell)
            name = f"{cell}, repeat {repeat}"
        paths_of.setdefault(name, []).append(other.run.path)
    lines = list(status.problems)
    # One line for all tries of a repeat: a study file that was changed may leave many.
    for name, paths in paths_of.items():
        count = len(paths)
        lines.append(
            f"{count} run(s) that the study does not have ({name}), such as {paths[0]}"
        )
    return [f"warning: {line}; left out" for line in lines]


# --- a dry run ------------------------------------------------------------------------------------


def dry_run(todo: Submission) -> str:
    """Describes what would be submitted."""
    due = todo.due()
    study = todo.study
    no_jobs = {repeat.key: "" for repeat in due}
    lines = [
        f"# {study.title}: {len(study.cells)} cells x {study.repeats} repeats",
        *warnings(todo.status),
        repeats_table(todo, no_jobs, "to submit"),
        "",
    ]
    if due and todo.cluster == "slurm":
        lines += _dry_arrays(todo, due)
    elif due:
        lines.append(f"# one after another, {todo.cluster}: {len(due)} run(s)")
    else:
        lines.append("nothing is left to submit")
    lines += ["", f"study folder: {todo.folder}", "dry run: nothing was submitted"]
    return "\n".join(lines)


def _dry_arrays(todo: Submission, due: Sequence[Repeat]) -> list[str]:
    """Returns a line for every array, and the scripts of the first one."""
    groups = runner.by_request(todo, due)
    at_most = todo.study.at_most
    live_jobs = runner.live_jobs(todo.status.alive())
    lines = []
    # An array starts when the one before it has ended, the first after the jobs that are alive:
    # more than `at_most` jobs at a time would disturb each other.
    after = ", ".join(live_jobs)
    for number, group in enumerate(groups, start=1):
        waits = f", after {after}" if after else ""
        labels = [spec.label(repeat.cell) for repeat in group]
        cells = shown("; ".join(labels), 100)
        lines.append(
            f"# array {number}: repeat {group[0].number}, {len(group)} run(s), at most "
            f"{at_most} at a time{waits}: {cells}"
        )
        after = f"array {number}"
    first_group = groups[0]
    config = todo.configs[first_group[0].key]
    scripts = {}
    for repeat in first_group:
        run = _dry_run_folder(todo, repeat)
        scripts[run] = inside_text(todo.configs[repeat.key], run, job_array.JOB)
    folder = todo.folder / "arrays"
    options = job_array.array_options(config, len(scripts), at_most, live_jobs, folder)
    return [
        *lines,
        "",
        "# sbatch script of array 1",
        job_array.script_text(options, scripts),
        "# script of its first run",
        next(iter(scripts.values())),
        *slurm.notes(config),
    ]


def _dry_run_folder(todo: Submission, repeat: Repeat) -> RunDir:
    """Returns the directory that a repeat's run would get: its time and the random part of its name
    are known when it is made."""
    config = todo.configs[repeat.key]
    name = f"{config.program.name}-<time>-{todo.mark(repeat)}-<random>"
    return RunDir(Path(config.job.runs_dir) / name)


# --- what to type next ----------------------------------------------------------------------------


def next_commands(todo: Submission, status: StudyStatus) -> str:
    """Returns the commands that a user types after `study run`."""
    folder = pasted(todo.folder)
    finished = status.count("finished")
    lines = []
    if finished < len(status.repeats):
        lines += [
            (command("study", "status", folder), "its progress"),
            (command("study", "cancel", folder), "end all its jobs"),
            (command("study", "run", *todo.argv), "submit again what failed"),
        ]
    if finished:
        lines.append((_report_command(todo.folder), "tables, plots, a page"))
    return next_lines(lines)


def next_command(study: Study, folder: Path, status: StudyStatus) -> str:
    """Returns the command that a user types after `study status`: the one that submitted the newest
    run, if runs are left; the report, if there is something to show."""
    finished = status.count("finished")
    report = _report_command(folder)
    if finished == len(status.repeats):
        return f"all runs have finished\nNext: {report}"
    so_far = f"\n  so far: {report}" if finished else ""
    # Nothing is left to submit: what has not finished waits or runs.
    if not status.count("missing") and not status.count("failed"):
        alive = [run for run in status.tries() if run.is_alive]
        # One that runs, if one does: False sorts first.
        first = min(alive, key=lambda run: run.outcome != "running")
        follow = command("follow", pasted(first.run.path))
        return f"Next: wait; or look: {follow}{so_far}"
    submissions = [run.run.submission for run in status.tries()]
    # Times are texts of which the later one sorts last; without runs, no command was recorded.
    newest = max(submissions, key=lambda each: each.time, default=Provenance())
    # The command that was typed has the flags, which the study file lacks.
    again = newest.command
    if not again:
        again = shlex.join(["slurmft", "study", "run", str(study.path)])
    return f"Next: {again}{so_far}"


def _report_command(folder: Path) -> str:
    source = pasted(folder)
    # Beside the runs, where the next report finds and replaces it.
    output = pasted(folder / "report")
    return command("report", source, "--output", output)
