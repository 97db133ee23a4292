"""`slurmft watch`: a live view of a run, redrawn in place."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from slurmft.cli.follow import Follower, show_outcome
from slurmft.cli.parser import Parser, add_run
from slurmft.cli.watch_view import ASCII, UNICODE, Line, RunView
from slurmft.cluster.wait import JobWatch
from slurmft.core.errors import Exit
from slurmft.core.terminal import raw
from slurmft.runs import resolve
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir

_REDRAW_S = 1.0

_SHOWN = ("start", "epoch", "resume", "warning", "ranks")
_SAMPLES = 64
"""Places in the records of a long run that the curve of its loss is read from."""

_COLOURS = {"bold": "1", "dim": "2", "good": "32", "bad": "31", "notice": "33"}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""A screen of its own without a cursor, and back."""

DESCRIPTION = """\
Shows a run while it runs: progress, speed, loss, time left, the memory of the ranks, and the
slowest of them. q or Ctrl-C quits; the job keeps running. Otherwise ends with the job, with its
exit code. Without a terminal it prints what `slurmft follow` prints. NO_COLOR=1 switches colours
off."""

EXAMPLES = """\
examples:
  slurmft watch last
  slurmft watch 4711 > progress.txt
"""


def parser() -> Parser:
    """The command line of `slurmft watch`."""
    command = Parser(prog="slurmft watch", description=DESCRIPTION, epilog=EXAMPLES)
    add_run(command)
    return command


def main(argv: list[str]) -> int:
    """`slurmft watch RUN`."""
    arguments = parser().parse(argv)
    run = resolve.find(arguments.run, arguments.runs_dir)
    if not has_screen():
        return Follower(run).follow()
    watcher = Watcher(run)
    try:
        ended = watcher.draw()
    except KeyboardInterrupt:
        return 130
    if not ended:
        return Exit.OK
    return show_outcome(watcher.job)


def has_screen() -> bool:
    """Whether there is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Watcher:
    """Keeps a view up to date, and shows it until the job ends or the user quits."""

    def __init__(self, run: RunDir) -> None:
        self.job = JobWatch(run)
        self.view = RunView(name=run.path.name)
        self._run = run
        self._records = RecordReader(run.records)
        self._recent = self._records.read_recent(*_SHOWN, samples=_SAMPLES)
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        self._glyphs = UNICODE if encoding == "utf8" else ASCII
        self._colours = not os.environ.get("NO_COLOR")

    def draw(self) -> bool:
        """Draws screens; returns whether the job has ended."""
        with screen() as keys:
            while not (ended := self._update()):
                self._show("q or Ctrl-C quits; the job keeps running")
                if keys.pressed(_REDRAW_S) & {"q", "Q"}:
                    break
        width, height = shutil.get_terminal_size()
        for line in self.view.screen(width, height, self._glyphs, ""):
            print(self._paint(line), file=raw(sys.stdout))
        return ended

    def _update(self) -> bool:
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

    def _show(self, footer: str) -> None:
        """Draws over what is there: a screen that is cleared first would flicker."""
        width, height = shutil.get_terminal_size()
        lines = self.view.screen(width, height - 1, self._glyphs, footer)
        text = "".join(f"{self._paint(line)}\x1b[K\r\n" for line in lines)
        print(f"\x1b[H{text}\x1b[J", end="", file=raw(sys.stdout), flush=True)

    def _paint(self, line: Line) -> str:
        if not self._colours:
            return "".join(text for text, _ in line)
        return "".join(
            f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if style else text for text, style in line
        )


class Keys:
    """The keyboard, if there is one."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None

    def pressed(self, wait_s: float) -> set[str]:
        """The keys pressed; waits for one so long."""
        if self._fd is None:
            time.sleep(wait_s)
            return set()
        ready, _, _ = select.select([self._fd], [], [], wait_s)
        data = os.read(self._fd, 64) if ready else b""
        if ready and not data:  # the terminal is gone
            self._fd = None
        return set(data.decode(errors="replace"))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Keys come when they are pressed, unseen, not with the line."""
        if self._fd is None:
            yield
            return
        before: Any = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def screen() -> Iterator[Keys]:
    """A screen of its own; what was on the terminal comes back, also when this is killed."""
    keys = Keys()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with keys.at_once():
        raw(sys.stdout).write(_ENTER)
        try:
            yield keys
        finally:
            print(_LEAVE, end="", file=raw(sys.stdout), flush=True)
            signal.signal(signal.SIGTERM, before)
