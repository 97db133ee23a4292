"""Study files (TOML): what a study varies, and its cells. `slurmft study --help` has an example.

A cell is one combination of values of [grid] with one of [[cells]]. Repeat r of it has the seed
(42, or the one given) + r - 1.

`strong`: the total work is fixed (samples and epochs). `weak`: the work of each process is fixed
(`max_steps` and `batch_size`). `none`: the study does not compare numbers of processes.

`global_batch_size` without `batch_size`: the samples of an optimizer step, divided among the
processes; with both, micro-steps make them up. `published` is relative to the file. Of a program of
one's own, [fixed] has options of the job alone; in [grid] and [[cells]] all other names are those
of placeholders (`slurmft.plugins.studies.programs`).
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core import shipped, trusted
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import parse_toml, read_text
from slurmft.core.filesystem import absolute
from slurmft.core.options import TYPE_NAMES
from slurmft.core.site import in_file, typed_values
from slurmft.plugins.studies import programs, published
from slurmft.plugins.studies.table import setting_text
from slurmft.runs.scan import MeasuredRun
from slurmft.train.login.configure import OPTIONS

FILE = "study.toml"
"""Name of the copy of a study file in the study's folder."""

SCALINGS = ("strong", "weak", "none")
GLOBAL_BATCH_SIZE = "global_batch_size"

STUDY = trusted.Door(
    "the folder of a study",
    "`STUDIES_DIR/NAME/`",
    "the runs that `study run` submits, and the jobs that `study cancel` cancels",
    cure="give a folder of your own: --studies-dir; or a study file of your own",
)

_DEFAULTS: dict[str, Any] = {
    "name": "",
    "title": "",
    "scaling": "none",
    "repeats": 3,
    "at_most": 1,
    "retries": 2,
    "published": "",
    "program": {},
    "fixed": {},
    "grid": {},
    "cells": [],
}
"""Keys of a study file; a value has the type of its default."""
_TYPES = TYPE_NAMES | {dict: "a table", list: "a list of tables"}
_FIELDS_OF_REPEATS = {
    "seed": "the repeats have seeds of their own; the first one goes into [fixed]",
    "repeat": "its values are 1 to repeats",
}
"""What differs between the repeats of a cell, and so cannot vary between cells."""
_MAX_RUNS = 100_000
"""Runs of the largest study: a file that asks for more has a mistake in its lists."""
_BOUNDS = {"repeats": (1, 1000), "at_most": (1, _MAX_RUNS), "retries": (0, 100)}
"""Smallest and largest value of each number: no retries are a choice, no repeats would be no
study, and a digit too many is an error of the file rather than of its hundredth job."""

Cell = dict[str, Any]
"""Varied field -> value, in the order of the study file, as JSON has them."""


RepeatKey = tuple[str, int | str]
"""Key of a cell, and number of a repeat of it, or the name of a run that has no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A study file, checked as far as is possible without its runs."""

    path: Path
    text: str
    """The file as it is."""
    name: str
    title: str
    scaling: str
    repeats: int
    at_most: int
    retries: int
    published: Path | None
    """The file of published figures; in a study's folder, the copy that is there."""
    fixed: dict[str, Any]
    """Settings of all cells."""
    program: dict[str, Any]
    """Its table [program]; empty: the study trains."""
    cells: tuple[Cell, ...]

    @property
    def is_in_own_folder(self) -> bool:
        """It was read from the folder that holds its runs."""
        return self.path.name == FILE and self.path.parent.name == self.name

    @property
    def varied(self) -> list[str]:
        """The fields of the cells."""
        return list(self.cells[0])


def read_study(
    source: str | Path, with_published: bool = True, is_acted_on: bool = False
) -> Study:
    """Reads the study of a file, or of a study's folder.

    Args:
        source: the file, the folder, or the name of a study that comes with slurmft.
        with_published: check that the file of published figures can be read.
        is_acted_on: its runs are to be submitted or cancelled.

    Raises:
        UsageError: there is no such file, or what it says is not a study.
        NotOwnError: it is acted on, and others can have written it: in a folder, where its user
            has not named the file itself, or by the name of a study that comes with slurmft.
    """
    path = absolute(shipped.find("studies", source))
    if is_acted_on and path.exists() and shipped.of_name("studies", str(source)):
        trusted.check_meant("the study", str(source), "one that comes with slurmft")
    in_folder = path.is_dir()
    if in_folder:
        path = path / FILE
    try:
        study = parse_study(read_text(path), path)
        # What is checked is what is used: the folder may be another one by the time that it is
        # locked.
        if is_acted_on and (in_folder or study.is_in_own_folder):
            study = parse_study(STUDY.read(path).decode("utf-8"), path)
    except FileNotFoundError:
        missing = f"{str(source)!r}: no such file"
        if in_folder:
            missing = f"{str(source)!r} holds no {FILE}"
        hint = "give a study file, the folder of a study, or a name that slurmft examples lists"
        raise UsageError(missing, hint) from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the study file {str(source)!r}: {error}"
        raise UsageError(what, "check that it is a text file") from None
    # Now rather than in a report, which is made after all the runs.
    if with_published and study.published:
        try:
            published.load(study.published)
        except UsageError as error:
            raise in_file(path, error) from None
    return study


def parse_study(text: str, path: Path) -> Study:
    """Parses the text of a study file, and checks it.

    Args:
        path: the file, for messages, and for `published`, which is relative to it.
    """
    try:
        raw = parse_toml(text)
    except ValueError as error:
        problem = f"{path} is not TOML: {error}"
        raise UsageError(problem, "see slurmft study --help") from None
    _check_top(path, raw)
    keys = _DEFAULTS | raw
    # A program's placeholders are checked below, when the cells have named what varies.
    where = f"{path}: [fixed]"
    if keys["program"]:
        program = programs.read(path, keys["program"])
        fixed = programs.typed(where, keys["fixed"])
    else:
        program = {}
        fixed = _settings(where, keys["fixed"])
    axes = _axes(path, raw, fixed | program)
    study = Study(
        path=path,
        text=text,
        name=keys["name"],
        title=keys["title"] or keys["name"],
        scaling=keys["scaling"],
        repeats=keys["repeats"],
        at_most=keys["at_most"],
        retries=keys["retries"],
        published=_published(path, keys["published"]),
        fixed=fixed,
        program=program,
        cells=_cells(path, axes, keys["repeats"]),
    )
    if program:
        programs.check_placeholders(path, program, study.varied, fixed)
    check_work(study)
    return study


def _check_top(path: Path, raw: dict[str, Any]) -> None:
    """Checks the keys of a study file, and the values that are no tables."""
    for key, value in raw.items():
        _check_key(path, key, value)
    name = raw.get("name", "")
    # The name is that of the study's folder, too: it must neither be hidden nor lead elsewhere.
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name):
        raise UsageError(
            f"{path}: name {name!r} is not a folder name",
            "use letters, digits and . _ - between them, 63 at most",
        )
    if raw.get("scaling", "none") not in SCALINGS:
        raise in_file(path, unknown("scaling", raw["scaling"], list(SCALINGS)))
    # It heads a table, and a page.
    title = raw.get("title", "")
    if "\n" in title:
        problem = f"{path}: the title {title!r} is more than a line"
        raise UsageError(problem, "shorten it")


def _check_key(path: Path, key: str, value: Any) -> None:
    if key not in _DEFAULTS:
        if key in OPTIONS:
            raise UsageError(
                f"{path}: {key!r} belongs to a table", "put it below [fixed]"
            )
        raise in_file(path, unknown("key", key, list(_DEFAULTS)))
    kind = type(_DEFAULTS[key])
    # Not isinstance: true would be a whole number.
    if type(value) is not kind:
        raise UsageError(
            f"{path}: {key} must be {_TYPES[kind]}, not {value!r}",
            "see slurmft study --help",
        )
    if kind is int:
        least, most = _BOUNDS[key]
        if not least <= value <= most:
            raise UsageError(
                f"{path}: {key} = {value} must be between {least} and {most:,}"
            )


def _published(path: Path, name: str) -> Path | None:
    """Returns the file of published figures: of a study's folder, the copy that is there."""
    if not name:
        return None
    file_name = Path(name).name
    # The name of a file that comes with slurmft may lack its ending.
    for copy in (path.with_name(file_name), path.with_name(f"{file_name}.json")):
        # In a study's folder the name is still relative to where the study file came from.
        if path.name == FILE and copy.exists():
            return copy
    beside = path.parent / name
    if beside.exists():
        return beside
    shipped_file = shipped.find("published", name)
    # A name that is of no such file is one that is missing beside the study.
    return shipped_file if shipped_file.exists() else beside


def _settings(where: str, values: dict[str, Any]) -> dict[str, Any]:
    """Converts settings to the types of their options."""
    for key, value in values.items():
        if key == "runs_dir":
            what = f"{where}: {key} = {value!r} is not possible in a study"
            raise UsageError(what, "the study has its own: --studies-dir")
        if key in _DEFAULTS:
            raise UsageError(
                f"{where}: {key!r} is a key of the study itself",
                "move it above the first [table]",
            )
    return typed_values(where, values, OPTIONS)


# --- cells ----------------------------------------------------------------------------------------


def _axes(path: Path, raw: dict[str, Any], fixed: dict[str, Any]) -> list[list[Cell]]:
    """Returns the axes of the grid in the file's order: every list of [grid], and [[cells]]."""
    is_own_program = bool(raw.get("program"))
    axes: list[list[Cell]] = []
    # Over the file's keys rather than these two: the table that comes first varies slowest.
    for table in raw:
        untyped: Iterable[list[Cell]]
        if table == "grid":
            where = f"{path}: [grid]"
            untyped = _grid(where, raw["grid"])
        elif table == "cells":
            where = f"{path}: [[cells]]"
            untyped = [_explicit(path, raw["cells"])]
        else:
            continue
        for axis in untyped:
            axes.append([_typed_cell(where, cell, is_own_program) for cell in axis])
            for field in axis[0]:
                _check_varied(where, field, fixed)
    if not axes:
        raise UsageError(
            f"{path} varies nothing", "give [grid], such as nodes = [1, 2, 4]"
        )
    # All cells of an axis have the fields of its first one.
    counts: Counter[str] = Counter()
    for axis in axes:
        counts.update(axis[0].keys())
    in_both = []
    for field, count in sorted(counts.items()):
        if count > 1:
            in_both.append(field)
    if in_both:
        raise UsageError(
            f"{path}: {', '.join(in_both)} is in both [grid] and [[cells]]",
            "leave it out of one of them",
        )
    return axes


def _grid(where: str, grid: dict[str, Any]) -> Iterator[list[Cell]]:
    """Yields an axis for every list of [grid]."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(
                f"{where} {key} must be a list of values, not {values!r}",
                f"write {key} = [...], or move it to [fixed]",
            )
        yield [{key: value} for value in values]


def _explicit(path: Path, tables: list[Any]) -> list[Cell]:
    """Returns the axis that [[cells]] is: its tables, which must name the same fields."""
    filled = [table for table in tables if isinstance(table, dict) and table]
    # An empty [[cells]] would be a cell without a label.
    if not tables or len(filled) < len(tables):
        raise UsageError(
            f"{path}: cells must be tables with values, not {tables!r}",
            "write [[cells]]",
        )
    first = tables[0]
    for table in tables:
        not_in_both = sorted(table.keys() ^ first.keys())
        if not_in_both:
            raise UsageError(
                f"{path}: the cell {label(table)!r} and the first one differ in their fields: "
                f"{', '.join(not_in_both)}",
                "give every [[cells]] the same fields",
            )
    # Labels and columns take the order of the fields from a cell: it is the same in all.
    return [{key: table[key] for key in first} for table in tables]


def _typed_cell(where: str, cell: Cell, is_own_program: bool) -> Cell:
    """Converts the values of a cell to the types of their options, with lists for tuples.

    So the cell equals the one in the record of its run, which is JSON.
    """
    if is_own_program:
        values = programs.typed(where, cell, varied=True)
    else:
        values = _settings(where, cell)
    as_json: Cell = {}
    for key, value in values.items():
        as_json[key] = list(value) if isinstance(value, tuple) else value
    return as_json


def _check_varied(where: str, field: str, fixed: dict[str, Any]) -> None:
    """Raises UsageError for a field that cannot be varied, or is fixed."""
    if field in _FIELDS_OF_REPEATS:
        raise UsageError(f"{where} varies {field}", _FIELDS_OF_REPEATS[field])
    if field in OPTIONS and not OPTIONS[field].varies:
        hint = "all runs of a study have the same: give it in [fixed], or as a flag"
        raise UsageError(f"{where} varies {field}", hint)
    if field in fixed:
        holder = "fixed" if field in OPTIONS else "program"
        raise UsageError(
            f"{where} varies {field}, but [{holder}] has {field} = {fixed[field]!r}",
            "leave one of them out",
        )


def _cells(path: Path, axes: list[list[Cell]], repeats: int) -> tuple[Cell, ...]:
    """Returns all combinations of values; what comes first varies slowest."""
    # Before any is made: a few long lists have millions of combinations.
    count = math.prod(len(axis) for axis in axes)
    run_count = count * repeats
    if run_count > _MAX_RUNS:
        what = f"{path}: {count:,} cells x {repeats:,} repeats are {run_count:,} runs"
        raise UsageError(what, f"the limit is {_MAX_RUNS:,}")
    cells = []
    for parts in itertools.product(*axes):
        cell: Cell = {}
        for part in parts:
            cell |= part
        cells.append(cell)
    # Runs of two equal cells could not be told apart: a run names its cell by its values.
    counts = Counter(key_of(cell) for cell in cells)
    for cell in cells:
        if counts[key_of(cell)] > 1:
            raise UsageError(
                f"{path}: the cell {label(cell)!r} occurs twice",
                "for more runs of it, raise repeats",
            )
    return tuple(cells)


def key_of(cell: Cell) -> str:
    """Returns the key of a cell, which does not depend on the order of its fields."""
    return json.dumps(cell, sort_keys=True)


def repeat_of(run: MeasuredRun) -> RepeatKey | None:
    """Returns the repeat that a run is a try of; None: it is of no study."""
    entry = run.study
    if entry is None:
        return None
    # A run that does not say which repeat it is counts as one of its own.
    number = run.name if entry.repeat is None else entry.repeat
    return key_of(entry.cell), number


def label(cell: Cell) -> str:
    """Returns a cell as it is shown: nodes=2 batch_size=64"""
    return " ".join(f"{key}={setting_text(value)}" for key, value in cell.items())


# --- runs of cells --------------------------------------------------------------------------------


def rounds(study: Study) -> Iterator[tuple[int, Cell]]:
    """Yields the number of the repeat and the cell of every run, in the order of submission.

    The first repeats of all cells come first, so that a drift of the machine does not look like
    scaling.
    """
    for repeat in range(1, study.repeats + 1):
        for cell in study.cells:
            yield repeat, cell


def typed(cell: Cell) -> dict[str, Any]:
    """Returns the values of a cell as a configuration has them, with tuples for lists."""
    values: dict[str, Any] = {}
    for key, value in cell.items():
        if key in OPTIONS and OPTIONS[key].is_repeatable:
            value = tuple(value)
        values[key] = value
    return values


def divide_batch(values: dict[str, Any], filled: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a cell with a batch size for each process in place of the global one.

    Args:
        filled: the values with what recipe and site file add, such as the number of processes.
    """
    # With a batch size, too, the number of micro-steps follows from both.
    if GLOBAL_BATCH_SIZE not in values or "batch_size" in values:
        return values
    samples = values[GLOBAL_BATCH_SIZE]
    # Its default, the devices of a node, is known on the node only.
    nproc = filled.get("nproc_per_node")
    if nproc is None:
        raise UsageError(
            f"{GLOBAL_BATCH_SIZE} = {samples} needs the number of processes",
            "give nproc_per_node",
        )
    nodes = filled.get("nodes", 1)
    steps = filled.get("gradient_accumulation_steps", 1)
    parts = nodes * nproc * steps
    # Values below 1 are refused only when the configuration is made, after this.
    if parts < 1 or samples % parts:
        raise UsageError(
            f"{GLOBAL_BATCH_SIZE} = {samples} cannot be divided by {parts} (nodes x processes x "
            "accumulation steps)",
            f"give a multiple of {parts}",
        )
    divided = {}
    for key, value in values.items():
        if key != GLOBAL_BATCH_SIZE:
            divided[key] = value
    divided["batch_size"] = samples // parts
    return divided


def check_work(study: Study) -> None:
    """Raises UsageError if settings contradict each other, or the kind of scaling."""
    # What a program of the user's own does with its values is not known.
    if study.program:
        return
    named = {*study.fixed, *study.varied}
    # On one number of processes there is no scaling to contradict.
    varied_options = []
    for name in study.varied:
        if name in OPTIONS:
            varied_options.append(OPTIONS[name])
    if not any(each.counts == "devices" for each in varied_options):
        return
    if study.scaling == "weak" and GLOBAL_BATCH_SIZE in named:
        raise UsageError(
            f"{study.path}: scaling = 'weak' fixes the work of a process, {GLOBAL_BATCH_SIZE} that "
            "of all",
            "give batch_size and max_steps, or scaling = 'strong'",
        )
    if study.scaling == "weak" and "max_steps" not in named:
        raise UsageError(
            f"{study.path}: scaling = 'weak' without max_steps: an epoch is less work for each of "
            "more processes",
            "give max_steps in [fixed], or scaling = 'strong'",
        )
    if (
        study.scaling == "strong"
        and "max_steps" in named
        and GLOBAL_BATCH_SIZE not in named
    ):
        raise UsageError(
            f"{study.path}: scaling = 'strong', but max_steps with a batch for each process is "
            "more work for more processes",
            f"give {GLOBAL_BATCH_SIZE}, or scaling = 'weak'",
        )
