"""Plots of published tables: what they measured over devices, and the speedups that follow."""

from collections.abc import Sequence
from typing import Any

from slurmft.core.files import is_number
from slurmft.plugins.studies import published
from slurmft.plugins.studies.published import PublishedTable, with_unit
from slurmft.plugins.studies.report.matching import measured_of
from slurmft.plugins.studies.report.measures import Spread
from slurmft.plugins.studies.report.plots import Chart, Points

_OVER = ("gpus", "devices", "nodes")
"""Columns that a plot may have on its x-axis, the first one that a table has."""


def charts_of_published(tables: Sequence[PublishedTable]) -> list[Chart]:
    """Returns the plots of the tables of a file, in their order."""
    charts = []
    for table in tables:
        over = next((name for name in _OVER if name in table.columns), None)
        if over is None:
            continue
        for name in measured_of(table):
            values = [row[name] for row in table.rows]
            chart = _chart(table, over, name, values)
            if name == "speedup":
                chart.ideal = 1
            charts.append(chart)
        computed = published.speedups(table)
        if computed:
            charts.append(_speedup_chart(table, computed, tables))
    # On one number of devices there is nothing to see.
    return [chart for chart in charts if len(_places(chart)) > 1]


def _chart(table: PublishedTable, over: str, name: str, values: Sequence[Any]) -> Chart:
    """Returns the plot of values, one for each row of a table."""
    key = name
    # The tables of a file may have speedups each.
    if table.part not in ("", name):
        key = f"{table.part}-{name}"
    return Chart(
        key=key,
        title=f"Published: {with_unit(name)}",
        x_label=with_unit(over),
        y_label=with_unit(name),
        series=_series(table, over, values),
    )


def _series(
    table: PublishedTable, over: str, values: Sequence[Any]
) -> dict[str, Points]:
    """Returns the points of each group of rows that differ in the column `over` alone."""
    series: dict[str, Points] = {}
    measured = measured_of(table)
    for row, value in zip(table.rows, values, strict=True):
        # A paper may have left a place empty, or written a word there.
        if is_number(row[over]) and is_number(value):
            name = published.series_of(table, row, over, measured) or "published"
            points = series.setdefault(name, [])
            points.append((float(row[over]), Spread.of(value)))
    return series


def _speedup_chart(
    table: PublishedTable, computed: Sequence[Any], tables: Sequence[PublishedTable]
) -> Chart:
    """Returns the plot of the speedups that follow from a throughput, beside those of the text."""
    measured = table.columns[-1]
    chart = _chart(table, "gpus", "speedup", computed)
    chart.title = f"Published: speedup of {with_unit(measured)}"
    chart.ideal = 1
    chart.notes.append("Computed from the throughput of a GPU.")
    for text in published.text_speedups(table, tables):
        for row in text.rows:
            name = published.series_of(text, row, "gpus")
            speedup = row[text.columns[-1]]
            point = (float(row["gpus"]), Spread.of(speedup))
            chart.series[f"published: text, {name}"] = [point]
            chart.notes.append(
                f"The text says {speedup} for {name} on {row['gpus']} GPUs."
            )
    return chart


def _places(chart: Chart) -> set[float]:
    """Returns the values on the x-axis of a chart."""
    places: set[float] = set()
    for points in chart.series.values():
        places.update(x for x, _ in points)
    return places
