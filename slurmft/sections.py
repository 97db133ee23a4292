"""The parts of a report: for every study, and every file of published tables, what to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slurmft.charts import Chart, charts_of, published_chart, published_speedup_chart
from slurmft.counterparts import beside, keys_of, matches, measured_of
from slurmft.measured import data_table, phase_table, rows_of, speed_table
from slurmft.origins import changes, origins
from slurmft.published import PublishedTable
from slurmft.runsets import RunSet
from slurmft.tabular import Table


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


def slug(text: str) -> str:
    """Text as a part of a file name or an HTML id: letters, digits, hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "report"


def of_runs(runset: RunSet, published: Sequence[PublishedTable]) -> Section:
    """The section of a set of runs, with published tables beside ours."""
    rows = rows_of(runset)
    speed = speed_table(rows, runset)
    changed = changes(rows, runset.fields)
    speed = replace(speed, notes=[*speed.notes, *changed])
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
            told = theirs.told if is_last else ()  # of all tables of a file, once
            tables.append(replace(table, notes=[*table.notes, *changed, *told]))
    return Section(
        key=key,
        title=runset.title,
        tables=tables,
        data=data,
        make_charts=lambda: charts_of(rows, runset, published),
        origins=origins(rows),
        problems=problems,
    )


def of_published(tables: Sequence[PublishedTable]) -> Section:
    """The section of a file of published tables, as they were published."""
    shown = [table.layout() for table in tables]
    shown[-1] = replace(shown[-1], notes=tables[-1].told)  # the file's, so once

    def make_charts() -> list[Chart]:
        made = [f(t) for t in tables for f in (published_chart, published_speedup_chart)]
        return [chart for chart in made if chart]

    first = tables[0]
    return Section(
        key=f"published-{slug(first.file)}",
        title=f"Published: {first.work}",
        tables=shown,
        data=[(f"published-{slug(t.key)}", t.layout()) for t in tables],
        make_charts=make_charts,
    )
