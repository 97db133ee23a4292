"""What a model predicts of a measured row, from rows with fewer devices alone; in tables.

Nothing here fits: that is `forecaster`, which needs numpy, and is imported where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slurmft.studies.report.formats import NOTHING, Column, Table, Value, decimals_of, rounded
from slurmft.studies.report.published import PublishedTable, with_unit


@dataclass(frozen=True, slots=True)
class Forecast:
    """A measured value, and what the model says that was not given it."""

    measured: float
    median: float
    low: float
    high: float
    """The true value lies between low and high with a probability of 90 %."""
    devices: int
    fitted: tuple[int, ...]
    """The numbers of devices of the rows that the model was fitted to, ascending."""

    @property
    def error_percent(self) -> float:
        """How far the prediction is from the measured value."""
        return 100 * (self.median / self.measured - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measured value lies in the interval."""
        return self.low <= self.measured <= self.high

    def text(self, decimals: int) -> str:
        """9.7 (9.1-10.3)"""
        low, high = rounded(self.low, decimals), rounded(self.high, decimals)
        return f"{rounded(self.median, decimals)} ({low}-{high})"


Forecasts = Sequence[Forecast | None]
"""One for every row of a table; None: too few rows have fewer devices."""

_Columns = list[tuple[Column, list[Value]]]


def columns(label: str, found: Forecasts) -> _Columns:
    """The prediction with its interval, and its error, for people; none where there is none."""
    if not any(found):
        return []
    return [
        (Column("predicted", label), _texts(found)),
        (Column("predicted_error_percent", "error (%)"), [_error(f) for f in found]),
    ]


def data_columns(key: str, found: Forecasts) -> _Columns:
    """The same for CSV, with the ends of the interval and what was fitted."""
    if not any(found):
        return []
    parts: dict[str, Callable[[Forecast], float | str]] = {
        key: lambda f: f.median,
        f"{key}_low": lambda f: f.low,
        f"{key}_high": lambda f: f.high,
        "predicted_error_percent": lambda f: f.error_percent,
        "predicted_from_devices": lambda f: _counts(f.fitted, " "),
    }
    return [
        (Column(name), [Value.of(read(f) if f else None) for f in found])
        for name, read in parts.items()
    ]


def _texts(found: Forecasts) -> list[Value]:
    decimals = decimals_of(f.median for f in found if f)
    return [Value(f.median, f.text(decimals)) if f else Value(None, NOTHING) for f in found]


def _error(forecast: Forecast | None) -> Value:
    if forecast is None:
        return Value(None, NOTHING)
    return Value(forecast.error_percent, f"{forecast.error_percent:+.1f}")


def notes(found: Forecasts, network_gbit_s: float | None = None) -> list[str]:
    """What was fitted to what, and how often the intervals were right."""
    made = [f for f in found if f]
    if not made:
        return ["nothing is predicted: no row has two smaller numbers of devices in its series"]
    froms = {f.devices: f.fitted for f in sorted(made, key=lambda f: f.devices)}
    parts = [f"{devices} from {_counts(fitted)}" for devices, fitted in froms.items()]
    network = f"; line rate between nodes {network_gbit_s:g} Gbit/s" if network_gbit_s else ""
    return [
        "predicted: by the model of slurmft plan, for every row fitted on all rows of its series "
        f"with fewer devices alone ({'; '.join(parts)} devices){network}; in brackets what holds "
        "90 %, error: predicted / measured - 1",
        f"{sum(f.is_inside for f in made)} of {len(made)} measured values lie in their 90 %",
    ]


def _counts(devices: Iterable[int], separator: str = ", ") -> str:
    return separator.join(map(str, devices))


# --- published tables -----------------------------------------------------------------------------


def value_of(table: PublishedTable) -> str:
    """The column of a published table that is predicted."""
    return "time_s" if table.across is None else table.columns[-1]


def layout(table: PublishedTable, found: Forecasts) -> Table:
    """A published table in its layout, with predictions: of rows in columns beside the value; of
    columns a device count in rows below the published ones."""
    if not any(found):
        return table.layout()
    if table.across is not None:
        return _in_rows(table, found)
    shown = table.layout()
    at = table.columns.index(value_of(table)) + 1
    more = columns(f"predicted {with_unit(value_of(table))}", found)
    return _with_columns(shown, more, at)


def data(table: PublishedTable, found: Forecasts) -> Table:
    """The same for CSV: a row for every published value."""
    if not any(found):
        return table.layout()
    plain = replace(table, across=None).layout()
    return _with_columns(plain, data_columns("predicted", found), len(plain.columns))


def _with_columns(table: Table, more: _Columns, at: int) -> Table:
    heads = [*table.columns[:at], *(column for column, _ in more), *table.columns[at:]]
    rows = [
        [*row[:at], *(values[i] for _, values in more), *row[at:]]
        for i, row in enumerate(table.rows)
    ]
    return replace(table, columns=heads, rows=rows)


def _in_rows(table: PublishedTable, found: Forecasts) -> Table:
    assert table.across
    wide = table.layout()
    texts = _texts(found)
    lines: dict[tuple[object, ...], dict[object, int]] = {}
    for i, row in enumerate(map(table.named, table.rows)):
        lines.setdefault(tuple(row[c] for c in table.labels), {})[row[table.across]] = i
    heads = list(dict.fromkeys(table.column(table.across)))
    none, count = Value(None, NOTHING), len(table.labels)
    rows = []
    for published, its in zip(wide.rows, lines.values(), strict=True):
        label = list(published[:count])
        rows.append([*label, Value.of("published"), *published[count:]])
        if not any(found[i] for i in its.values()):
            continue
        rows.append(
            [*label, Value.of("predicted")]
            + [texts[its[head]] if head in its else none for head in heads]
        )
        rows.append(
            [*label, Value.of("error (%)")]
            + [_error(found[its[head]]) if head in its else none for head in heads]
        )
    whose = Column("whose", numeric=False)
    return replace(wide, columns=[*wide.columns[:count], whose, *wide.columns[count:]], rows=rows)
