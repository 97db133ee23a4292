"""Tables as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io

from slurmft.studies.report.formats import (
    Column,
    Table,
    Value,
    as_csv,
    as_markdown,
    as_text,
)

HOSTILE = "<script>alert('x')</script> & 50% $(rm) a_b {c} ~ ^ \\d | \"q\" #1"


def test_hostile_text_is_escaped() -> None:
    table = Table(HOSTILE, [Column("name", numeric=False)], [[Value.of(HOSTILE)]], [HOSTILE])
    (row,) = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert row == {"name": HOSTILE}
    markdown = as_markdown(table)
    assert "<script>" not in markdown
    assert r"\| " in markdown
    assert "\x1b" not in as_text(Table("\x1b[2J", table.columns, table.rows))


def test_columns_give_way_by_rank() -> None:
    columns = [Column("kept"), Column("first to go", rank=2), Column("second", rank=1)]
    table = Table("t", columns, [[Value.of("x" * 30)] * 3])
    text = as_text(table, width=70)
    assert "left out here, in CSV: first to go" in text
    assert "second" in text.splitlines()[2]
