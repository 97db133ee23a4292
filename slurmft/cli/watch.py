"""Shows a run while it runs: progress, speed, loss, time left, the memory of the ranks, and the
slowest of them. Ctrl-C quits; the job keeps running. Otherwise ends with the job, with its exit
code. Without a terminal it prints what `slurmft follow` prints. NO_COLOR=1 switches colours off.

examples:
  slurmft watch last
  slurmft watch 4711 > progress.txt
"""

from __future__ import annotations

import itertools
import signal
import sys
import time

from rich.console import Console
from rich.live import Live

from slurmft.cli.follow import Follower, show_outcome
from slurmft.cli.parser import Parser, add_run
from slurmft.cli.watch_view import RunView
from slurmft.cluster.wait import JobWatch
from slurmft.core.terminal import raw
from slurmft.runs import resolve
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir

_REDRAW_S = 1.0

_SHOWN = ("start", "epoch", "resume", "warning", "ranks")
_SAMPLES = 64
"""Places in the records of a long run that the curve of its loss is read from."""


def parser() -> Parser:
    """The command line of `slurmft watch`."""
    command = Parser("slurmft watch", __doc__)
    add_run(command)
    return command


def main(argv: list[str]) -> int:
    """`slurmft watch RUN`."""
    arguments = parser().parse(argv)
    run = resolve.find(arguments.run, arguments.runs_dir)
    console = Console(file=raw(sys.stdout))
    if not console.is_terminal or console.is_dumb_terminal:
        return Follower(run).follow()
    watcher = Watcher(run)
    # What was on the terminal comes back, also when this is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while not watcher.update():
                screen.update(watcher.view, refresh=True)
                time.sleep(_REDRAW_S)
    except KeyboardInterrupt:
        return 130
    watcher.view.footer = ""
    console.print(watcher.view)
    return show_outcome(watcher.job)


class Watcher:
    """Keeps a view up to date."""

    def __init__(self, run: RunDir) -> None:
        self.job = JobWatch(run)
        self.view = RunView(name=run.path.name, footer="Ctrl-C quits; the job keeps running")
        self._run = run
        self._records = RecordReader(run.records)
        self._recent = self._records.read_recent(*_SHOWN, samples=_SAMPLES)

    def update(self) -> bool:
        """Reads what is new; returns whether the job has ended."""
        ended = self.job.has_ended()
        if ended:
            self.job.await_result()
        recent, self._recent = self._recent, []
        for record in itertools.chain(recent, self._records.read()):
            if record.get("event") == "start":
                ranks = self._run.read_environment()["ranks"]
                self.view.hosts = [str(rank.get("host", "?")) for rank in ranks]
            self.view.take(record)
        self.view.state = self._state()
        return ended

    def _state(self) -> str:
        state, recorded = self.job.state, self._run.get_state()
        text = f"job {self.job.job_id} {state.name.lower()}"
        if state.reason:
            return f"{text} ({state.reason})"
        if recorded["reason"] and not state.ended:
            return f"{text}: {recorded['reason']}"
        return text
