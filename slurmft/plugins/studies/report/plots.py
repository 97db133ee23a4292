"""Plots of what runs measured: their points, which the page lists too, and their drawing by
matplotlib, which only this module imports, and only to draw."""

import importlib.util
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from slurmft.core.files import is_number
from slurmft.plugins.studies.cells import DEVICE_FIELDS
from slurmft.plugins.studies.published import PublishedTable, with_unit
from slurmft.plugins.studies.report import measures
from slurmft.plugins.studies.report.matching import keys_of
from slurmft.plugins.studies.report.measures import Row, RunSet, Spread, label
from slurmft.plugins.studies.table import Column, Table, Value, column, decimals_of, without_folders
from slurmft.runs.records import add_point
from slurmft.runs.scan import MeasuredRun

HINT = "plots need matplotlib: pip install matplotlib"

_MOST_SERIES = 8
"""More cannot be distinguished in print."""
_MOST_POINTS = 300

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
    """What the names are values of."""
    ideal: float | None = None
    """The devices at which the line of ideal speedups has the value 1."""
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """The points of the plot; of curves about ten each."""
        found = [
            (name, x, y.median)
            for name, points in self.series.items()
            for x, y in points[:: max(1, len(points) // 10) if self.are_curves else 1]
        ]
        names, places, heights = zip(*found, strict=True)
        decimals = decimals_of(y.median for points in self.series.values() for _, y in points)
        columns = [
            column("series", names, label=self.legend or "series", numeric=False),
            Column("x", [Value(x, f"{x:g}") for x in places], self.x_label),
            column("y", heights, decimals, label=self.y_label),
        ]
        return Table(self.title, columns)


# --- what is plotted ------------------------------------------------------------------------------


def charts_of(
    rows: Sequence[Row], runset: RunSet, published: Iterable[PublishedTable]
) -> list[Chart]:
    """All plots of a set of runs that have data."""
    own = _over_field(rows, runset) if runset.is_own else _over_devices(rows, runset, published)
    return own + _curves(rows, runset.fields)


def _over_field(rows: Sequence[Row], runset: RunSet) -> list[Chart]:
    """What programs of the user's own measured over the only field that varies, and has numbers."""
    name, *more = runset.fields or [""]
    found = [row for row in rows if row.finished]
    if more or not all(is_number(row.cell.get(name)) for row in found):
        return []
    found.sort(key=lambda row: float(row.cell[name]))
    points = {
        m: [(float(r.cell[name]), s) for r in found if (s := r.measures.get(m.key))]
        for m in measures.measures_of(runset)
    }
    return [
        Chart(m.key, f"{m.label} over {name}", name, m.label, {"measured": values})
        for m, values in points.items()
        if len(values) > 1
    ]


def _over_devices(
    rows: Sequence[Row], runset: RunSet, published: Iterable[PublishedTable]
) -> list[Chart]:
    """The measures over devices, and the speedup beside the published ones."""
    groups, charts = _groups(rows, runset.fields), []
    legend = ", ".join(f.replace("_", " ") for f in runset.fields if f not in DEVICE_FIELDS)
    labels = {m.key: m.label for m in measures.measures_of(runset)}
    labels["metric"] = measures.metric_name(rows)
    metrics = ["metric", *(m.key for m in measures.other_metrics(runset))]
    titles = _OVER_DEVICES | {key: f"{labels[key]} of the last evaluation" for key in metrics}
    for key, title in (*titles.items(), ("speedup", "Speedup")):
        found: dict[str, Points] = {
            name: [(r.devices, r.measures[key]) for r in members if r.devices and key in r.measures]
            for name, members in groups.items()
        }
        names = [name for name, points in found.items() if points]
        if len({x for points in found.values() for x, _ in points}) < 2:
            continue
        series = {name: found[name] for name in _spread_out(names, _MOST_SERIES)}
        y_label = labels.get(key, key)
        chart = Chart(key, title, "devices (ranks)", y_label, series, legend=legend)
        if len(names) > len(series):
            counted = f"{len(series)} of {len(names)} series"
            chart.notes.append(f"{counted}, evenly chosen; the tables have all.")
        charts.append(chart)
        if key == "speedup":
            bases = [r.baseline.devices for r in rows if r.baseline and r.baseline.devices]
            chart.ideal = min(bases, default=1)
            for table in published:
                chart.series |= _published_speedups(table)
    return charts


def _groups(rows: Sequence[Row], fields: Sequence[str]) -> dict[str, list[Row]]:
    """The measured rows by their fields other than devices.

    Where a number of devices occurs twice, as 2 nodes x 1 and 1 x 2, the name has the processes per
    node, too.
    """
    named = [
        (", ".join(str(v) for v in measures.others(row, fields).values()), row)
        for row in rows
        if row.finished and row.devices
    ]
    counts = Counter((name, row.devices) for name, row in named)
    ambiguous = {name for (name, _), count in counts.items() if count > 1}
    groups: dict[str, list[Row]] = {}
    for name, row in named:
        processes = f"{row.value('nproc_per_node') or 'auto'} a node" if name in ambiguous else ""
        full_name = ", ".join(filter(None, (name, processes))) or "measured"
        groups.setdefault(full_name, []).append(row)
    return groups


def _published_speedups(table: PublishedTable) -> dict[str, Points]:
    """The published speedups that are numbers, by the other columns that name a row."""
    if not {"speedup", "gpus"} <= set(table.columns):
        return {}
    columns = [c for c in keys_of(table) if c != "gpus"]
    series: dict[str, Points] = {}
    for row in table.rows:
        if is_number(row["speedup"]) and is_number(row["gpus"]):
            words = ", ".join(f"{with_unit(c)} {row[c]}" for c in columns)
            points = series.setdefault(f"published: {words or 'speedup'}", [])
            points.append((row["gpus"], Spread.of(row["speedup"])))
    return series


def _spread_out(values: Sequence[str], most: int) -> list[str]:
    """At most so many of the values, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _curves(rows: Sequence[Row], fields: Sequence[str]) -> list[Chart]:
    """The loss over steps and over epochs, and the metrics of the evaluations, of one run of each
    cell that is shown; of a single cell, of its runs. Only their records are read."""
    begun = [row for row in rows if row.runs]
    shown = {label(row, fields): (row.finished or row.runs)[0] for row in begun}
    if len(begun) == 1:
        shown = {run.name: run for run in begun[0].runs}
    legend, charts = "cell" if len(begun) > 1 else "run", dict[str, Chart]()
    names = _spread_out(list(shown), _MOST_SERIES)
    for name in names:
        for words, points in _curves_of(shown[name]).items():
            if len(points) > 1:
                new = Chart(*words, {}, are_curves=True, legend=legend)
                charts.setdefault(new.key, new).series[name] = points
    for chart in charts.values() if len(names) < len(shown) else ():
        chart.notes.append(f"one run each of {len(names)} of {len(shown)} cells, evenly chosen.")
    return list(charts.values())


def _curves_of(run: MeasuredRun) -> dict[tuple[str, str, str, str], Points]:
    """Key, title and labels of a curve -> its points; of a step that was repeated after a restart,
    the last."""
    losses, step_of_epoch = list[tuple[float, float]](), 0.0
    found: dict[tuple[str, str, str, str], dict[float, float]] = {}
    for record in run.records():
        event, epoch = record["event"], measures.number_of(record.get("epoch"))
        if event == "step" and record.get("loss") is not None:
            add_point(losses, record["step"], record["loss"])
            step_of_epoch = record["step"] / epoch if epoch else step_of_epoch
        for name, value in record["metrics"].items() if event == "epoch" and epoch else ():
            if value is not None:
                key = (f"metric-{name}", f"{name} of the evaluations", "epoch", name)
                found.setdefault(key, {})[epoch] = value
    size = math.ceil(len(losses) / _MOST_POINTS) or 1
    parts = (zip(*losses[i : i + size], strict=True) for i in range(0, len(losses), size))
    points = [(fmean(steps), fmean(values)) for steps, values in parts]
    found = {("loss", "Training loss", "optimizer step", "loss"): dict(points)} | found
    if step_of_epoch:
        over_epochs = ("loss-epochs", "Training loss over epochs", "epoch", "loss")
        found |= {over_epochs: {step / step_of_epoch: loss for step, loss in points}}
    return {what: [(x, Spread.of(y)) for x, y in sorted(v.items())] for what, v in found.items()}


# --- drawing --------------------------------------------------------------------------------------

_WIDTH_IN = 5.5
"""The text width of most papers."""


def is_available() -> bool:
    """Whether matplotlib is installed; it is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart) -> tuple[str, bytes]:
    """A chart as SVG (a whole file) and PNG (200 dots per inch)."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(Path(__file__).with_suffix(".mplstyle")):
        labels = _shortened(list(chart.series))
        columns = max(1, 90 // (max(map(len, labels)) + 8))
        figure = Figure(figsize=(_WIDTH_IN, 2.7 + 0.17 * (len(labels) // columns)))
        axes = figure.add_subplot()
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        _lines(axes, chart, labels)
        if len(labels) > 1 or labels[0] != "measured":
            legend = {"title": chart.legend or None, "alignment": "left"}
            figure.legend(loc="outside lower left", ncols=columns, **legend)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=200, metadata={"Software": "slurmft"})
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue(), png.getvalue()


def _shortened(names: Sequence[str]) -> list[str]:
    """Labels for the legend: long ones lose the folders of paths, then their middle."""
    cut = [n if len(n) <= 60 else f"{n[:28]}...{n[-29:]}" for n in without_folders(names)]
    # matplotlib leaves out labels that begin with an underscore
    return [f" {text}" if text.startswith("_") else text for text in cut]


def _lines(axes: Any, chart: Chart, labels: Sequence[str]) -> None:
    """Lines over devices or another field, with the range of the repeats; or curves."""
    from matplotlib.ticker import LogLocator

    for (name, points), words in zip(chart.series.items(), labels, strict=True):
        x, y = [x for x, _ in points], [s.median for _, s in points]
        ranges = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        style: dict[str, Any] = {"markevery": 0.2} if chart.are_curves else {}
        style |= {"color": "#555555", "mfc": "white"} if name.startswith("published: ") else {}
        some = ranges if any(map(any, ranges)) else None
        axes.errorbar(x, y, some, label=words, elinewidth=0.8, **style)
    if chart.are_curves:
        return
    places = sorted({x for points in chart.series.values() for x, _ in points})
    lows = [s.low for points in chart.series.values() for _, s in points]
    if chart.ideal:
        ideal = [1, places[-1] / chart.ideal]
        axes.plot([chart.ideal, places[-1]], ideal, color="#888888", marker="", label="ideal")
    if places[0] > 0:
        axes.set_xscale("log", base=2)
    if min(lows) > 0 and (chart.ideal or axes.get_ylim()[1] > 3 * min(lows)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0, *lows))
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.minorticks_off()
