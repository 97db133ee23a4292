"""Tables as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io

from slurmft.plugins.studies.report.formats import as_csv, as_markdown, as_text
from slurmft.plugins.studies.table import Table, column

HOSTILE = "<script>alert('x')</script> & 50% $(rm) a_b {c} ~ ^ \\d | \"q\" #1"


def test_hostile_text_is_escaped() -> None:
    table = Table(HOSTILE, [column("name", [HOSTILE], numeric=False)], [HOSTILE])
    (row,) = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert row == {"name": HOSTILE}
    markdown = as_markdown(table)
    assert "<script>" not in markdown
    assert r"\| " in markdown
    assert "\x1b" not in as_text(Table("\x1b[2J", table.columns))


def test_columns_give_way_by_rank() -> None:
    ranks = {"kept": 0, "first to go": 2, "second": 1}
    table = Table(
        "t", [column(key, ["x" * 30], rank=rank) for key, rank in ranks.items()]
    )
    text = as_text(table, width=70)
    assert "left out here, in CSV: first to go" in text
    assert "second" in text.splitlines()[2]


def test_rows_with_long_names_keep_their_first_measures() -> None:
    columns = [
        column("folder", ["x" * 80], numeric=False),
        column("seconds", [2.5], rank=1),
        column("rest", [1.0], rank=2),
    ]
    text = as_text(Table("t", columns), width=70)
    assert "2.5" in text
    assert "left out here, in CSV: rest" in text
