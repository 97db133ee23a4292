"""The log files of a run as one stream of lines, in the order of their times.

Files are read piece by piece, and opened for each piece: a log may be larger than the memory, there
may be more of them than a process may hold open, and a network file system shows what is new in a
file when it is opened.
"""

import heapq
import io
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmft.core.files import MOST_FILES, open_regular, read_on
from slurmft.core.run_files import Rank
from slurmft.runs import log_times
from slurmft.runs.rundir import RunDir, read_log_head

_PIECE_BYTES = 1 << 18
_LINE_PIECES = 4
"""A line that is longer than so many pieces is shown as several."""
_TAIL_BYTES = 1 << 26
"""How far back the last lines are looked for."""
_MEMORY_BYTES = 1 << 26
"""Of the pieces of all files."""
_CLOCK_S = 5.0
"""How far the time in a line may be off what is known of the lines around it."""

_STAMP_STEP_S = 0.001
"""Stamps are cut to milliseconds: a line may seem to come before the attempt that it follows."""

_SLURMS = ("srun: ", "slurmstepd")
_TRACE = "Traceback (most recent call last)"
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)


class Line(NamedTuple):
    """A line of a log."""

    time: float
    """Unix seconds; of a line without a time of its own, those of the line that it follows."""
    source: int
    """Position of its file among all: lines of one file that belong together stay so."""
    text: str
    label: str
    """Who wrote it: rank 3, node 0 (its torchrun), task 0, slurm, job, mpirun."""
    host: str
    attempt: int
    """0: not known."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which lines to show."""

    ranks: tuple[int, ...] = ()
    node: str = ""
    """Host, or number of a node."""
    attempt: int | None = None

    def __str__(self) -> str:
        flags = [f"--rank {rank}" for rank in self.ranks]
        if self.node:
            flags.append(f"--node {self.node}")
        if self.attempt is not None:
            flags.append(f"--attempt {self.attempt}")
        return " ".join(flags)

    def has_file(self, place: "_Place") -> bool:
        labels = [f"rank {rank}" for rank in self.ranks]
        if self.ranks and place.label not in labels:
            return False
        if not self.node:
            return True
        if self.node.isdigit():
            return place.node == int(self.node)
        # A host's name is known from the lines only: after a requeue a rank may be elsewhere.
        return place.node is not None

    def has_line(self, line: Line) -> bool:
        # The number of a node has chosen files already: see `has_file`.
        is_host = bool(self.node) and not self.node.isdigit()
        if is_host and line.host != self.node:
            return False
        return self.attempt is None or line.attempt == self.attempt


class Logs:
    """All logs of a run, those that come up later included."""

    def __init__(self, run: RunDir, choice: Choice) -> None:
        self._run = run
        self._choice = choice
        self._files: dict[Path, LogFile] = {}
        self._starts: list[tuple[float, int]] = []
        self.left_out = 0
        """Files of more than `MOST_FILES`, which are not read."""
        self._look_for_files()

    def lines(self, whole: bool = True, last: int | None = None) -> Iterator[Line]:
        """Returns the lines that are new, oldest first; `last` leaves out all but so many of each
        file."""
        self._look_for_files()
        # Generators: each holds one piece of its file at a time.
        lines_of_files = [file.lines(whole, last) for file in self._files.values()]
        # Lines compare by time, then by source: lines of one file stay in their order.
        merged: Iterable[Line] = heapq.merge(*lines_of_files)
        return filter(self._choice.has_line, merged)

    def host_width(self) -> int:
        """Returns the width of the widest host name."""
        hosts = [file.place.host for file in self._files.values()]
        return max(map(len, hosts), default=0)

    def labels(self) -> list[str]:
        """Returns who writes the files: rank 0, node 0, ..."""
        return [file.place.label for file in self._files.values()]

    def _look_for_files(self) -> None:
        """Adds the files that are new: ranks first, then nodes, then the job's."""
        starts = []
        for transition in self._run.history():
            if transition.state == "running":
                starts.append((transition.time, transition.attempt or 0))
        # In place: the files share this list.
        self._starts[:] = starts
        ranks: dict[int, Rank] = {}
        hosts: dict[int, str] = {}
        for rank in self._run.read_environment().ranks:
            ranks[rank.rank] = rank
            hosts[rank.node_number] = rank.host
        # In submitit's folder are what srun writes for the tasks, and the job's own.
        paths = list(self._run.logs.glob("*.log"))
        paths += self._run.submitit.glob("*_log.*")
        places = [_place(path, ranks, hosts) for path in paths]
        chosen = sorted(filter(self._choice.has_file, places), key=_order)
        self.left_out = max(0, len(chosen) - MOST_FILES)
        for place in chosen[:MOST_FILES]:
            if place.path not in self._files:
                source = len(self._files)
                self._files[place.path] = LogFile(place, source, self._starts)
        for file in self._files.values():
            file.piece_bytes = min(_PIECE_BYTES, _MEMORY_BYTES // len(self._files))


class LogFile:
    """Reads the lines of one log, and later those that were added."""

    def __init__(
        self, place: "_Place", source: int, starts: list[tuple[float, int]]
    ) -> None:
        """`starts`: when each attempt began (Unix seconds) and its number, oldest first."""
        self.place = place
        self._starts = starts
        # Before any time: the first line sets it.
        self._last = Line(
            time=-math.inf,
            source=source,
            text="",
            label=place.label,
            host=place.host,
            attempt=0,
        )
        self.piece_bytes = _PIECE_BYTES
        self._offset = 0
        self._inode = 0
        self._trace = False
        """The last line is part of a traceback."""
        self._had_trace = False
        """The last line is part of a traceback, or of what joins it to another."""

    def lines(self, whole: bool = True, last: int | None = None) -> Iterator[Line]:
        """Yields the lines that are new, in an order of never falling times; `last` leaves out all
        but so many of them. `whole`: a last line without its end counts, too."""
        caught_up = self._offset > 0
        if last is not None:
            self._offset = self._start_of(last)
        while True:
            piece, changed_at = self._piece(whole)
            if not piece:
                return
            self._offset += len(piece)
            self._begin(piece, changed_at, caught_up)
            for text in _texts(piece):
                yield self._line(text, changed_at)
            # Only the first piece comes right after the last look.
            caught_up = False

    def _piece(self, whole: bool) -> tuple[bytes, float]:
        """Reads the lines that come next, if there are any; returns them, and the Unix time of the
        last change of the file."""
        try:
            with open_regular(self.place.path) as file:
                status = os.fstat(file.fileno())
                # All writers append: another file in its place, or a shorter one, begins anew.
                is_another_file = status.st_ino != self._inode
                is_cut = status.st_size < self._offset
                if is_another_file or is_cut:
                    # At the first look the offset may be that of the last lines: it stays.
                    if self._inode:
                        self._offset = 0
                    self._inode = status.st_ino
                file.seek(self._offset)
                piece = read_on(file, self.piece_bytes)
                self._offset = file.tell() - len(piece)
                is_all = len(piece) < self.piece_bytes
                if b"\n" not in piece and not is_all:
                    piece += file.readline(_LINE_PIECES * self.piece_bytes)
        # It is not there any more, or its server restarts: nothing is new.
        except OSError:
            return b"", 0.0
        whole_lines, newline, _ = piece.rpartition(b"\n")
        is_long_line = not newline and not is_all
        if is_long_line or (is_all and whole):
            return piece, status.st_mtime
        # The rest of a line comes with the next piece.
        return whole_lines + newline, status.st_mtime

    def _start_of(self, last: int) -> int:
        """Returns the offset at which the last so many lines of the file begin."""
        try:
            with open_regular(self.place.path) as file:
                size = file.seek(0, os.SEEK_END)
                if not last:
                    return size
                least = max(0, size - _TAIL_BYTES)
                missing = last
                # The newline at the end of the file ends the last line, and begins none.
                end = size - 1
                while end > least:
                    start = max(least, end - _PIECE_BYTES)
                    file.seek(start)
                    block = file.read(end - start)
                    newlines = block.count(b"\n")
                    if newlines >= missing:
                        return start + _last_lines(block, missing)
                    missing -= newlines
                    end = start
                return least
        except OSError:
            return 0

    def _begin(self, piece: bytes, changed_at: float, caught_up: bool) -> None:
        """Sets the time of lines that come before the first one that has any."""
        if self._last.time == -math.inf:
            self._at(self._first_time(_texts(piece), changed_at))
            return
        has_time = self._time_in(next(_texts(piece)), changed_at) is not None
        if caught_up and not has_time and not self._trace:
            # It was written since the last look. The clock of the file server may be ahead.
            self._at(min(changed_at, time.time()))

    def _first_time(self, lines: Iterable[str], changed_at: float) -> float:
        for line in lines:
            when = self._time_in(line, changed_at)
            if when is not None:
                return when
        return changed_at

    def _at(self, when: float) -> None:
        # heapq.merge needs times that never fall, and a host's clock may be set back.
        later = max(when, self._last.time)
        self._last = self._last._replace(time=later)

    def _time_in(self, text: str, changed_at: float) -> float | None:
        """Returns the time that a line has; none of a text that only has a date in it."""
        stamped_at, _ = log_times.split(text)
        if stamped_at is not None:
            return stamped_at
        # It goes on with the text of the line before.
        if text[:1].isspace():
            return None
        year = time.localtime(changed_at).tm_year
        when = log_times.foreign(text, year)
        if when is None:
            return None
        # Another time is a date in the text, such as that of a data set.
        earliest = self._last.time - _CLOCK_S
        latest = changed_at + _CLOCK_S
        if not earliest <= when <= latest:
            return None
        return when

    def _line(self, raw: str, changed_at: float) -> Line:
        stamped, text = log_times.split(raw)
        # A progress bar overwrites its line: of its states the last one counts.
        _, is_bar, text = text.rstrip("\r").rpartition("\r")
        when = self._time_in(raw, changed_at)
        # Bars leave their line open, and the other stream's next line begins with its stamp there.
        if is_bar:
            stamped_within, text = log_times.split_within(text)
            when = stamped_within or when
        if when is not None and not self._belongs(text):
            self._at(when)
        # a head is always stamped: other text may only look like one
        if stamped is not None:
            head = read_log_head(text)
            if head is not None:
                host, attempt = head
                self._last = self._last._replace(host=host, attempt=attempt)
        label = self.place.label
        # srun and slurmstepd write into the files of the tasks.
        if label.startswith("task") and text.startswith(_SLURMS):
            label = "slurm"
        attempt = self._last.attempt or self._attempt_by_time()
        return self._last._replace(text=text, label=label, attempt=attempt)

    def _attempt_by_time(self) -> int:
        """Returns the attempt that had last begun at the time of the last line; 0: none."""
        for began_at, attempt in reversed(self._starts):
            if began_at <= self._last.time + _STAMP_STEP_S:
                return attempt
        return 0

    def _belongs(self, text: str) -> bool:
        """Returns whether a line is part of the traceback before it."""
        if text.startswith(_TRACE):
            joins = self._had_trace
            self._trace = True
            self._had_trace = True
            return joins
        is_empty = not text.strip()
        is_indented = text[:1].isspace()
        if self._trace:
            # the first that is neither is the error: its end
            self._trace = is_empty or is_indented
            return True
        if self._had_trace and (is_empty or text.startswith(_CHAINED)):
            return True
        self._had_trace = False
        # The first line of a file belongs to nothing.
        return is_indented and self._last.time != -math.inf


def _texts(piece: bytes) -> Iterator[str]:
    """Yields the lines of a piece, one after the other: as a list, they would need much memory."""
    for line in io.BytesIO(piece):
        # A library may print any bytes, and a kill may cut a character in two.
        yield line.decode("utf-8", "replace").removesuffix("\n")


def _last_lines(block: bytes, count: int) -> int:
    """Returns where the last so many lines of a block begin; each but the first of the block
    follows a newline."""
    place = len(block)
    for _ in range(count):
        place = block.rindex(b"\n", 0, place)
    return place + 1


def log_of_rank(run: RunDir, rank: int) -> LogFile:
    """Returns the log of one rank, whose `lines` are each time those that are new."""
    path = run.rank_log(rank)
    place = _Place(path, label=f"rank {rank}", node=None, host="")
    return LogFile(place, source=0, starts=[])


@dataclass(frozen=True, slots=True)
class _Place:
    """A log file, and who writes it."""

    path: Path
    label: str
    node: int | None
    """The node's number; None: the job's own file."""
    host: str
    """Where a file without a head comes from; "" if it is not known."""


_LOG_NAME = re.compile(r"(rank|node|task)-(\d+)\.log|.+_(\d+)_log\.(?:out|err)")
_ORDER = {"rank": 0, "node": 1, "task": 2}


def _order(place: _Place) -> tuple[int, str]:
    kind = place.label.split()[0]
    return _ORDER.get(kind, len(_ORDER)), place.path.name


def _place(path: Path, ranks: dict[int, Rank], hosts: dict[int, str]) -> _Place:
    match = _LOG_NAME.fullmatch(path.name)
    if match is None:
        return _Place(path, path.stem, None, "")
    kind = match[1] or "task"  # without a kind: Slurm's
    number = int(match[2] or match[3])
    label = f"{kind} {number}"
    if kind != "rank":
        # One task a node: both have the node's number.
        host = hosts.get(number, "")
        return _Place(path, label, number, host)
    rank = ranks.get(number)
    if rank is None:  # the ranks have not met yet
        return _Place(path, label, 0, "")
    return _Place(path, label, rank.node_number, rank.host)
