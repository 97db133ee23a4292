"""Measured rows as tables: speed, phases, and all data."""

from collections.abc import Sequence
from dataclasses import replace

from slurmft.cluster import cost
from slurmft.plugins.studies.report import measures
from slurmft.plugins.studies.report.measures import METRIC, SCALED, Measure, Row, RunSet, label
from slurmft.plugins.studies.table import Column, Table, Value, cell_columns, column, decimals_of
from slurmft.show import classes


def speed_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Times, throughput, speedup, metric."""
    columns = _leading(rows, runset.fields)
    if runset.is_own:
        columns += [*(_medians(m, rows) for m in measures.measures_of(runset)), *_scaled(rows)]
        return Table(runset.title, columns, _notes(rows, runset))
    *before, last = (m for m in measures.SPEED if m.key != "train_samples_per_s")
    columns += [_medians(measure, rows) for measure in before]
    metric = replace(_medians(METRIC, rows), label=measures.metric_name(rows))
    others = [_medians(measure, rows) for measure in measures.other_metrics(runset)]
    columns += [*_scaled(rows), metric, *others, _medians(last, rows)]
    return Table(runset.title, columns, _notes(rows, runset))


def phase_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """What the phases of a run took, and more that was measured of it."""
    known = (m for m in measures.TIMES if any(m.key in row.measures for row in rows))
    columns = [*_leading(rows, runset.fields), *(_medians(m, rows, plain=True) for m in known)]
    return Table(f"{runset.title}: phases of a run, medians", columns)


def cost_tables(rows: Sequence[Row], runset: RunSet) -> list[Table]:
    """What all runs of a row cost, those that failed included; none, where nothing is known."""
    costs = dict(zip(map(id, runset.runs), cost.costs_of(runset.runs), strict=True))
    if not any(each["node_hours"] for each in costs.values()):
        return []
    of_rows = [[costs[id(run)] for run in row.runs] for row in rows]
    shown: dict[str, list[float | None]] = {}
    for name, key, scale in _COSTS:
        known = [[scale * c[key] for c in found if c[key] is not None] for found in of_rows]
        shown[name] = [sum(values) if values else None for values in known]
    peaks = ([c["peak_memory_bytes"] or 0 for c in found] for found in of_rows)
    shown["GiB a node"] = [max(each, default=0) / 2**30 or None for each in peaks]
    columns = [
        column(name, values, decimals_of(v or None for v in values), rank=rank)
        for rank, (name, values) in enumerate(shown.items())
    ]
    said = (cost.advice(costs[id(run)], run) for run in runset.runs)
    notes = list(dict.fromkeys(filter(None, said)))
    sources = dict.fromkeys(each["source"] for each in costs.values())
    notes.append(f"by {' and '.join(sources)}; n/a: unknown")
    title = f"{runset.title}: cost, all attempts"
    return [Table(title, [*_leading(rows, runset.fields), *columns], notes)]


_COSTS = (
    ("node-hours", "node_hours", 1.0),
    ("GPU-hours", "gpu_hours", 1.0),
    ("CPU-hours", "cpu_hours", 1.0),
    ("energy (kWh)", "energy_j", 1 / 3.6e6),
)


def class_tables(rows: Sequence[Row]) -> list[Table]:
    """Of the newest run with classes: precision and recall of each, and the confusion matrix."""
    runs = [run for row in rows for run in row.finished if classes.of(run.result)]
    if not runs:
        return []
    newest = max(runs, key=lambda run: run.state.time)
    found = dict(list(classes.of(newest.result).items())[: classes.SHOWN])
    names, values = column("class", found, numeric=False), found.values()
    shown = [
        column(key, (getattr(of_class, key) for of_class in values), digits)
        for key, digits in (("precision", 4), ("recall", 4), ("f1", 4), ("support", 0))
    ]
    total = len(measures.result_of(newest)["classes"])
    note = f"the {len(found)} of {total:,} classes with the lowest f1; all are in result.json"
    notes = [note] if total > len(found) else []
    made = [Table(f"Classes, {newest.name}", [names, *shown], notes)]
    if not notes and all(of_class.predicted_as is not None for of_class in values):
        cells = [
            column(f"as {name}", ((each.predicted_as or {}).get(name, 0) for each in values),
                   rank=1)
            for name in found
        ]  # fmt: skip
        title = f"What texts of a class were predicted as, {newest.name}"
        made.append(Table(title, [names, *cells]))
    return made


def data_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Everything, for CSV: median, smallest and largest of every measure."""
    columns = [column("set", [runset.name] * len(rows)), *_leading(rows, runset.fields)]
    if not _state_column(rows):
        columns.append(column("state", ["finished"] * len(rows)))
    for key in (measure.key for measure in measures.measures_of(runset)):
        spreads = [row.measures.get(key) for row in rows]
        for suffix, part in (("", "median"), ("_min", "low"), ("_max", "high")):
            found = (spread and getattr(spread, part) for spread in spreads)
            columns.append(column(key + suffix, found))
    columns += [column(key, (row.median(key) for row in rows)) for key in SCALED]
    bases = (row.baseline and label(row.baseline, runset.fields) for row in rows)
    columns.append(column("baseline", bases))
    columns.append(column("metric_name", (measures.metric_name([row]) for row in rows)))
    columns.append(column("runs", (" ".join(run.name for run in row.runs) for row in rows)))
    return Table(runset.title, columns)


def _leading(rows: Sequence[Row], fields: Sequence[str]) -> list[Column]:
    """The columns that name a row: fields, devices, finished runs, and the state of the others."""
    columns = cell_columns([row.cell for row in rows], measures.in_order(fields))
    columns.append(column("devices", (row.devices for row in rows)))
    columns.append(column("n", (len(row.finished) for row in rows)))
    return columns + _state_column(rows)


def _medians(measure: Measure, rows: Sequence[Row], plain: bool = False) -> Column:
    """The column of a measure; `plain`: without spreads."""
    found, decimals = [row.measures.get(measure.key) for row in rows], measure.decimals
    if decimals is None:
        most = 10 if measure.figures > 3 else 4  # a metric may be of whatever size
        decimals = decimals_of((s.median for s in found if s), measure.figures, most)
    values = [Value.of(spread and spread.median, decimals) for spread in found]
    for i, spread in enumerate(found if measure.ranged and not plain else ()):
        if spread and spread.n > 1:
            values[i] = replace(values[i], text=f"{values[i].text} ±{spread.percent:.0f}%")
    return Column(measure.key, values, measure.label, rank=1 + measure.rank)


def _scaled(rows: Sequence[Row]) -> list[Column]:
    """Speedup and efficiency; no columns where all rows are their own baseline."""
    if not any(row.baseline not in (None, row) for row in rows):
        return []
    return [column(key, (row.median(key) for row in rows), 2, rank=2) for key in SCALED]


def _state_column(rows: Sequence[Row]) -> list[Column]:
    if not any(row.state for row in rows):
        return []
    return [Column("state", [state_value(row) for row in rows], numeric=False)]


def state_value(row: Row) -> Value:
    """The state of a row as it is shown; a long reason is in the notes."""
    text = row.state or "finished"
    return Value(text, text if len(text) <= _STATE else text[: _STATE - 3] + "...")


_STATE = 24
"""Characters of a state that a table shows."""


def _notes(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """How the numbers of these rows were made."""
    notes = ["a row is a cell, with medians of its n finished runs"]
    if any(s.n > 1 for row in rows for s in row.measures.values()):
        notes[0] += "; ±: the repeat farthest from the median (CSV: smallest and largest)"
    notes[0] += ". time: from the job's start to its end"
    notes[0] += "" if runset.is_own else "; train: optimizer steps only"
    if any(row.baseline not in (None, row) for row in rows):
        way = "training time" if runset.scaling == "strong" else "training throughput"
        way = "time" if runset.is_own else way
        notes.append(
            f"speedup: by {way}, relative to the row with the fewest devices that is equal in all "
            "else; efficiency: speedup / ratio of devices"
        )
    notes += [
        f"{label(row, runset.fields)}: {row.state}" for row in rows if len(row.state) > _STATE
    ]
    foreign = [
        f"{label(row, runset.fields)} is compared with {label(row.baseline, runset.fields)}"
        for row in rows
        if row.baseline
        and not set(measures.batches_of(row)) & set(measures.batches_of(row.baseline))
    ]
    if foreign:
        notes.append(f"no row on fewer devices has this batch size: {'; '.join(foreign)}")
    return notes
