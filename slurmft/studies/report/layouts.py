"""Published tables in the layout in which they were published, with or without predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmft.studies.forecast import Forecasts
from slurmft.studies.published import PublishedTable, with_unit
from slurmft.studies.report import predictions
from slurmft.studies.report.formats import NOTHING, Column, Table, Value

Line = tuple[tuple[Any, ...], str]
"""What names a line of a wide table: the values of its label columns, and whose it is."""

Lines = dict[Line, dict[Any, Value]]
"""The values of each line, by the heads of the columns."""


def layout(table: PublishedTable, forecasts: Forecasts = ()) -> Table:
    """A published table as it was published, value for value.

    Predictions are columns beside the value, or, in a table with a column for every device count,
    lines below the published ones.
    """
    if table.across is None:
        plain = _plain(table)
        if not any(forecasts):
            return plain
        value = predicted_column(table)
        more = predictions.columns(f"predicted {with_unit(value)}", forecasts)
        return plain.with_columns(more, table.columns.index(value) + 1)
    lines = published_lines(table)
    if not any(forecasts):
        return wide(table, lines).without("whose")
    texts = predictions.with_intervals(forecasts)
    for row, forecast, text in zip(map(table.named, table.rows), forecasts, texts, strict=True):
        if forecast:
            labels, head = tuple(row[c] for c in table.labels), row[table.across]
            lines.setdefault((labels, "predicted"), {})[head] = text
            lines.setdefault((labels, "error (%)"), {})[head] = predictions.error_of(forecast)
    return wide(table, lines)


def data(table: PublishedTable, forecasts: Forecasts = ()) -> Table:
    """The same for CSV; with predictions, a row for every published value."""
    if not any(forecasts):
        return layout(table)
    return _plain(table).with_columns(
        predictions.data_columns("predicted", forecasts), len(table.columns)
    )


def predicted_column(table: PublishedTable) -> str:
    """The column of a published table that is predicted."""
    return "time_s" if table.across is None else table.columns[-1]


def _plain(table: PublishedTable) -> Table:
    rows = [[Value.of(v) for v in row] for row in table.rows]
    return Table(table.name, [column_of(table, c) for c in table.columns], rows)


def column_of(table: PublishedTable, name: str) -> Column:
    numeric = all(isinstance(v, (int, float, type(None))) for v in table.column(name))
    return Column(name, with_unit(name), numeric)


def published_lines(table: PublishedTable) -> Lines:
    """The lines of a table with a column for every device count, as published."""
    assert table.across
    lines: Lines = {}
    for row in map(table.named, table.rows):
        labels = tuple(row[c] for c in table.labels)
        lines.setdefault((labels, "published"), {})[row[table.across]] = Value.of(
            row[table.columns[-1]]
        )
    return lines


def wide(
    table: PublishedTable,
    lines: Lines,
    more_heads: Iterable[Any] = (),
    states: Mapping[Line, Sequence[str]] | None = None,
) -> Table:
    """A table with a column for every device count: lines with the same labels follow each other.

    Args:
        table: a published one, in whose layout it is.
        lines: what it shows.
        more_heads: device counts that were not published.
        states: of lines, shown in a last column if there is one.
    """
    assert table.across
    heads = list(dict.fromkeys([*table.column(table.across), *more_heads]))
    columns = [column_of(table, c) for c in table.labels] + [Column("whose", numeric=False)]
    columns += [Column(f"{table.across}_{h}", with_unit(f"{h}_{table.across}")) for h in heads]
    columns += [Column("state", numeric=False)] if states else []
    order = {labels: i for i, labels in enumerate(dict.fromkeys(labels for labels, _ in lines))}
    none, rows = Value(None, NOTHING), []
    for line in sorted(lines, key=lambda line: order[line[0]]):
        labels, whose = line
        row = [*map(Value.of, labels), Value.of(whose), *(lines[line].get(h, none) for h in heads)]
        rows.append(row + ([Value.of("; ".join(states.get(line, ())))] if states else []))
    return Table(table.name, columns, rows)
