"""The parts of a report: for every study, and every file of published tables, what to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slurmft.core.errors import UsageError
from slurmft.studies.report import forecast as report_forecast
from slurmft.studies.report.charts import (
    Chart,
    charts_of,
    forecast_chart,
    published_chart,
    published_speedup_chart,
)
from slurmft.studies.report.forecast import Forecast
from slurmft.studies.report.formats import Table
from slurmft.studies.report.matching import beside, keys_of, matches, measured_of
from slurmft.studies.report.measures import Row, rows_of
from slurmft.studies.report.provenance import changes, origins
from slurmft.studies.report.published import PublishedTable
from slurmft.studies.report.runset import RunSet
from slurmft.studies.report.tables import data_table, phase_table, speed_table


@dataclass(frozen=True, slots=True)
class Section:
    """What belongs together: tables, plots, and where they come from."""

    key: str
    """For the names of its files."""
    title: str
    tables: Sequence[Table]
    data: Sequence[tuple[str, Table]]
    """The same for CSV, with the names of its files, without ending."""
    make_charts: Callable[[], list[Chart]]
    """Plots are made when they are wanted: curves read many records."""
    origins: Sequence[str] = field(default=())
    problems: Sequence[str] = field(default=())
    cache: list[list[Chart]] = field(default_factory=list, repr=False)

    @property
    def charts(self) -> list[Chart]:
        if not self.cache:
            self.cache.append(self.make_charts())
        return self.cache[0]

    def file_of(self, chart: Chart) -> str:
        """The name of a plot's files, without ending."""
        return f"{self.key}-{slug(chart.key)}"


class Forecaster(Protocol):
    """The module `forecaster`, which needs numpy: only those who ask for it import it."""

    def of_rows(self, rows: Sequence[Row], title: str) -> list[Forecast | None]: ...

    def of_table(self, table: PublishedTable) -> list[Forecast | None]: ...

    def network_gbit_s(self, table: PublishedTable) -> float | None: ...


def slug(text: str) -> str:
    """Text as a part of a file name or an HTML id: letters, digits, hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "report"


def of_runs(
    runset: RunSet, published: Sequence[PublishedTable], forecaster: Forecaster | None = None
) -> Section:
    """The section of a set of runs, with published tables, and maybe predictions, beside ours."""
    rows = rows_of(runset)
    told = _predict(rows, runset, forecaster) if forecaster else []
    speed = speed_table(rows, runset)
    changed = changes(rows, runset.fields)
    speed = replace(speed, notes=[*speed.notes, *told, *changed])
    key = slug(runset.name)
    tables = [speed, phase_table(rows, runset)]
    data = [(key, data_table(rows, runset))]
    problems = [*runset.problems]
    for i, theirs in enumerate(published):
        if not any(m.published and m.ours for m in matches(theirs, rows)):
            keys = ", ".join(k.replace("_", " ") for k in keys_of(theirs)) or "nothing"
            problems.append(f"no row matches one of {theirs.name}, by {keys}")
        elif measured_of(theirs):
            table = beside(theirs, rows, runset.fields)
            data.append((f"{key}-{slug(theirs.key)}", table))
            is_last = all(later.file != theirs.file for later in published[i + 1 :])
            doubts = theirs.told if is_last else ()  # of all tables of a file, once
            tables.append(replace(table, notes=[*table.notes, *changed, *doubts]))
    return Section(
        key=key,
        title=runset.title,
        tables=tables,
        data=data,
        make_charts=lambda: charts_of(rows, runset, published),
        origins=origins(rows),
        problems=problems,
    )


def _predict(rows: Sequence[Row], runset: RunSet, forecaster: Forecaster) -> list[str]:
    """Gives rows their forecasts; returns what must be known of them."""
    found = forecaster.of_rows(rows, runset.title)
    for row, forecast in zip(rows, found, strict=True):
        row.forecast = forecast
    return report_forecast.notes(found)


def of_published(tables: Sequence[PublishedTable], forecaster: Forecaster | None = None) -> Section:
    """The section of a file of published tables, as published; maybe with predictions."""
    problems: list[str] = []
    found = [_forecasts(table, forecaster, problems) for table in tables]
    shown = [report_forecast.layout(t, f) for t, f in zip(tables, found, strict=True)]
    for i, (table, its) in enumerate(zip(tables, found, strict=True)):
        if forecaster and any(its):
            told = report_forecast.notes(its, forecaster.network_gbit_s(table))
            shown[i] = replace(shown[i], notes=told)
    if forecaster and not any(any(its) for its in found):
        shown[-1] = replace(shown[-1], notes=report_forecast.notes([]))
    shown[-1] = replace(shown[-1], notes=[*shown[-1].notes, *tables[-1].told])  # the file's: once

    def make_charts() -> list[Chart]:
        made = [
            chart
            for table, its in zip(tables, found, strict=True)
            for chart in (
                published_chart(table),
                published_speedup_chart(table),
                forecast_chart(table, its),
            )
        ]
        return [chart for chart in made if chart]

    first = tables[0]
    return Section(
        key=f"published-{slug(first.file)}",
        title=f"Published: {first.work}",
        tables=shown,
        data=[
            (f"published-{slug(t.key)}", report_forecast.data(t, f))
            for t, f in zip(tables, found, strict=True)
        ],
        make_charts=make_charts,
        problems=problems,
    )


def _forecasts(
    table: PublishedTable, forecaster: Forecaster | None, problems: list[str]
) -> list[Forecast | None]:
    """A forecast for every row of a published table, where it is asked for and can be made."""
    try:
        if forecaster:
            return forecaster.of_table(table)
    except UsageError as error:
        problems.append(f"nothing is predicted of {table.name}: {error.message}")
    return [None] * len(table.rows)
