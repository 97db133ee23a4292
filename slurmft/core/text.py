"""Numbers, times and tables as people read them."""

import re
import shutil
import textwrap
import time
from collections.abc import Sequence
from typing import NamedTuple


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def shown(text: str, width: int = 60) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def screen_width() -> int:
    """Columns of the terminal that is written to; without one, no limit."""
    return shutil.get_terminal_size((10**6, 24)).columns


def hanging(head: str, text: str, indent: int = 4) -> str:
    """A line, or several where the terminal has no room for it: all but the first are indented.
    Paths stay in one piece."""
    return textwrap.fill(
        text,
        max(screen_width() - 1, indent + 20),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


class ScreenColumn(NamedTuple):
    """A column of a table on a screen."""

    head: str
    cells: Sequence[str]
    rank: int = 0
    """Columns of the highest rank are left out first where there is no room; 0: never."""
    least: int = 10**6
    """Characters that a cell may be cut to."""


def on_screen(columns: Sequence[ScreenColumn]) -> list[str]:
    """A table as lines: as many of its columns as the terminal has room for; those without any
    value are left out."""
    room, widths = screen_width() + 2, dict[str, int]()
    natural = {c.head: max(map(len, (c.head, *c.cells))) for c in columns}
    for c in sorted(columns, key=lambda column: column.rank):
        width = min(natural[c.head], max(c.least, len(c.head))) + 2
        if not c.rank or (width <= room and any(cell not in ("", "-") for cell in c.cells)):
            widths[c.head], room = width - 2, room - width
    for head, width in widths.items():
        widths[head] += (more := max(0, min(room, natural[head] - width)))
        room -= more
    found = [c for c in columns if c.head in widths]
    cells = [[shown(text, widths[c.head]) for text in (c.head, *c.cells)] for c in found]
    return aligned(list(zip(*cells, strict=True)))


_WHERE = re.compile(r" \((?:rank \d+ on|node) [^()]+\)")
_LONG_PATH = re.compile(r"(?<![\w./])/(?:[^/\s'\"]+/){2,}")


def brief(reason: str) -> str:
    """Why a run failed, without the process and the folders of long paths."""
    return _LONG_PATH.sub(".../", _WHERE.sub("", reason))


def some(names: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """Names, not too many: n1, n2 and 998 more"""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def number(value: float | None) -> str:
    """Four digits; JSON has no NaN, and says null."""
    return "nan" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """47 s, 3:07 min, 2:05:00 h"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{second:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d} h"


def clock(seconds: float) -> str:
    """Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def ago(seconds: float) -> str:
    """How long ago a time (Unix seconds) is."""
    return f"{duration(max(0.0, time.time() - seconds))} ago"


def in_bytes(count: float) -> str:
    """Bytes for people: 512 bytes, 1.5 MiB"""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
