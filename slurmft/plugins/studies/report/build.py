"""Builds reports of runs and published tables: collects, prints and writes them to files."""

import base64
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import slurmft
from slurmft.core import filesystem, shipped, terminal
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.files import named_by_user, write_bytes
from slurmft.core.filesystem import absolute
from slurmft.plugins.studies import published
from slurmft.plugins.studies.published import PublishedTable
from slurmft.plugins.studies.report import plots
from slurmft.plugins.studies.report.formats import (
    FORMATS,
    WIDTH,
    as_csv,
    as_list,
    as_text,
    numbered,
)
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
from slurmft.plugins.studies.report.published_plots import charts_of_published
from slurmft.plugins.studies.report.tables import (
    class_tables,
    cost_tables,
    data_table,
    phase_table,
    speed_table,
    time_tables,
)
from slurmft.plugins.studies.table import Table
from slurmft.runs import resolve, scan
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun


@dataclass(frozen=True, slots=True)
class Section:
    """Tables and plots that belong together, and where they come from."""

    key: str
    """The beginning of the names of its files."""
    title: str
    tables: Sequence[Table]
    data: Sequence[tuple[str, Table]]
    """Tables for CSV, with all measures: name of the file, without ending, and table."""
    charts: Callable[[], list[Chart]] = list
    """Makes the plots, once they are needed: curves read many records."""
    comparison: Sequence[str] = ()
    """Whether two cells differ by more than noise; empty where there are not two."""
    origins: Sequence[str] = ()
    problems: Sequence[str] = ()

    def file_of(self, chart: Chart) -> str:
        """Returns the name of a plot's files, without ending."""
        return f"{self.key}-{slug(chart.key)}"


def slug(text: str) -> str:
    """Returns text as a part of a file name or an HTML id: letters, digits, hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "report"


def of_runs(runset: RunSet, beside_them: Sequence[PublishedTable]) -> Section:
    """Returns the section of a run set: its tables, and published tables beside."""
    rows = rows_of(runset)
    key = slug(runset.name)
    changed = list(changes(rows, runset.fields))
    tables = [_with_notes(speed_table(rows, runset), changed)]
    # a program of the user's own has no phases that slurmft knows
    if not runset.is_own_program:
        tables.append(phase_table(rows, runset))
    if not runset.study:
        tables += class_tables(rows)
    tables += cost_tables(rows, runset)
    tables += time_tables(rows, runset)
    data = [(key, data_table(rows, runset))]
    problems = list(runset.problems)
    sources = origins(rows)
    for theirs in beside_them:
        pairs = matches(theirs, rows)
        has_match = any(pair.published and pair.ours for pair in pairs)
        if not has_match:
            # The keys say which of our settings to look at: most often one has another value.
            keys = [name.replace("_", " ") for name in keys_of(theirs)]
            compared_by = ", ".join(keys) or "nothing"
            problems.append(
                f"no row matches a row of {theirs.name}; compared by: {compared_by}"
            )
        elif measured_of(theirs):
            table = beside(theirs, rows, runset.fields)
            data.append((f"{key}-{slug(theirs.key)}", table))
            tables.append(_with_notes(table, changed))
            sources += theirs.footnotes
    return Section(
        key=key,
        title=runset.title,
        tables=tables,
        data=data,
        # The files and the page ask for the plots one after the other.
        charts=functools.cache(lambda: charts_of(rows, runset, beside_them)),
        comparison=_comparison_of(rows, runset),
        # those of published tables are one for each file
        origins=list(dict.fromkeys(sources)),
        problems=problems,
    )


def _with_notes(table: Table, notes: Sequence[str]) -> Table:
    return replace(table, notes=[*table.notes, *notes])


def _comparison_of(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """Compares the runs of two cells, as lines; of another number of cells, none."""
    measured = [row for row in rows if row.finished]
    if len(measured) != 2:
        return []
    # numpy and scipy: 0.3 s
    from slurmft.plugins.studies.report.comparison import compare_cells

    first, second = measured
    comparison = compare_cells(first.runs, second.runs)
    # A result that was edited may lack what a comparison needs, and still fill a row.
    if comparison is None:
        return []
    label_a = label(first, runset.fields)
    label_b = label(second, runset.fields)
    return comparison.summary(label_a, label_b)


def of_published(tables: Sequence[PublishedTable], title: str = "") -> Section:
    """Returns the section of a file of published tables, as published."""
    first = tables[0]
    plain_tables = [as_published(table) for table in tables]
    names = [f"published-{slug(table.key)}" for table in tables]
    data = list(zip(names, plain_tables, strict=True))
    return Section(
        key=f"published-{slug(first.file)}",
        title=_titled(title, f"Published: {first.work}"),
        tables=plain_tables,
        data=data,
        charts=functools.cache(lambda: charts_of_published(tables)),
        origins=first.footnotes,
    )


def _titled(title: str, section_title: str) -> str:
    """Returns the title of a section below the user's title, unless it already begins with that."""
    # Without a title of the user's, "" is the beginning of every title.
    if section_title.startswith(title):
        return section_title
    return f"{title}: {section_title}"


# --- collecting ---------------------------------------------------------------------------------


def collect_sections(
    paths: Sequence[Path],
    beside: Sequence[Path],
    title: str,
    peak_tflop_per_s: float | None = None,
) -> tuple[list[Section], list[str]]:
    """Returns the sections of a report, and what could not be read.

    Args:
        paths: run directories, folders of them, files of published tables.
        beside: further files of published tables.
        title: of the runs of no study, and above the others.
        peak_tflop_per_s: what a device could compute, for the model FLOPs utilisation.
    """
    folders: list[Path] = []
    files = [shipped.find("published", path) for path in beside]
    for path in paths:
        source = shipped.find("published", path)
        if absolute(source).is_file():
            files.append(source)
        else:
            folders.append(Path(resolve.folder_of(str(source))))
    all_runs, problems = scan.find(folders)
    runs = scan.trainings(all_runs, ", ".join(map(str, folders)))
    # A file that is named twice is shown once.
    table_files = [published.load(absolute(path)) for path in dict.fromkeys(files)]
    if peak_tflop_per_s:
        runs = [_with_peak(run, peak_tflop_per_s) for run in runs]
    runsets = group_by_study(runs, title or title_of(folders))
    sections = _run_sections(runsets, table_files, title)
    sections += [of_published(tables, title) for tables in table_files]
    return _with_distinct_keys(sections), resolve.problem_lines(problems)


def title_of(folders: Sequence[Path]) -> str:
    """Returns the title of the runs in folders; a folder may be a run itself."""
    names = []
    for folder in folders:
        # Resolved: the name of "." is that of no folder. The name of / is empty.
        place = folder.resolve()
        name = place.name or str(folder)
        # Most people have a folder of this name: the one above tells it apart.
        if name == JobConfig().runs_dir:
            name = f"{place.parent.name}/{name}"
        names.append(name)
    if len(folders) == 1 and RunDir(folders[0]).exists():
        return f"Run {names[0]}"
    return f"Runs in {', '.join(names)}"


def _with_peak(run: MeasuredRun, tflop_per_s: float) -> MeasuredRun:
    """Returns a copy of a run whose result also says what its devices could compute."""
    if run.result is None:
        return run
    # A copy: the run as it was read stays as its files have it.
    return replace(run, result=run.result | {"peak_tflop_per_s": tflop_per_s})


def _run_sections(
    runsets: Sequence[RunSet],
    table_files: Sequence[list[PublishedTable]],
    title: str,
) -> list[Section]:
    """Returns a section for each run set, and after it the published tables that its study names.

    Args:
        table_files: the tables of each file that the user gave; they take the place of those that
            studies name.
        title: of the report, or "".
    """
    tables_of_user = [table for tables in table_files for table in tables]
    sections: list[Section] = []
    named_by_studies: list[list[PublishedTable]] = []
    for runset in runsets:
        tables = tables_of_user if table_files else _study_tables(runset)
        titled = replace(runset, title=_titled(title, runset.title))
        sections.append(of_runs(titled, tables))
        # Studies of one paper name the same file: it is shown once.
        if not table_files and tables and tables not in named_by_studies:
            named_by_studies.append(tables)
            sections.append(of_published(tables, title))
    return sections


def _study_tables(runset: RunSet) -> list[PublishedTable]:
    """Returns the published tables that a study names; an unreadable file is a problem of it."""
    study = runset.study
    if study is None or study.published is None:
        return []
    try:
        return published.load(study.published)
    except UsageError as error:
        runset.problems.append(error.message)
        return []


def _with_distinct_keys(sections: Sequence[Section]) -> list[Section]:
    """Returns the sections with distinct keys, so that none writes the files of another."""
    by_key: dict[str, Section] = {}
    for section in sections:
        key = section.key
        number = 1
        while key in by_key:
            number += 1
            key = f"{section.key}-{number}"
        # The names of CSV files begin with the key: they change with it.
        data = []
        for name, table in section.data:
            data.append((name.replace(section.key, key, 1), table))
        by_key[key] = replace(section, key=key, data=data)
    return list(by_key.values())


# --- printing -------------------------------------------------------------------------------------


def tables_text(
    sections: Sequence[Section],
    problems: Sequence[str],
    form: str,
    width: int = WIDTH,
) -> str:
    """Returns all tables in one format.

    Args:
        form: a key of FORMATS. The titles of several CSV tables are comments.
        width: of text, in characters.
    """
    if form == "csv":
        tables = [table for section in sections for _, table in section.data]
        if len(tables) == 1:
            return as_csv(tables[0])
        parts = []
        for table in tables:
            title = " ".join(table.title.split())  # a line break would end the comment
            parts.append(f"# {title}\n{as_csv(table)}")
        return "\n".join(parts)
    write_table, _ = FORMATS[form]
    if form == "text":
        # Markdown and LaTeX go into files: only text depends on the terminal.
        write_table = functools.partial(as_text, width=width)
    parts = []
    for section in sections:
        tables = list(section.tables)
        if form == "text":
            tables = numbered(section.tables, width)
        parts += [write_table(table) for table in tables]
        parts.append(
            as_list("A difference, or noise?", section.comparison, form, width)
        )
        parts.append(as_list("Where this comes from", section.origins, form, width))
        parts.append(as_list("Problems", section.problems, form, width))
    parts.append(as_list("Could not be read", problems, form, width))
    # A list without lines is an empty text.
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
    folder = absolute(folder)
    names: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _files(sections, problems, title, paths):
            if isinstance(content, str):
                # As commands print it: a file is looked at on a terminal, too. What is left are
                # names of files, which may have surrogates in place of bytes that are not UTF-8.
                content = terminal.plain(content).encode("utf-8", "replace")
            write_bytes(named_by_user(folder / name), content)
            names.append(name)
    except OSError as error:
        reason = filesystem.reason(error, folder)
        raise UsageError(
            f"cannot write to {str(folder)!r}: {reason}",
            "give a folder that you can write: --output",
        ) from None
    return names


def _files(
    sections: Sequence[Section],
    problems: Sequence[str],
    title: str,
    paths: Sequence[Path],
) -> Iterator[tuple[str, str | bytes]]:
    """Yields the name and content of each file, the page last; without matplotlib no plots."""
    for form, (_, ending) in FORMATS.items():
        # CSV has a file for each table: tables of other columns cannot share one.
        if form != "csv":
            yield f"tables.{ending}", tables_text(sections, problems, form)
    for section in sections:
        for name, table in section.data:
            yield f"{name}.csv", as_csv(table)
    images: dict[str, str] = {}
    charts = []
    if plots.is_available():
        for section in sections:
            charts += [(section, chart) for chart in section.charts()]
    for section, chart in charts:
        name = section.file_of(chart)
        svg, png = plots.draw(chart)
        # In base64 the page holds the plot as an image: no style of one reaches another.
        encoded = base64.b64encode(svg.encode("utf-8", "replace"))
        images[name] = encoded.decode()
        yield f"{name}.svg", svg
        yield f"{name}.png", png
    if not title:
        title = sections[0].title
        if len(sections) > 1:
            title += f" and {len(sections) - 1} more"
    yield "report.html", _page(title, sections, images, problems, paths)


def _page(
    title: str,
    sections: Sequence[Section],
    images: Mapping[str, str],
    problems: Sequence[str],
    paths: Sequence[Path],
) -> str:
    """Returns the report as one HTML file that needs no server, network or other file.

    Args:
        images: the plots, `Section.file_of` -> SVG in base64.
    """
    import jinja2  # 60 ms

    # Titles, paths and errors are text from files: none may become markup.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    template = environment.from_string(text)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    sources = ", ".join(str(path) for path in paths)
    has_charts = any(section.charts() for section in sections)
    return template.render(
        title=title,
        sections=sections,
        images=images,
        origin=f"made by slurmft {slurmft.__version__}, {now}, from {sources}",
        hint=plots.HINT if has_charts and not images else "",
        problems=problems,
    )
