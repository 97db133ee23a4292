"""Published tables, alone and with our rows beside them, matched by what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slurmft.plugins.studies.cells import DEVICE_FIELDS
from slurmft.plugins.studies.published import CONFIGURATION, PublishedTable, with_unit
from slurmft.plugins.studies.report.measures import SCALED, Row, metric_name
from slurmft.plugins.studies.report.tables import state_value
from slurmft.plugins.studies.spec import GLOBAL_BATCH_SIZE
from slurmft.plugins.studies.table import Column, Table, Value, column, decimals_of
from slurmft.train.login.configure import OPTIONS


def _published_names() -> dict[str, str]:
    """Returns published column or setting -> option: both under its own name and under others."""
    names: dict[str, str] = {}
    for name, each in OPTIONS.items():
        if each.affects_measurement:
            names |= dict.fromkeys((name, *each.published), name)
    return names


_FIELDS = _published_names()

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
    """A published table, value for value."""
    columns = [_column(table, name, [row[name] for row in table.rows]) for name in table.columns]
    return Table(table.name, columns)


def _column(table: PublishedTable, name: str, raw: Sequence[Any]) -> Column:
    numeric = all(isinstance(row[name], (int, float, type(None))) for row in table.rows)
    return column(name, raw, label=with_unit(name), numeric=numeric)


class Match(NamedTuple):
    """A published row and a row of ours; either may be absent."""

    published: dict[str, Any] | None
    ours: Row | None


def keys_of(published: PublishedTable) -> list[str]:
    """The columns by which rows are matched."""
    return [c for c in published.columns if c in ("gpus", "devices", CONFIGURATION, *_FIELDS)]


def measured_of(published: PublishedTable) -> list[str]:
    """The columns that our rows have a measure for."""
    return [c for c in published.columns if c in _MEASURES]


def key_of(row: Row, name: str, like: Any = None) -> Any:
    """Returns the value of one of our rows in a published key column; of a configuration, the part
    that the published value names."""
    if name in ("gpus", "devices"):
        return row.devices
    if name == CONFIGURATION:
        batch, precision = row.value("batch_size"), row.value("precision")
        return batch if isinstance(like, int) else f"{precision}-{batch}"
    return row.value(_FIELDS[name])


def matches(published: PublishedTable, rows: Sequence[Row]) -> list[Match]:
    """Published rows in their order, each with every row of ours that measured the same; then ours
    that were not published."""
    keys = keys_of(published)
    found, used = list[Match](), set[int]()
    for theirs in published.rows:
        same = [r for r in rows if all(_equal(theirs[k], key_of(r, k, theirs[k])) for k in keys)]
        used |= {id(r) for r in same}
        found += [Match(theirs, r) for r in same] or [Match(theirs, None)]
    return found + [Match(None, r) for r in rows if id(r) not in used]


def _equal(theirs: Any, ours: Any) -> bool:
    """Returns whether two values are the same number, or the same text in any case."""
    try:
        return float(theirs) == float(ours)
    except (TypeError, ValueError):
        return str(theirs).lower() == str(ours).lower()


def beside(published: PublishedTable, rows: Sequence[Row], fields: Sequence[str]) -> Table:
    """A published table, with a column of ours after each of theirs that we measure. Of the fields
    in which ours differ, those that it does not have name our rows."""
    found = matches(published, rows)
    used = {_FIELDS[c] for c in keys_of(published) if c in _FIELDS}
    if CONFIGURATION in published.columns:
        used |= {"batch_size", "precision"}
    if "batch_size" in used:
        used.add(GLOBAL_BATCH_SIZE)
    if "gpus" in published.columns:
        used |= set(DEVICE_FIELDS)
    ours = [f for f in fields if f not in used]
    ours = [f for f in ours if len({repr(m.ours.cell.get(f)) for m in found if m.ours}) > 1]
    title, notes = f"{published.name}: published / ours", _notes(published, rows, found)
    return Table(title, _columns(published, found, ours), list(notes))


def _columns(
    published: PublishedTable, found: Sequence[Match], fields: Sequence[str]
) -> list[Column]:
    keys = keys_of(published)
    columns: list[Column] = []
    for name in published.columns:
        ours = [key_of(m.ours, name) if name in keys and m.ours else None for m in found]
        theirs = [
            m.published[name] if m.published else own for m, own in zip(found, ours, strict=True)
        ]
        columns.append(_column(published, name, theirs))
        if measure := _MEASURES.get(name):
            columns[-1] = replace(columns[-1], label=f"{with_unit(name)} published")
            ours = [m.ours.median(measure) if m.ours else None for m in found]
            decimals = 2 if measure in SCALED else 4 if measure == "metric" else decimals_of(ours)
            columns.append(column(f"{name}_ours", ours, decimals, label=f"{with_unit(name)} ours"))
    for name in fields:
        label = f"{name.replace('_', ' ')} ours"
        cells = (m.ours and m.ours.cell.get(name) for m in found)
        columns.append(column(f"{name}_ours", cells, label=label, numeric=False, rank=1))
    if any(m.ours and m.ours.state for m in found):
        states = [state_value(m.ours) if m.ours else Value.of(None) for m in found]
        columns.append(Column("state_ours", states, "state of ours", numeric=False))
    return columns


def _notes(published: PublishedTable, rows: Sequence[Row], found: Sequence[Match]) -> Iterator[str]:
    measured = [m.ours for m in found if m.published and m.ours and m.ours.finished]
    if "time_s" in published.columns:
        yield "our time is that of the training phase, without start-up and evaluation"
    name = metric_name(rows)
    for theirs in ("accuracy", "f1"):
        if theirs in published.columns and name != theirs:
            yield f"our {name} is compared with the published {theirs}"
    known = {*keys_of(published), *measured_of(published)}
    for other in (c for c in published.columns if c not in known):
        yield f"{other} of our runs is unknown: rows that differ only in it show the same"
    differing = []
    for setting in (n for n in published.setup if n in _FIELDS):
        ours = list(dict.fromkeys(str(row.value(_FIELDS[setting])) for row in measured))
        if not all(_equal(published.setup[setting], value) for value in ours):
            words = f"{setting.replace('_', ' ')} {', '.join(ours)} ({published.setup[setting]})"
            differing.append(words)
    if differing:
        yield f"not as published: {'; '.join(differing)}"
