"""Measured rows as tables: speed, phases, and all data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slurmft.cluster import cost, time_use
from slurmft.plugins.studies.report import measures
from slurmft.plugins.studies.report.measures import (
    METRIC,
    SCALED,
    Measure,
    Row,
    RunSet,
    Spread,
    label,
)
from slurmft.plugins.studies.table import (
    NOTHING,
    Column,
    Table,
    Value,
    cell_columns,
    column,
    decimals_of,
)
from slurmft.show import classes
from slurmft.show import time_use as show_time_use


def speed_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns the times, throughput, speedup and metrics of the rows."""
    columns = _leading(rows, runset.fields)
    if runset.is_own_program:
        for measure in measures.measures_of(runset):
            columns.append(_medians(measure, rows))
        columns += _scaled(rows)
        return Table(runset.title, columns, _notes(rows, runset))
    speed_columns = []
    for measure in measures.SPEED:
        # The throughput of all devices is left to the CSV: it is that of one, times the devices.
        if measure.key != "train_samples_per_s":
            speed_columns.append(_medians(measure, rows))
    # The speedup is one of training: it stands beside the columns of training.
    *training, evaluation = speed_columns
    columns += training
    columns += _scaled(rows)
    metric = _medians(METRIC, rows)
    metric_name = measures.metric_name(rows)
    columns.append(replace(metric, label=metric_name))
    for measure in measures.other_metrics(runset):
        columns.append(_medians(measure, rows))
    # Last: of these columns it is the first that a narrow terminal lacks.
    columns.append(evaluation)
    return Table(runset.title, columns, _notes(rows, runset))


def phase_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns the times of the phases of a run, and more that was measured of it."""
    columns = _leading(rows, runset.fields)
    for measure in measures.TIMES:
        # What no run says, such as tokens or what its devices could compute, is no column.
        if any(measure.key in row.measures for row in rows):
            columns.append(_medians(measure, rows, plain=True))
    return Table(f"{runset.title}: phases of a run, medians", columns)


# --- cost -----------------------------------------------------------------------------------------


def _largest(values: Sequence[float]) -> float | None:
    # No process holds 0 bytes: nobody measured it.
    return max(values) or None


class _Cost(NamedTuple):
    """A column of costs."""

    label: str
    key: str
    """Of `cost.costs_of`."""
    factor: float
    """From the unit of the cost to that of the column."""
    combine: Callable[[Sequence[float]], float | None]
    """Makes one value of those of the runs of a row, of which there is at least one."""


_COSTS = (
    _Cost("node-hours", "node_hours", 1.0, sum),
    _Cost("GPU-hours", "gpu_hours", 1.0, sum),
    _Cost("CPU-hours", "cpu_hours", 1.0, sum),
    _Cost("energy (kWh)", "energy_j", 1 / 3.6e6, sum),  # Slurm accounts in joules
    # Not the sum: the runs of a row need not have been at the same time.
    _Cost("GiB a node", "peak_memory_bytes", 2**-30, _largest),
)
"""The columns, the least important last: it is the first that a narrow terminal lacks."""


def cost_tables(rows: Sequence[Row], runset: RunSet) -> list[Table]:
    """Returns what all runs of a row cost, those that failed included; no table, where nothing is
    known."""
    runs = runset.runs
    # All at once: one call of sacct answers for all jobs.
    all_costs = cost.costs_of(runs)
    if not any(run_cost["node_hours"] for run_cost in all_costs):
        return []
    # by id: a run holds dictionaries, and has no hash
    cost_of_run: dict[int, Mapping[str, Any]] = {}
    advice: dict[str, None] = {}  # repeats of a cell get the same: it is shown once
    sources: dict[str, None] = {}
    for run, run_cost in zip(runs, all_costs, strict=True):
        cost_of_run[id(run)] = run_cost
        advice[cost.advice(run_cost, run)] = None
        sources[run_cost["source"]] = None
    columns = _leading(rows, runset.fields)
    for rank, each in enumerate(_COSTS):
        totals = []
        for row in rows:
            numbers = []
            for run in row.runs:
                value = cost_of_run[id(run)][each.key]
                if value is not None:
                    numbers.append(each.factor * value)
            # Of no run, or of none that says it: unknown, which is not 0.
            totals.append(each.combine(numbers) if numbers else None)
        decimals = decimals_of(totals)
        columns.append(column(each.label, totals, decimals, rank=rank))
    notes = [line for line in advice if line]  # "": the request of a run fits
    all_sources = " and ".join(sources)
    notes.append(f"by {all_sources}; n/a: unknown")
    return [Table(f"{runset.title}: cost, all attempts", columns, notes)]


# --- time -----------------------------------------------------------------------------------------


def time_tables(rows: Sequence[Row], runset: RunSet) -> list[Table]:
    """Returns where the time of all runs of a row went, those that failed included; no table, where
    no time has passed."""
    all_shares = []
    hours = []
    for row in rows:
        use = time_use.in_all([time_use.of_records(run) for run in row.runs])
        hours.append(use["total_s"] / 3600 or None)
        all_shares.append(show_time_use.shares(use))
    if not any(all_shares):
        return []
    columns = _leading(rows, runset.fields)
    columns.append(column("hours", hours, decimals_of(hours)))
    for rank, (key, name) in enumerate(show_time_use.LABELS.items()):
        # A part that no run has, such as hangs, is no column.
        if any(shares.get(key) for shares in all_shares):
            values = [_share(key, shares) for shares in all_shares]
            columns.append(Column(f"{name} (%)", values, rank=rank))
    notes = [
        "of the time from submission to end, all attempts; ETTR: steps that count; lost: steps "
        "that were done again; waits: for the slowest rank, in forward passes"
    ]
    return [Table(f"{runset.title}: where the time went", columns, notes)]


def _share(key: str, shares: Mapping[str, float]) -> Value:
    """Returns a part of the time, in percent."""
    value = Value.of(shares.get(key), 1)
    if key != "steps_s":
        return value
    text = show_time_use.ettr(shares)
    # A least value is none to compute with, as in JSON.
    if text == value.text:
        return value
    return Value(None, text or NOTHING)


# --- classes --------------------------------------------------------------------------------------


def class_tables(rows: Sequence[Row]) -> list[Table]:
    """Returns precision and recall of each class, and the confusion matrix, of the newest run with
    classes."""
    runs = []
    for row in rows:
        for run in row.finished:
            if classes.of(run.result):
                runs.append(run)
    if not runs:
        return []
    newest = max(runs, key=lambda run: run.state.time)
    scores = classes.of(newest.result)
    # Of many classes these are the worst: `classes.of` sorts them so.
    listed_names = list(scores)[: classes.SHOWN]
    listed = {name: scores[name] for name in listed_names}
    names = column("class", listed_names, numeric=False)
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
    """Returns a row for each class of the texts, and a column for each predicted one."""
    columns = [names]
    for predicted in listed:
        counts = []
        for facts in listed.values():
            predicted_as = facts.predicted_as or {}
            # Pairs that never occurred are not in the result.
            counts.append(predicted_as.get(predicted, 0))
        columns.append(column(f"as {predicted}", counts, rank=1))
    return Table(f"What texts of a class were predicted as, {run}", columns)


# --- all data -------------------------------------------------------------------------------------


def data_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Returns everything, for CSV: median, smallest and largest of every measure."""
    set_names = [runset.name] * len(rows)
    columns = [column("set", set_names)]
    columns += _leading(rows, runset.fields)
    if not _state_column(rows):  # files of several reports have the same columns
        columns.append(column("state", ["finished"] * len(rows)))
    for measure in measures.measures_of(runset):
        columns += _spread_columns(measure, rows)
    for key in SCALED:
        medians = [row.median(key) for row in rows]
        columns.append(column(key, medians))
    baselines = []
    metric_names = []
    all_run_names = []
    for row in rows:
        baseline = row.baseline
        baselines.append(label(baseline, runset.fields) if baseline else None)
        # By row: the rows of a set may be of tasks with different metrics.
        metric_names.append(measures.metric_name([row]))
        run_names = [run.name for run in row.runs]
        all_run_names.append(" ".join(run_names))
    columns.append(column("baseline", baselines))
    columns.append(column("metric_name", metric_names))
    columns.append(column("runs", all_run_names))
    return Table(runset.title, columns)


def _spread_columns(measure: Measure, rows: Sequence[Row]) -> list[Column]:
    """Returns median, smallest and largest value of a measure, unrounded."""
    columns = []
    spreads = [row.measures.get(measure.key) for row in rows]
    for ending, part in (("", "median"), ("_min", "low"), ("_max", "high")):
        # A row may lack the measure: the cell is empty then.
        values = [getattr(spread, part, None) for spread in spreads]
        columns.append(column(f"{measure.key}{ending}", values))
    return columns


# --- columns --------------------------------------------------------------------------------------

_STATE_WIDTH = 24
"""Characters of a state that a table shows."""


def _leading(rows: Sequence[Row], fields: Sequence[str]) -> list[Column]:
    """Returns the columns that name a row: its cell, devices, finished runs, and the state of the
    others."""
    cells = [row.cell for row in rows]
    devices = [row.devices for row in rows]
    finished_counts = [len(row.finished) for row in rows]
    columns = cell_columns(cells, measures.in_order(fields))
    columns.append(column("devices", devices))
    columns.append(column("n", finished_counts))
    return columns + _state_column(rows)


def _medians(measure: Measure, rows: Sequence[Row], plain: bool = False) -> Column:
    """Returns the column of a measure; `plain`: without spreads."""
    medians = [row.median(measure.key) for row in rows]
    decimals = measure.decimals
    if decimals is None:
        most = 10 if measure.figures > 3 else 4  # a metric may be of any size
        decimals = decimals_of(medians, measure.figures, most)
    has_ranges = measure.ranged and not plain
    values = []
    for row, median in zip(rows, medians, strict=True):
        value = Value.of(median, decimals)
        spread = row.measures.get(measure.key)
        # A single run has no spread, which is not one of 0 %.
        if has_ranges and spread and spread.n > 1:
            # Only the text: in CSV the median stays a number.
            text = f"{value.text} ±{spread.percent:.0f}%"
            value = replace(value, text=text)
        values.append(value)
    # Rank 0 never gives way: that is for what names a row.
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
    # A row may be its own baseline: it then has the speedup 1, which says nothing.
    return any(row.baseline not in (None, row) for row in rows)


def _state_column(rows: Sequence[Row]) -> list[Column]:
    """Returns the states; no column where all runs have finished."""
    if not any(row.state for row in rows):
        return []
    states = [state_value(row) for row in rows]
    return [Column("state", states, numeric=False)]


def state_value(row: Row) -> Value:
    """Returns the state of a row as it is shown; a long reason is in the notes."""
    state = row.state or "finished"
    if len(state) <= _STATE_WIDTH:
        return Value(state, state)
    return Value(state, state[: _STATE_WIDTH - 3] + "...")


def _notes(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """Returns how the numbers of these rows were computed."""
    rows_note = (
        "a row has the medians of n finished runs, of the same settings but the seed"
    )
    spreads: list[Spread] = []
    for row in rows:
        spreads += row.measures.values()
    if any(spread.n > 1 for spread in spreads):
        rows_note += (
            "; ±: the repeat farthest from the median (CSV: smallest and largest)"
        )
    times_note = "time: from the job's start to its end"
    if not runset.is_own_program:
        times_note += "; train: optimizer steps only"
    notes = [f"{rows_note}. {times_note}"]
    if _has_baselines(rows):
        quantity = _compared_by(runset)
        notes.append(
            f"speedup: by {quantity}, relative to the row with the fewest devices that "
            "is equal in all else; efficiency: speedup / ratio of devices"
        )
    for row in rows:
        if len(row.state) > _STATE_WIDTH:
            row_name = label(row, runset.fields)
            notes.append(f"{row_name}: {row.state}")
    other_batches = "; ".join(_with_other_batches(rows, runset.fields))
    if other_batches:
        notes.append(f"no row on fewer devices has this batch size: {other_batches}")
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
        baseline_batches = measures.batches_of(row.baseline)
        if batches.isdisjoint(baseline_batches):
            ours = label(row, fields)
            baseline = label(row.baseline, fields)
            lines.append(f"{ours} is compared with {baseline}")
    return lines


def _compared_by(runset: RunSet) -> str:
    """Returns the quantity whose ratio is the speedup: see `measures._speed`."""
    if runset.is_own_program:
        return "time"
    return "training time" if runset.scaling == "strong" else "training throughput"
