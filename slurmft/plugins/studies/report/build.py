"""Builds reports of runs and published tables: collects, prints and writes them to files."""

import base64
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import slurmft
from slurmft.core import shipped
from slurmft.core.errors import UsageError
from slurmft.core.files import write_bytes
from slurmft.core.filesystem import absolute
from slurmft.plugins.studies import published
from slurmft.plugins.studies.published import PublishedTable
from slurmft.plugins.studies.report import plots
from slurmft.plugins.studies.report.formats import FORMATS, WIDTH, as_csv, as_list, as_text
from slurmft.plugins.studies.report.matching import (
    as_published,
    beside,
    keys_of,
    matches,
    measured_of,
)
from slurmft.plugins.studies.report.measures import (
    Row,
    RunSet,
    group_by_study,
    label,
    rows_of,
)
from slurmft.plugins.studies.report.plots import Chart, charts_of
from slurmft.plugins.studies.report.provenance import changes, origins
from slurmft.plugins.studies.report.tables import (
    class_tables,
    cost_tables,
    data_table,
    phase_table,
    speed_table,
)
from slurmft.plugins.studies.table import Table
from slurmft.runs import resolve, scan


@dataclass(frozen=True, slots=True)
class Section:
    """Tables and plots that belong together, and where they come from."""

    key: str
    """For the names of its files."""
    title: str
    tables: Sequence[Table]
    data: Sequence[tuple[str, Table]]
    """The same for CSV: name of the file, without ending, and table."""
    charts: Callable[[], list[Chart]] = list
    """Makes the plots, once they are needed: curves read many records."""
    comparison: Sequence[str] = ()
    """Whether two cells differ by more than noise; empty where there are not two."""
    origins: Sequence[str] = ()
    problems: Sequence[str] = ()

    def file_of(self, chart: Chart) -> str:
        """The name of a plot's files, without ending."""
        return f"{self.key}-{slug(chart.key)}"


def slug(text: str) -> str:
    """Text as a part of a file name or an HTML id: letters, digits, hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "report"


def of_runs(runset: RunSet, beside_them: Sequence[PublishedTable]) -> Section:
    """The section of a run set: its tables, and published tables beside."""
    rows = rows_of(runset)
    key, speed = slug(runset.name), speed_table(rows, runset)
    changed = list(changes(rows, runset.fields))
    tables = [replace(speed, notes=[*speed.notes, *changed])]
    tables += [] if runset.is_own else [phase_table(rows, runset)]
    tables += [] if runset.study else class_tables(rows)
    tables += cost_tables(rows, runset)
    data = [(key, data_table(rows, runset))]
    problems, sources = [*runset.problems], origins(rows)
    for theirs in beside_them:
        if not any(m.published and m.ours for m in matches(theirs, rows)):
            keys = ", ".join(k.replace("_", " ") for k in keys_of(theirs)) or "nothing"
            problems.append(f"no row matches a row of {theirs.name}; compared by: {keys}")
        elif measured_of(theirs):
            table = beside(theirs, rows, runset.fields)
            data.append((f"{key}-{slug(theirs.key)}", table))
            tables.append(replace(table, notes=[*table.notes, *changed]))
            sources += theirs.footnotes
    return Section(
        key=key,
        title=runset.title,
        tables=tables,
        data=data,
        charts=functools.cache(lambda: charts_of(rows, runset, beside_them)),
        comparison=_comparison_of(rows, runset),
        origins=list(dict.fromkeys(sources)),  # those of published tables are one for each file
        problems=problems,
    )


def _comparison_of(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """Compares the runs of two cells, as lines; of another number of cells, none."""
    measured = [row for row in rows if row.finished]
    if len(measured) != 2:
        return []
    from slurmft.plugins.studies.report.comparison import compare_cells  # numpy and scipy: 0.3 s

    first, second = measured
    comparison = compare_cells(first.runs, second.runs)
    if comparison is None:
        return []
    return comparison.summary(label(first, runset.fields), label(second, runset.fields))


def of_published(tables: Sequence[PublishedTable], title: str = "") -> Section:
    """The section of a file of published tables, as published."""
    first, shown = tables[0], [as_published(table) for table in tables]
    data = [(f"published-{slug(t.key)}", table) for t, table in zip(tables, shown, strict=True)]
    return Section(
        key=f"published-{slug(first.file)}",
        title=_titled(title, f"Published: {first.work}"),
        tables=shown,
        data=data,
        origins=first.footnotes,
    )


def _titled(title: str, own: str) -> str:
    """A title under the user's, unless it is that."""
    return own if own.startswith(title) else f"{title}: {own}"


# --- collecting ---------------------------------------------------------------------------------


def collect_sections(
    paths: Sequence[Path],
    beside: Sequence[Path],
    title: str,
    peak_tflop_per_s: float | None = None,
) -> tuple[list[Section], list[str]]:
    """The sections of a report, and what could not be read.

    Args:
        paths: run directories, folders of them, files of published tables.
        beside: further files of published tables.
        title: of the runs of no study, and above the others.
        peak_tflop_per_s: what a device could compute, for the model FLOPs utilisation.
    """
    paths, beside = ([shipped.find("published", p) for p in given] for given in (paths, beside))
    folders = [Path(resolve.folder_of(str(path))) for path in paths if not absolute(path).is_file()]
    files = [path for path in paths if absolute(path).is_file()]
    found, problems = scan.find(folders)
    if folders and not found:
        raise UsageError(f"no run can be read: {problems[0]}", "give other run directories")
    for result in (run.result for run in found if run.result and peak_tflop_per_s):
        result["peak_tflop_per_s"] = peak_tflop_per_s
    given = [published.load(absolute(path)) for path in dict.fromkeys((*beside, *files))]
    sections: list[Section] = []
    named_by_studies: list[list[PublishedTable]] = []
    names = ", ".join(folder.resolve().name or str(folder) for folder in folders)
    for runset in group_by_study(found, title or f"Runs in {names}"):
        given_here = [table for tables in given or [_study_tables(runset)] for table in tables]
        titled = replace(runset, title=_titled(title, runset.title))
        sections.append(of_runs(titled, given_here))
        if not given and given_here and given_here not in named_by_studies:
            named_by_studies.append(given_here)
            sections.append(of_published(given_here, title))
    sections += [of_published(tables, title) for tables in given]
    return _with_own_keys(sections), problems


def _study_tables(runset: RunSet) -> list[PublishedTable]:
    """The published tables that its study names; an unreadable file is a problem of the study."""
    study = runset.study
    if study is None or study.published is None:
        return []
    try:
        return published.load(study.published)
    except UsageError as error:
        runset.problems.append(error.message)
        return []


def _with_own_keys(sections: Sequence[Section]) -> list[Section]:
    """The sections with distinct keys, so that none writes the files of another."""
    made: dict[str, Section] = {}
    for section in sections:
        key, number = section.key, 1
        while key in made:
            number += 1
            key = f"{section.key}-{number}"
        data = [(name.replace(section.key, key, 1), table) for name, table in section.data]
        made[key] = replace(section, key=key, data=data)
    return list(made.values())


# --- printing -------------------------------------------------------------------------------------


def tables_text(
    sections: Sequence[Section], problems: Sequence[str], form: str, width: int = WIDTH
) -> str:
    """All tables in one format; `width`: of text, in characters. The titles of several CSV tables
    are comments."""
    if form == "csv":
        tables = [table for section in sections for _, table in section.data]
        if len(tables) == 1:
            return as_csv(tables[0])
        return "\n".join(f"# {' '.join(table.title.split())}\n{as_csv(table)}" for table in tables)
    write_table = functools.partial(as_text, width=width) if form == "text" else FORMATS[form][0]
    parts = []
    for section in sections:
        parts += [write_table(table) for table in section.tables]
        parts.append(as_list("A difference, or noise?", section.comparison, form, width))
        parts.append(as_list("Where this comes from", section.origins, form, width))
        parts.append(as_list("Problems", section.problems, form, width))
    parts.append(as_list("Could not be read", problems, form, width))
    return "\n".join(part for part in parts if part)


# --- files ----------------------------------------------------------------------------------------


def write_report(
    folder: Path,
    sections: Sequence[Section],
    problems: Sequence[str],
    title: str,
    paths: Sequence[Path],
) -> list[str]:
    """Writes all files of a report, each atomically; returns their names."""
    folder, names = absolute(folder), list[str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _files(sections, problems, title, paths):
            raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
            write_bytes(folder / name, raw)
            names.append(name)
    except OSError as error:
        raise UsageError(
            f"cannot write to {str(folder)!r}: {error.strerror or error}",
            "give a folder that you can write: --output",
        ) from None
    return names


def _files(
    sections: Sequence[Section], problems: Sequence[str], title: str, paths: Sequence[Path]
) -> Iterator[tuple[str, str | bytes]]:
    """Names and contents; without matplotlib no plots."""
    for form, (_, ending) in FORMATS.items():
        if form != "csv":
            yield f"tables.{ending}", tables_text(sections, problems, form)
    for section in sections:
        for name, table in section.data:
            yield f"{name}.csv", as_csv(table)
    images: dict[str, str] = {}
    for section in sections if plots.is_available() else ():
        for chart in section.charts():
            name = section.file_of(chart)
            svg, png = plots.draw(chart)
            images[name] = base64.b64encode(svg.encode("utf-8", "replace")).decode()
            yield f"{name}.svg", svg
            yield f"{name}.png", png
    more = f" and {len(sections) - 1} more" if len(sections) > 1 else ""
    yield "report.html", _page(title or sections[0].title + more, sections, images, problems, paths)


def _page(
    title: str,
    sections: Sequence[Section],
    images: Mapping[str, str],
    problems: Sequence[str],
    paths: Sequence[Path],
) -> str:
    """The report as one HTML file that needs no server, network or other file; `images`: the plots,
    `Section.file_of` -> SVG in base64."""
    import jinja2  # 60 ms

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = Path(__file__).with_name("report.html")
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        sections=sections,
        images=images,
        origin=f"made by slurmft {slurmft.__version__}, {now}, from {', '.join(map(str, paths))}",
        hint=plots.HINT if any(s.charts() for s in sections) and not images else "",
        problems=problems,
    )
