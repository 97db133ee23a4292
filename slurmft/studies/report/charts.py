"""What the plots show, as data: which series, of which points. Drawing is `plots`' business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmft.runs.scan import MeasuredRun, is_number
from slurmft.studies.report.forecast import Forecast, Forecasts, value_of
from slurmft.studies.report.formats import Column, Table, Value, decimals_of, rounded
from slurmft.studies.report.matching import keys_of, published_speedups
from slurmft.studies.report.measures import (
    DEVICE_FIELDS,
    FORECAST,
    MEASURES,
    PHASES,
    Row,
    Spread,
    label,
    others,
)
from slurmft.studies.report.published import PublishedTable, with_unit
from slurmft.studies.report.runset import RunSet

MOST_SERIES = 8
"""More cannot be told apart in print."""
MOST_BARS = 32
MOST_POINTS = 300

DEVICES = "devices (ranks)"


@dataclass(slots=True)
class Series:
    """The points of one configuration, by x."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    """Smallest and largest of the repeats."""
    published: bool = False
    predicts: str | None = None
    """The label of the series whose points these predict."""


@dataclass(slots=True)
class Chart:
    """One plot."""

    key: str
    """For file names and ids."""
    title: str
    kind: str
    """bars (grouped by x), lines, stack (a bar a row, of the series' parts), curves."""
    x_label: str
    y_label: str
    series: list[Series]
    legend: str = ""
    """What the labels are values of."""
    names: list[str] = field(default_factory=list)
    """stack: the names of the bars; their x is the place in it."""
    ideal: float | None = None
    """Devices from which on a line of ideal speedups goes."""
    logarithmic: bool = False
    note: str = ""

    @property
    def description(self) -> str:
        """The plot in words, for those who do not see it."""
        parts = []
        for s in self.series:
            ends = (
                f"from {s.y[0]:.4g} at {self._at(s.x[0])} to {s.y[-1]:.4g} at {self._at(s.x[-1])}"
            )
            parts.append(f"{s.label}: {ends}" if len(s.x) > 1 else f"{s.label}: {s.y[0]:.4g}")
        kind = {"bars": "Grouped bars", "stack": "Stacked bars"}.get(self.kind, "Lines")
        return (
            f"{kind} of {self.y_label} by {self.x_label}. {'; '.join(parts)}. {self.note}".strip()
        )

    def _at(self, x: float) -> str:
        return self.names[int(x)] if self.names else f"{x:g}"

    def table(self) -> Table:
        """The points of the plot; of curves at most ten each."""
        columns = [
            Column("series", self.legend or "series", numeric=False),
            Column("x", self.x_label, numeric=not self.names),
            Column("y", self.y_label),
        ]
        decimals = decimals_of(y for s in self.series for y in s.y)
        rows = []
        for s in self.series:
            step = max(1, len(s.x) // 10) if self.kind == "curves" else 1
            for x, y in list(zip(s.x, s.y, strict=True))[::step]:
                at = Value(x, self._at(x))
                rows.append([Value.of(s.label), at, Value(y, rounded(y, decimals))])
        return Table(self.title, columns, rows)


def charts_of(
    rows: Sequence[Row], runset: RunSet, published: Iterable[PublishedTable]
) -> list[Chart]:
    """All plots of a set of runs that have data."""
    groups = _groups(rows, runset.fields)
    names = [f for f in runset.fields if f not in DEVICE_FIELDS]
    legend = ", ".join(name.replace("_", " ") for name in names)
    made = [
        _bars("train_samples_per_s_per_device", "Training throughput of a device", groups),
        _bars("evaluate_samples_per_s_per_device", "Evaluation throughput of a device", groups),
        _lines("train_s", "Training time", "train (s)", groups),
        _lines("wall_s", "Time of the whole job", "time (s)", groups),
        _speedups(groups, published),
        _lines("metric_s_per_evaluation", "Metric of one evaluation", "metric (s)", groups),
        _lines("broadcast_ms_per_evaluation", "Broadcast of its result", "broadcast (ms)", groups),
        _phases(rows, runset.fields),
        _losses(rows, runset.fields),
    ]  # fmt: skip
    found = [chart for chart in made if chart]
    for chart in found:
        chart.legend = chart.legend or legend
    return found


def published_chart(published: PublishedTable) -> Chart | None:
    """A plot of a published table that has a column a device count; None: of others."""
    if published.across is None:
        return None
    value = published.columns[-1]
    series: dict[str, Series] = {}
    for row in map(published.named, published.rows):
        if not is_number(row[value]):
            continue  # the tables have it
        name = ", ".join(str(row[c]) for c in published.labels) or "published"
        its = series.setdefault(name, Series(name, [], []))
        its.x.append(row[published.across])
        its.y.append(row[value])
    if len({x for s in series.values() for x in s.x}) < 2:
        return None
    kind = "bars" if "samples_per_s" in value else "lines"
    y_label = with_unit(value)
    title = f"Published: {y_label}"
    chart = Chart(published.part, title, kind, "GPUs", y_label, list(series.values()))
    chart.legend = ", ".join(c.replace("_", " ") for c in published.labels)
    chart.logarithmic = kind == "lines"
    return _limited(chart)


def published_speedup_chart(published: PublishedTable) -> Chart | None:
    """The speedups of a published table of rows; None: it has none."""
    lines = published_speedups(published)
    if not lines:
        return None
    series = [Series(k, [x for x, _ in v], [y for _, y in v]) for k, v in lines.items()]
    chart = Chart("speedup", "Published: speedup", "lines", "GPUs", "speedup", series, ideal=1)
    return _limited(chart)


def forecast_chart(published: PublishedTable, found: Forecasts) -> Chart | None:
    """A plot of a published table with what was predicted; None: nothing was."""
    if not any(found):
        return None
    value, devices = value_of(published), "gpus" if "gpus" in published.columns else "nodes"
    keys = [c for c in keys_of(published) if c != devices]
    series: dict[str, Series] = {}
    forecasts: dict[str, list[Forecast | None]] = {}
    for row, forecast in zip(map(published.named, published.rows), found, strict=True):
        name = ", ".join(str(row[c]) for c in keys) or "published"
        its = series.setdefault(name, Series(name, [], []))
        its.x.append(row[devices])
        its.y.append(row[value])
        forecasts.setdefault(name, []).append(forecast)
    y_label = with_unit(value)
    chart = Chart(
        f"{published.part or value} predicted",
        f"Published, and predicted from fewer devices: {y_label}",
        "lines",
        with_unit(devices),
        y_label,
        list(series.values()),
        legend=", ".join(map(with_unit, keys)),
        logarithmic=True,
    )
    limited = _limited(chart)
    if limited:
        _add_forecasts(limited, forecasts)
    return limited


def _add_forecasts(chart: Chart, forecasts: Mapping[str, Forecasts]) -> None:
    """Adds to a chart, for every series in it, the predicted points."""
    for series in list(chart.series):
        found = [f for f in forecasts.get(series.label, ()) if f]
        if found:
            chart.series.append(
                Series(
                    f"{series.label}, predicted",
                    [f.devices for f in found],
                    [f.median for f in found],
                    [f.low for f in found],
                    [f.high for f in found],
                    predicts=series.label,
                )
            )
    if any(s.predicts for s in chart.series):
        told = "Open markers: predicted from fewer devices, with what holds 90 %."
        chart.note = f"{chart.note} {told}".strip()


_Groups = dict[str, list[Row]]


def _groups(rows: Sequence[Row], fields: Sequence[str]) -> _Groups:
    """The measured rows by what they differ in besides devices, each by devices.

    Where one number of devices comes up twice, as with 2 nodes x 1 and 1 x 2, the processes of a
    node are part of the name.
    """
    found: _Groups = {}
    for row in rows:
        if row.finished and row.devices:
            name = ", ".join(str(v) for v in others(row, fields).values())
            found.setdefault(name, []).append(row)
    made: _Groups = {}
    for name, group in found.items():
        counts = [row.devices for row in group]
        for row in group:
            more = f"{row.value('nproc_per_node') or 'auto'} a node"
            its = name if len(set(counts)) == len(counts) else ", ".join(filter(None, (name, more)))
            made.setdefault(its or "measured", []).append(row)
    return made


def _series(key: str, groups: _Groups) -> list[Series]:
    made = []
    for name, rows in groups.items():
        points = [(r.devices, s) for r in rows if (s := r.measures.get(key)) and r.devices]
        if points:
            made.append(_of_spreads(name, points))
    return made


def _of_spreads(name: str, points: Sequence[tuple[float, Spread]]) -> Series:
    spreads = [s for _, s in points]
    low, high = [s.low for s in spreads], [s.high for s in spreads]
    return Series(name, [x for x, _ in points], [s.median for s in spreads], low, high)


def _limited(chart: Chart) -> Chart | None:
    """A chart with as many series as can be told apart; None: it has no data."""
    total = len(chart.series)
    if total > MOST_SERIES:
        chart.series = _spread_out(chart.series, MOST_SERIES)
        chart.note = f"{MOST_SERIES} of {total} series, evenly chosen; the tables have all."
    return chart if chart.series else None


def _spread_out(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of some values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _bars(key: str, title: str, groups: _Groups) -> Chart | None:
    label = MEASURES[key].label.replace(" /device", " per device")
    return _limited(Chart(key, title, "bars", DEVICES, label, _series(key, groups)))


def _lines(key: str, title: str, y_label: str, groups: _Groups) -> Chart | None:
    series = _series(key, groups)
    if len({x for s in series for x in s.x}) < 2:
        return None
    chart = Chart(key, title, "lines", DEVICES, y_label, series, logarithmic=True)
    limited = _limited(chart)
    if limited and key == FORECAST:
        _add_forecasts(limited, {n: [r.forecast for r in rows] for n, rows in groups.items()})
    return limited


def _speedups(groups: _Groups, published: Iterable[PublishedTable]) -> Chart | None:
    series = []
    for name, rows in groups.items():
        points = [(r.devices, s) for r in rows if (s := r.scaled.get("speedup")) and r.devices]
        if len(points) > 1:
            series.append(Series(name, [x for x, _ in points], [s for _, s in points]))
    if not series:
        return None
    chart = Chart("speedup", "Speedup", "lines", DEVICES, "speedup", series)
    bases = [r.baseline.devices for rows in groups.values() for r in rows if r.baseline]
    chart.ideal = min(filter(None, bases), default=1)
    chart = _limited(chart) or chart
    for table in published:
        for name, line in published_speedups(table).items():
            x, y = [x for x, _ in line], [y for _, y in line]
            chart.series.append(Series(f"published: {name}", x, y, published=True))
    return chart


def _phases(rows: Sequence[Row], fields: Sequence[str]) -> Chart | None:
    measured = [row for row in rows if row.median("train_s") is not None]
    shown = _spread_out(measured, MOST_BARS)
    if not shown:
        return None
    names = [f"{label(r, fields)} ({r.devices})" if r.devices else label(r, fields) for r in shown]
    series = []
    for phase in PHASES:
        values = [max(0.0, row.median(f"{phase}_s") or 0.0) for row in shown]
        series.append(
            Series(phase.replace("startup", "start-up"), [*map(float, range(len(shown)))], values)
        )
    chart = Chart(
        "phases",
        "Phases of a run, by cell (devices)",
        "stack",
        "cell (devices)",
        "time (s)",
        series,
    )
    chart.names, chart.legend = names, "phase"
    if len(shown) < len(measured):
        chart.note = f"{len(shown)} of {len(measured)} cells, evenly chosen; the tables have all."
    return chart


def _losses(rows: Sequence[Row], fields: Sequence[str]) -> Chart | None:
    """The losses of one run a cell; records are read of those alone that are shown."""
    begun = [row for row in rows if row.runs]
    shown = _spread_out(begun, MOST_SERIES)
    series = []
    for row in shown:
        run = (row.finished or row.runs)[0]
        x, y = thinned(_loss_points(run))
        if len(x) > 1:
            name = label(row, fields) if fields else run.name
            series.append(Series(name, x, y))
    if not series:
        return None
    chart = Chart(
        "loss", "Training loss", "curves", "optimizer step", "loss", series, legend="cell"
    )
    if len(shown) < len(begun):
        chart.note = f"one run each of {len(shown)} of {len(begun)} cells, evenly chosen."
    return chart


def _loss_points(run: MeasuredRun) -> list[tuple[float, float]]:
    """Step and loss; of steps that were done again the last time counts."""
    points = {}
    for record in run.records("step"):
        step, loss = record.get("step"), record.get("loss")
        if isinstance(step, int) and isinstance(loss, (int, float)):
            points[float(step)] = float(loss)
    return sorted(points.items())


def thinned(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS points: means of neighbours, so that no outlier is chosen by chance."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    x = [sum(p[0] for p in group) / len(group) for group in groups]
    y = [sum(p[1] for p in group) / len(group) for group in groups]
    return x, y
