"""Tables of cells: what reports, the status of a study and plans show, before it has a format."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from slurmft.core.text import aligned

NOTHING = "n/a"
"""Shown in place of an absent value."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a table: raw for sorting and CSV, and the text that is shown."""

    raw: Any
    text: str

    @classmethod
    def of(cls, raw: Any, decimals: int | None = None) -> Self:
        """Returns a value as it is shown: a number with so many decimals, else as it is."""
        if raw is None:
            return cls(raw, NOTHING)
        if decimals is None:
            return cls(raw, str(raw))
        return cls(raw, f"{raw or 0:.{decimals}f}")  # `or 0`: no -0.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in CSV."""
    values: Sequence[Value]
    label: str = ""
    """Its name for people; may be broken over lines between words. Default: the key."""
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
        are_plain = all(isinstance(value.raw, (int, float, type(None))) for value in self.values)
        have_ranges = any(sign in value.text for value in self.values for sign in "±(")
        return "decimal" if are_plain and not have_ranges else "right"


def column(key: str, raw: Iterable[Any], decimals: int | None = None, **more: Any) -> Column:
    """Returns a column of values as they are, or of numbers with so many decimals."""
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


def cell_columns(cells: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> list[Column]:
    """Returns the columns that name the cells of a table.

    Args:
        cells: the settings of a cell, one for each row.
        fields: the settings to show.
    """
    columns = []
    for name in fields:
        values = [cell.get(name) for cell in cells]
        are_numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        texts = without_folders([NOTHING if value is None else str(value) for value in values])
        named = [Value(value, text) for value, text in zip(values, texts, strict=True)]
        columns.append(Column(name, named, numeric=are_numbers))
    return columns


def as_lines(columns: Sequence[Column]) -> list[str]:
    """Returns a table as plain lines, without a title: a heading, and a line for each row."""
    heading = [column.label or column.key for column in columns]
    rows = zip(*(column.values for column in columns), strict=True)
    return aligned([heading, *([value.text for value in row] for row in rows)])


# --- values ---------------------------------------------------------------------------------------

_PATH = r"(?<![\w./])(?:/[^/\s,'\"]+)+"


def without_folders(texts: Sequence[str]) -> list[str]:
    """Returns texts whose long paths have no more folders than tell them apart."""
    for most in range(1, 4):
        last_parts = rf"{_PATH}/([^/\s,'\"]+(?:/[^/\s,'\"]+){{{most - 1}}})(?=[\s,'\"]|$)"
        shorter = [re.sub(last_parts, r"\1", text) for text in texts]
        if len(set(shorter)) == len(set(texts)):
            return shorter
    return list(texts)


def decimals_of(values: Iterable[float | None], figures: int = 3, most: int = 4) -> int:
    """Returns the decimals, 0 to `most`, that give the smallest of the values that many significant
    figures."""
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v != 0]
    if not sizes:
        return 0
    return min(most, max(0, figures - 1 - math.floor(math.log10(min(sizes)))))
