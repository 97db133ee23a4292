"""Predicts measured rows from rows with fewer devices: a backtest of the scaling model.

Every row is predicted by a fit to the rows of its series with fewer devices; rows on the same
number of devices share a fit. See `slurmft.studies.scaling.model` for the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from slurmft.core.errors import UsageError
from slurmft.core.text import shown
from slurmft.runs.scan import MeasuredRun
from slurmft.studies.forecast import Forecast, Forecasts
from slurmft.studies.published import PublishedTable
from slurmft.studies.scaling import model
from slurmft.studies.scaling import series as scaling_series
from slurmft.studies.scaling.model import Fit, Row
from slurmft.studies.scaling.series import Point
from slurmft.studies.scaling.series import network_gbit_s as network_gbit_s

_LEAST_COUNTS = 2
"""Smaller numbers of devices that a forecast needs: one does not show how time scales."""


def of_runs(groups: Sequence[tuple[Sequence[MeasuredRun], float | None]], title: str) -> Forecasts:
    """Forecasts of training times; None where too few groups have fewer devices.

    Args:
        groups: finished repeats of a cell, and their measured training time.
        title: label of the progress bar on a terminal.
    """
    series: dict[str, list[Row]] = {}
    of_run: dict[Path, tuple[str, Row]] = {}
    runs = [run for repeats, _ in groups for run in repeats]
    for name, members in scaling_series.by_series(runs).items():
        for run in members:
            if (row := _row_of(run)) is not None:
                series.setdefault(name, []).append(row)
                of_run[run.path] = name, row
    targets: list[Point | None] = []
    for repeats, measured in groups:
        found = next((of_run[r.path] for r in repeats if r.path in of_run), None)
        if found is None or measured is None:
            targets.append(None)
        else:
            targets.append(Point(*found, "train", measured))
    return _forecasts(targets, series, None, title)


def of_table(table: PublishedTable) -> Forecasts:
    """Forecasts of the values of a published table, one for each row.

    Raises:
        UsageError: the model cannot read it.
    """
    points = scaling_series.points(table)
    if not points:
        return [None] * len(table.rows)
    series: dict[str, list[Row]] = {}
    for point in points:
        series.setdefault(point.series, []).append(point.row)
    return _forecasts(points, series, network_gbit_s(table), table.name)


def _row_of(run: MeasuredRun) -> Row | None:
    """A run as a row of the model; None: its result cannot be used."""
    try:
        return scaling_series.row_of(run)
    except UsageError:
        return None


def _forecasts(
    targets: Sequence[Point | None],
    series: dict[str, list[Row]],
    network_gbit_s: float | None,
    title: str,
) -> list[Forecast | None]:
    """A forecast for every target that has enough rows to fit."""
    fewer = {
        (t.series, t.row.devices): [r for r in series[t.series] if r.devices < t.row.devices]
        for t in targets
        if t
    }
    wanted = [k for k, rows in fewer.items() if len(_counts(rows)) >= _LEAST_COUNTS]
    fits = {}
    # A fit takes seconds; the bar appears on a terminal only.
    for key in tqdm(
        wanted, shown(title, 40), file=sys.stderr, unit="fit", leave=False, disable=None
    ):
        try:
            fits[key] = model.fit(fewer[key], network_gbit_s)
        except ValueError:
            continue  # a time of 0
    return [_forecast(t, fits.get((t.series, t.row.devices))) if t else None for t in targets]


def _forecast(target: Point, fit: Fit | None) -> Forecast | None:
    row = target.row
    if fit is None or target.phase not in (model.TOTAL, *fit.covered):
        return None
    interval = fit.predict(row.devices, row.nodes, row.work).phase_s(target.phase)
    low, high = sorted((target.in_unit(interval.low), target.in_unit(interval.high)))
    median = target.in_unit(interval.median)
    return Forecast(target.value, median, low, high, row.devices, _counts(fit.rows))


def _counts(rows: Iterable[Row]) -> tuple[int, ...]:
    return tuple(sorted({row.devices for row in rows}))
