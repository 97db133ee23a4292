"""Draws charts by matplotlib, which only this module imports, and only to draw."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from typing import Any

from slurmft.studies.report.charts import Chart, Series

HINT = "plots need matplotlib: pip install matplotlib"

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
"""Okabe and Ito's palette for the colour-blind; its yellow, faint on paper, is replaced by grey."""
_MARKERS = "osD^vPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")
"""Besides the colours, for prints in grey."""

_STYLE = {
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "patch.linewidth": 0.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "slurmft",
}
_WIDTH_IN = 5.5
"""The text width of most papers."""


def is_available() -> bool:
    """Whether matplotlib is installed; it is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart) -> tuple[str, bytes]:
    """A chart as SVG (a whole file) and PNG (200 dots per inch)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, _height_in(chart)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        {"bars": _bars, "lines": _lines, "stack": _stack, "curves": _curves}[chart.kind](
            axes, chart
        )
        axes.set_title(_plain(textwrap.fill(chart.title, 64)), loc="left", fontweight="bold")
        _add_legend(figure, axes, chart)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=200, metadata={"Software": "slurmft"})
        figure.set_layout_engine("none")  # keeps the layout of the first file for the second
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue(), png.getvalue()


def _height_in(chart: Chart) -> float:
    """Height of the plot with its legend."""
    if chart.kind == "stack":
        return 1.4 + 0.2 * len(chart.names)
    return 2.7 + 0.17 * _legend_lines([_name(series) for series in chart.series])


def _legend_lines(labels: list[str]) -> int:
    return -(-len(labels) // max(1, 90 // (max(map(len, labels)) + 8)))


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _add_legend(figure: Any, axes: Any, chart: Chart) -> None:
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [_name(series) for series in chart.series] + ["ideal"]
    labels = sorted(found, key=order.index)
    handles = [found[label] for label in labels]
    if not labels or (len(labels) < 2 and labels[0] in ("measured", "published")):
        return
    columns = -(-len(labels) // _legend_lines(labels))
    title = _plain(chart.legend) if chart.legend else None
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, title=title,
                  alignment="left", title_fontsize=7)  # fmt: skip


def _name(series: Series) -> str:
    """A label for the legend: long ones lose their middle, as paths differ at their ends."""
    text = series.label
    text = text if len(text) <= 60 else f"{text[:28]}...{text[-29:]}"
    # matplotlib leaves out labels that begin with an underscore
    return _plain(f" {text}" if text.startswith("_") else text)


def _errors(series: Series) -> Any:
    """Distances from the median to the smallest and the largest; None: one run each."""
    if series.low is None or series.high is None or series.low == series.high:
        return None
    down = [y - low for y, low in zip(series.y, series.low, strict=True)]
    up = [high - y for y, high in zip(series.y, series.high, strict=True)]
    return [down, up]


def _fill(i: int) -> dict[str, Any]:
    """Color and hatch of a bar; on dark colors the hatch is white."""
    edge = "white" if i in (0, 6) else "black"
    return {"color": _COLORS[i], "hatch": _HATCHES[i], "edgecolor": edge}


def _bars(axes: Any, chart: Chart) -> None:
    """Groups by x, with a bar for each series."""
    places = sorted({x for s in chart.series for x in s.x})
    width = 0.84 / len(chart.series)
    for i, series in enumerate(chart.series):
        shift = (i - (len(chart.series) - 1) / 2) * width
        axes.bar(
            [places.index(x) + shift for x in series.x],
            series.y,
            width * 0.94,
            yerr=_errors(series),
            label=_name(series),
            error_kw={"elinewidth": 0.8},
            **_fill(i),
        )
    axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    axes.grid(False, axis="x")
    _label(axes, chart)


def _lines(axes: Any, chart: Chart) -> None:
    """Lines over devices, on a logarithmic axis."""
    places = sorted({x for s in chart.series for x in s.x})
    for i, series in enumerate(s for s in chart.series if not s.published):
        axes.errorbar(
            series.x,
            series.y,
            yerr=_errors(series),
            label=_name(series),
            color=_COLORS[i],
            marker=_MARKERS[i],
            linestyle=_DASHES[i % len(_DASHES)],
            elinewidth=0.8,
        )
    for i, series in enumerate(s for s in chart.series if s.published):
        axes.plot(series.x, series.y, label=_name(series), color="#555555", marker=_MARKERS[i % 8],
                  markerfacecolor="white", linestyle=_DASHES[1 + i % 3], linewidth=1)  # fmt: skip
    if chart.ideal:
        ends = [chart.ideal, places[-1]]
        ideal = [1, ends[1] / ends[0]]
        axes.plot(ends, ideal, color="#888888", linewidth=0.9, label="ideal", zorder=1)
    if len(places) > 1 and places[0] > 0:
        axes.set_xscale("log", base=2)
        if chart.logarithmic or chart.ideal:
            _logarithmic_y(axes, chart)
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.minorticks_off()
    _label(axes, chart)


def _logarithmic_y(axes: Any, chart: Chart) -> None:
    """A logarithmic axis with plain numbers, where the values are positive and differ much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    values = [y for s in chart.series for y in s.y]
    if min(values) <= 0 or (max(values) < 3 * min(values) and not chart.ideal):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log", base=2 if chart.ideal else 10)
    wide = max(values) > 50 * min(values)
    if not chart.ideal:
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _stack(axes: Any, chart: Chart) -> None:
    """A horizontal bar for every cell, stacked from its parts."""
    lefts = [0.0] * len(chart.names)
    for i, series in enumerate(chart.series):
        axes.barh(series.x, series.y, 0.72, left=lefts, label=_name(series), **_fill(i))
        lefts = [left + y for left, y in zip(lefts, series.y, strict=True)]
    axes.set_yticks(range(len(chart.names)), [_plain(n[:60]) for n in chart.names])
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel(chart.y_label)


def _curves(axes: Any, chart: Chart) -> None:
    """Lines of many points, with few markers."""
    from matplotlib.ticker import MaxNLocator

    for i, series in enumerate(chart.series):
        axes.plot(series.x, series.y, label=_name(series), color=_COLORS[i], linewidth=1.1,
                  linestyle=_DASHES[i % len(_DASHES)], marker=_MARKERS[i], markersize=3.5,
                  markevery=(0.02 * i, 0.2))  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, chart)


def _label(axes: Any, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
