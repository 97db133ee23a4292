"""Tables as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.cluster import time_use
from slurmft.cluster.time_use import in_all, key_of
from slurmft.plugins.studies import spec
from slurmft.plugins.studies.report.formats import (
    as_csv,
    as_markdown,
    as_text,
    numbered,
)
from slurmft.plugins.studies.report.measures import Row, RunSet, label
from slurmft.plugins.studies.report.tables import time_tables
from slurmft.plugins.studies.table import Table, cell_columns, column
from slurmft.runs.time_use import Part

HOSTILE = "<script>alert('x')</script> & 50% $(rm) a_b {c} ~ ^ \\d | \"q\" #1"


def test_hostile_text_is_escaped() -> None:
    table = Table(HOSTILE, [column("name", [HOSTILE], numeric=False)], [HOSTILE])
    (row,) = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert row == {"name": HOSTILE}
    markdown = as_markdown(table)
    assert "<script>" not in markdown
    assert r"\| " in markdown
    assert "\x1b" not in as_text(Table("\x1b[2J", table.columns))


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"), ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3+cmd|'x'!A0", "'-2+3+cmd|'x'!A0"), ("+f(1)", "'+f(1)"), ("\t=1", "'\t'=1"),
        ("\r=1", "'\n'=1"), ("a\r=1", "a\n'=1"), (" =1", "' =1"), ("\uff1d1", "'\uff1d1"),
        (-1.5, "-1.5"), ("-1.5e-3", "-1.5e-3"), ("+7", "+7"), (-3, "-3"), ("--lr", "--lr"),
        ("a;=f(1)", "a;'=f(1)"), ("a; @f", "a;' @f"), ("a\t+f(1)", "a\t'+f(1)"), ("a;b=1", "a;b=1"),
        ("-", "-"), ("a=1", "a=1"), (None, ""), (True, "True"), ("/data/x", "/data/x"),
    ],
)  # fmt: skip
def test_no_cell_is_a_formula(value: Any, cell: str) -> None:
    """The list of OWASP's page on CSV injection. Numbers and flags stay as they are."""
    table = Table("t", [column("name", [value], numeric=False)])
    name, only = csv.reader(io.StringIO(as_csv(table), newline=""))
    assert (name, only or [""]) == (["name"], [cell])
    heads = Table("t", [column(str(value), [1])])
    ((head,), _) = csv.reader(io.StringIO(as_csv(heads), newline=""))
    assert head == (cell if isinstance(value, str) else str(value))


def test_lists_are_shown_as_people_write_them() -> None:
    """A report over the runs of users with different site files showed Python's lists."""
    cells: list[dict[str, Any]] = [
        {"setup": ["export A=1", "source /p/x/env.sh"]},
        {"setup": []},
    ]
    (setup,) = cell_columns(cells, ["setup"])
    assert [value.text for value in setup.values] == [
        "export A=1; source env.sh",
        "none",
    ]
    assert spec.label(cells[0]) == "setup=export A=1; source /p/x/env.sh"


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


def test_rows_have_numbers_where_their_settings_fill_the_line() -> None:
    """As of runs of several tasks, each of which has options that the others lack."""
    cells: list[dict[str, Any]] = [{"task": "focal", "gamma": 1}, {"task": "other"}]
    columns = cell_columns(cells, ["task", "gamma"])
    results = [column("seconds", [2.5, 3.5], rank=1), column("rest", [1, 2], rank=2)]
    table = Table("t", [*columns, *results], ["a note"])
    assert as_text(table, width=30).splitlines()[2].split() == [
        *("task", "gamma", "seconds", "rest"),
    ]
    texts = [as_text(each, width=20) for each in numbered([table, table], 20)]
    assert texts[0] == as_text(table, width=20)
    title, blank, *grid = texts[0].splitlines()
    assert (title, blank) == ("t", "")
    assert [line.split() for line in grid[2:4]] == [
        ["1", "2.5", "1"],
        ["2", "3.5", "2"],
    ]
    listed = texts[0].partition("\n\n- ")[2]
    assert " ".join(listed.split()) == (
        "row 1: task focal, gamma 1 - row 2: task other - a note"
    )
    assert "- rows are numbered\n  as above\n- a note" in texts[1]


def test_label_of_a_row_has_no_settings_that_are_not_set() -> None:
    row: Any = SimpleNamespace(cell={"task": "focal", "preset": None})
    assert label(row, ["task", "preset"]) == "task focal"


def test_an_unknown_share_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that does not tell its steps; beside a training, its ETTR is a least one."""
    training: Any = SimpleNamespace(name="training", is_finished=True)
    program: Any = SimpleNamespace(name="program", is_finished=True)
    parts = dict.fromkeys(map(key_of, Part), 0.0)
    uses = {
        "training": in_all([parts | {"steps_s": 30.0, "queue_s": 70.0}]),
        "program": in_all([parts | {"program_s": 100.0}]),
    }
    monkeypatch.setattr(time_use, "of_records", lambda run: uses[run.name])
    rows = []
    for runs in ([training], [program], [training, program], []):
        rows.append(Row(cell={}, runs=runs, devices=None, state="", common={}))
    (table,) = time_tables(rows, RunSet("a", "a", [], []))
    (ettr,) = [each for each in table.columns if each.key == "ETTR (%)"]
    assert [value.text for value in ettr.values] == ["30.0", "n/a", "≥ 15.0", "n/a"]
    assert [value.raw for value in ettr.values] == [30.0, None, None, None]
    lines = as_text(table).splitlines()
    assert any("≥ 15.0" in line for line in lines)
