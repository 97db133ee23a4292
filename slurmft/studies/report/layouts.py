"""Published tables in the layout in which they were published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmft.studies.published import PublishedTable, with_unit
from slurmft.studies.report.formats import NOTHING, Column, Table, Value

Line = tuple[tuple[Any, ...], str]
"""What names a line of a wide table: the values of its label columns, and whose it is."""

Lines = dict[Line, dict[Any, Value]]
"""The values of each line, by the heads of the columns."""


def layout(table: PublishedTable) -> Table:
    """A published table as it was published, value for value."""
    if table.across is not None:
        return wide(table, published_lines(table)).without("whose")
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
