"""Tables: columns, values as they are and as they are shown; as text, Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import tabulate

tabulate.MIN_PADDING = 0
"""The default widens every header by two of the 120 columns."""

WIDTH = 120
"""Columns of the terminal that a text table must fit."""

NOTHING = "n/a"
"""Shown in place of an absent value."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a table: raw for sorting and CSV, and the text that is shown."""

    raw: Any
    text: str

    @classmethod
    def of(cls, raw: Any, decimals: int | None = None) -> Self:
        """A value as it is shown: a number with so many decimals, else as it is."""
        text = str(raw) if decimals is None else f"{raw or 0:.{decimals}f}"
        return cls(raw, NOTHING if raw is None else text)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in CSV."""
    values: Sequence[Value]
    label: str = ""
    """Its name for people; words may be broken over lines. Default: the key."""
    numeric: bool = True
    rank: int = 0
    """Columns of the highest rank are left out first if the table is too wide; 0: never."""

    @property
    def words(self) -> str:
        return self.label or self.key.replace("_", " ")

    @property
    def alignment(self) -> str:
        """At the decimal point where all values are plain numbers; else to the right."""
        if not self.numeric:
            return "left"
        plain = all(isinstance(value.raw, (int, float, type(None))) for value in self.values)
        ranges = any(sign in value.text for value in self.values for sign in "±(")
        return "decimal" if plain and not ranges else "right"


def column(key: str, raw: Iterable[Any], decimals: int | None = None, **more: Any) -> Column:
    """A column of values as they are, or of numbers with so many decimals."""
    return Column(key, [Value.of(value, decimals) for value in raw], **more)


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its notes."""

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[Value, ...]]:
        return list(zip(*(column.values for column in self.columns), strict=True))


def as_text(table: Table, width: int = WIDTH) -> str:
    """A table for terminals: columns of the highest rank are left out until it fits."""
    fitted = _fitted(table, width)
    title = textwrap.fill(_line(fitted.title), width)
    notes = as_list("", fitted.notes, "text", width)
    return f"{title}\n\n{_grid(fitted)}\n\n{notes}".rstrip() + "\n"


def _fitted(table: Table, width: int = WIDTH) -> Table:
    """A table as wide as a terminal; a note names the columns that were left out for that."""
    columns, left_out = list(table.columns), list[str]()
    while max(map(len, _grid(replace(table, columns=columns)).splitlines())) > width:
        last = max(reversed(columns), key=lambda column: column.rank)
        if last.rank == 0:
            break  # what names a row stays, even if the line is too long
        columns.remove(last)
        left_out.append(last.words)
    note = [f"left out here, in CSV: {', '.join(left_out)}"] if left_out else []
    return replace(table, columns=columns, notes=[*table.notes, *note])


def _grid(table: Table) -> str:
    headers = [column.words.replace(" ", "\n") for column in table.columns]
    return "\n".join(line.rstrip() for line in _tabulate(table, headers, "simple").splitlines())


def as_markdown(table: Table) -> str:
    """A table for GitHub and its like."""
    fitted = _fitted(table)
    grid = _tabulate(fitted, [markdown(c.words) for c in fitted.columns], "pipe", markdown)
    notes = as_list("", fitted.notes, "markdown")
    return f"**{markdown(table.title)}**\n\n{grid}\n\n{notes}".rstrip() + "\n"


_LATEX = """\
% \\usepackage{{booktabs,graphicx}}
\\begin{{table}}
  \\centering\\small
  \\caption{{{title}}}
  \\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%
{tabular}}}
\\end{{table}}
{notes}"""
_ROWS_OF_A_PAGE = 40


def as_latex(table: Table) -> str:
    """A table for papers: no wider than a line, and on as many pages as it needs."""
    parts, rows = [], max(1, len(table.rows))
    for first in range(0, rows, _ROWS_OF_A_PAGE):
        last = first + _ROWS_OF_A_PAGE
        page = [replace(c, values=c.values[first:last]) for c in table.columns]
        notes = table.notes if last >= rows else ()
        shown = _fitted(Table(table.title, page, notes))
        tabular = _tabulate(shown, [c.words for c in shown.columns], "latex_booktabs", _ascii)
        title = latex(table.title) + (f" ({first // _ROWS_OF_A_PAGE + 1})" if first else "")
        listed = as_list("", shown.notes, "latex")
        parts.append(_LATEX.format(title=title, tabular=tabular, notes=listed))
    return "\n".join(parts)


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(tabulate.LATEX_ESCAPE_RULES.get(c, c) for c in _ascii(text))


def _ascii(text: str) -> str:
    """The characters that every LaTeX can set."""
    for sign, words in {"\u00b1": "+-", "\u00d7": "x", "\u2013": "-"}.items():
        text = text.replace(sign, words)
    plain = unicodedata.normalize("NFKD", _line(text)).encode("ascii", "replace")
    return plain.decode()


def without_folders(texts: Sequence[str]) -> list[str]:
    """Texts whose long paths have no more folders than tell them apart."""
    for most in range(1, 4):
        end = re.compile(rf"{_PATH}/([^/\s,'\"]+(?:/[^/\s,'\"]+){{{most - 1}}})(?=[\s,'\"]|$)")
        found = [end.sub(r"\1", text) for text in texts]
        if len(set(found)) == len(set(texts)):
            return found
    return list(texts)


_PATH = r"(?<![\w./])(?:/[^/\s,'\"]+)+"


def as_csv(table: Table) -> str:
    """All columns, values unrounded; without title and notes. An absent value is an empty field."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if value.raw is None else value.raw for value in row])
    return made.getvalue()


def as_list(title: str, lines: Sequence[str], form: str, width: int = WIDTH) -> str:
    """A list below the tables, with a title or none."""
    if not lines:
        return ""
    head = f"{title}:\n" if title else ""
    if form == "latex":
        items = "".join(f"  \\item {latex(line)}\n" for line in lines)
        return f"{head}\\begin{{itemize}}\\footnotesize\n{items}\\end{{itemize}}\n"
    if form == "markdown":
        return f"{head}\n".lstrip() + "".join(f"- {markdown(line)}\n" for line in lines)
    wrapper = textwrap.TextWrapper(width, initial_indent="- ", subsequent_indent="  ")
    return head + "".join(f"{wrapper.fill(_line(line))}\n" for line in lines)


FORMATS: dict[str, tuple[Callable[[Table], str], str]] = {
    "text": (as_text, "txt"),
    "markdown": (as_markdown, "md"),
    "latex": (as_latex, "tex"),
    "csv": (as_csv, "csv"),
}
"""Format -> its function and the ending of its files."""


def _tabulate(
    table: Table, headers: Sequence[str], form: str, escape: Callable[[str], str] | None = None
) -> str:
    rows = [[(escape or _line)(value.text) for value in row] for row in table.rows]
    alignments = [column.alignment for column in table.columns] if rows else None
    return str(tabulate.tabulate(rows, headers, form, disable_numparse=True, colalign=alignments))


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
