"""Tables: columns, values as they are and as they are shown; as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tabulate

tabulate.MIN_PADDING = 0
"""The default widens every header by two of the 120 columns."""

WIDTH = 120
"""Columns of the terminal that a text table must fit."""

NOTHING = "n/a"
"""Shown in place of an absent value."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in CSV."""
    label: str = ""
    """Its name for people; words may be broken over lines. Default: the key."""
    numeric: bool = True
    rank: int = 0
    """Columns of the highest rank are left out first if the table is too wide; 0: never."""

    @property
    def words(self) -> str:
        return self.label or self.key.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a table: raw for sorting and CSV, and the text that is shown."""

    raw: Any
    text: str

    @classmethod
    def of(cls, raw: Any) -> Value:
        """A value that is shown as it is: 60.5 stays 60.5."""
        return cls(raw, NOTHING if raw is None else str(raw))

    @classmethod
    def rounded(cls, raw: float | None, decimals: int) -> Value:
        """A number that is shown with fixed decimals."""
        return cls(raw, NOTHING if raw is None else f"{raw:.{decimals}f}")


Columns = list[tuple[Column, list[Value]]]
"""A table by columns, as it is built."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its notes."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = field(default=())

    @classmethod
    def of_columns(cls, title: str, columns: Columns, notes: Sequence[str] = ()) -> Table:
        rows = [list(row) for row in zip(*(values for _, values in columns), strict=True)]
        return cls(title, [column for column, _ in columns], rows, notes)

    def without(self, key: str) -> Table:
        """The same without one column."""
        kept = [i for i, column in enumerate(self.columns) if column.key != key]
        columns = [self.columns[i] for i in kept]
        return replace(self, columns=columns, rows=[[row[i] for i in kept] for row in self.rows])


def as_text(table: Table, width: int = WIDTH) -> str:
    """A table for terminals: columns of the highest rank are left out until it fits.

    Args:
        table: the table.
        width: columns of the terminal.
    """
    fitted = _fitted(table, width)
    lines = [_line(fitted.title), "", _grid(fitted), "", *_bullets(fitted.notes, width)]
    return "\n".join(lines).rstrip() + "\n"


def _fitted(table: Table, width: int = WIDTH) -> Table:
    """A table as wide as a terminal; a note names the columns that were left out for that."""
    left_out: list[str] = []
    while max(len(line) for line in _grid(table).splitlines()) > width:
        last = max(table.columns, key=lambda column: column.rank)
        if last.rank == 0:
            break  # what names a row stays, even if the line is too long
        left_out.append(last.words)
        table = table.without(last.key)
    if not left_out:
        return table
    return replace(table, notes=[*table.notes, f"left out here, in CSV: {', '.join(left_out)}"])


def _grid(table: Table) -> str:
    headers = [column.words.replace(" ", "\n") for column in table.columns]
    return "\n".join(line.rstrip() for line in _tabulate(table, headers, "simple").splitlines())


def as_markdown(table: Table) -> str:
    """A table for GitHub and its like."""
    fitted = _fitted(table)
    rows = [[replace(v, text=markdown(v.text)) for v in row] for row in fitted.rows]
    headers = [markdown(column.words) for column in fitted.columns]
    parts = [f"**{markdown(table.title)}**", _tabulate(replace(fitted, rows=rows), headers, "pipe")]
    parts += ["\n".join(f"- {markdown(note)}" for note in fitted.notes)] if fitted.notes else []
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table) -> str:
    """All columns, values unrounded; without title and notes. An absent value is an empty field."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if value.raw is None else value.raw for value in row])
    return made.getvalue()


def as_list(title: str, lines: Sequence[str], form: str) -> str:
    """A list below the tables."""
    if not lines or form == "csv":
        return ""
    if form == "markdown":
        return "\n".join((f"{title}:", "", *(f"- {markdown(line)}" for line in lines))) + "\n"
    return "\n".join((f"{title}:", *_bullets(lines, WIDTH))) + "\n"


def _bullets(lines: Sequence[str], width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(width, initial_indent="- ", subsequent_indent="  ")
    return [part for line in lines for part in wrapper.wrap(_line(line))]


FORMATS: dict[str, tuple[Callable[[Table], str], str]] = {
    "text": (as_text, "txt"),
    "markdown": (as_markdown, "md"),
    "csv": (as_csv, "csv"),
}
"""Format -> its function and the ending of its files."""


def _tabulate(table: Table, headers: Sequence[str], form: str) -> str:
    made = tabulate.tabulate(
        [[_line(value.text) for value in row] for row in table.rows],
        headers=headers,
        tablefmt=form,
        disable_numparse=True,
        colalign=[_alignment(table, i) for i in range(len(table.columns))] if table.rows else None,
    )
    return str(made)


def _alignment(table: Table, index: int) -> str:
    """Aligned at the decimal point where all values are plain numbers; else to the right."""
    if not table.columns[index].numeric:
        return "left"
    plain = all(isinstance(row[index].raw, (int, float, type(None))) for row in table.rows)
    ranges = any(sign in row[index].text for row in table.rows for sign in "±(")
    return "decimal" if plain and not ranges else "right"


def _line(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|`*_[]<>"})


def markdown(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    return _line(text).translate(_MARKDOWN)


# --- numbers --------------------------------------------------------------------------------------


def decimals_of(values: Iterable[float | None], figures: int = 3, most: int = 4) -> int:
    """Decimals, 0 to `most`, that give the smallest of the values that many significant figures."""
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v != 0]
    if not sizes:
        return 0
    return min(most, max(0, figures - 1 - math.floor(math.log10(min(sizes)))))
