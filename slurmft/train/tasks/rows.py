"""Rows of data files and data sets: columns, labels, texts, with errors that name the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.train.sources import no_column

# --- local files ----------------------------------------------------------------------------------


def read_rows(path: Path) -> Any:
    """The rows of a .jsonl, .csv (.gz too) or .parquet file, as a pyarrow table.

    Raises:
        UsageError: the file is none of these inside, or has no rows.
    """
    import pyarrow as pa

    try:
        table = _read_table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    if table.num_rows == 0:
        raise UsageError(f"{str(path)!r} has no rows")
    return table


def _read_table(path: Path) -> Any:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    import pyarrow as pa

    name = path.name.removesuffix(".gz")
    with pa.input_stream(str(path), compression="detect") as stream:
        if name.endswith(".csv"):
            import pyarrow.csv

            return pyarrow.csv.read_csv(stream)
        if path.stat().st_size == 0:
            return pa.table({})
        import pyarrow.json

        return pyarrow.json.read_json(stream)


def column(table: Any, name: str, path: str) -> list[Any]:
    """A column's values.

    Raises:
        UsageError: there is no such column, or it has empty cells.
    """
    if name not in table.column_names:
        raise no_column(path, name, table.column_names)
    values: list[Any] = table.column(name).to_pylist()
    if None in values:
        raise UsageError(f"{path!r}: row {values.index(None) + 1} has no {name!r}")
    return values


def label_ids(
    values: Sequence[Any], names: Sequence[str], where: str, by_number: bool = True
) -> list[int]:
    """Labels, given as names or (unless not `by_number`) as numbers, as numbers.

    Raises:
        UsageError: a label beyond the known ones, with its row.
    """
    by_name = {name: i for i, name in enumerate(names)}
    known = f"0 to {len(names) - 1}, or {', '.join(names)}" if by_number else ", ".join(names)
    ids = []
    for row, value in enumerate(values, start=1):
        named = isinstance(value, str) or not by_number
        label = by_name.get(str(value)) if named else value
        if type(label) is not int or not 0 <= label < len(names):
            raise UsageError(f"{where!r}: row {row} has the label {value!r}", f"labels are {known}")
        ids.append(label)
    return ids


def label_names(values: Sequence[Any], where: str) -> list[str]:
    """The names of the labels that a column holds: texts by the alphabet, numbers by value.

    Raises:
        UsageError: values of another type, or of several; all the same, or all different.
    """
    kind = type(values[0])
    for row, value in enumerate(values, start=1):
        if type(value) is not kind or kind not in (str, int, bool):
            raise UsageError(
                f"{where!r}: row {row} has the label {value!r}",
                "labels are all texts or all whole numbers; choose their column with "
                "--label-column",
            )
    labels = sorted(set(values))
    if len(labels) == 1 or len(labels) == len(values):
        same = f"the one label {labels[0]!r}" if len(labels) == 1 else "another label in every row"
        raise UsageError(f"{where!r} has {same}", "choose the column with --label-column")
    return [str(name) for name in labels]


def label_numbers(values: Sequence[Any], where: str) -> list[float]:
    """Labels that are numbers, as floats.

    Raises:
        UsageError: a label that is none, with its row.
    """
    for row, value in enumerate(values, start=1):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UsageError(
                f"{where!r}: row {row} has the label {value!r}, which is no number",
                "choose the column with --label-column",
            )
    return [float(value) for value in values]


def check_texts(values: Sequence[Any], where: str) -> None:
    """Makes sure that a column holds texts.

    Raises:
        UsageError: a value that is none, with its row.
    """
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise UsageError(f"{where!r}: row {row} has the text {value!r}, which is no string")
