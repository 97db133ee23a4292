"""The text of `slurmft logs`: logs of ranks, nodes and Slurm as one, after the first failure."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from slurmft.core.errors import UsageError
from slurmft.core.files import to_json
from slurmft.core.text import some
from slurmft.runs.logfiles import Choice, Line, Logs
from slurmft.runs.rundir import RunDir


class LogText:
    """The logs of a run as lines with their ends, for people, or as JSON for programs."""

    def __init__(
        self, run: RunDir, choice: Choice, tail: int | None = None, as_json: bool = False
    ) -> None:
        """`tail`: how many lines there are at most of what is there now; None: all."""
        _check(run, choice, tail)
        self._run, self._choice, self._tail, self._json = run, choice, tail, as_json
        self._logs = Logs(run, choice)
        self._host_width, self._label_width = self._logs.host_width(), len("rank 0")
        self._day = ""

    def until_now(self) -> Iterator[str]:
        """What failed first, and then all lines that there are; nothing before anybody wrote."""
        attempt = self._choice.attempt
        ended = [self._run.root_failure()] if attempt is None else self._run.failures_of(attempt)
        if failure := next(iter(ended), None):
            # Because of that, ranks that lost it have failed, and nodes whose ranks ended.
            names = dict.fromkeys(f.where for f in self._run.failures_of(failure.attempt))
            after = [name for name in names if name != failure.where]
            if self._json:
                yield to_json({"event": "failure"} | asdict(failure) | {"then": after}) + "\n"
            else:
                step = f", after step {failure.step}" if failure.step else ""
                yield f"failed first: {failure.where}, attempt {failure.attempt}{step}\n"
                yield (failure.traceback or failure.message).rstrip() + "\n"
                yield f"hint: {failure.hint}\n" if failure.hint else ""
                yield f"then: {some(after)}\n\n" if after else "\n"
        yield from self.last_lines(whole=True)

    def last_lines(self, whole: bool) -> Iterator[str]:
        """The lines that there are, or the last ones: by reading no more of each file, if every
        line counts. `whole`: a last line without its end counts, too."""
        if self._tail is None:
            return self.new_lines(whole)
        every = self._choice.attempt is None and not self._choice.node
        lines = self._logs.lines(whole, self._tail if every else None)
        return self._written(deque(lines, maxlen=self._tail))

    def new_lines(self, whole: bool = True) -> Iterator[str]:
        """The lines that are new."""
        return self._written(self._logs.lines(whole))

    def _written(self, lines: Iterable[Line]) -> Iterator[str]:
        for line in lines:
            about = {"time": round(line.time, 3), "source": line.label, "host": line.host or None}
            about |= {"attempt": line.attempt or None, "text": line.text}
            yield f"{to_json(about) if self._json else self._as_text(line)}\n"

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


def _check(run: RunDir, choice: Choice, tail: int | None) -> None:
    """Raises UsageError for what the run cannot have."""
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail} must be 0 or more")
    ranks = run.read_environment().ranks
    for rank in choice.ranks:
        if ranks and not 0 <= rank < len(ranks):
            raise UsageError(f"--rank {rank}: the run has the ranks 0 to {len(ranks) - 1}")
    newest = run.attempt_number()
    if choice.attempt is not None and not 1 <= choice.attempt <= newest:
        raise UsageError(f"--attempt {choice.attempt}: the job has started {newest} time(s)")
