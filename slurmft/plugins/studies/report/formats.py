"""Tables as text, Markdown, LaTeX and CSV."""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import tabulate

from slurmft.plugins.studies.table import Table, column

tabulate.MIN_PADDING = 0
"""The default widens every header by two of the 120 columns."""

WIDTH = 120
"""Columns of the terminal that a text table must fit."""


def as_text(table: Table, width: int = WIDTH) -> str:
    """Returns a table for terminals: columns of the highest rank are left out until it fits."""
    [with_short_names] = numbered([table], width)
    fitted = _fitted(with_short_names, width)
    title = textwrap.fill(printable(fitted.title), width)
    notes = as_list("", fitted.notes, "text", width)
    grid = _grid(fitted)
    text = f"{title}\n\n{grid}\n\n{notes}"
    return text.rstrip() + "\n"


def numbered(tables: Iterable[Table], width: int) -> list[Table]:
    """Returns tables whose rows have numbers in place of their settings, where a line has no room
    for these and a result; notes of the first such table say what its rows are."""
    changed = []
    first_rows: list[str] = []
    for table in tables:
        if _has_room(table, width):
            changed.append(table)
            continue
        rows = _rows_in_words(table)
        notes = rows
        if rows == first_rows:
            notes = ["rows are numbered as above"]
        first_rows = first_rows or rows
        numbers = column("row", range(1, len(rows) + 1))
        results = [each for each in table.columns if not each.is_setting]
        columns = [numbers, *results]
        changed.append(replace(table, columns=columns, notes=[*notes, *table.notes]))
    return changed


def _has_room(table: Table, width: int) -> bool:
    """Returns whether a line has room for what names a row and for the first result."""
    settings = [each for each in table.columns if each.is_setting]
    if len(settings) < 2:
        return True  # a number would be no shorter, or would need a list of its own
    names = [each for each in table.columns if each.rank == 0]
    ranked = [each for each in table.columns if each.rank]
    results = sorted(ranked, key=attrgetter("rank"))
    return _grid_width(replace(table, columns=[*names, *results[:1]])) <= width


def _rows_in_words(table: Table) -> list[str]:
    """Returns what the settings of each row are, those left out that it does not have."""
    lines = []
    settings = [each for each in table.columns if each.is_setting]
    for number, row in enumerate(replace(table, columns=settings).rows, start=1):
        described = [
            f"{setting.words} {value.text}"
            for setting, value in zip(settings, row, strict=True)
            if value.raw is not None
        ]
        lines.append(f"row {number}: {', '.join(described)}")
    return lines


def _fitted(table: Table, width: int = WIDTH) -> Table:
    """Returns a table as wide as a terminal; a note names the columns left out for that."""
    columns = list(table.columns)
    left_out: list[str] = []
    # Where what names a row is too wide by itself, nothing fits: a long line then shows results,
    # at least those of the lowest rank, rather than names of rows alone.
    names = [column for column in columns if column.rank == 0]
    ranks = [column.rank for column in columns if column.rank]
    kept_rank = 0
    if ranks and _grid_width(replace(table, columns=names)) > width:
        kept_rank = min(ranks)
    while _grid_width(replace(table, columns=columns)) > width:
        # Of columns of one rank, the rightmost goes first.
        last = max(reversed(columns), key=attrgetter("rank"))
        if last.rank <= kept_rank:
            break  # what names a row stays, even if the line is too long
        columns.remove(last)
        left_out.append(last.words)
    notes = list(table.notes)
    if left_out:
        all_left_out = ", ".join(left_out)
        notes.append(f"left out here, in CSV: {all_left_out}")
    return replace(table, columns=columns, notes=notes)


def _grid_width(table: Table) -> int:
    lines = _grid(table).splitlines()
    return max(len(line) for line in lines)


def _grid(table: Table) -> str:
    # A header has a word on each line: most columns are then as narrow as their numbers.
    headers = [column.words.replace(" ", "\n") for column in table.columns]
    lines = _tabulate(table, headers, "simple").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(table: Table) -> str:
    """Returns a table for GitHub and its like."""
    fitted = _fitted(table)
    headers = [markdown(column.words) for column in fitted.columns]
    grid = _tabulate(fitted, headers, "pipe", markdown)
    notes = as_list("", fitted.notes, "markdown")
    title = markdown(table.title)
    text = f"**{title}**\n\n{grid}\n\n{notes}"
    return text.rstrip() + "\n"


_LATEX = """\
% \\usepackage{{booktabs,graphicx}}
\\begin{{table}}
  \\centering\\small
  \\caption{{{title}}}
  \\resizebox{{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}}{{!}}{{%
{tabular}}}
\\end{{table}}
{notes}"""
_LATEX_ESCAPES = str.maketrans(tabulate.LATEX_ESCAPE_RULES)
_ROWS_OF_A_PAGE = 40
"""LaTeX breaks no table over pages: rows below the edge would be cut off."""


def as_latex(table: Table) -> str:
    """Returns a table for papers: no wider than a line, and on as many pages as it needs."""
    pages = []
    row_count = max(1, len(table.rows))
    for first in range(0, row_count, _ROWS_OF_A_PAGE):
        last = first + _ROWS_OF_A_PAGE
        columns = []
        for each in table.columns:
            values = each.values[first:last]
            columns.append(replace(each, values=values))
        notes = table.notes if last >= row_count else ()  # on the last page only
        page = _fitted(Table(table.title, columns, notes))
        title = latex(table.title)
        if first:
            page_number = first // _ROWS_OF_A_PAGE + 1
            title += f" ({page_number})"
        headers = [column.words for column in page.columns]
        # tabulate escapes LaTeX's special characters itself; `_ascii` only replaces others.
        tabular = _tabulate(page, headers, "latex_booktabs", _ascii)
        listed = as_list("", page.notes, "latex")
        pages.append(_LATEX.format(title=title, tabular=tabular, notes=listed))
    return "\n".join(pages)


def latex(text: str) -> str:
    """Escapes LaTeX's special characters."""
    return _ascii(text).translate(_LATEX_ESCAPES)


def _ascii(text: str) -> str:
    """Replaces characters that not every LaTeX can set."""
    for sign, replacement in {"\u00b1": "+-", "\u00d7": "x", "\u2013": "-"}.items():
        text = text.replace(sign, replacement)
    # NFKD takes accents off their letters; what has no letter becomes a question mark.
    decomposed = unicodedata.normalize("NFKD", printable(text))
    return decomposed.encode("ascii", "replace").decode()


def as_csv(table: Table) -> str:
    """Returns all columns with values unrounded, without title and notes. An absent value is an
    empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_harmless(column.key) for column in table.columns])
    for row in table.rows:
        # csv writes None as an empty field.
        writer.writerow([_harmless(value.raw) for value in row])
    return text.getvalue()


# Spreadsheets take a text that begins so for a formula, which may start a program: see OWASP, "CSV
# Injection". Spaces before it, and the wide forms of these characters, are passed over by some.
_FORMULA = re.compile(r"[\t\n]|\s*[=+@\uff1d\uff0b\uff0d\uff20-]")
# Where commas are in numbers, as in Germany, a cell ends at a semicolon; and a quote within it
# holds no line together.
_FORMULA_WITHIN = re.compile(r"(?<=[;\t\n])(?=\s*[=+@\uff1d\uff0b\uff0d\uff20-])")
_HARMLESS = re.compile(r"[+-]{0,2}[\w.+-]*")
"""A number, or a flag such as --lr: a formula of these calls nothing."""


def _harmless(value: Any) -> Any:
    """Returns a value for CSV that no spreadsheet takes for a formula; numbers stay as they are."""
    if not isinstance(value, str) or _HARMLESS.fullmatch(value):
        return value
    # csv does not quote a carriage return, and a spreadsheet begins a row behind it.
    value = value.replace("\r\n", "\n").replace("\r", "\n")
    if _FORMULA.match(value):
        value = f"'{value}"
    return _FORMULA_WITHIN.sub("'", value)


def as_list(title: str, lines: Sequence[str], form: str, width: int = WIDTH) -> str:
    """Returns a list below the tables, with a title or none."""
    if not lines:
        return ""
    head = f"{title}:\n" if title else ""
    if form == "latex":
        items = [f"  \\item {latex(line)}\n" for line in lines]
        head += "\\begin{itemize}\\footnotesize\n"
        items.append("\\end{itemize}\n")
    elif form == "markdown":
        # A blank line: otherwise Markdown takes the list as more of the title's paragraph.
        head = f"{head}\n".lstrip()
        items = [f"- {markdown(line)}\n" for line in lines]
    else:
        wrapper = textwrap.TextWrapper(
            width,
            initial_indent="- ",
            subsequent_indent="  ",
        )
        items = []
        for line in lines:
            wrapped = wrapper.fill(printable(line))
            items.append(f"{wrapped}\n")
    return head + "".join(items)


FORMATS: dict[str, tuple[Callable[[Table], str], str]] = {
    "text": (as_text, "txt"),
    "markdown": (as_markdown, "md"),
    "latex": (as_latex, "tex"),
    "csv": (as_csv, "csv"),
}
"""Format -> its function and the ending of its files."""


def _tabulate(
    table: Table,
    headers: Sequence[str],
    form: str,
    escape: Callable[[str], str] | None = None,
) -> str:
    escape = escape or printable
    rows = []
    for row in table.rows:
        rows.append([escape(value.text) for value in row])
    # Without rows, tabulate counts no columns that it could align.
    alignments = [column.alignment for column in table.columns] if rows else None
    # Values are texts as they are to be shown: parsed as numbers, 0.5000 would become 0.5.
    text = tabulate.tabulate(
        rows,
        headers,
        form,
        disable_numparse=True,
        colalign=alignments,
    )
    return str(text)


def printable(text: str) -> str:
    """Returns text as one line without control characters, which a terminal would obey."""
    signs = [sign if sign.isprintable() else " " for sign in text]
    return "".join(signs)


_MARKDOWN = str.maketrans({sign: f"\\{sign}" for sign in "\\|`*_[]<>"})


def markdown(text: str) -> str:
    """Escapes Markdown's special characters."""
    return printable(text).translate(_MARKDOWN)
