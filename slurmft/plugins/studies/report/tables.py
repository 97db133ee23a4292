"""Measured rows as tables: speed, phases, and all data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slurmft.cluster import cost
from slurmft.plugins.studies.report import measures
from slurmft.plugins.studies.report.measures import METRIC, SCALED, Measure, Row, RunSet, label
from slurmft.plugins.studies.table import Column, Table, Value, cell_columns, column, decimals_of
from slurmft.show import classes


def speed_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns the times, throughput, speedup and metrics of the rows."""
    columns = _leading(rows, runset.fields)
    if runset.is_own:
        columns += [_medians(measure, rows) for measure in measures.measures_of(runset)]
        columns += _scaled(rows)
        return Table(runset.title, columns, _notes(rows, runset))
    # The throughput of all devices is left to the CSV: it is that of one, times the devices.
    *training, evaluation = [m for m in measures.SPEED if m.key != "train_samples_per_s"]
    columns += [_medians(measure, rows) for measure in training]
    columns += _scaled(rows)
    metric = _medians(METRIC, rows)
    columns.append(replace(metric, label=measures.metric_name(rows)))
    columns += [_medians(measure, rows) for measure in measures.other_metrics(runset)]
    columns.append(_medians(evaluation, rows))
    return Table(runset.title, columns, _notes(rows, runset))


def phase_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns the times of the phases of a run, and more that was measured of it."""
    columns = _leading(rows, runset.fields)
    for measure in measures.TIMES:
        if any(measure.key in row.measures for row in rows):
            columns.append(_medians(measure, rows, plain=True))
    return Table(f"{runset.title}: phases of a run, medians", columns)


# --- cost -----------------------------------------------------------------------------------------


def _largest(values: Sequence[float]) -> float | None:
    # No process holds 0 bytes: nobody measured it.
    return max(values) or None


_COSTS: tuple[tuple[str, str, float, Callable[[Sequence[float]], float | None]], ...] = (
    ("node-hours", "node_hours", 1.0, sum),
    ("GPU-hours", "gpu_hours", 1.0, sum),
    ("CPU-hours", "cpu_hours", 1.0, sum),
    ("energy (kWh)", "energy_j", 1 / 3.6e6, sum),  # Slurm accounts in joules
    ("GiB a node", "peak_memory_bytes", 2**-30, _largest),
)
"""Label of a column, key of a cost, its factor, and how those of several runs become one."""


def cost_tables(rows: Sequence[Row], runset: RunSet) -> list[Table]:
    """Returns what all runs of a row cost, those that failed included; no table, where nothing is
    known."""
    runs = runset.runs
    # All at once: one call of sacct answers for all jobs.
    all_costs = cost.costs_of(runs)
    if not any(run_cost["node_hours"] for run_cost in all_costs):
        return []
    by_run = {id(run): run_cost for run, run_cost in zip(runs, all_costs, strict=True)}
    columns = _leading(rows, runset.fields)
    for rank, (name, key, factor, combine) in enumerate(_COSTS):
        totals = []
        for row in rows:
            values = [by_run[id(run)][key] for run in row.runs]
            numbers = [factor * value for value in values if value is not None]
            # Of no run, or of none that says it: unknown, which is not 0.
            totals.append(combine(numbers) if numbers else None)
        columns.append(column(name, totals, decimals_of(totals), rank=rank))
    advice = [cost.advice(by_run[id(run)], run) for run in runs]
    # Repeats of a cell get the same advice: it is shown once.
    notes = [line for line in dict.fromkeys(advice) if line]
    sources = dict.fromkeys(run_cost["source"] for run_cost in all_costs)
    notes.append(f"by {' and '.join(sources)}; n/a: unknown")
    return [Table(f"{runset.title}: cost, all attempts", columns, notes)]


# --- classes --------------------------------------------------------------------------------------


def class_tables(rows: Sequence[Row]) -> list[Table]:
    """Returns precision and recall of each class, and the confusion matrix, of the newest run with
    classes."""
    runs = [run for row in rows for run in row.finished if classes.of(run.result)]
    if not runs:
        return []
    newest = max(runs, key=lambda run: run.state.time)
    scores = classes.of(newest.result)
    listed = dict(list(scores.items())[: classes.SHOWN])
    names = column("class", listed, numeric=False)
    columns = [names]
    for key, decimals in (("precision", 4), ("recall", 4), ("f1", 4), ("support", 0)):
        values = [getattr(facts, key) for facts in listed.values()]
        columns.append(column(key, values, decimals))
    notes = []
    if len(scores) > len(listed):
        notes.append(
            f"the {len(listed)} of {len(scores):,} classes with the lowest f1; all are in "
            "result.json"
        )
    tables = [Table(f"Classes, {newest.name}", columns, notes)]
    has_confusion = all(facts.predicted_as is not None for facts in listed.values())
    # A matrix of some of the classes would hide where the texts of the others went.
    if has_confusion and not notes:
        tables.append(_confusion_table(newest.name, names, listed))
    return tables


def _confusion_table(run: str, names: Column, listed: dict[str, Any]) -> Table:
    columns = [names]
    for name in listed:
        counts = [(facts.predicted_as or {}).get(name, 0) for facts in listed.values()]
        columns.append(column(f"as {name}", counts, rank=1))
    return Table(f"What texts of a class were predicted as, {run}", columns)


# --- all data -------------------------------------------------------------------------------------


def data_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns everything, for CSV: median, smallest and largest of every measure."""
    columns = [column("set", [runset.name] * len(rows)), *_leading(rows, runset.fields)]
    if not _state_column(rows):  # files of several reports have the same columns
        columns.append(column("state", ["finished"] * len(rows)))
    for measure in measures.measures_of(runset):
        columns += _spread_columns(measure, rows)
    for key in SCALED:
        columns.append(column(key, [row.median(key) for row in rows]))
    baselines = []
    for row in rows:
        baselines.append(label(row.baseline, runset.fields) if row.baseline else None)
    columns.append(column("baseline", baselines))
    metric_names = [measures.metric_name([row]) for row in rows]
    columns.append(column("metric_name", metric_names))
    run_names = [" ".join(run.name for run in row.runs) for row in rows]
    columns.append(column("runs", run_names))
    return Table(runset.title, columns)


def _spread_columns(measure: Measure, rows: Sequence[Row]) -> list[Column]:
    """Returns median, smallest and largest value of a measure, unrounded."""
    columns = []
    for ending, part in (("", "median"), ("_min", "low"), ("_max", "high")):
        # A row may lack the measure: the cell is empty then.
        values = [getattr(row.measures.get(measure.key), part, None) for row in rows]
        columns.append(column(f"{measure.key}{ending}", values))
    return columns


# --- columns --------------------------------------------------------------------------------------

_STATE_WIDTH = 24
"""Characters of a state that a table shows."""


def _leading(rows: Sequence[Row], fields: Sequence[str]) -> list[Column]:
    """Returns the columns that name a row: its cell, devices, finished runs, and the state of the
    others."""
    columns = cell_columns([row.cell for row in rows], measures.in_order(fields))
    columns.append(column("devices", [row.devices for row in rows]))
    columns.append(column("n", [len(row.finished) for row in rows]))
    return columns + _state_column(rows)


def _medians(measure: Measure, rows: Sequence[Row], plain: bool = False) -> Column:
    """Returns the column of a measure; `plain`: without spreads."""
    spreads = [row.measures.get(measure.key) for row in rows]
    medians = [row.median(measure.key) for row in rows]
    decimals = measure.decimals
    if decimals is None:
        most = 10 if measure.figures > 3 else 4  # a metric may be of any size
        decimals = decimals_of(medians, measure.figures, most)
    values = []
    for spread, median in zip(spreads, medians, strict=True):
        value = Value.of(median, decimals)
        has_range = measure.ranged and spread is not None and spread.n > 1
        if spread and has_range and not plain:
            # Only the text: in CSV the median stays a number.
            value = replace(value, text=f"{value.text} ±{spread.percent:.0f}%")
        values.append(value)
    return Column(measure.key, values, measure.label, rank=1 + measure.rank)


def _scaled(rows: Sequence[Row]) -> list[Column]:
    """Returns speedup and efficiency; no columns where all rows are their own baseline."""
    if not _has_baselines(rows):
        return []
    columns = []
    for key in SCALED:
        values = [row.median(key) for row in rows]
        columns.append(column(key, values, decimals=2, rank=2))
    return columns


def _has_baselines(rows: Sequence[Row]) -> bool:
    return any(row.baseline not in (None, row) for row in rows)


def _state_column(rows: Sequence[Row]) -> list[Column]:
    if not any(row.state for row in rows):
        return []
    return [Column("state", [state_value(row) for row in rows], numeric=False)]


def state_value(row: Row) -> Value:
    """Returns the state of a row as it is shown; a long reason is in the notes."""
    state = row.state or "finished"
    if len(state) <= _STATE_WIDTH:
        return Value(state, state)
    return Value(state, state[: _STATE_WIDTH - 3] + "...")


def _notes(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """Returns how the numbers of these rows were computed."""
    parts = ["a row is a cell, with medians of its n finished runs"]
    spreads = [spread for row in rows for spread in row.measures.values()]
    if any(spread.n > 1 for spread in spreads):
        parts[0] += "; ±: the repeat farthest from the median (CSV: smallest and largest)"
    parts.append("time: from the job's start to its end")
    if not runset.is_own:
        parts[-1] += "; train: optimizer steps only"
    notes = [". ".join(parts)]
    if _has_baselines(rows):
        notes.append(
            f"speedup: by {_compared_by(runset)}, relative to the row with the fewest devices that "
            "is equal in all else; efficiency: speedup / ratio of devices"
        )
    for row in rows:
        if len(row.state) > _STATE_WIDTH:
            notes.append(f"{label(row, runset.fields)}: {row.state}")
    other_batches = _with_other_batches(rows, runset.fields)
    if other_batches:
        notes.append(f"no row on fewer devices has this batch size: {'; '.join(other_batches)}")
    return notes


def _with_other_batches(rows: Sequence[Row], fields: Sequence[str]) -> list[str]:
    """Returns which rows have neither the batch per process nor the global one of their baseline.

    A speedup over another batch size is also the gain, or loss, of that batch size.
    """
    lines = []
    for row in rows:
        if row.baseline is None:
            continue
        batches = set(measures.batches_of(row))
        if batches.isdisjoint(measures.batches_of(row.baseline)):
            lines.append(f"{label(row, fields)} is compared with {label(row.baseline, fields)}")
    return lines


def _compared_by(runset: RunSet) -> str:
    if runset.is_own:
        return "time"
    return "training time" if runset.scaling == "strong" else "training throughput"
