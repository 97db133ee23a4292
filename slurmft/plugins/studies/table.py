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
        # -0.0 is shown as 0.0: it is false, as all zeros are.
        number = raw or 0
        return cls(raw, f"{number:.{decimals}f}")


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
    is_setting: bool = False
    """It is one of the settings that name a row."""

    @property
    def words(self) -> str:
        """The heading of the column for people."""
        return self.label or self.key.replace("_", " ")

    @property
    def alignment(self) -> str:
        """The side on which values are aligned: "left" for text, "decimal" for plain numbers, and
        "right" for numbers with a range."""
        if not self.numeric:
            return "left"
        for value in self.values:
            is_number = isinstance(value.raw, (int, float, type(None)))
            # "240 (205 to 275)" and "0.91 ± 0.02" have several decimal points.
            has_range = "±" in value.text or "(" in value.text
            if has_range or not is_number:
                return "right"
        return "decimal"


def column(
    key: str,
    raw: Iterable[Any],
    decimals: int | None = None,
    **more: Any,
) -> Column:
    """Returns a column of values as they are, or of numbers with so many decimals."""
    values = [Value.of(value, decimals) for value in raw]
    return Column(key, values, **more)


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its notes."""

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[Value, ...]]:
        """The values by row."""
        return _rows(self.columns)


def _rows(columns: Sequence[Column]) -> list[tuple[Value, ...]]:
    """Returns the values of columns by row; all columns have as many."""
    values = [column.values for column in columns]
    return list(zip(*values, strict=True))


def cell_columns(
    cells: Sequence[Mapping[str, Any]], fields: Sequence[str]
) -> list[Column]:
    """Returns the columns that name the cells of a table.

    Args:
        cells: the settings of a cell, one for each row.
        fields: the settings to show.
    """
    columns = []
    for name in fields:
        raw = [cell.get(name) for cell in cells]
        full_texts = []
        for value in raw:
            full_texts.append(NOTHING if value is None else setting_text(value))
        texts = without_folders(full_texts)
        values = []
        for value, text in zip(raw, texts, strict=True):
            # Shortened for people; in CSV the value is whole.
            values.append(Value(value, text))
        # One text is enough: a column is aligned as a whole.
        numeric = all(_is_number(value) for value in raw)
        columns.append(Column(name, values, numeric=numeric, is_setting=True))
    return columns


def _is_number(value: Any) -> bool:
    # To isinstance, True and False are whole numbers.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def lines_of_cells(
    cells: Sequence[Mapping[str, Any]],
    fields: Sequence[str],
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Returns lines, each with the fields of a cell and a row of further texts, below a heading."""
    lines = [[*fields, *heading]]
    # By columns first: how a path is shortened depends on all cells.
    columns = cell_columns(cells, fields)
    for values, row in zip(_rows(columns), rows, strict=True):
        texts = [value.text for value in values]
        lines.append([*texts, *row])
    return "\n".join(aligned(lines))


# --- values ---------------------------------------------------------------------------------------


def setting_text(value: Any) -> str:
    """Returns the value of a setting as people write it: a list has no brackets and quotes."""
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value)) or "none"
    return str(value)


_PATH = r"(?<![\w./])(?:/[^/\s,;'\"]+)+"
"""An absolute path in a text or a list: no relative one, and no part of a URL."""


def without_folders(texts: Sequence[str]) -> list[str]:
    """Returns texts whose long paths have no more folders than tell them apart."""
    # First the last part alone, then up to two folders before it.
    for folder_count in range(3):
        last_parts = rf"[^/\s,;'\"]+(?:/[^/\s,;'\"]+){{{folder_count}}}"
        path = rf"{_PATH}/({last_parts})(?=[\s,;'\"]|$)"
        shorter = [re.sub(path, r"\1", text) for text in texts]
        # As many different texts as before: no two values look alike that are not.
        if len(set(shorter)) == len(set(texts)):
            return shorter
    return list(texts)


def decimals_of(values: Iterable[float | None], figures: int = 3, most: int = 4) -> int:
    """Returns the decimals, 0 to `most`, that give the smallest of the values that many significant
    figures."""
    numbers = [value for value in values if value is not None]
    # 0 has no first figure; NaN and infinity have no figures at all.
    sizes = []
    for number in numbers:
        if math.isfinite(number) and number != 0:
            sizes.append(abs(number))
    if not sizes:
        return 0
    # The place of the first figure: 0 for 1 to 9.99, -1 for 0.1 to 0.999.
    exponent = math.floor(math.log10(min(sizes)))
    decimals = max(0, figures - 1 - exponent)
    return min(most, decimals)
