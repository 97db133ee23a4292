"""Predicts measured rows from rows with fewer devices: how right the scaling model would have been.

For every row the model is fitted anew, on all rows of its series with fewer devices alone; rows
with as many share a fit. See `slurmft.studies.scaling.model` for the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.runs.scan import MeasuredRun
from slurmft.studies.report.forecast import Forecast
from slurmft.studies.report.measures import FORECAST
from slurmft.studies.report.measures import Row as MeasuredRow
from slurmft.studies.report.published import PublishedTable
from slurmft.studies.scaling import model
from slurmft.studies.scaling import series as scaling_series
from slurmft.studies.scaling.model import Fit, Row

_LEAST_COUNTS = 2
"""Numbers of devices below a row's that it takes: with one, only the priors say how time scales."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What is to be predicted."""

    series: str
    row: Row
    phase: str
    measured: float
    in_unit: Callable[[float], float]


def of_rows(rows: Sequence[MeasuredRow], title: str) -> list[Forecast | None]:
    """The training times of measured rows, one each; None where too few rows have fewer devices.

    Args:
        rows: of one set.
        title: what the progress on a terminal says.
    """
    finished = [run for row in rows for run in row.finished]
    series: dict[str, list[Row]] = {}
    of_run: dict[int, tuple[str, Row]] = {}
    for name, group in scaling_series.by_series(finished).items():
        for run in group:
            if (row := _row_of(run)) is not None:
                series.setdefault(name, []).append(row)
                of_run[id(run)] = name, row
    targets: list[_Target | None] = []
    for each in rows:
        measured = each.median(FORECAST)
        found = next((of_run[id(r)] for r in each.finished if id(r) in of_run), None)
        if found is None or measured is None:
            targets.append(None)
        else:
            targets.append(_Target(found[0], found[1], "train", measured, float))
    return _forecasts(targets, series, None, title)


def of_table(table: PublishedTable) -> list[Forecast | None]:
    """The values of a published table, one for each of its rows.

    Raises:
        UsageError: it is in no form that the model knows.
    """
    points = scaling_series.points(table)
    if not points:
        return [None] * len(table.rows)
    series: dict[str, list[Row]] = {}
    for point in points:
        series.setdefault(point.series, []).append(point.row)
    targets = [_Target(p.series, p.row, p.phase, p.value, p.in_unit) for p in points]
    return _forecasts(targets, series, scaling_series.network_gbit_s(table), table.name)


def network_gbit_s(table: PublishedTable) -> float | None:
    """The line rate between nodes that the predictions of a published table knew."""
    return scaling_series.network_gbit_s(table)


def _row_of(run: MeasuredRun) -> Row | None:
    """A run as a row of the model; None: its result is not as slurmft writes it."""
    try:
        return scaling_series.row_of(run)
    except UsageError:
        return None


def _forecasts(
    targets: Sequence[_Target | None],
    series: dict[str, list[Row]],
    network_gbit_s: float | None,
    title: str,
) -> list[Forecast | None]:
    """A forecast for every target for which there are rows enough."""
    fewer = {
        (t.series, t.row.devices): [r for r in series[t.series] if r.devices < t.row.devices]
        for t in targets
        if t
    }
    wanted = [k for k, rows in fewer.items() if len(_counts(rows)) >= _LEAST_COUNTS]
    fits = {}
    for key in _progress(wanted, title):
        try:
            fits[key] = model.fit(fewer[key], network_gbit_s)
        except ValueError:
            continue  # a time of 0, which is no measurement
    return [_forecast(t, fits.get((t.series, t.row.devices))) if t else None for t in targets]


def _forecast(target: _Target, fit: Fit | None) -> Forecast | None:
    row = target.row
    if fit is None or target.phase not in (model.TOTAL, *fit.covered):
        return None
    interval = fit.predict(row.devices, row.nodes, row.work).phase_s(target.phase)
    low, high = sorted((target.in_unit(interval.low), target.in_unit(interval.high)))
    median = target.in_unit(interval.median)
    return Forecast(target.measured, median, low, high, row.devices, _counts(fit.rows))


def _counts(rows: Iterable[Row]) -> tuple[int, ...]:
    return tuple(sorted({row.devices for row in rows}))


def _progress(keys: Sequence[Any], title: str) -> Iterable[Any]:
    """The keys; on a terminal with a bar, as each takes about a second."""
    if not keys or not sys.stderr.isatty():
        return keys
    from tqdm import tqdm

    shown = title if len(title) <= 40 else f"{title[:37]}..."
    bar: Iterable[Any] = tqdm(keys, desc=shown, unit="fit", file=sys.stderr, leave=False)
    return bar
