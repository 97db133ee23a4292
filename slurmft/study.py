"""`slurmft study run|status|cancel`: measures every cell of a study file, several times over.

Which runs there are is read from the run directories each time: there is no other state. See
`slurmft.grid` for the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from slurmft import grid, launchers, slurm, standing, studydir, tally
from slurmft.cli import Parser, add_options, given, shown
from slurmft.config import JobConfig, TrainConfig, flag, options
from slurmft.dispatch import merge, provenance
from slurmft.errors import Exit, UsageError, unknown
from slurmft.grid import GLOBAL_BATCH_SIZE, Study
from slurmft.rundir import RunDir
from slurmft.standing import Standing
from slurmft.submission import (
    Submission,
    configurations,
    difference,
    dry_arrays,
    live_jobs,
    run_here,
    submit_arrays,
)
from slurmft.tally import Repeat, Tally

ASK_ABOVE = 1000
"""Runs that are submitted without a question."""

DESCRIPTION = """\
Measures every cell of a study file, several times over, and shows how far it is.

  slurmft study run FILE       submits what is missing; again, as often as you like
  slurmft study status FILE    which runs have finished, run, wait, failed, are missing
  slurmft study cancel FILE    ends all its jobs

The file's folder (studies/NAME) may stand for it."""

EXAMPLES = """\
a study file:
  name = "scaling"
  scaling = "strong"          # the work is fixed: samples and epochs
  repeats = 3                 # runs of every cell, with different seeds
  at_most = 1                 # jobs at a time
  [fixed]                     # any flag of slurmft submit
  recipe = "mn4-emotion"
  [grid]                      # every combination of these
  nodes = [1, 2, 4]

examples:
  slurmft study run scaling.toml --dry-run
  slurmft study run scaling.toml --partition gpu --data /gpfs/emotion --model /gpfs/distilbert
  slurmft study run results/studies/lab-train.toml --cluster local
  slurmft study status scaling.toml --json
"""


def run_parser() -> Parser:
    """The command line of `slurmft study run`."""
    made = Parser(
        prog="slurmft study run",
        description="Submits the runs of a study that are missing, or failed and may be tried "
        "again. Flags win over the file's [fixed].",
        epilog=EXAMPLES,
    )
    _add_place(made)
    made.add_argument("--dry-run", action="store_true", help="show cells and jobs; submit nothing")
    made.add_argument(
        "--yes",
        action="store_true",
        help=f"submit more than {ASK_ABOVE:,} runs, and count runs with other settings as the same",
    )
    add_options(made, TrainConfig, "what to train")
    add_options(made, JobConfig, "where to run it", set(options(JobConfig)) - {"runs_dir"})
    return made


def _add_place(parser: Parser) -> None:
    parser.add_argument("study", help="study file, or the folder of a study")
    parser.add_argument(
        "--studies-dir",
        default="studies",
        metavar="DIR",
        help="folder for the folders of studies, seen by every node (default: studies)",
    )


def with_flags(study: Study, flags: dict[str, Any]) -> Study:
    """The study with flags in place of what its file fixes.

    Raises:
        UsageError: a flag for what the study varies, or one that contradicts the kind of scaling.
    """
    for name in flags:
        if name in study.varied:
            raise UsageError(
                f"{flag(name)}: the study {study.name} varies {name}",
                "leave the flag out, or change the study file",
            )
    named = {*study.fixed, *study.varied}
    if "batch_size" in flags and GLOBAL_BATCH_SIZE in named:
        raise UsageError(
            f"--batch-size {flags['batch_size']}: the study {study.name} has {GLOBAL_BATCH_SIZE}",
            "leave the flag out, or change the study file",
        )
    changed = dataclasses.replace(study, fixed=merge(study.fixed, flags))
    grid.check_work(changed)
    return changed


def run_main(argv: list[str]) -> int:
    """`slurmft study run FILE`"""
    arguments = run_parser().parse(argv)
    flags = given(arguments, [*options(TrainConfig), *options(JobConfig)])
    study = with_flags(grid.read(arguments.study), flags)
    folder = studydir.folder_of(study, arguments.studies_dir)
    configs = configurations(study, folder)
    if arguments.dry_run:
        todo = Submission(study, folder, configs, tally.take(study, folder), argv)
        check_settings(todo, arguments.yes)
        print(dry_run(todo))
        return Exit.OK
    share = any(config.job.share_with_group for config in configs.values())
    with studydir.exclusive(folder, share):
        studydir.check_name(study, folder)
        studydir.discard_cut_off(folder)
        todo = Submission(study, folder, configs, tally.take(study, folder), argv)
        for line in check_settings(todo, arguments.yes):
            print(line, file=sys.stderr)
        if not confirmed(len(todo.due()), arguments):
            print("nothing was submitted")
            return Exit.OK
        studydir.keep_copies(study, folder)
        return submit_due(todo)


def submit_due(todo: Submission) -> int:
    """Submits or runs what is due, and says so; returns the exit code."""
    for line in studydir.warnings(todo.tally):
        print(line, file=sys.stderr)
    due, told = todo.due(), provenance("study", ["run", *todo.argv])
    now = todo.tally
    given_up = [r for r in todo.tally.repeats if todo.given_up(r)]
    code: int = Exit.FAILED if given_up else Exit.OK
    if due and todo.cluster != "slurm":
        code = max(run_here(todo, due, told), code)
        now = tally.take(todo.study, todo.folder)
        print(tally.status_table(todo.study, now))
    else:
        jobs = submit_arrays(todo, due, told) if due else {}
        print(done_table(todo, jobs))
    for repeat in given_up:
        print(_given_up(repeat, todo.study))
    print(f"study folder: {todo.folder}")
    print(next_commands(todo, now))
    return code


def _given_up(repeat: Repeat, study: Study) -> str:
    assert repeat.best is not None
    return (
        f"given up after {repeat.failures} failed run(s): {grid.label(repeat.cell)}, repeat "
        f"{repeat.number}: {shown(repeat.best.reason)}\n"
        f"  look into {repeat.best.run.path}, or raise retries = {study.retries} in the study file"
    )


def next_commands(todo: Submission, now: Tally) -> str:
    """The commands that a user types next; `now`: how the study stands."""
    folder = shlex.quote(str(todo.folder))
    again = shlex.join(["python", "-m", "slurmft", "study", "run", *todo.argv])
    look = f"  {report_command(todo.folder)}   # tables, plots, a page"
    finished = now.count("finished")
    if finished == len(now.repeats):
        return f"Next:\n{look}"
    lines = [
        "Next:",
        f"  python -m slurmft study status {folder}   # how far it is",
        f"  python -m slurmft study cancel {folder}   # end all its jobs",
        f"  {again}   # submit again what failed",
    ]
    return "\n".join(lines + ([look] if finished else []))


def done_table(todo: Submission, jobs: dict[int, str], new: str = "submitted") -> str:
    """A line for every cell: what its repeats are now.

    Args:
        todo: the submission.
        jobs: id of a repeat that was submitted -> its job; "" for one that has none yet.
        new: what those that were submitted are called.
    """
    rows = [[*todo.study.varied, "repeats"]]
    for cell, repeats in todo.tally.by_cell():
        words = Counter(new if id(r) in jobs else _word(todo, r) for r in repeats)
        ids = ", ".join(filter(None, (jobs.get(id(r)) for r in repeats)))
        text = ", ".join(f"{count} {word}" for word, count in words.items())
        rows.append([*map(str, cell.values()), text + (f" ({ids})" if ids else "")])
    return tally.table(rows)


def _word(todo: Submission, repeat: Repeat) -> str:
    return "given up" if todo.given_up(repeat) else repeat.state


def dry_run(todo: Submission) -> str:
    """What would be submitted."""
    due = todo.due()
    none = {id(repeat): "" for repeat in due}
    lines = [f"# {todo.study.title}: {len(todo.study.cells)} cells x {todo.study.repeats} repeats"]
    lines += [*studydir.warnings(todo.tally), done_table(todo, none, "to submit"), ""]
    if due and todo.cluster == "slurm":
        lines += dry_arrays(todo, due)
    elif due:
        lines += [f"# one after another, {todo.cluster}: {len(due)} run(s)"]
    return "\n".join([*lines, "", f"study folder: {todo.folder}", "dry run: nothing was submitted"])


# --- what must not be -----------------------------------------------------------------------------


def check_settings(todo: Submission, yes: bool) -> list[str]:
    """Makes sure that all runs that count have the settings that the study has now.

    Failed runs with other settings are no tries: what was wrong may be what was changed.

    Returns:
        Warnings, where `yes` says that such runs are the same measurement.

    Raises:
        UsageError: finished or running ones have others.
    """
    different: list[tuple[Standing, str]] = []
    for repeat in todo.tally.repeats:
        for each in list(repeat.tries):
            if not (words := difference(each.run, todo.config(repeat))):
                continue
            if each.state == "failed":
                repeat.tries.remove(each)
            else:
                different.append((each, words))
    if not different:
        return []
    what = (
        f"{len(different)} run(s) in {str(todo.folder)!r} have other settings than the study now: "
        f"{different[0][1]} ({different[0][0].run.name})"
    )
    if yes:
        return [f"warning: {what}; counted all the same (--yes)"]
    raise UsageError(
        what, "give the study another name; or --yes, if they measure the same all the same"
    )


def confirmed(count: int, arguments: argparse.Namespace) -> bool:
    """Whether so many runs are wanted: asks, where they are very many.

    Raises:
        UsageError: there is nobody to ask.
    """
    if count <= ASK_ABOVE or arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"the study would submit {count:,} runs, and there is no terminal to ask",
            "add --yes, if you mean it; --dry-run shows them",
        )
    try:
        return input(f"submit {count:,} runs? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


# --- study status, study cancel -------------------------------------------------------------------


def status_main(argv: list[str]) -> int:
    """`slurmft study status FILE`"""
    parser = Parser(
        prog="slurmft study status",
        description="How far a study is: of every cell, the repeats that have finished, run, wait, "
        "failed or are missing, and why.",
    )
    _add_place(parser)
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")
    arguments = parser.parse(argv)
    study = grid.read(arguments.study)
    folder = studydir.folder_of(study, arguments.studies_dir)
    found = tally.take(study, folder)
    if arguments.json:
        print(json.dumps(tally.as_json(study, folder, found), indent=2, ensure_ascii=False))
        return Exit.OK
    for line in studydir.warnings(found):
        print(line, file=sys.stderr)
    print(f"{study.title} ({folder})")
    print(tally.status_table(study, found))
    totals = (f"{found.count(state)} {state}" for state in tally.STATES if found.count(state))
    print(f"{len(found.repeats)} runs: {', '.join(totals)}")
    print(_next_of(study, folder, found))
    return Exit.OK


def _next_of(study: Study, folder: Path, found: Tally) -> str:
    """What to type next: the command that submitted the newest run, where some are left; the one
    that shows what was measured, where something was."""
    finished = found.count("finished")
    look = report_command(folder)
    if finished == len(found.repeats):
        return f"all runs have finished\nNext: {look}"
    so_far = f"\n  so far: {look}" if finished else ""
    return _to_finish(study, found) + so_far


def report_command(folder: Path) -> str:
    """The command that shows what a study has measured: tables, plots, a page in its folder."""
    output = str(folder / "report")
    return shlex.join(["python", "-m", "slurmft", "report", str(folder), "--output", output])


def _to_finish(study: Study, found: Tally) -> str:
    if not found.count("missing") and not found.count("failed"):
        return f"Next: wait; or look: slurmft follow {_running(found)}"
    told = [t.run.config["submission"] for t in found.tries()]
    newest: dict[str, Any] = max(told, key=lambda s: str(s.get("time")), default={})
    command = newest.get("command")
    return f"Next: {command or shlex.join(['slurmft', 'study', 'run', str(study.path)])}"


def _running(found: Tally) -> str:
    alive = sorted((t for t in found.tries() if t.is_alive), key=lambda t: t.outcome != "running")
    return shlex.quote(str(alive[0].run.path))


def cancel_main(argv: list[str]) -> int:
    """`slurmft study cancel FILE`"""
    parser = Parser(
        prog="slurmft study cancel", description="Ends all jobs of a study that wait or run."
    )
    _add_place(parser)
    arguments = parser.parse(argv)
    study = grid.read(arguments.study)
    folder = studydir.folder_of(study, arguments.studies_dir)
    if not folder.is_dir():
        print(f"there is no study folder {str(folder)!r}: nothing to cancel")
        return Exit.OK
    try:
        with studydir.exclusive(folder, studydir.is_shared(folder)):
            cancel(study, alive_runs(folder))
    except studydir.HeldError:
        # Without Slurm, `study run` holds the folder while its runs go, and ends with one of them.
        local = [t for t in alive_runs(folder) if t.cluster != "slurm"]
        if not local:
            raise
        cancel(study, local)
    return Exit.OK


def alive_runs(folder: Path) -> list[Standing]:
    """The runs of a study that wait or run; says what it cannot read."""
    found, problems = tally.find(folder)
    for problem in problems:
        print(f"warning: {problem}; its job, if it has one, is not cancelled", file=sys.stderr)
    return [t for t in standing.stand(r for r in found if not r.is_finished) if t.is_alive]


def cancel(study: Study, alive: list[Standing]) -> None:
    """Ends the jobs of runs, and says so.

    Raises:
        UsageError: some are on another cluster or host; the others are cancelled.
    """
    here = [t for t in alive if not t.apart]
    # The last arrays first: else each would start when the one before it is gone.
    if jobs := live_jobs([t for t in here if t.cluster == "slurm"])[::-1]:
        slurm.cancel(*jobs)
    for each in here:
        run, cluster, job = RunDir(each.run.path), each.cluster, each.job
        if cluster == "slurm":  # those that have not started have no time to say so
            run.set_state("cancelled", "by slurmft study cancel", Exit.CANCELLED)
        elif job:
            launchers.get(cluster).cancel(job, run)
    print(f"{len(here)} run(s) of {study.name} are being cancelled")
    if away := [t for t in alive if t.apart]:
        raise UsageError(
            f"{len(away)} run(s) of {study.name} are {away[0].apart}",
            "slurmft study cancel there, too",
        )


COMMANDS = {"run": run_main, "status": status_main, "cancel": cancel_main}


def main(argv: list[str]) -> int:
    """`slurmft study COMMAND ...`"""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: slurmft study {{{','.join(COMMANDS)}}} ...\n\n{DESCRIPTION}\n\n{EXAMPLES}")
        return Exit.OK
    if argv:
        raise unknown("command", f"study {argv[0]}", [f"study {name}" for name in COMMANDS])
    raise UsageError("slurmft study: which command?", "run, status or cancel; --help shows more")
