"""The parts of a report: what it shows of every study, and of every file of published tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slurmft.studies.published import PublishedTable
from slurmft.studies.report.formats import Table
from slurmft.studies.report.matching import as_published, beside, keys_of, matches, measured_of
from slurmft.studies.report.measures import rows_of
from slurmft.studies.report.plots import Chart, charts_of
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


def of_runs(runset: RunSet, published: Sequence[PublishedTable]) -> Section:
    """The section of a run set: its tables, and published tables beside."""
    rows = rows_of(runset)
    speed = speed_table(rows, runset)
    changed = changes(rows, runset.fields)
    speed = replace(speed, notes=[*speed.notes, *changed])
    key = slug(runset.name)
    tables = [speed, *([] if runset.is_own else [phase_table(rows, runset)])]
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


def of_published(tables: Sequence[PublishedTable]) -> Section:
    """The section of a file of published tables, as published."""
    first, shown = tables[0], [as_published(table) for table in tables]
    data = [(f"published-{slug(t.key)}", table) for t, table in zip(tables, shown, strict=True)]
    shown[-1] = replace(shown[-1], notes=first.footnotes)
    return Section(
        key=f"published-{slug(first.file)}",
        title=f"Published: {first.work}",
        tables=shown,
        data=data,
        make_charts=list,
    )
