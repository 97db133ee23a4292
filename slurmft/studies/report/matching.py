"""Published tables with ours beside them: which of our rows measured the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmft.runs.scan import is_number
from slurmft.studies.report.formats import NOTHING, Column, Table, Value, decimals_of, rounded
from slurmft.studies.report.measures import SCALED, Row, metric_name
from slurmft.studies.report.published import CONFIGURATION, PublishedTable, column, with_unit
from slurmft.studies.report.tables import state_value
from slurmft.studies.spec import GLOBAL_BATCH_SIZE

_FIELDS = {
    "task": "task",
    "dataset": "task",
    "model": "model",
    "nodes": "nodes",
    "precision": "precision",
    "batch_size_per_gpu": "batch_size",
    "batch_size_per_process": "batch_size",
    "eval_batch_size": "eval_batch_size",
    "max_seq_length": "max_length",
    "learning_rate": "learning_rate",
    "epochs": "epochs",
}
"""Published column or setting -> field of ours."""

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
"""Published column -> measure of ours."""


@dataclass(frozen=True, slots=True)
class Match:
    """A published row and one of ours; either may be absent."""

    published: dict[str, Any] | None
    ours: Row | None


def keys_of(published: PublishedTable) -> list[str]:
    """The columns by which rows are matched."""
    return [c for c in published.columns if c in ("gpus", "devices", CONFIGURATION, *_FIELDS)]


def measured_of(published: PublishedTable) -> list[str]:
    """The columns that ours have, too."""
    return [c for c in published.columns if c in _MEASURES]


def key_of(row: Row, name: str, like: Any = None) -> Any:
    """What one of our rows has in a published key column.

    Args:
        row: ours.
        name: the column.
        like: a published value; for a configuration only what that names is compared.
    """
    if name in ("gpus", "devices"):
        return row.devices
    if name == CONFIGURATION:
        batch, precision = row.value("batch_size"), row.fact("precision")
        return batch if isinstance(like, int) else f"{precision}-{batch}"
    return row.fact(_FIELDS[name])


def matches(published: PublishedTable, rows: Sequence[Row]) -> list[Match]:
    """Published rows in their order, each with every row of ours that measured the same; then ours
    that were not published."""
    keys = keys_of(published)
    found: list[Match] = []
    used: set[int] = set()
    for theirs in map(published.named, published.rows):
        same = [r for r in rows if all(_equal(theirs[k], key_of(r, k, theirs[k])) for k in keys)]
        used |= {id(r) for r in same}
        found += [Match(theirs, r) for r in same] or [Match(theirs, None)]
    return found + [Match(None, r) for r in rows if id(r) not in used]


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, str) and isinstance(ours, str):
        return theirs.lower() == ours.lower()
    return bool(theirs == ours)


def beside(published: PublishedTable, rows: Sequence[Row], fields: Sequence[str]) -> Table:
    """A published table in its layout, with ours.

    Tables of rows get a column of ours after each of theirs; those with a column a device count
    get rows of ours below theirs.

    Args:
        published: what was published.
        rows: ours.
        fields: what ours differ in; those that the published table does not have name our rows.
    """
    found = matches(published, rows)
    ours = [f for f in fields if f not in _used_fields(published)]
    ours = [f for f in ours if len({repr(m.ours.cell.get(f)) for m in found if m.ours}) > 1]
    make = _in_columns if published.across is None else _in_rows
    table = make(published, found, ours)
    return Table(f"{published.name}: published / ours", *table, notes(published, rows, found))


def _used_fields(published: PublishedTable) -> set[str]:
    used = {_FIELDS[c] for c in keys_of(published) if c in _FIELDS}
    if CONFIGURATION in published.columns:
        used |= {"batch_size", "precision"}
    if "batch_size" in used:
        used.add(GLOBAL_BATCH_SIZE)
    if "gpus" in published.columns:
        used |= {"nodes", "nproc_per_node", "gpus_per_node"}
    return used


_Parts = tuple[list[Column], list[list[Value]]]


def _in_columns(published: PublishedTable, found: Sequence[Match], fields: list[str]) -> _Parts:
    keys = keys_of(published)
    columns, values = [], []
    for name in published.columns:
        measure = _MEASURES.get(name)
        title = f"{with_unit(name)} published" if measure else with_unit(name)
        columns.append(Column(name, title, column(name, published.column(name)).numeric))
        values.append([Value.of(_theirs(m, name, keys)) for m in found])
        if measure:
            columns.append(Column(f"{name}_ours", f"{with_unit(name)} ours"))
            values.append(_ours([m.ours for m in found], measure))
    for name in fields:
        columns.append(
            Column(f"{name}_ours", f"{name.replace('_', ' ')} ours", numeric=False, rank=1)
        )
        values.append([Value.of(m.ours and m.ours.cell.get(name)) for m in found])
    if any(m.ours and m.ours.state for m in found):
        columns.append(Column("state_ours", "state of ours", numeric=False))
        values.append([state_value(m.ours) if m.ours else Value.of(None) for m in found])
    return columns, [list(row) for row in zip(*values, strict=True)]


def _theirs(match: Match, name: str, keys: Sequence[str]) -> Any:
    """The published value; in key columns ours, where only that is there."""
    if match.published is not None:
        return match.published[name]
    return key_of(match.ours, name) if name in keys and match.ours else None


def _ours(rows: Sequence[Row | None], measure: str) -> list[Value]:
    found = [_value_of(row, measure) for row in rows]
    fixed = {"metric": 4} | dict.fromkeys(SCALED, 2)
    decimals = fixed.get(measure, decimals_of(found))
    return [Value(v, rounded(v, decimals)) for v in found]


def _value_of(row: Row | None, measure: str) -> float | None:
    if row is None:
        return None
    return row.scaled.get(measure) if measure in SCALED else row.median(measure)


def _in_rows(published: PublishedTable, found: Sequence[Match], fields: list[str]) -> _Parts:
    across = published.across
    assert across
    labels, name = published.labels, published.columns[-1]
    keys = keys_of(published)
    counts = {_theirs(m, across, keys) for m in found} - {None}
    heads = list(dict.fromkeys([*published.column(across), *sorted(counts)]))
    lines: dict[tuple[Any, ...], dict[Any, Value]] = {}
    states: dict[tuple[Any, ...], list[str]] = {}
    values = _ours([m.ours for m in found], _MEASURES[name]) if name in _MEASURES else []
    for i, match in enumerate(found):
        at = tuple(_theirs(match, c, keys) for c in labels)
        head = _theirs(match, across, keys)
        lines.setdefault((at, "published"), {})
        if match.published:
            lines[at, "published"][head] = Value.of(match.published[name])
        if match.ours and values:
            more = ", ".join(f"{f} {match.ours.cell.get(f)}" for f in fields)
            line = (at, f"ours: {more}" if more else "ours")
            lines.setdefault(line, {})[head] = values[i]
            if match.ours.state:
                states.setdefault(line, []).append(f"{head}: {state_value(match.ours).text}")
    columns = [column(c, published.column(c)) for c in labels]
    columns += [Column("whose", numeric=False)]
    columns += [Column(f"{across}_{h}", with_unit(f"{h}_{across}")) for h in heads]
    if states:
        columns.append(Column("state", numeric=False))
    order = {at: i for i, at in enumerate(dict.fromkeys(at for at, _ in lines))}
    none = Value(None, NOTHING)
    rows = []
    for at, whose in sorted(lines, key=lambda line: order[line[0]]):
        row = [*map(Value.of, at), Value.of(whose), *(lines[at, whose].get(h, none) for h in heads)]
        told = [Value.of("; ".join(states.get((at, whose), [])))] if states else []
        rows.append(row + told)
    return columns, rows


def notes(published: PublishedTable, rows: Sequence[Row], found: Sequence[Match]) -> list[str]:
    """What must be known to compare the two."""
    told = []
    both = [m.ours for m in found if m.published and m.ours]
    measured = [row for row in both if row.finished]
    if "time_s" in published.columns:
        told.append("our time is the training phase's: without start-up and evaluation")
    name = metric_name(rows)
    for theirs in ("accuracy", "f1"):
        if theirs in published.columns and name != theirs:
            told.append(f"beside the published {theirs} stands our {name}")
    known = {*keys_of(published), *measured_of(published)}
    for other in (c for c in published.columns if c not in known):
        told.append(f"{other} is not known of ours: rows that differ in it alone show the same")
    if differing := _differences(published, measured):
        told.append(f"not as published: {'; '.join(differing)}")
    return told


def _differences(published: PublishedTable, rows: Sequence[Row]) -> list[str]:
    """Settings of ours that are others than those of the published setup."""
    lines = []
    for name, theirs in published.setup.items():
        if name not in _FIELDS:
            continue
        ours = list(dict.fromkeys(str(row.fact(_FIELDS[name])) for row in rows))
        if any(not _same_setting(theirs, value) for value in ours):
            lines.append(f"{name.replace('_', ' ')} {', '.join(ours)} ({theirs})")
    return lines


def _same_setting(theirs: Any, ours: str) -> bool:
    try:
        return float(theirs) == float(ours)
    except (TypeError, ValueError):
        return str(theirs).lower() == ours.lower()


def published_speedups(published: PublishedTable) -> dict[str, list[tuple[float, float]]]:
    """Configuration -> (devices, speedup) of a published table, for the plot of speedups."""
    if "speedup" not in published.columns or "gpus" not in published.columns:
        return {}
    series: dict[str, list[tuple[float, float]]] = {}
    rest = [c for c in keys_of(published) if c != "gpus"]
    for row in map(published.named, published.rows):
        if not is_number(row["gpus"]) or not is_number(row["speedup"]):
            continue  # the tables have it
        name = ", ".join(f"{with_unit(c)} {row[c]}" for c in rest)
        series.setdefault(name, []).append((row["gpus"], row["speedup"]))
    return series
