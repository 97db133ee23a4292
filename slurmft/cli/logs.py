"""Prints the logs of all ranks of a run, of its torchruns and of Slurm, merged in the order of
their times. The first failure comes before them, with its traceback, and the names of the processes
that failed because of it.

examples:
  slurmft logs last                            # all of it
  slurmft logs last --tail 50 --follow         # the end, and new lines until the job ends
  slurmft logs 4711 --rank 3 --attempt 2
"""

from argparse import Namespace
from collections.abc import Iterable

from slurmft.cli.follow import show_outcome
from slurmft.cli.parser import Parser, add_run
from slurmft.cluster.wait import JobWatch
from slurmft.core.errors import Exit
from slurmft.runs.log_text import Writer, check_choice, last_lines, until_now
from slurmft.runs.logfiles import Choice, Logs
from slurmft.runs.rundir import FINAL_STATES, RunDir


def parser() -> Parser:
    command = Parser("slurmft logs", __doc__)
    add_run(command)
    add = command.add_argument
    ranks = "only lines of this rank; repeatable"
    add("--rank", type=int, action="append", metavar="R", help=ranks)
    node = "only lines of this host, or of the node of this number"
    add("--node", default="", metavar="NAME", help=node)
    add("--attempt", type=int, metavar="N", help="only lines of this start of the job")
    add("--tail", type=int, metavar="N", help="only the last N lines")
    follow = "print new lines until the job ends; exit with its exit code"
    add("--follow", action="store_true", help=follow)
    add("--json", action="store_true", help="a JSON object for each line")
    return command


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    choice = Choice(tuple(arguments.rank or ()), arguments.node, arguments.attempt)
    check_choice(run, choice, arguments.tail)
    return _show(run, choice, arguments)


def _show(run: RunDir, choice: Choice, arguments: Namespace) -> int:
    logs, ended = Logs(run, choice), run.get_state()["state"] in FINAL_STATES
    writer = Writer(arguments.json, logs.hosts())
    job = JobWatch(run) if arguments.follow and not ended else None
    try:
        if job is None:
            _print(until_now(writer, run, logs, choice, arguments.tail))
            return int(run.get_state()["exit_code"] or 0) if arguments.follow else Exit.OK
        _print(writer.lines(last_lines(logs, choice, arguments.tail, whole=False)))
        return _follow(job, logs, writer)
    except KeyboardInterrupt:
        return 130


def _print(texts: Iterable[str]) -> None:
    for text in texts:
        print(text, end="")
    print(end="", flush=True)


def _follow(job: JobWatch, logs: Logs, writer: Writer) -> int:
    """Prints what comes until the job ends; returns its exit code."""
    while not job.has_ended():
        _print(writer.lines(logs.lines(whole=False)))
        job.pause()
    job.await_result()
    _print(writer.lines(logs.lines()))
    return Exit.OK if job.succeeded else show_outcome(job)
