"""What the plots show, as data; `plots` draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmft.core.files import is_number
from slurmft.runs.records import Curve
from slurmft.runs.scan import MeasuredRun
from slurmft.studies.published import PublishedTable, with_unit
from slurmft.studies.report.formats import Column, Table, Value, decimals_of
from slurmft.studies.report.matching import keys_of
from slurmft.studies.report.measures import (
    DEVICE_FIELDS,
    MEASURES,
    PHASES,
    Row,
    label,
    measures_of,
    others,
)
from slurmft.studies.report.runset import RunSet

MOST_SERIES = 8
"""More cannot be distinguished in print."""
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
    """stack: the names of the bars, which x indexes."""
    ideal: float | None = None
    """The devices at which the line of ideal speedups has the value 1."""
    logarithmic: bool = False
    note: str = ""

    def _at(self, x: float) -> str:
        return self.names[int(x)] if self.names else f"{x:g}"

    def table(self) -> Table:
        """The points of the plot; of curves about ten each."""
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
                rows.append([Value.of(s.label), at, Value.rounded(y, decimals)])
        return Table(self.title, columns, rows)


def charts_of(
    rows: Sequence[Row], runset: RunSet, published: Iterable[PublishedTable]
) -> list[Chart]:
    """All plots of a set of runs that have data."""
    if runset.is_own:
        made = [*_over_field(rows, runset), _losses(rows, runset.fields)]
        return [chart for chart in made if chart]
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
    charts = [chart for chart in made if chart]
    for chart in charts:
        chart.legend = chart.legend or legend
    return charts


def _over_field(rows: Sequence[Row], runset: RunSet) -> list[Chart | None]:
    """What was measured over the only field that varies, and has numbers."""
    name, *more = runset.fields or [""]
    found = [row for row in rows if row.finished]
    if more or not all(is_number(row.cell.get(name)) for row in found):
        return []
    found.sort(key=lambda row: float(row.cell[name]))
    made = [(m, _series(m.key, {"measured": found}, name)) for m in measures_of(runset)]
    return [
        Chart(measure.key, f"{measure.label} over {name}", "lines", name, measure.label, series)
        for measure, series in made
        if _has_two_places(series)
    ]


def _published_speedups(table: PublishedTable) -> list[Series]:
    """The published speedups that are numbers, by the other columns that name a row."""
    if not {"speedup", "gpus"} <= set(table.columns):
        return []
    columns = [c for c in keys_of(table) if c != "gpus"]
    series: dict[str, Series] = {}
    for row in map(table.named, table.rows):
        if is_number(row["gpus"]) and is_number(row["speedup"]):
            words = ", ".join(f"{with_unit(c)} {row[c]}" for c in columns)
            name = f"published: {words or 'speedup'}"
            points = series.setdefault(name, Series(name, [], [], published=True))
            points.x.append(row["gpus"])
            points.y.append(row["speedup"])
    return list(series.values())


_Groups = dict[str, list[Row]]


def _groups(rows: Sequence[Row], fields: Sequence[str]) -> _Groups:
    """The measured rows by their fields other than devices.

    Where a number of devices occurs twice, as 2 nodes x 1 and 1 x 2, the name has the processes per
    node, too.
    """
    named = [
        (", ".join(str(v) for v in others(row, fields).values()), row)
        for row in rows
        if row.finished and row.devices
    ]
    counts = Counter((name, row.devices) for name, row in named)
    ambiguous = {name for (name, _), count in counts.items() if count > 1}
    groups: _Groups = {}
    for name, row in named:
        processes = f"{row.value('nproc_per_node') or 'auto'} a node" if name in ambiguous else ""
        full_name = ", ".join(filter(None, (name, processes))) or "measured"
        groups.setdefault(full_name, []).append(row)
    return groups


def _series(key: str, groups: _Groups, field: str = "") -> list[Series]:
    """The medians of a measure with smallest and largest, over devices or another field."""
    made = []
    for name, rows in groups.items():
        at = [(r.cell[field] if field else r.devices, r.measures.get(key)) for r in rows]
        points = [(x, s) for x, s in at if s and x is not None]
        spreads = [s for _, s in points]
        low, high = [s.low for s in spreads], [s.high for s in spreads]
        made.append(Series(name, [x for x, _ in points], [s.median for s in spreads], low, high))
    return [series for series in made if series.x]


def _has_two_places(series: Sequence[Series]) -> bool:
    return len({x for s in series for x in s.x}) > 1


def _limited(chart: Chart) -> Chart | None:
    """A chart with at most MOST_SERIES series; None: it has no data."""
    total = len(chart.series)
    if total > MOST_SERIES:
        chart.series = _spread_out(chart.series, MOST_SERIES)
        chart.note = f"{MOST_SERIES} of {total} series, evenly chosen; the tables have all."
    return chart if chart.series else None


def _spread_out(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _bars(key: str, title: str, groups: _Groups) -> Chart | None:
    label = MEASURES[key].label.replace(" /device", " per device")
    return _limited(Chart(key, title, "bars", DEVICES, label, _series(key, groups)))


def _lines(key: str, title: str, y_label: str, groups: _Groups) -> Chart | None:
    series = _series(key, groups)
    if not _has_two_places(series):
        return None
    return _limited(Chart(key, title, "lines", DEVICES, y_label, series, logarithmic=True))


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
        chart.series += _published_speedups(table)
    return chart


def _phases(rows: Sequence[Row], fields: Sequence[str]) -> Chart | None:
    measured = [row for row in rows if row.median("train_s") is not None]
    shown = _spread_out(measured, MOST_BARS)
    if not shown:
        return None
    places = [float(i) for i in range(len(shown))]
    series = [
        Series(
            phase.replace("startup", "start-up"),
            places,
            [max(0.0, row.median(f"{phase}_s") or 0.0) for row in shown],
        )
        for phase in PHASES
    ]
    title, x_label = "Phases of a run, by cell (devices)", "cell (devices)"
    chart = Chart("phases", title, "stack", x_label, "time (s)", series, legend="phase")
    chart.names = [label(r, fields) + (f" ({r.devices})" if r.devices else "") for r in shown]
    if len(shown) < len(measured):
        chart.note = f"{len(shown)} of {len(measured)} cells, evenly chosen; the tables have all."
    return chart


def _losses(rows: Sequence[Row], fields: Sequence[str]) -> Chart | None:
    """The losses of one run of each cell that is shown; only their records are read."""
    begun = [row for row in rows if row.runs]
    shown = _spread_out(begun, MOST_SERIES)
    series = []
    for row in shown:
        run = (row.finished or row.runs)[0]
        points = _loss_points(run)
        if len(points) > 1:
            name = label(row, fields) if fields else run.name
            series.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    if not series:
        return None
    chart = Chart("loss", "Training loss", "curves", "optimizer step", "loss", series, "cell")
    if len(shown) < len(begun):
        chart.note = f"one run each of {len(shown)} of {len(begun)} cells, evenly chosen."
    return chart


def _loss_points(run: MeasuredRun) -> list[tuple[float, float]]:
    """Step and loss; of a step that was repeated after a restart, the last."""
    curve = Curve(MOST_POINTS)
    for record in run.records("step"):
        step, loss = record.get("step"), record.get("loss")
        if isinstance(step, int) and isinstance(loss, (int, float)):
            curve.add(step, float(loss))
    return curve.points()
