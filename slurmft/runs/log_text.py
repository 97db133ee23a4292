"""The text of `slurmft logs`: logs of ranks, nodes and Slurm as one, after the first failure."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypedDict

from slurmft.core.errors import UsageError
from slurmft.core.files import to_json
from slurmft.core.run_files import Failure
from slurmft.core.text import some
from slurmft.runs.logfiles import Choice, Line, Logs
from slurmft.runs.rundir import RunDir


class LogLine(TypedDict):
    """A line of a log."""

    time: float
    """Unix seconds; a line without a time of its own has that of the line before it."""
    source: str
    """Who wrote it: rank 3, node 0 (its torchrun), task 0, slurm, job, mpirun."""
    host: str | None
    attempt: int | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFailure(Failure):
    """The failure that came first: printed before all lines."""

    event: Literal["failure"] = "failure"
    then: list[str]
    """The processes that failed because of it."""


class LogText:
    """The logs of a run as lines with their ends, for people, or as JSON for programs."""

    def __init__(
        self,
        run: RunDir,
        choice: Choice,
        tail: int | None = None,
        as_json: bool = False,
    ) -> None:
        """`tail`: how many lines there are at most of what is there now; None: all."""
        _check(run, choice, tail)
        self._run = run
        self._choice = choice
        self._tail = tail
        self._json = as_json
        self._logs = Logs(run, choice)
        self._host_width = self._logs.host_width()
        self._label_width = len("rank 0")
        self._day = ""
        self.has_lines = False
        """Whether any line of the logs was returned."""

    @property
    def left_out(self) -> int:
        """How many log files are too many."""
        return self._logs.left_out

    def until_now(self) -> Iterator[str]:
        """Yields the first failure, and then all lines that there are; nothing before anybody
        wrote."""
        failure = self._first_failure()
        if failure is not None:
            yield from self._failure(failure)
        yield from self.last_lines(whole=True)

    def _first_failure(self) -> Failure | None:
        if self._choice.attempt is None:
            return self._run.root_failure()
        failures = self._run.failures_of(self._choice.attempt)
        return next(iter(failures), None)

    def _failure(self, failure: Failure) -> Iterator[str]:
        # Because of it, ranks that lost it have failed, and nodes whose ranks ended.
        after: list[str] = []
        for each in self._run.failures_of(failure.attempt):
            is_other = each.where != failure.where
            if is_other and each.where not in after:
                after.append(each.where)
        if self._json:
            first = FirstFailure(**asdict(failure), then=after)
            yield to_json(first) + "\n"
            return
        where = f"{failure.where}, attempt {failure.attempt}"
        if failure.step:  # 0: before the first step, as in the import of the program
            where += f", after step {failure.step}"
        if failure.is_loss_of_peer:
            yield f"a peer was lost, and no node recorded why; seen by: {where}\n"
        else:
            yield f"failed first: {where}\n"
        text = failure.traceback or failure.message
        yield text.rstrip() + "\n"
        if failure.hint:
            yield f"hint: {failure.hint}\n"
        if after:
            yield f"then: {some(after)}\n"
        yield "\n"

    def last_lines(self, whole: bool) -> Iterator[str]:
        """Returns the lines that there are, or the last ones: by reading no more of each file, if
        every line counts. `whole`: a last line without its end counts, too."""
        if self._tail is None:
            return self.new_lines(whole)
        choice = self._choice
        # Lines of an attempt or a host are known once they are read: all of each file then.
        every_line_counts = choice.attempt is None and not choice.node
        last = None
        if every_line_counts:
            last = self._tail
        lines = self._logs.lines(whole, last)
        return self._written(deque(lines, maxlen=min(self._tail, sys.maxsize)))

    def new_lines(self, whole: bool = True) -> Iterator[str]:
        """Returns the lines that are new."""
        return self._written(self._logs.lines(whole))

    def _written(self, lines: Iterable[Line]) -> Iterator[str]:
        for line in lines:
            self.has_lines = True
            if self._json:
                yield f"{_as_json(line)}\n"
            else:
                yield f"{self._as_text(line)}\n"

    def _as_text(self, line: Line) -> str:
        local_time = time.localtime(line.time)
        day = time.strftime("%Y-%m-%d", local_time)
        head = ""
        if day != self._day:
            head = f"--- {day}\n"
        self._day = day  # each day is named once: lines have clock times alone
        # A line is shown at once: wider names of later lines move only what follows them.
        self._host_width = max(self._host_width, len(line.host))
        self._label_width = max(self._label_width, len(line.label))
        host = line.host.ljust(self._host_width)
        label = line.label.ljust(self._label_width)
        # without any host, there is no column of hosts
        who = f"{host}  {label}".lstrip()
        # strftime has no milliseconds.
        millis = int(line.time % 1 * 1000)
        seconds = time.strftime("%H:%M:%S", local_time)
        clock = f"{seconds}.{millis:03d}"
        return f"{head}{clock}  {who} | {line.text}"


def _as_json(line: Line) -> str:
    facts = LogLine(
        time=round(line.time, 3),  # stamps have milliseconds
        source=line.label,
        host=line.host or None,
        attempt=line.attempt or None,
        text=line.text,
    )
    return to_json(facts)


def _check(run: RunDir, choice: Choice, tail: int | None) -> None:
    """Raises UsageError where the run has no such rank or attempt."""
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail} must be 0 or more")
    # Before the ranks have met, nobody knows how many there will be: any number is allowed.
    ranks = run.read_environment().ranks
    last = len(ranks) - 1
    for rank in choice.ranks:
        if ranks and not 0 <= rank <= last:
            raise UsageError(f"--rank {rank}: the run has the ranks 0 to {last}")
    newest = run.attempt_number()
    attempt = choice.attempt
    if attempt is not None and not 1 <= attempt <= newest:
        raise UsageError(f"--attempt {attempt}: the job has started {newest} time(s)")
