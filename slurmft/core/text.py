"""Numbers, times and tables as people read them."""

import re
import shutil
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from slurmft.core.terminal import plain


def width_of(text: str) -> int:
    """Returns how many columns of a terminal a `plain` text takes."""
    # Nearly all texts; the others are counted character by character.
    if text.isascii():
        return len(text)
    width = 0
    for character in text:
        # Accents that belong to the letter before them take no column of their own.
        if unicodedata.combining(character):
            continue
        width += 1
        # Chinese, Japanese and Korean characters, and most emoji, take two.
        if unicodedata.east_asian_width(character) in "WF":
            width += 1
    return width


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines, in columns of equal width, as a terminal shows them."""
    # What is escaped when it is printed is longer then: the columns behind it would shift.
    plain_rows = [[plain(cell) for cell in row] for row in rows]
    widths = []
    for column in zip(*plain_rows, strict=True):
        widths.append(max(width_of(cell) for cell in column))
    lines = []
    for row in plain_rows:
        cells = []
        for cell, width in zip(row, widths, strict=True):
            cells.append(cell + " " * (width - width_of(cell)))
        line = "  ".join(cells)
        # Spaces at the end could make two lines of one on a terminal.
        lines.append(line.rstrip())
    return lines


def shown(text: str, width: int = 60) -> str:
    """Returns a text as one line of at most `width` columns."""
    line = " ".join(text.split())
    if width_of(line) <= width:
        return line
    return _cut(line, width - 3) + "..."


def _cut(line: str, width: int) -> str:
    """Returns the beginning of a line: as much as fits into a width."""
    end = max(0, width)
    # Wide characters alone make it shorter than as many characters.
    while width_of(line[:end]) > max(0, width):
        end -= 1
    return line[:end]


def shown_with_end(text: str, width: int = 60) -> str:
    """Returns a text as one line of at most `width` columns, cut in its middle."""
    line = " ".join(text.split())
    if width_of(line) <= width:
        return line
    # Of a run's name, the end is its time: "text-c...20261124-101500".
    backwards = _cut(line[::-1], min(_END, width - 3))
    begin = _cut(line, width - 3 - width_of(backwards))
    return f"{begin}...{backwards[::-1]}"


def shown_parts(text: str, width: int = 60) -> str:
    """Returns the first parts of a text, as many as fit whole into a line; two spaces divide parts.
    Dots stand for the others, where there is room. Only a first part that is too long is cut."""
    first, *others = text.split("  ")
    line = shown(first, width)
    for part in others:
        longer = f"{line}  {part}"
        if width_of(longer) > width:
            dots = f"{line}  ..."
            if width_of(dots) <= width:
                line = dots
            break
        line = longer
    return line


_END = len("20261124-101500")
"""Characters at the end of a text that is cut in its middle."""
_NARROWEST = 20
"""Columns: on a terminal that says it has fewer, lines are longer than it is."""


def screen_width(no_terminal: int = 10**6) -> int:
    """Returns the columns of the terminal that is written to; without one, no limit.

    Args:
        no_terminal: columns of a file or a pipe, which gets whole lines.
    """
    columns = shutil.get_terminal_size((no_terminal, 24)).columns
    return max(columns, _NARROWEST)


NO_BREAK = "\u00a0"
"""A space at which no line is broken."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[KMGT]iB|bytes|ms|s|min|h)\b)")
_LONGEST_PIECE = 30
"""Characters of a name and its value, which stay on one line."""


def hanging(head: str, text: str, indent: int = 4) -> str:
    """Returns a text as a line, or as several where the terminal has no room for it.

    All lines but the first are indented. Paths stay in one piece, as do 26.3 %, 17.5 MiB, and names
    with their values that have two spaces between them.
    """
    # Some terminals go to the next line after a character in the last column. On one that is very
    # narrow, words must have some room behind the indent.
    width = max(screen_width() - 1, indent + 20)
    lines = textwrap.fill(
        _in_pieces(text),
        width,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(NO_BREAK, " ")


def _in_pieces(text: str) -> str:
    """Returns a text with other spaces where no line is to be broken."""
    pieces = _BEFORE_UNIT.sub(NO_BREAK, text).split("  ")
    if len(pieces) == 1:
        return pieces[0]
    unbroken = []
    for piece in pieces:
        if len(piece) <= _LONGEST_PIECE:
            unbroken.append(piece.replace(" ", NO_BREAK))
        else:
            unbroken.append(piece)
    return "  ".join(unbroken)


class ScreenColumn(NamedTuple):
    """A column of a table on a screen."""

    head: str
    cells: Sequence[str]
    rank: int = 0
    """Columns of the highest rank are left out first where there is no room; 0: never."""
    least: int = 10**6
    """Characters that a cell may be cut to."""
    cut: Callable[[str, int], str] = shown
    """How cells that are too wide are cut."""


def on_screen(columns: Sequence[ScreenColumn]) -> list[str]:
    """Returns a table as lines, with as many of its columns as the terminal has room for.

    Columns without any value are left out, unless their rank is 0.
    """
    # Cells are cut as they will be printed: half an escape would be another character.
    columns = [
        column._replace(cells=[plain(cell) for cell in column.cells])
        for column in columns
    ]
    natural_widths = {}
    for column in columns:
        texts = (column.head, *column.cells)
        natural_widths[column.head] = max(width_of(each) for each in texts)
    widths: dict[str, int] = {}
    # The space between columns is counted after each, also after the last.
    room = screen_width() + 2
    for column in sorted(columns, key=lambda each: each.rank):
        least = max(column.least, len(column.head))  # the head is never cut
        width = min(natural_widths[column.head], least)
        has_value = any(cell not in ("", "-") for cell in column.cells)
        if column.rank == 0 or (has_value and width + 2 <= room):
            widths[column.head] = width
            room -= width + 2
    # What is left goes to the columns that were cut, the most important ones first.
    for head, width in widths.items():
        # Below 0 where columns of rank 0 alone are wider than the terminal.
        extra = max(0, min(room, natural_widths[head] - width))
        widths[head] += extra
        room -= extra
    table = []
    # In their own order again, whatever their ranks.
    for column in columns:
        if column.head in widths:
            width = widths[column.head]
            texts = (column.head, *column.cells)
            table.append([column.cut(text, width) for text in texts])
    rows = list(zip(*table, strict=True))
    return aligned(rows)


# " (rank 3 on n1)", " (node n1)": `Failure` adds them to its message.
_WHERE = re.compile(r" \((?:rank \d+ on|node) [^()]+\)")
# Two folders or more from the root: the last part of a path says what it is.
_LONG_PATH = re.compile(r"(?<![\w./])/(?:[^/\s'\"]+/){2,}")


def brief(reason: str) -> str:
    """Shortens the reason of a failure: without the process and the folders of long paths."""
    without_process = _WHERE.sub("", reason)
    return _LONG_PATH.sub(".../", without_process)


def after_state(reason: str, state: str) -> str:
    """Returns a reason as it stands behind the state in one line: without that word at its
    beginning, as in "cancelled; the newest checkpoint is step-5"."""
    if reason == state:
        return ""
    return reason.removeprefix(f"{state}: ").removeprefix(f"{state}; ")


def with_reason(state: str, reason: str) -> str:
    """Returns a state and why, with that word once: cancelled; failed: the loss is nan"""
    behind = after_state(reason, state)
    if not behind:
        return state
    return f"{state}: {behind}"


def counted(count: int, one: str, several: str = "") -> str:
    """Returns a number of things: 1 row, 2,000 rows; `several`: the plural, where it is no "s"."""
    if count == 1:
        return f"1 {one}"
    return f"{count:,} {several or one + 's'}"


def some(names: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """Returns the first names, and how many there are besides: n1, n2 and 998 more"""
    # The last one takes no more room than the words that would stand for it.
    if len(names) == most + 1:
        most += 1
    text = separator.join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


def number(value: float | None) -> str:
    """Returns a number with four digits; None, as JSON has NaN, is "nan"."""
    if value is None:
        return "nan"
    if abs(value) >= _LONG:
        return f"{value:.4e}"
    return f"{value:.4f}"


_LONG = 1e15
"""From here on digits are no longer counted by eye."""


def duration(seconds: float) -> str:
    """Returns seconds in words: 47 s, 3:07 min, 2:05:00 h"""
    # Rounded first: 59.6 s are 1:00 min, and not 60 s.
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest_s:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d} h"


def clock(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Returns a time in Unix seconds as local date and time, or in another form of strftime; "?"
    for a number that no calendar has, as in a file that somebody has edited."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


def ago(seconds: float) -> str:
    """Returns how long ago a time in Unix seconds was: 3:07 min ago"""
    # The clock of the host that wrote the time may be ahead.
    passed_s = max(0.0, time.time() - seconds)
    return f"{duration(passed_s)} ago"


def in_bytes(count: float) -> str:
    """Returns a number of bytes in words: 512 bytes, 1.5 MiB"""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    tebibytes = count / 1024
    return f"{tebibytes:.1f} TiB"


def numbers(text: str) -> list[int]:
    """Parses a list as the kernel writes it: "0-3,8" is 0, 1, 2, 3, 8.

    Raises:
        ValueError: the text is no such list, or has more numbers than a machine has CPUs.
    """
    parsed: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            end = int(last or first) + 1
            part_numbers = range(int(first), end)
            # Before they are made: a file may have "0-99999999999".
            if len(parsed) + len(part_numbers) > _MOST_CPUS:
                raise ValueError(f"more than {_MOST_CPUS:,} CPUs")
            parsed += part_numbers
    return parsed


_MOST_CPUS = 2**16


def by_host(facts: Iterable[tuple[str, str]]) -> str:
    """Groups facts about hosts, as text: "on n1, n2: 4; on n3: 0"."""
    hosts_of: dict[str, list[str]] = {}
    # Each once: the ranks of a host mostly have the same fact.
    for host, fact in dict.fromkeys(facts):
        hosts_of.setdefault(fact, []).append(host)
    parts = []
    for fact, hosts in hosts_of.items():
        parts.append(f"on {some(hosts)}: {fact}")
    return "; ".join(parts)
