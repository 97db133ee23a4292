"""Prints the logs of all ranks of a run as one. Those of its torchruns and of Slurm are merged with
them in the order of their times. The first failure comes before them, with its traceback, and the
names of the processes that failed because of it.

examples:
  slurmft logs last                            # all of it
  slurmft logs last --tail 50 --follow         # the end, and new lines until the job ends
  slurmft logs 4711 --rank 3 --attempt 2
"""

import sys
from collections.abc import Iterable

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.follow import show_outcome
from slurmft.cli.parser import Parser, count, whole
from slurmft.cluster.wait import JobWatch
from slurmft.core.errors import Exit, UsageError
from slurmft.core.interruption import exit_code
from slurmft.core.run_files import FINAL_STATES
from slurmft.core.text import some
from slurmft.runs.log_text import FirstFailure, LogLine, LogText
from slurmft.runs.logfiles import Choice, Logs
from slurmft.runs.rundir import RunDir

ELSEWHERE = Elsewhere.PLAIN


def parser() -> Parser:
    command = Parser("slurmft logs", __doc__).add_run()
    add = command.add_argument
    ranks = "only lines of this rank; repeatable"
    add("--rank", type=whole, action="append", metavar="R", help=ranks)
    node = "only lines of this host, or of the node of this number"
    add("--node", default="", metavar="NAME", help=node)
    add(
        "--attempt", type=count, metavar="N", help="only lines of this start of the job"
    )
    add("--tail", type=whole, metavar="N", help="only the last N lines")
    follow = "print new lines until the job ends; exit with its exit code"
    add("--follow", action="store_true", help=follow)
    return command.add_json("a JSON object for each line", FirstFailure, LogLine)


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    choice = Choice(tuple(arguments.rank or ()), arguments.node, arguments.attempt)
    text = LogText(run, choice, arguments.tail, arguments.json)
    if text.left_out:
        problem = f"warning: {text.left_out:,} more log files are not read"
        print(f"{problem}: choose some by --rank or --node", file=sys.stderr)
    try:
        if arguments.follow and run.get_state().state not in FINAL_STATES:
            return _follow(run, text)
        _print(text.until_now())
        # Nothing would look like the logs of a rank that printed nothing.
        is_silent = not text.has_lines and arguments.tail != 0
        if is_silent and not arguments.follow:
            _tell_of_nothing(run, choice)
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)
    # The job had ended before: a script gets its exit code all the same.
    if arguments.follow:
        return run.get_state().exit_code or Exit.OK
    return Exit.OK


def _tell_of_nothing(run: RunDir, choice: Choice) -> None:
    """Raises UsageError where no line fits the choice, but others are there."""
    labels = Logs(run, Choice()).labels()
    if not labels or choice == Choice():
        print("the run has logged nothing yet", file=sys.stderr)
        return
    raise UsageError(
        f"no line of the logs is from {choice}", f"there are logs of {some(labels)}"
    )


def _follow(run: RunDir, text: LogText) -> int:
    """Prints new lines until the job ends; returns the exit code of the job."""
    job = JobWatch(run)
    _print(text.last_lines(whole=False))
    # A rank may be in the middle of a line: it comes with its end.
    for _ in job.looks():
        _print(text.new_lines(whole=False))
    # Nobody writes any more: what has no end is a line, too.
    _print(text.new_lines())
    if job.state.succeeded:
        return Exit.OK
    return show_outcome(job)


def _print(texts: Iterable[str]) -> None:
    for text in texts:
        print(text, end="")
    sys.stdout.flush()
