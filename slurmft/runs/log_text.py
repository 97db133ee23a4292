"""The text of `slurmft logs`: logs of ranks, nodes and Slurm as one, after the first failure."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.files import to_json
from slurmft.core.terminal import plain
from slurmft.core.text import some
from slurmft.runs.logfiles import Choice, Line, Logs
from slurmft.runs.rundir import RunDir


def text_of(run: RunDir, choice: Choice, tail: int | None = None) -> str:
    """The logs of a run up to now, as `slurmft logs` prints them; "" before anybody wrote.

    Raises:
        UsageError: a rank or an attempt that the run does not have; a negative tail.
    """
    check_choice(run, choice, tail)
    logs = Logs(run, choice)
    return plain("".join(until_now(Writer(False, logs.hosts()), run, logs, choice, tail)))


def check_choice(run: RunDir, choice: Choice, tail: int | None) -> None:
    """Raises UsageError for what the run cannot have."""
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail} must be 0 or more")
    ranks = run.read_environment()["ranks"]
    for rank in choice.ranks:
        if ranks and not 0 <= rank < len(ranks):
            raise UsageError(f"--rank {rank}: the run has the ranks 0 to {len(ranks) - 1}")
    newest = run.attempt_number()
    if choice.attempt is not None and not 1 <= choice.attempt <= newest:
        raise UsageError(f"--attempt {choice.attempt}: the job has started {newest} time(s)")


def until_now(
    writer: "Writer", run: RunDir, logs: Logs, choice: Choice, tail: int | None
) -> Iterator[str]:
    """What failed first, and then all lines that there are."""
    if failure := first_failure(run, choice.attempt):
        yield writer.failure(failure, secondary_failures(run, failure))
    yield from writer.lines(last_lines(logs, choice, tail, whole=True))


def last_lines(logs: Logs, choice: Choice, tail: int | None, whole: bool) -> Iterable[Line]:
    """All lines, or the last ones: by reading no more of each file, if every line counts."""
    if tail is None:
        return logs.lines(whole)
    every = choice.attempt is None and not choice.node
    return deque(logs.lines(whole, tail if every else None), maxlen=tail)


def first_failure(run: RunDir, attempt: int | None = None) -> dict[str, Any] | None:
    """The failure that ended an attempt; the last one, if it is not given."""
    return run.root_failure() if attempt is None else next(iter(run.failures_of(attempt)), None)


def secondary_failures(run: RunDir, first: dict[str, Any]) -> list[str]:
    """Who failed because of that: ranks that lost it, nodes whose ranks ended."""
    after = dict.fromkeys(f["where"] for f in run.failures_of(first["attempt"]))
    return [where for where in after if where != first["where"]]


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
            texts.append(f"then: {some(after)}")
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
