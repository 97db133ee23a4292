"""Tables: columns, values as they are and as they are shown; as text, Markdown, CSV and LaTeX."""

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
"""Else every header takes two columns more, of the 120 that there are."""

WIDTH = 120
"""Columns of the terminal that a text table must fit."""

NOTHING = "n/a"
"""What stands where there is no value."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in CSV."""
    label: str = ""
    """Its name for people; words may be broken over lines. Default: the key."""
    numeric: bool = True
    rank: int = 0
    """Columns of the highest rank are left out first where the table is too wide; 0: never."""

    @property
    def words(self) -> str:
        return self.label or self.key.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a table: what it is, for sorting and CSV, and how it is shown."""

    raw: Any
    text: str

    @classmethod
    def of(cls, raw: Any) -> Value:
        """A value that is shown as it is: 60.5 stays 60.5."""
        return cls(raw, NOTHING if raw is None else str(raw))


@dataclass(frozen=True, slots=True)
class Table:
    """A table with what must be read with it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = field(default=())

    def without(self, key: str) -> Table:
        """The same without one column."""
        kept = [i for i, column in enumerate(self.columns) if column.key != key]
        columns = [self.columns[i] for i in kept]
        return replace(self, columns=columns, rows=[[row[i] for i in kept] for row in self.rows])


def as_text(table: Table, width: int = WIDTH) -> str:
    """A table for terminals: columns of the highest rank give way until it fits.

    Args:
        table: the table.
        width: columns of the terminal.
    """
    shown, left_out = fitting(table, width)
    notes = [*table.notes]
    if left_out:
        notes.append(f"left out here, in CSV: {', '.join(left_out)}")
    lines = [_line(shown.title), "", _grid(shown), "", *_bullets(notes, width)]
    return "\n".join(lines).rstrip() + "\n"


def fitting(table: Table, width: int = WIDTH) -> tuple[Table, list[str]]:
    """A table as wide as a terminal, and the names of the columns that it lost for that."""
    left_out: list[str] = []
    while max(len(line) for line in _grid(table).splitlines()) > width:
        last = max(table.columns, key=lambda column: column.rank)
        if last.rank == 0:
            break  # fields and devices stay: a line too long is better than a row unnamed
        left_out.append(last.words)
        table = table.without(last.key)
    return table, left_out


def _grid(table: Table) -> str:
    headers = [column.words.replace(" ", "\n") for column in table.columns]
    return "\n".join(line.rstrip() for line in _tabulate(table, headers, "simple").splitlines())


def as_markdown(table: Table) -> str:
    """A table for GitHub and its like."""
    shown, left_out = fitting(table)
    rows = [[replace(v, text=markdown(v.text)) for v in row] for row in shown.rows]
    headers = [markdown(column.words) for column in shown.columns]
    notes = [*table.notes] + ([f"left out here, in CSV: {', '.join(left_out)}"] * bool(left_out))
    parts = [f"**{markdown(table.title)}**", _tabulate(replace(shown, rows=rows), headers, "pipe")]
    parts += ["\n".join(f"- {markdown(note)}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def as_latex(table: Table) -> str:
    """A `table` environment for LaTeX with the package booktabs; UTF-8."""
    shown, left_out = fitting(table)
    headers = [column.words for column in shown.columns]
    grid = _tabulate(shown, headers, "latex_booktabs").replace("±", _PLUS_MINUS)
    notes = [*table.notes] + ([f"left out here, in CSV: {', '.join(left_out)}"] * bool(left_out))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(table.title)}}}",
        r"\small",
        *grid.splitlines(),
        *(rf"\par\footnotesize {latex(note)}" for note in notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """All columns, values as they are; without title and notes. Nothing is an empty field."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if value.raw is None else value.raw for value in row])
    return made.getvalue()


def as_list(title: str, lines: Sequence[str], form: str) -> str:
    """Lines that belong to the tables above; for LaTeX, where they are not printed, as comments."""
    if not lines or form == "csv":
        return ""
    if form == "latex":
        return "".join(f"% {_line(line)}\n" for line in (f"{title}:", *lines))
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
    "latex": (as_latex, "tex"),
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
    """Points below each other, where all values are plain numbers; else numbers to the right."""
    if not table.columns[index].numeric:
        return "left"
    plain = all(isinstance(row[index].raw, (int, float, type(None))) for row in table.rows)
    ranges = any(sign in row[index].text for row in table.rows for sign in "±(")
    return "decimal" if plain and not ranges else "right"


def _line(text: str) -> str:
    """On one line, without what terminals take for commands."""
    return "".join(c if c.isprintable() else " " for c in text)


def latex(text: str) -> str:
    """Text of which LaTeX takes nothing for a command."""
    escaped = "".join(tabulate.LATEX_ESCAPE_RULES.get(c, c) for c in _line(text))
    return escaped.replace("±", _PLUS_MINUS)


_PLUS_MINUS = r"$\pm$"


_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|`*_[]<>"})


def markdown(text: str) -> str:
    """Text of which Markdown takes nothing for markup."""
    return _line(text).translate(_MARKDOWN)


# --- numbers --------------------------------------------------------------------------------------


def decimals_of(values: Iterable[float | None], figures: int = 3) -> int:
    """Decimals with which the smallest of some values has as many significant figures, 0 to 4."""
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v != 0]
    if not sizes:
        return 0
    return min(4, max(0, figures - 1 - math.floor(math.log10(min(sizes)))))


def rounded(value: float | None, decimals: int) -> str:
    """A number with fixed decimals."""
    return NOTHING if value is None else f"{value:.{decimals}f}"
