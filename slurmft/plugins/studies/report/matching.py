"""Published tables, alone and with our rows beside them, matched by what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slurmft.plugins.studies.cells import DEVICE_FIELDS
from slurmft.plugins.studies.published import (
    CONFIGURATION,
    PublishedTable,
    speedups,
    with_unit,
)
from slurmft.plugins.studies.report.departures import departures
from slurmft.plugins.studies.report.measures import SCALED, Row, metric_name
from slurmft.plugins.studies.report.tables import state_value
from slurmft.plugins.studies.spec import GLOBAL_BATCH_SIZE
from slurmft.plugins.studies.table import Column, Table, Value, column, decimals_of
from slurmft.train.login.configure import OPTIONS


def _published_names() -> dict[str, str]:
    """Returns published column or setting -> option: both under its own name and under others."""
    names: dict[str, str] = {}
    for name, each in OPTIONS.items():
        # Rows that differ only in, say, a folder measured the same: such options match nothing.
        if not each.affects_measurement:
            continue
        names[name] = name
        for published_name in each.published:
            names[published_name] = name
    return names


_FIELDS = _published_names()

_SIZES = ("gpus", "devices", "nodes")
"""Published columns that speedups are over."""

_MEASURES = {
    "time_s": "train_s",
    "accuracy": "metric",
    "f1": "metric",
    "train_samples_per_s_per_gpu": "train_samples_per_s_per_device",
    "eval_samples_per_s_per_gpu": "evaluate_samples_per_s_per_device",
    "metric_compute_s": "metric_s_per_evaluation",
    "broadcast_ms": "broadcast_ms_per_evaluation",
    **{name: name for name in SCALED},
    "train_speedup_published_text": "speedup",
}
"""Published column -> key of our measure."""


def as_published(table: PublishedTable) -> Table:
    """Returns a published table, value for value; with the speedups that follow from it."""
    columns = []
    for name in table.columns:
        values = [row[name] for row in table.rows]
        columns.append(_column(table, name, values))
    computed = speedups(table)
    if computed:
        columns.append(column("speedup_computed", computed, 2))
    return Table(table.name, columns)


def _column(table: PublishedTable, name: str, raw: Sequence[Any]) -> Column:
    # By the published rows alone: `raw` may hold values of ours, too.
    published_values = [row[name] for row in table.rows]
    # An empty place in a column of numbers does not make it one of texts.
    types = (int, float, type(None))
    numeric = all(isinstance(value, types) for value in published_values)
    return column(name, raw, label=with_unit(name), numeric=numeric)


class Match(NamedTuple):
    """A published row and a row of ours; either may be absent."""

    published: dict[str, Any] | None
    ours: Row | None


def keys_of(published: PublishedTable) -> list[str]:
    """Returns the columns by which rows are matched."""
    keys = {"gpus", "devices", CONFIGURATION, *_FIELDS}
    return [name for name in published.columns if name in keys]


def measured_of(published: PublishedTable) -> list[str]:
    """Returns the columns that our rows have a measure for."""
    return [name for name in published.columns if name in _MEASURES]


def key_of(row: Row, name: str, like: Any = None) -> Any:
    """Returns the value of one of our rows in a published key column; of a configuration, the part
    that the published value names."""
    if name in ("gpus", "devices"):
        return row.devices
    if name == CONFIGURATION:
        batch_size = row.value("batch_size")
        # Theirs is "fp32-64", or the batch size alone: 64.
        if isinstance(like, int):
            return batch_size
        precision = row.value("precision")
        return f"{precision}-{batch_size}"
    return row.value(_FIELDS[name])


def matches(published: PublishedTable, rows: Sequence[Row]) -> list[Match]:
    """Returns published rows in their order, each with every row of ours that measured the same;
    then ours that were not published."""
    keys = keys_of(published)
    pairs: list[Match] = []
    matched_rows: set[int] = set()  # ids: a row is a mutable dataclass, and has no hash
    for theirs in published.rows:
        same = [row for row in rows if _measured_the_same(theirs, row, keys)]
        matched_rows.update(id(row) for row in same)
        if same:
            pairs.extend(Match(theirs, row) for row in same)
        else:
            pairs.append(Match(theirs, None))
    for row in rows:
        if id(row) not in matched_rows:
            pairs.append(Match(None, row))
    return pairs


def _measured_the_same(theirs: dict[str, Any], ours: Row, keys: Sequence[str]) -> bool:
    for key in keys:
        published_value = theirs[key]
        our_value = key_of(ours, key, like=published_value)
        if not _equal(published_value, our_value):
            return False
    return True


def _equal(theirs: Any, ours: Any) -> bool:
    """Returns whether two values are the same number, or the same text in any case."""
    try:
        # 5e-4 and "0.0005" are the same learning rate
        return float(theirs) == float(ours)
    except (TypeError, ValueError):
        return str(theirs).lower() == str(ours).lower()


def beside(
    published: PublishedTable,
    rows: Sequence[Row],
    fields: Sequence[str],
) -> Table:
    """Returns a published table, with a column of ours after each of theirs that we measure.

    Of the fields in which ours differ, those that it does not have name our rows.
    """
    pairs = matches(published, rows)
    our_rows = [pair.ours for pair in pairs if pair.ours]
    in_table = _fields_in(published)
    differing = []
    for name in fields:
        # repr: a list has no hash
        values = {repr(row.cell.get(name)) for row in our_rows}
        if name not in in_table and len(values) > 1:
            differing.append(name)
    notes = list(_notes(published, rows, pairs))
    columns = _columns(published, pairs, differing)
    return Table(f"{published.name}: published / ours", columns, notes)


def _fields_in(published: PublishedTable) -> set[str]:
    """Returns our fields whose values follow from the columns of a published table."""
    fields: set[str] = set()
    for name in keys_of(published):
        if name in _FIELDS:
            fields.add(_FIELDS[name])
    if CONFIGURATION in published.columns:
        # The names of its bars say both: PRECISION-BATCHSIZE.
        fields |= {"batch_size", "precision"}
    if "batch_size" in fields:
        # It follows from the batch of a device and the devices, which the table has.
        fields.add(GLOBAL_BATCH_SIZE)
    if "gpus" in published.columns:
        # All devices: they follow from the nodes and from what each of them has.
        fields.update(DEVICE_FIELDS)
    return fields


def _columns(
    published: PublishedTable,
    pairs: Sequence[Match],
    fields: Sequence[str],
) -> list[Column]:
    columns: list[Column] = []
    for name in published.columns:
        columns += _columns_of(published, name, pairs)
    for name in fields:
        setting = name.replace("_", " ")
        values = []
        for pair in pairs:
            values.append(pair.ours.cell.get(name) if pair.ours else None)
        columns.append(
            column(
                f"{name}_ours",
                values,
                label=f"{setting} ours",
                numeric=False,
                rank=1,
            )
        )
    if any(pair.ours.state for pair in pairs if pair.ours):
        states = []
        for pair in pairs:
            # A published row without one of ours has no state, not even "missing".
            state = state_value(pair.ours) if pair.ours else Value.of(None)
            states.append(state)
        columns.append(Column("state_ours", states, "state of ours", numeric=False))
    return columns


def _columns_of(
    published: PublishedTable,
    name: str,
    pairs: Sequence[Match],
) -> list[Column]:
    """Returns a published column, and ours after it where we measure it."""
    is_key = name in keys_of(published)
    values = []
    for pair in pairs:
        if pair.published:
            values.append(pair.published[name])
        elif is_key and pair.ours:
            # A row that was not published: our own values say which one it is.
            values.append(key_of(pair.ours, name))
        else:
            values.append(None)
    theirs = _column(published, name, values)
    measure = _MEASURES.get(name)
    if not measure:
        return [theirs]
    # Two columns of one quantity stand side by side: each says whose it is.
    quantity = with_unit(name)
    theirs = replace(theirs, label=f"{quantity} published")
    medians = []
    for pair in pairs:
        medians.append(_median(pair, name, published))
    decimals = _decimals(measure, medians)
    ours = column(f"{name}_ours", medians, decimals, label=f"{quantity} ours")
    return [theirs, ours]


def _median(pair: Match, name: str, published: PublishedTable) -> float | None:
    """Returns our value for a published column, as far as it compares with the published one."""
    if pair.ours is None:
        return None
    measure = _MEASURES[name]
    if measure in SCALED and _has_another_base(pair.ours, published):
        return None
    # A run may have another primary metric, and this one beside it.
    if measure == "metric" and _has_metric(pair.ours, name):
        measure = f"metric_{name}"
    return pair.ours.median(measure)


def _has_metric(row: Row, name: str) -> bool:
    """Returns whether a metric of this name is among those besides the primary one."""
    return f"metric_{name}" in row.measures


def _has_another_base(row: Row, published: PublishedTable) -> bool:
    """Returns whether the speedup of a row is over another number of nodes or devices than the
    published ones, as where the run on one node is still missing."""
    size = _size_column(published)
    if row.baseline is None or size is None:
        return False
    return bool(key_of(row.baseline, size) != _base_size(published, size))


def _size_column(published: PublishedTable) -> str | None:
    """Returns the column that the speedups of a published table are over; None where it has no
    speedup, or no such column."""
    if not any(_MEASURES.get(name) in SCALED for name in published.columns):
        return None
    for name in _SIZES:
        if name in published.columns:
            return name
    return None


def _base_size(published: PublishedTable, name: str) -> Any:
    """Returns the number of nodes or devices over which published speedups are: that of a row with
    the speedup 1; where the table has none of these, one."""
    for row in published.rows:
        if row.get("speedup") == 1:
            return row[name]
    return 1


def _decimals(measure: str, medians: Sequence[float | None]) -> int:
    """Returns as many decimals as our own tables have for the measure."""
    if measure in SCALED:
        return 2
    if measure == "metric":
        return 4
    return decimals_of(medians)


def _notes(
    published: PublishedTable,
    rows: Sequence[Row],
    pairs: Sequence[Match],
) -> Iterator[str]:
    if "time_s" in published.columns:
        yield "our time is that of the training phase, without start-up and evaluation"
    name = metric_name(rows)
    for theirs in ("accuracy", "f1"):
        has_it = any(_has_metric(row, theirs) for row in rows)
        if theirs in published.columns and name != theirs and not has_it:
            yield f"our {name} is compared with the published {theirs}"
    size = _size_column(published)
    if size and any(_has_another_base(row, published) for row in rows):
        base = f"{with_unit(size)} {_base_size(published, size)}"
        yield f"no speedup of ours: none of our runs has the published base, {base}"
    comparable = {*keys_of(published), *measured_of(published)}
    for other in published.columns:
        if other not in comparable:
            yield f"{other} of our runs is unknown: rows that differ only in it show the same"
    # A row without a published one beside it may differ: nobody compares it.
    compared = []
    for pair in pairs:
        if pair.published and pair.ours and pair.ours.finished:
            compared.append((pair.published, pair.ours))
    differing = "; ".join(departures(published, compared, _FIELDS))
    if differing:
        yield f"not as published: {differing}"
