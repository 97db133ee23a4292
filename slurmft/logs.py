"""`slurmft logs`: what ranks, nodes and Slurm wrote, as one log, the first failure before it."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from slurmft import selection
from slurmft.cli import Parser
from slurmft.errors import Exit, UsageError
from slurmft.follow import JobWatch
from slurmft.logfiles import Choice, Line, Logs
from slurmft.rundir import FINAL_STATES, RunDir, read_json, to_json

_READ_EVERY_S = 0.5

DESCRIPTION = """\
Prints the logs of all ranks of a run, of its torchruns and of Slurm, merged in the order of their
times. What failed first comes before them, with its traceback; ranks that only lost others are
named behind it."""

EXAMPLES = """\
examples:
  slurmft logs last                            # all of it
  slurmft logs last --tail 50 --follow         # the end, and what comes, until the job ends
  slurmft logs 4711 --rank 3 --attempt 2
"""


def parser() -> Parser:
    """The command line of `slurmft logs`."""
    made = Parser(prog="slurmft logs", description=DESCRIPTION, epilog=EXAMPLES)
    selection.add_argument(made)
    made.add_argument(
        "--rank", type=int, action="append", metavar="R", help="of this rank alone; repeatable"
    )
    made.add_argument("--node", default="", metavar="NAME", help="of this host, or node number")
    made.add_argument("--attempt", type=int, metavar="N", help="of this start of the job alone")
    made.add_argument("--tail", type=int, metavar="N", help="only the last N lines")
    made.add_argument(
        "--follow", action="store_true", help="and what comes, until the job ends; its exit code"
    )
    made.add_argument("--json", action="store_true", help="a JSON object for each line")
    return made


def main(argv: list[str]) -> int:
    """`slurmft logs RUN`."""
    arguments = parser().parse(argv)
    run = selection.find(arguments.run, arguments.runs_dir)
    choice = Choice(tuple(arguments.rank or ()), arguments.node, arguments.attempt)
    _check(run, choice, arguments.tail)
    return _show(run, choice, arguments)


def text_of(run: RunDir, choice: Choice, tail: int | None = None) -> str:
    """The logs of a run up to now, as `slurmft logs` prints them; "" before anybody wrote.

    Raises:
        UsageError: a rank or an attempt that the run does not have; a negative tail.
    """
    _check(run, choice, tail)
    logs = Logs(run, choice)
    return "".join(_until_now(Writer(False, logs.hosts()), run, logs, choice, tail))


def _check(run: RunDir, choice: Choice, tail: int | None) -> None:
    """Raises UsageError for what the run cannot have."""
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail} must be 0 or more")
    ranks = (read_json(run.environment) or {}).get("ranks", [])
    for rank in choice.ranks:
        if ranks and not 0 <= rank < len(ranks):
            raise UsageError(f"--rank {rank}: the run has the ranks 0 to {len(ranks) - 1}")
    newest = run.attempt_number()
    if choice.attempt is not None and not 1 <= choice.attempt <= newest:
        raise UsageError(f"--attempt {choice.attempt}: the job has started {newest} time(s)")


def _show(run: RunDir, choice: Choice, arguments: Namespace) -> int:
    logs, ended = Logs(run, choice), run.get_state()["state"] in FINAL_STATES
    writer = Writer(arguments.json, logs.hosts())
    job = JobWatch(run) if arguments.follow and not ended else None
    try:
        if job is None:
            _print(_until_now(writer, run, logs, choice, arguments.tail))
            return int(run.get_state()["exit_code"] or 0) if arguments.follow else Exit.OK
        _print(writer.lines(_last(logs, choice, arguments.tail, whole=False)))
        return _follow(job, logs, writer)
    except KeyboardInterrupt:
        return 130


def _until_now(
    writer: Writer, run: RunDir, logs: Logs, choice: Choice, tail: int | None
) -> Iterator[str]:
    """What failed first, and then all lines that there are."""
    if failure := first_failure(run, choice.attempt):
        yield writer.failure(failure, echoes(run, failure))
    yield from writer.lines(_last(logs, choice, tail, whole=True))


def _print(texts: Iterable[str]) -> None:
    for text in texts:
        print(text, end="")
    print(end="", flush=True)


def _last(logs: Logs, choice: Choice, tail: int | None, whole: bool) -> Iterable[Line]:
    """All lines, or the last ones: by reading no more of each file, if every line counts."""
    if tail is None:
        return logs.lines(whole)
    every = choice.attempt is None and not choice.node
    return deque(logs.lines(whole, tail if every else None), maxlen=tail)


def _follow(job: JobWatch, logs: Logs, writer: Writer) -> int:
    """Prints what comes until the job ends; returns its exit code."""
    while not job.has_ended():
        _print(writer.lines(logs.lines(whole=False)))
        time.sleep(_READ_EVERY_S)
    job.await_result()
    _print(writer.lines(logs.lines()))
    return Exit.OK if job.succeeded else job.conclude()


def first_failure(run: RunDir, attempt: int | None = None) -> dict[str, Any] | None:
    """The failure that ended an attempt; the last one, if it is not given."""
    if attempt is None or attempt == run.attempt_number():
        return run.root_failure()
    found = [f for f in run.all_failures() if f["attempt"] == attempt]
    return min(found, key=lambda f: (f["echo"], f["time"]), default=None)


def echoes(run: RunDir, first: dict[str, Any]) -> list[str]:
    """Who failed after that: ranks that lost it, nodes whose ranks ended."""
    after = [
        f["where"]
        for f in run.all_failures()
        if f["attempt"] == first["attempt"] and f["time"] >= first["time"] and f != first
    ]
    return list(dict.fromkeys(where for where in after if where != first["where"]))


class Writer:
    """Lines and failures as texts for people, or for programs."""

    def __init__(self, as_json: bool, host_width: int) -> None:
        self._json = as_json
        self._host_width, self._label_width = host_width, len("rank 0")
        self._day = ""

    def failure(self, failure: dict[str, Any], after: list[str]) -> str:
        """What failed first."""
        if self._json:
            return to_json({"event": "failure"} | failure | {"then": after}) + "\n"
        step = f", after step {failure['step']}" if failure["step"] else ""
        texts = [f"failed first: {failure['where']}, attempt {failure['attempt']}{step}"]
        texts.append((failure["traceback"] or failure["message"]).rstrip())
        if failure["hint"]:
            texts.append(f"hint: {failure['hint']}")
        if after:
            texts.append(f"then: {', '.join(after)}")
        return "\n".join([*texts, "", ""])

    def lines(self, lines: Iterable[Line]) -> Iterator[str]:
        """Each with its line end."""
        for line in lines:
            yield (self._as_json(line) if self._json else self._as_text(line)) + "\n"

    def _as_json(self, line: Line) -> str:
        about = {"time": round(line.time, 3), "source": line.label, "host": line.host or None}
        return to_json(about | {"attempt": line.attempt or None, "text": line.text})

    def _as_text(self, line: Line) -> str:
        at = time.localtime(line.time)
        day = time.strftime("%Y-%m-%d", at)
        head = "" if day == self._day else f"--- {day}\n"
        self._day = day
        self._host_width = max(self._host_width, len(line.host))
        self._label_width = max(self._label_width, len(line.label))
        who = f"{line.host:<{self._host_width}}  {line.label:<{self._label_width}}".lstrip()
        clock = f"{time.strftime('%H:%M:%S', at)}.{int(line.time % 1 * 1000):03d}"
        return f"{head}{clock}  {who} | {line.text}"
