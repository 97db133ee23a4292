"""Times in logs: what a process of a run prints begins with when it did.

Each line is written at once, so that a kill loses none: there is no pipe and no process between a
rank and its log. Lines that libraries write by themselves have no stamp; some bring a time of their
own, the others follow the stamped line before them.
"""

import contextlib
import io
import os
import re
import sys
import time
from datetime import datetime
from typing import Any, TextIO

_LENGTH = len("2026-11-20T10:31:07.123+01:00")
_WITHIN_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ")
"""A stamp of ours, for lines in which it is not what comes first."""
_FOREIGN = re.compile(
    r"(?<!\d)(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d{3})?)(?!\d)"
)
"""NCCL, submitit, slurmstepd, Python's logging."""
_GLOG = re.compile(
    r"(?:\[rank\d+\]:)?\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d{3})"
)
"""PyTorch's C++ and torchrun: no year."""
_WITHIN = 160
"""Characters of a line in which a foreign time is looked for."""


def stamp(when: float) -> str:
    """A Unix time as stamps have it: local, to the millisecond, with the distance from UTC."""
    return datetime.fromtimestamp(when).astimezone().isoformat(timespec="milliseconds")


def split(line: str) -> tuple[float | None, str]:
    """The Unix time of a stamped line, and what was printed; None and the line for another."""
    # A look at three characters costs less than to parse every line.
    # Slices, not indexes: those of a shorter line are "".
    after_year = line[4:5]
    after_day = line[10:11]
    after_stamp = line[_LENGTH : _LENGTH + 1]
    if (after_year, after_day, after_stamp) != ("-", "T", " "):
        return None, line
    when = _unix_time(line[:_LENGTH])
    if when is None:
        return None, line
    return when, line[_LENGTH + 1 :]


def split_within(line: str) -> tuple[float | None, str]:
    """The Unix time of a line that stands behind what another stream has left open, as a progress
    bar, and both texts without the stamp; None and the line where there is no stamp in it."""
    match = _WITHIN_LINE.search(line)
    if match is None:
        return None, line
    when = _unix_time(match[0].rstrip())
    if when is None:
        return None, line
    parts = [line[: match.start()].strip(), line[match.end() :]]
    return when, "  ".join(filter(None, parts))


def foreign(line: str, year: int) -> float | None:
    """The time that a library or Slurm has written into a line of its own, as local time here; the
    year is the log's, as PyTorch's C++ leaves it out."""
    text = line[:_WITHIN]
    glog = _GLOG.match(text)
    if glog is not None:
        month, day, clock, millis = glog.groups()
        date = f"{year}-{month:0>2}-{day}"
        return _unix_time(f"{date}T{clock}.{millis}")
    match = _FOREIGN.search(text)
    if match is not None:
        day, clock = match.groups()
        # Python's logging writes a comma before milliseconds
        clock = clock.replace(",", ".")
        return _unix_time(f"{day}T{clock}")
    return None


def _unix_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # there is no 31 February
        return None


class StampedLog(io.RawIOBase):
    """Stamps what begins a line, and loses lines where the disk is full, instead of ending the run.

    Of a text of several lines only the first is stamped: the others belong to it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begins_line = True

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data)
        unwritten = text
        if self._begins_line:
            now = stamp(time.time())
            unwritten = f"{now} ".encode() + text
        self._begins_line = text.endswith(b"\n")
        with contextlib.suppress(OSError):
            while unwritten:  # the kernel may take less than all of it
                written = os.write(self._fd, unwritten)
                unwritten = unwritten[written:]
        # io wants to know how much of its own text is done with, lost or not.
        return len(text)


def stamped(fd: int) -> TextIO:
    """A text stream that stamps its lines; like Python's own, it writes each at once."""
    buffer = io.BufferedWriter(StampedLog(fd))
    # "replace": a character that UTF-8 cannot have is no reason for a print to fail.
    return io.TextIOWrapper(buffer, "utf-8", "replace", line_buffering=True)


def stamp_output(*names: str) -> None:
    """Stamps what this process prints on "stdout" or "stderr", but on a terminal."""
    for name in names:
        stream = getattr(sys, name)
        if not stream.isatty():
            stream.flush()
            setattr(sys, name, stamped(stream.fileno()))
