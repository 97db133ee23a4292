"""Plots of measurements: their points, which the page lists too, and their drawing.

Only this module imports matplotlib, and only to draw.
"""

import importlib.util
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from slurmft.core import descent
from slurmft.core.files import is_number
from slurmft.core.run_records import Epoch, Record, Step
from slurmft.plugins.studies.cells import DEVICE_FIELDS
from slurmft.plugins.studies.published import PublishedTable, with_unit
from slurmft.plugins.studies.report import measures
from slurmft.plugins.studies.report.formats import printable
from slurmft.plugins.studies.report.matching import keys_of
from slurmft.plugins.studies.report.measures import Row, RunSet, Spread, label
from slurmft.plugins.studies.table import (
    Column,
    Table,
    Value,
    column,
    decimals_of,
    setting_text,
    without_folders,
)
from slurmft.runs.records import add_point
from slurmft.runs.scan import MeasuredRun

HINT = "plots need matplotlib: pip install matplotlib"

_MOST_SERIES = 8
"""More cannot be distinguished in print."""
_MOST_POINTS = 300
"""Points of a curve; of more, neighbouring ones are averaged."""

_OVER_DEVICES = {
    "train_samples_per_s_per_device": "Training throughput of a device",
    "evaluate_samples_per_s_per_device": "Evaluation throughput of a device",
    "train_s": "Training time",
    "wall_s": "Time of the whole job",
    "metric_s_per_evaluation": "Metric of one evaluation",
    "broadcast_ms_per_evaluation": "Broadcast of its result",
}
"""Measures of a training that are plotted over its devices, with the title of the plot."""

Points = list[tuple[float, Spread]]


@dataclass(slots=True)
class Chart:
    """One plot."""

    key: str
    """For file names and ids."""
    title: str
    x_label: str
    y_label: str
    series: dict[str, Points]
    """Name -> points."""
    are_curves: bool = False
    """Whether the series are curves of many points, without a marker for each."""
    legend: str = ""
    """The settings whose values the names are."""
    ideal: float | None = None
    """The devices at which the line of ideal speedups has the value 1."""
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """Returns the points of the plot; of curves about ten each."""
        names = []
        places = []
        heights = []
        all_heights: list[float] = []
        for name, points in self.series.items():
            stride = 1
            if self.are_curves:
                stride = max(1, len(points) // 10)
            for x, spread in points[::stride]:
                names.append(name)
                places.append(Value(x, f"{x:g}"))
                heights.append(spread.median)
            all_heights += [spread.median for _, spread in points]
        # By all points, so that the decimals do not depend on which of a curve are listed.
        decimals = decimals_of(all_heights)
        columns = [
            column("series", names, label=self.legend or "series", numeric=False),
            Column("x", places, self.x_label),
            column("y", heights, decimals, label=self.y_label),
        ]
        return Table(self.title, columns)


# --- what is plotted ------------------------------------------------------------------------------


def charts_of(
    rows: Sequence[Row],
    runset: RunSet,
    published: Iterable[PublishedTable],
) -> list[Chart]:
    """Returns all plots of a set of runs that have data."""
    curves = _curves(rows, runset.fields)
    if runset.is_own_program:
        return _over_field(rows, runset) + curves
    return _over_devices(rows, runset, published) + curves


def _over_field(rows: Sequence[Row], runset: RunSet) -> list[Chart]:
    """Plots what programs of the user's own measured over the only setting that varies, if it has
    numbers."""
    if len(runset.fields) != 1:
        return []
    (name,) = runset.fields
    by_value: list[tuple[float, Row]] = []
    for row in rows:
        if not row.finished:
            continue
        value: Any = row.cell.get(name)
        if not is_number(value):
            return []
        by_value.append((float(value), row))
    by_value.sort(key=itemgetter(0))  # rows themselves have no order
    charts = []
    for measure in measures.measures_of(runset):
        points = []
        for place, row in by_value:
            spread = row.measures.get(measure.key)
            if spread:
                points.append((place, spread))
        # A single point is no course over the field.
        if len(points) > 1:
            title = f"{measure.label} over {name}"
            chart = Chart(
                key=measure.key,
                title=title,
                x_label=name,
                y_label=measure.label,
                series={"measured": points},
            )
            charts.append(chart)
    return charts


def _over_devices(
    rows: Sequence[Row],
    runset: RunSet,
    published: Iterable[PublishedTable],
) -> list[Chart]:
    """Plots the measures over devices, and the speedup beside the published ones."""
    groups = _groups(rows, runset.fields)
    legend_names = []
    for name in runset.fields:
        if name not in DEVICE_FIELDS:  # the devices are on the x-axis
            legend_names.append(name.replace("_", " "))
    legend = ", ".join(legend_names)
    labels = {measure.key: measure.label for measure in measures.measures_of(runset)}
    labels["metric"] = measures.metric_name(rows)
    other_metrics = [measure.key for measure in measures.other_metrics(runset)]
    titles = dict(_OVER_DEVICES)
    for key in ("metric", *other_metrics):
        titles[key] = f"{labels[key]} of the last evaluation"
    titles["speedup"] = "Speedup"
    charts = []
    for key, title in titles.items():
        series = _series_over_devices(key, groups)
        places: set[float] = set()
        for points in series.values():
            places.update(x for x, _ in points)
        if len(places) < 2:  # all on one number of devices: nothing to see
            continue
        chosen = _spread_out(list(series), _MOST_SERIES)
        plotted = {name: series[name] for name in chosen}
        chart = Chart(
            key=key,
            title=title,
            x_label="devices (ranks)",
            y_label=labels.get(key, key),
            series=plotted,
            legend=legend,
        )
        if len(series) > len(plotted):
            counts = f"{len(plotted)} of {len(series)} series"
            chart.notes.append(f"{counts}, evenly chosen; the tables have all.")
        if key == "speedup":
            _add_comparisons(chart, rows, published)
        charts.append(chart)
    return charts


def _series_over_devices(key: str, groups: dict[str, list[Row]]) -> dict[str, Points]:
    """Returns the points of a measure; groups that lack it are left out."""
    series: dict[str, Points] = {}
    for name, rows in groups.items():
        points = []
        for row in rows:
            spread = row.measures.get(key)
            if row.devices and spread:
                points.append((float(row.devices), spread))
        if points:
            series[name] = points
    return series


def _add_comparisons(
    chart: Chart,
    rows: Sequence[Row],
    published: Iterable[PublishedTable],
) -> None:
    """Adds the ideal and the published speedups to the plot of ours."""
    # Several baselines have several ideal lines; the plot has that of the smallest.
    bases = []
    for row in rows:
        if row.baseline and row.baseline.devices:
            bases.append(row.baseline.devices)
    chart.ideal = min(bases, default=1)
    for table in published:
        chart.series |= _published_speedups(table)


def _groups(rows: Sequence[Row], fields: Sequence[str]) -> dict[str, list[Row]]:
    """Groups the measured rows by their fields other than devices.

    Where a number of devices occurs twice, as 2 nodes x 1 and 1 x 2, the name has the processes per
    node, too.
    """
    named_rows = []
    counts: Counter[tuple[str, int]] = Counter()
    for row in rows:
        if row.finished and row.devices:
            settings = measures.others(row, fields).values()
            name = ", ".join(map(setting_text, settings))
            named_rows.append((name, row))
            counts[name, row.devices] += 1
    ambiguous = set()
    for (name, _), count in counts.items():
        if count > 1:
            ambiguous.add(name)
    groups: dict[str, list[Row]] = {}
    for name, row in named_rows:
        parts = []
        if name:  # "": the rows differ in their devices only
            parts.append(name)
        if name in ambiguous:
            processes = row.value("nproc_per_node") or "auto"
            parts.append(f"{processes} a node")
        full_name = ", ".join(parts) or "measured"
        members = groups.setdefault(full_name, [])
        members.append(row)
    return groups


def _published_speedups(table: PublishedTable) -> dict[str, Points]:
    """Returns the published speedups that are numbers, by the other columns that name a row."""
    if not {"speedup", "gpus"} <= set(table.columns):
        return {}
    # which are on the x-axis
    columns = [name for name in keys_of(table) if name != "gpus"]
    series: dict[str, Points] = {}
    for row in table.rows:
        gpus = row["gpus"]
        speedup = row["speedup"]
        # A paper may have left a place empty, or written a word there.
        if is_number(speedup) and is_number(gpus):
            settings = []
            for column_name in columns:
                settings.append(f"{with_unit(column_name)} {row[column_name]}")
            # Where devices alone name a row, the table is one line.
            name = ", ".join(settings) or "speedup"
            points = series.setdefault(f"published: {name}", [])
            points.append((gpus, Spread.of(speedup)))
    return series


def _spread_out(values: Sequence[str], most: int) -> list[str]:
    """Returns at most so many of the values, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return list(values)
    # Evenly, as rows are sorted by their settings: the first ones would be much alike.
    stride = (len(values) - 1) / (most - 1)
    chosen = []
    for number in range(most):
        place = round(number * stride)
        chosen.append(values[place])
    return chosen


# --- curves ---------------------------------------------------------------------------------------


class _Curve(NamedTuple):
    """A plot that a run has one curve of."""

    key: str
    title: str
    x_label: str
    y_label: str


_LOSS = _Curve("loss", "Training loss", "optimizer step", "loss")
_LOSS_OVER_EPOCHS = _Curve("loss-epochs", "Training loss over epochs", "epoch", "loss")


def _curves(rows: Sequence[Row], fields: Sequence[str]) -> list[Chart]:
    """Plots the loss over steps and over epochs, and the metrics of the evaluations, of one run of
    each cell that is shown; of a single cell, of its runs. Only their records are read."""
    begun = [row for row in rows if row.runs]
    runs: dict[str, MeasuredRun] = {}
    if len(begun) == 1:
        legend = "run"
        (row,) = begun
        for run in row.runs:
            runs[run.name] = run
    else:
        legend = "cell"
        for row in begun:
            # A run that has not finished has a curve, too, if a shorter one.
            first, *_ = row.finished or row.runs
            runs[label(row, fields)] = first
    # Before any records are read: those of a long run have many lines.
    names = _spread_out(list(runs), _MOST_SERIES)
    charts: dict[str, Chart] = {}
    for name in names:
        for curve, points in _curves_of(runs[name]).items():
            if len(points) > 1:
                new_chart = Chart(*curve, series={}, are_curves=True, legend=legend)
                chart = charts.setdefault(curve.key, new_chart)
                chart.series[name] = points
    if len(names) < len(runs):
        for chart in charts.values():
            note = f"one run each of {len(names)} of {len(runs)} cells, evenly chosen."
            chart.notes.append(note)
    return list(charts.values())


def _curves_of(run: MeasuredRun) -> dict[_Curve, Points]:
    """Returns the curves of a run; of a step that was repeated after a restart, the last point."""
    losses: list[tuple[float, float]] = []
    steps_per_epoch = 0.0
    metrics: dict[_Curve, dict[float, float]] = {}
    for record in run.records(Record):
        if isinstance(record, Step):
            # Not every step has a loss, and one that diverges has no place on an axis.
            if record.loss is None or not math.isfinite(record.loss):
                continue
            # A step that was repeated takes the place of the points from it on.
            add_point(losses, record.step, record.loss)
            # The curve over epochs is the same points in another unit.
            if record.epoch:
                steps_per_epoch = record.step / record.epoch
        elif isinstance(record, Epoch) and record.epoch:
            for name, value in record.metrics.items():
                if value is not None:
                    title = f"{name} of the evaluations"
                    curve = _Curve(f"metric-{name}", title, "epoch", name)
                    values = metrics.setdefault(curve, {})
                    # By epoch: of one that was evaluated again, the last value stays.
                    values[record.epoch] = value
    means = _means(losses)
    curves = {_LOSS: dict(means)}
    curves |= metrics
    if steps_per_epoch:
        over_epochs = {}
        for step, loss in means:
            over_epochs[step / steps_per_epoch] = loss
        curves[_LOSS_OVER_EPOCHS] = over_epochs
    points_of: dict[_Curve, Points] = {}
    for curve, heights in curves.items():
        # Sorted: after a restart, an earlier epoch comes again.
        points: Points = []
        for x, y in sorted(heights.items()):
            points.append((x, Spread.of(y)))
        points_of[curve] = points
    return points_of


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the means of neighbouring points, at most `_MOST_POINTS`."""
    # without points, any size will do
    size = math.ceil(len(points) / _MOST_POINTS) or 1
    means = []
    for first in range(0, len(points), size):
        neighbours = points[first : first + size]
        step = fmean(step for step, _ in neighbours)
        value = fmean(value for _, value in neighbours)
        means.append((step, value))
    return means


# --- drawing --------------------------------------------------------------------------------------

_WIDTH_IN = 5.5
"""The text width of most papers."""


def is_available() -> bool:
    """Returns whether matplotlib is installed; it is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart) -> tuple[str, bytes]:
    """Draws a chart as SVG (a whole file) and PNG (200 dots per inch)."""
    # matplotlib takes settings from a `matplotlibrc` in the present folder, whoever has made it.
    with descent.away_from_here():
        from matplotlib import style

        # not pyplot, which chooses a backend and keeps figures
        from matplotlib.figure import Figure

    with style.context(Path(__file__).with_suffix(".mplstyle")):
        labels = [printable(name) for name in _shortened(list(chart.series))]
        longest = max(len(text) for text in labels)
        # The legend is as wide as 90 characters; its line and gaps take 8 of each entry.
        columns = max(1, 90 // (longest + 8))
        height_in = 2.7 + 0.17 * (len(labels) // columns)
        figure = Figure(figsize=(_WIDTH_IN, height_in))
        axes = figure.add_subplot()
        axes.set(
            title=printable(chart.title),
            xlabel=printable(chart.x_label),
            ylabel=printable(chart.y_label),
        )
        _lines(axes, chart, labels)
        # A single line needs a legend only where its name says something.
        if len(labels) > 1 or labels[0] != "measured":
            figure.legend(
                loc="outside lower left",
                ncols=columns,
                title=printable(chart.legend) or None,
                alignment="left",
            )
        png = io.BytesIO()
        svg = io.StringIO()
        # Without a date, so that the same runs give the same files.
        figure.savefig(png, format="png", dpi=200, metadata={"Software": "slurmft"})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue(), png.getvalue()


def _shortened(names: Sequence[str]) -> list[str]:
    """Returns labels for the legend: long ones lose the folders of paths, then their middle."""
    labels = []
    for text in without_folders(names):
        # 28 characters, 3 dots and 29 characters: 60 in all.
        if len(text) > 60:
            start = text[:28]
            end = text[-29:]
            text = f"{start}...{end}"
        if text.startswith("_"):  # matplotlib leaves such labels out
            text = f" {text}"
        labels.append(text)
    return labels


def _lines(axes: Any, chart: Chart, labels: Sequence[str]) -> None:
    """Draws lines over devices or another field, with the range of the repeats; or curves."""
    for (name, points), label_text in zip(chart.series.items(), labels, strict=True):
        x = [place for place, _ in points]
        y = [spread.median for _, spread in points]
        below = []
        above = []
        for _, spread in points:
            below.append(spread.median - spread.low)
            above.append(spread.high - spread.median)
        # Bars of length 0 would be dashes through the markers of runs without repeats.
        has_ranges = any(below) or any(above)
        ranges = [below, above] if has_ranges else None
        style: dict[str, Any] = {}
        if chart.are_curves:
            # of the diagonal: a few marks tell lines apart in grey
            style["markevery"] = 0.2
        if name.startswith("published: "):
            style |= {"color": "#555555", "mfc": "white"}
        axes.errorbar(x, y, ranges, label=label_text, elinewidth=0.8, **style)
    if not chart.are_curves:
        _scale_axes(axes, chart)


def _scale_axes(axes: Any, chart: Chart) -> None:
    """Draws the ideal speedup, and makes the axes logarithmic where that shows more."""
    from matplotlib.ticker import LogLocator

    all_points: Points = []
    for points in chart.series.values():
        all_points += points
    places = sorted({x for x, _ in all_points})
    lowest = min(spread.low for _, spread in all_points)
    if chart.ideal:
        most = places[-1]
        speedups = [1, most / chart.ideal]
        axes.plot(
            [chart.ideal, most], speedups, color="#888888", marker="", label="ideal"
        )
    if places[0] > 0:
        axes.set_xscale("log", base=2)  # numbers of devices are mostly powers of 2
    # Over logarithmic devices, the ideal speedup is a straight line only on a logarithmic axis.
    if lowest > 0 and (chart.ideal or axes.get_ylim()[1] > 3 * lowest):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        # From 0 on: cut off below, small differences would look large.
        axes.set_ylim(bottom=min(0, lowest))
    # Only numbers of devices that were measured have a tick.
    tick_labels = [f"{x:g}" for x in places]
    axes.set_xticks(places, tick_labels)
    axes.minorticks_off()
