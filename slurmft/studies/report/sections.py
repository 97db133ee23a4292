"""The parts of a report: what it shows of every study, and of every file of published tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slurmft.core.errors import UsageError
from slurmft.studies.forecast import Forecaster, Forecasts
from slurmft.studies.published import PublishedTable
from slurmft.studies.report import layouts, predictions
from slurmft.studies.report.charts import Chart, charts_of, charts_of_published
from slurmft.studies.report.formats import Table
from slurmft.studies.report.matching import beside, keys_of, matches, measured_of
from slurmft.studies.report.measures import FORECAST, Row, rows_of
from slurmft.studies.report.provenance import changes, origins
from slurmft.studies.report.runset import RunSet
from slurmft.studies.report.tables import data_table, phase_table, speed_table


@dataclass(frozen=True)
class Section:
    """Tables and plots that belong together, and where they come from."""

    key: str
    """For the names of its files."""
    title: str
    tables: Sequence[Table]
    data: Sequence[tuple[str, Table]]
    """The same for CSV: name of the file, without ending, and table."""
    make_charts: Callable[[], list[Chart]]
    """Makes the plots when they are needed: curves read many records."""
    origins: Sequence[str] = ()
    problems: Sequence[str] = ()

    @functools.cached_property
    def charts(self) -> list[Chart]:
        return self.make_charts()

    def file_of(self, chart: Chart) -> str:
        """The name of a plot's files, without ending."""
        return f"{self.key}-{slug(chart.key)}"


def slug(text: str) -> str:
    """Text as a part of a file name or an HTML id: letters, digits, hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "report"


def of_runs(
    runset: RunSet, published: Sequence[PublishedTable], forecaster: Forecaster | None = None
) -> Section:
    """The section of a run set: its tables, predictions if wanted, and published tables beside."""
    rows = rows_of(runset)
    predicted = _predict(rows, runset, forecaster) if forecaster else []
    speed = speed_table(rows, runset)
    changed = changes(rows, runset.fields)
    speed = replace(speed, notes=[*speed.notes, *predicted, *changed])
    key = slug(runset.name)
    tables = [speed, phase_table(rows, runset)]
    data = [(key, data_table(rows, runset))]
    problems = [*runset.problems]
    for i, theirs in enumerate(published):
        if not any(m.published and m.ours for m in matches(theirs, rows)):
            keys = ", ".join(k.replace("_", " ") for k in keys_of(theirs)) or "nothing"
            problems.append(f"no row matches a row of {theirs.name}; compared by: {keys}")
        elif measured_of(theirs):
            table = beside(theirs, rows, runset.fields)
            data.append((f"{key}-{slug(theirs.key)}", table))
            is_last = all(later.file != theirs.file for later in published[i + 1 :])
            footnotes = theirs.footnotes if is_last else ()  # once for all tables of a file
            tables.append(replace(table, notes=[*table.notes, *changed, *footnotes]))
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
    """Sets the forecasts of rows; returns the notes on them."""
    groups = [(row.finished, row.median(FORECAST)) for row in rows]
    forecasts = forecaster.of_runs(groups, runset.title)
    for row, forecast in zip(rows, forecasts, strict=True):
        row.forecast = forecast
    return predictions.notes(forecasts)


def of_published(tables: Sequence[PublishedTable], forecaster: Forecaster | None = None) -> Section:
    """The section of a file of published tables, as published; predictions if wanted."""
    problems: list[str] = []
    forecasts = [_forecasts(table, forecaster, problems) for table in tables]
    both = list(zip(tables, forecasts, strict=True))
    shown = [layouts.layout(table, found) for table, found in both]
    for i, (table, found) in enumerate(both):
        if forecaster and any(found):
            notes = predictions.notes(found, forecaster.network_gbit_s(table))
            shown[i] = replace(shown[i], notes=notes)
    if forecaster and not any(any(found) for found in forecasts):
        shown[-1] = replace(shown[-1], notes=predictions.notes([]))
    shown[-1] = replace(shown[-1], notes=[*shown[-1].notes, *tables[-1].footnotes])
    first = tables[0]
    return Section(
        key=f"published-{slug(first.file)}",
        title=f"Published: {first.work}",
        tables=shown,
        data=[(f"published-{slug(t.key)}", layouts.data(t, found)) for t, found in both],
        make_charts=lambda: [c for t, found in both for c in charts_of_published(t, found)],
        problems=problems,
    )


def _forecasts(
    table: PublishedTable, forecaster: Forecaster | None, problems: list[str]
) -> Forecasts:
    """A forecast for every row of a published table, where one is wanted and possible."""
    try:
        if forecaster:
            return forecaster.of_table(table)
    except UsageError as error:
        problems.append(f"no predictions for {table.name}: {error.message}")
    return [None] * len(table.rows)
