"""`slurmft study run|status|cancel`: measures every cell of a study file, several times over.

Which runs there are is read from the run directories each time: there is no other state. See
`slurmft.studies.spec` for the file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from slurmft.cli.parser import Parser, add_options, given
from slurmft.core.config import JobConfig, options
from slurmft.core.errors import Exit, UsageError, unknown
from slurmft.studies import folder as study_folder
from slurmft.studies import progress as study_progress
from slurmft.studies import spec
from slurmft.studies.progress import Tally
from slurmft.studies.runner import (
    ASK_ABOVE,
    Submission,
    alive_runs,
    cancel,
    check_settings,
    configurations,
    done_table,
    dry_arrays,
    report_command,
    submit_due,
    with_flags,
)
from slurmft.studies.spec import Study
from slurmft.train.config import TrainConfig

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


def run_main(argv: list[str]) -> int:
    """`slurmft study run FILE`"""
    arguments = run_parser().parse(argv)
    flags = given(arguments, [*options(TrainConfig), *options(JobConfig)])
    study = with_flags(spec.read(arguments.study), flags)
    folder = study_folder.folder_of(study, arguments.studies_dir)
    configs = configurations(study, folder)
    if arguments.dry_run:
        todo = Submission(study, folder, configs, study_progress.take(study, folder), argv)
        check_settings(todo, arguments.yes)
        print(dry_run(todo))
        return Exit.OK
    share = any(config.job.share_with_group for config in configs.values())
    with study_folder.exclusive(folder, share):
        study_folder.check_name(study, folder)
        study_folder.discard_cut_off(folder)
        todo = Submission(study, folder, configs, study_progress.take(study, folder), argv)
        for line in check_settings(todo, arguments.yes):
            print(line, file=sys.stderr)
        if not confirmed(len(todo.due()), arguments):
            print("nothing was submitted")
            return Exit.OK
        study_folder.keep_copies(study, folder)
        return submit_due(todo)


def dry_run(todo: Submission) -> str:
    """What would be submitted."""
    due = todo.due()
    none = {id(repeat): "" for repeat in due}
    lines = [f"# {todo.study.title}: {len(todo.study.cells)} cells x {todo.study.repeats} repeats"]
    lines += [*study_folder.warnings(todo.tally), done_table(todo, none, "to submit"), ""]
    if due and todo.cluster == "slurm":
        lines += dry_arrays(todo, due)
    elif due:
        lines += [f"# one after another, {todo.cluster}: {len(due)} run(s)"]
    return "\n".join([*lines, "", f"study folder: {todo.folder}", "dry run: nothing was submitted"])


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
    study = spec.read(arguments.study)
    folder = study_folder.folder_of(study, arguments.studies_dir)
    found = study_progress.take(study, folder)
    if arguments.json:
        print(
            json.dumps(study_progress.as_json(study, folder, found), indent=2, ensure_ascii=False)
        )
        return Exit.OK
    for line in study_folder.warnings(found):
        print(line, file=sys.stderr)
    print(f"{study.title} ({folder})")
    print(study_progress.status_table(study, found))
    totals = (
        f"{found.count(state)} {state}" for state in study_progress.STATES if found.count(state)
    )
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
    study = spec.read(arguments.study)
    folder = study_folder.folder_of(study, arguments.studies_dir)
    if not folder.is_dir():
        print(f"there is no study folder {str(folder)!r}: nothing to cancel")
        return Exit.OK
    try:
        with study_folder.exclusive(folder, study_folder.is_shared(folder)):
            cancel(study, alive_runs(folder))
    except study_folder.HeldError:
        # Without Slurm, `study run` holds the folder while its runs go, and ends with one of them.
        local = [t for t in alive_runs(folder) if t.cluster != "slurm"]
        if not local:
            raise
        cancel(study, local)
    return Exit.OK


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
