"""Measured rows as tables: speed, phases, and all data."""

from __future__ import annotations

from collections.abc import Sequence

from slurmft.studies.report import forecast as report_forecast
from slurmft.studies.report.formats import NOTHING, Column, Table, Value, decimals_of, rounded
from slurmft.studies.report.measures import (
    FORECAST,
    MEASURES,
    METRIC,
    NEAR,
    PHASES,
    SCALED,
    SPEED,
    TIMES,
    Measure,
    Row,
    Spread,
    batches_of,
    in_order,
    label,
    metric_name,
    number_of,
    result_of,
)
from slurmft.studies.report.runset import RunSet


def speed_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Times, throughput, speedup, metric."""
    measures = [m for m in SPEED if m.key != "train_samples_per_s"]
    before, last = measures[:-1], measures[-1]
    columns = _leading(rows, runset.fields)
    for measure in before:
        columns.append((_column(measure), _shown(measure, rows)))
        if measure.key == FORECAST:
            columns += report_forecast.columns("predicted train (s)", [r.forecast for r in rows])
    columns += _scaled(rows)
    columns.append((Column("metric", metric_name(rows), rank=METRIC.rank), _shown(METRIC, rows)))
    columns.append((_column(last), _shown(last, rows)))
    return _table(runset.title, columns, _notes(rows, runset))


def phase_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Where the time of a run goes, and its memory."""
    measures = [MEASURES[f"{p}_s"] for p in PHASES] + [
        m for m in TIMES if m.key.endswith("gib") or m.rank
    ]
    columns = _leading(rows, runset.fields)
    columns += [(_column(m, ranked=m.rank), _shown(m, rows, plain=True)) for m in measures]
    return _table(f"{runset.title}: phases of a run, medians", columns, ())


def data_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Everything, for CSV: median, smallest and largest of every measure."""
    columns: _Columns = [(Column("set"), [Value.of(runset.name)] * len(rows))]
    columns += _leading(rows, runset.fields)
    if not _state_column(rows):
        columns.append((Column("state"), [Value.of("finished")] * len(rows)))
    for measure in MEASURES.values():
        found = [row.measures.get(measure.key) for row in rows]
        for suffix, part in (("", "median"), ("_min", "low"), ("_max", "high")):
            values = [Value.of(s and getattr(s, part)) for s in found]
            columns.append((Column(measure.key + suffix), values))
    columns += report_forecast.data_columns(f"predicted_{FORECAST}", [r.forecast for r in rows])
    for key in SCALED:
        columns.append((Column(key), [Value.of(row.scaled.get(key)) for row in rows]))
    columns.append(
        (
            Column("baseline"),
            [Value.of(r.baseline and label(r.baseline, runset.fields)) for r in rows],
        )
    )
    columns.append((Column("metric_name"), [Value.of(metric_name([row])) for row in rows]))
    columns.append((Column("runs"), [Value.of(" ".join(x.name for x in r.runs)) for r in rows]))
    return _table(runset.title, columns, ())


_Columns = list[tuple[Column, list[Value]]]


def _table(title: str, columns: _Columns, notes: Sequence[str]) -> Table:
    cells = zip(*(values for _, values in columns), strict=True)
    return Table(title, [column for column, _ in columns], [list(row) for row in cells], notes)


def _leading(rows: Sequence[Row], fields: Sequence[str]) -> _Columns:
    """What names a row: its fields, its devices, its finished runs, what became of the others."""
    made: _Columns = []
    for name in in_order(fields):
        values = [row.cell.get(name) for row in rows]
        numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        made.append((Column(name, numeric=numeric), [Value.of(v) for v in values]))
    made.append((Column("devices"), [Value.of(row.devices) for row in rows]))
    made.append((Column("n"), [Value.of(len(row.finished)) for row in rows]))
    return made + _state_column(rows)


def _column(measure: Measure, ranked: int | None = None) -> Column:
    return Column(measure.key, measure.label, rank=measure.rank if ranked is None else ranked)


def _shown(measure: Measure, rows: Sequence[Row], plain: bool = False) -> list[Value]:
    found = [row.measures.get(measure.key) for row in rows]
    decimals = measure.decimals
    if decimals is None:
        decimals = decimals_of(s.median for s in found if s)
    return [_value(s, decimals, measure.ranged and not plain) for s in found]


def _value(spread: Spread | None, decimals: int, ranged: bool) -> Value:
    if spread is None:
        return Value(None, NOTHING)
    text = rounded(spread.median, decimals)
    if ranged and spread.n > 1:
        text += f" ±{spread.percent:.0f}%"
    return Value(spread.median, text)


def _scaled(rows: Sequence[Row]) -> _Columns:
    """The columns that follow from several rows; none where all rows are their own baseline."""
    if not any(row.baseline not in (None, row) for row in rows):
        return []
    return [
        (column, [Value(v := row.scaled.get(key), rounded(v, 2)) for row in rows])
        for key, column in SCALED.items()
    ]


def _state_column(rows: Sequence[Row]) -> _Columns:
    if not any(row.state for row in rows):
        return []
    return [(Column("state", numeric=False), [state_value(row) for row in rows])]


def state_value(row: Row) -> Value:
    """The state of a row as it is shown; a long reason is in the notes."""
    text = row.state or "finished"
    return Value(text, text if len(text) <= _STATE else text[: _STATE - 3] + "...")


_STATE = 24
"""Characters of a state that fit into a text table."""


def _notes(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """How the numbers were made, as far as it concerns these."""
    notes = ["a row is a cell, with medians of its n finished runs"]
    if any(s.n > 1 for row in rows for s in row.measures.values()):
        notes[0] += "; ±: the repeat that is farthest from the median (CSV: smallest and largest)"
    notes[0] += ". time: from the job's start to its end; train: optimizer steps only"
    if any(row.baseline not in (None, row) for row in rows):
        way = "training time" if runset.scaling == "strong" else "training throughput"
        notes.append(
            f"speedup: by {way}, against the row with the fewest devices that is equal in all else;"
            " efficiency: speedup by the ratio of devices"
        )
    notes += [
        f"{label(row, runset.fields)}: {row.state}" for row in rows if len(row.state) > _STATE
    ]
    notes += _foreign_baselines(rows, runset.fields)
    if runset.scaling == "strong" and (uneven := _uneven_work(rows)):
        notes.append(uneven)
    return notes


def _foreign_baselines(rows: Sequence[Row], fields: Sequence[str]) -> list[str]:
    """Rows whose baseline has another batch size."""
    found = [
        f"{label(row, fields)} is compared with {label(row.baseline, fields)}"
        for row in rows
        if row.baseline and not set(batches_of(row)) & set(batches_of(row.baseline))
    ]
    return [f"no row on fewer devices has this batch size: {'; '.join(found)}"] if found else []


def _uneven_work(rows: Sequence[Row]) -> str | None:
    for row in rows:
        for run in row.finished:
            base = (row.baseline.finished if row.baseline else [run])[0]
            mine, its = (number_of(result_of(r).get("train_samples")) for r in (run, base))
            if mine and its and abs(mine / its - 1) > NEAR:
                return (
                    f"strong scaling wants the same work in all rows, but {run.name} trained "
                    f"{mine:.0f} samples and {base.name} {its:.0f}: the speedups say little"
                )
    return None
