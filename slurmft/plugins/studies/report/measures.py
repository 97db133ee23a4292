"""Measurements of runs, of a study or of none: a row for every cell, with medians and spreads.

The cells and repeats of a study are read from its `study.toml`; without it, only the existing runs
are known.
"""

import contextlib
import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slurmft.core.errors import UsageError
from slurmft.core.files import is_number
from slurmft.plugins.studies import cells, spec
from slurmft.plugins.studies.cells import BATCH_FIELDS, DEVICE_FIELDS, fields_of, varied
from slurmft.plugins.studies.spec import GLOBAL_BATCH_SIZE, Cell, RepeatKey, Study
from slurmft.plugins.studies.table import setting_text
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

# --- sets of runs ---------------------------------------------------------------------------------


# Without slots: a cached property needs a place.
@dataclass(frozen=True)
class RunSet:
    """The runs of one table, grouped by cell."""

    name: str
    title: str
    fields: Sequence[str]
    """Settings in which its cells differ."""
    cells: Sequence[tuple[Cell, Sequence[MeasuredRun]]]
    """Values of the fields, and the runs with them; without runs, the cell is missing."""
    repeats: int = 1
    """Runs that a cell should have, at least."""
    scaling: str | None = None
    """strong: the same work in all cells; weak: the same work per device; None: unknown."""
    study: Study | None = None
    """Its study file, if it can be read."""
    problems: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[MeasuredRun]:
        return [run for _, runs in self.cells for run in runs]

    # Each pair of rows asks for it.
    @functools.cached_property
    def is_own_program(self) -> bool:
        """Whether its runs are of a program of the user's own."""
        return any(run.is_own_program for run in self.runs)


def group_by_study(runs: Sequence[MeasuredRun], title: str = "") -> list[RunSet]:
    """Groups runs (oldest first) by study, oldest study first; then those of no study, a set for
    each program, with this title."""
    studies: dict[tuple[str, Path | None], list[MeasuredRun]] = {}
    others: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        program = run.config["program"]
        entry = run.study
        if entry is not None:
            # Two folders may hold studies of one name: these are not one study.
            study = (entry.name, _study_folder(run))
            studies.setdefault(study, []).append(run)
        else:
            name = str(program.get("name")) if run.is_own_program else ""
            others.setdefault(name, []).append(run)
    runsets = []
    for (name, folder), members in studies.items():
        runsets.append(_of_study(name, folder, members))
    for program_name, members in others.items():
        set_title = title or "Runs"
        if len(others) > 1 and program_name:
            set_title += f": {program_name}"
        runsets.append(_of_no_study(set_title, members))
    return runsets


def _of_no_study(title: str, runs: list[MeasuredRun]) -> RunSet:
    """Returns runs as cells by the settings in which they differ."""
    fields = varied(runs)
    groups = []
    for repeats in cells.cells(runs):
        settings = fields_of(repeats[0])  # repeats have the same settings
        cell = {name: settings.get(name) for name in fields}
        groups.append((cell, repeats))
    return RunSet("runs", title, fields, groups)


def _study_folder(run: MeasuredRun) -> Path | None:
    """Returns the nearest folder with a study.toml, not above that of the run's folder of runs."""
    for folder in list(run.path.parents)[:3]:
        if (folder / spec.FILE).is_file():
            return folder
    return None


def _of_study(name: str, folder: Path | None, runs: list[MeasuredRun]) -> RunSet:
    """Returns the runs of a study, in the cells of its file and in those that the runs name."""
    problems: list[str] = []
    study = _read_study(name, folder, problems) if folder else None
    run_cells = [run.study.cell for run in runs if run.study]
    study_cells = study.cells if study else ()
    # The cells of the file come first, in its order. A run of a cell that was since removed from
    # the file has a row, too: nothing that was measured is dropped.
    cell_of_key: dict[str, Cell] = {}
    for cell in (*study_cells, *run_cells):
        cell_of_key.setdefault(spec.key_of(cell), cell)
    # Of every cell, also of those without a run: they have a row that says so.
    runs_of_key: dict[str, list[MeasuredRun]] = {key: [] for key in cell_of_key}
    # The runs come oldest first: a later try replaces all but a finished one.
    best: dict[RepeatKey | None, MeasuredRun] = {}
    for run in runs:
        repeat = spec.repeat_of(run)
        if repeat not in best or run.is_finished or not best[repeat].is_finished:
            best[repeat] = run
    for repeat, run in best.items():
        if repeat:
            cell_key, _ = repeat
            runs_of_key[cell_key].append(run)
    cells_with_runs = []
    for key, cell in cell_of_key.items():
        cells_with_runs.append((cell, runs_of_key[key]))
    return RunSet(
        name=name,
        title=study.title if study else name,
        fields=_differing_fields(list(cell_of_key.values())),
        cells=cells_with_runs,
        repeats=study.repeats if study else 1,
        scaling=study.scaling if study else None,
        study=study,
        problems=problems,
    )


def _differing_fields(every_cell: Sequence[Cell]) -> list[str]:
    """Returns the fields that are not the same in all cells, in the order of the cells."""
    names: dict[str, None] = {}
    for cell in every_cell:
        names |= dict.fromkeys(cell)
    differing = []
    for name in names:
        # repr: a list has no hash
        values = {repr(cell.get(name)) for cell in every_cell}
        if len(values) > 1:
            differing.append(name)
    return differing


def _read_study(name: str, folder: Path, problems: list[str]) -> Study | None:
    """Reads the study file in a folder; None, with a problem noted, if it cannot be used."""
    try:
        # Without the published tables: a mistake in those must not hide the missing cells.
        study = spec.read_study(folder, with_published=False)
        if study.name != name:
            raise UsageError(f"{folder / spec.FILE} is of the study {study.name!r}")
    except UsageError as error:
        problems.append(f"missing runs are unknown: {error.message}")
        return None
    return study


def planned(study: Study, cell: Cell, common: Mapping[str, Any]) -> Cell:
    """Returns the fields that a run of a cell would have, as far as they are known.

    Args:
        common: fields that are the same in all existing runs; the study file lacks flags.
    """
    values = study.fixed | spec.typed(cell)
    fields: Cell = {}
    # The study takes precedence over what its runs have in common.
    for name, value in (dict(common) | values).items():
        if value is not None:
            fields[name] = value
    if GLOBAL_BATCH_SIZE in values and "batch_size" not in values:
        fields.pop("batch_size", None)  # it is for other numbers of processes
        with contextlib.suppress(UsageError):  # the number of processes is not known
            fields["batch_size"] = spec.divide_batch(values, fields)["batch_size"]
    return fields


# --- what a run measures --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """A measure over repeats."""

    median: float
    low: float
    high: float
    n: int

    @property
    def percent(self) -> float:
        """Distance of the farthest repeat from the median, in percent of the median."""
        if not self.median:
            return 0.0
        above = self.high - self.median
        below = self.median - self.low
        farthest = max(above, below)
        return 100 * farthest / abs(self.median)  # a metric may be negative

    @classmethod
    def of(cls, *values: float) -> Self:
        return cls(
            median=statistics.median(values),
            low=min(values),
            high=max(values),
            n=len(values),
        )


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity of a run, and how it is shown."""

    key: str
    label: str
    read: Callable[[dict[str, Any]], float]
    """The value in a run's result; an error means that it has none."""
    rank: int = 0
    """See `table.Column`."""
    decimals: int | None = None
    """None: as many as the smallest value needs for its `figures`."""
    figures: int = 3
    ranged: bool = False
    """Whether the spread is shown beside the median."""
    per_evaluation: bool = False
    """Whether the value is divided by the number of evaluations."""


def result_of(run: MeasuredRun) -> dict[str, Any]:
    assert run.result is not None
    return run.result


def _phase(name: str) -> Callable[[dict[str, Any]], float]:
    return lambda r: float(r["phases_s"][name])


def _a_device(name: str) -> Callable[[dict[str, Any]], float]:
    """Returns a reader of the value of one device, from that of all."""
    return lambda r: float(r[name] / r["world_size"])


_TRAIN = Measure("train_s", "train (s)", _phase("train"), ranged=True)
SPEED = (
    Measure("wall_s", "time (s)", lambda r: r["wall_s"], rank=4, ranged=True),
    _TRAIN,
    Measure(
        "train_samples_per_s_per_device",
        "train samples/s per device",
        _a_device("train_samples_per_s"),
        ranged=True,
    ),
    Measure(
        "train_samples_per_s",
        "train samples/s",
        lambda r: r["train_samples_per_s"],
        rank=5,
    ),
    Measure(
        "evaluate_samples_per_s_per_device",
        "evaluate samples/s per device",
        _a_device("evaluate_samples_per_s"),
        rank=5,
    ),
)
METRIC = Measure(
    "metric",
    "metric",
    lambda r: r["metrics"][r["primary_metric"]],
    decimals=4,
)
"""The task's primary metric; its column has the metric's name."""
TIMES = (
    Measure("startup_s", "start-up (s)", lambda r: r["startup_s"]),
    _TRAIN,
    Measure("evaluate_s", "evaluate (s)", _phase("evaluate")),
    Measure("metric_s", "metric (s)", _phase("metric")),
    Measure("broadcast_s", "broadcast (s)", _phase("broadcast")),
    # loading of model and data after start-up, and saving
    Measure(
        "rest_s",
        "rest (s)",
        lambda r: r["wall_s"] - r["startup_s"] - sum(r["phases_s"].values()),
    ),
    # of the rank that held most: this one decides whether a batch fits
    Measure(
        "peak_memory_gib",
        "peak memory (GiB)",
        lambda r: max(r["peak_memory_bytes"]) / 2**30,
    ),
    Measure(
        "train_tokens_per_s_per_device",
        "train tokens/s per device",
        _a_device("train_tokens_per_s"),
        rank=1,
    ),
    Measure(
        "train_model_tflop_per_s_per_device",
        "model TFLOP/s per device",
        _a_device("train_model_tflop_per_s"),
        rank=2,
    ),
    Measure(
        "mfu",
        "MFU",
        lambda r: _a_device("train_model_tflop_per_s")(r) / r["peak_tflop_per_s"],
        rank=1,
    ),
    Measure("parameters_m", "parameters (M)", lambda r: r["parameters"] / 1e6, rank=3),
    Measure(
        "trained_parameters_m",
        "of these train (M)",
        lambda r: r["trained_parameters"] / 1e6,
        rank=3,
    ),
    Measure(
        "imports_s",
        "imports of the slowest node (s)",
        lambda r: r["imports_s"]["max"],
        rank=3,
    ),
    Measure(
        "metric_s_per_evaluation",
        "metric (s) per evaluation",
        _phase("metric"),
        rank=2,
        per_evaluation=True,
    ),
    Measure(
        "broadcast_ms_per_evaluation",
        "broadcast (ms) per evaluation",
        lambda r: 1000 * r["phases_s"]["broadcast"],
        rank=2,
        per_evaluation=True,
    ),
)
MEASURES = {measure.key: measure for measure in (*SPEED, METRIC, *TIMES)}


def measures_of(runset: RunSet) -> list[Measure]:
    """Returns what its runs measure: of a program of the user's own, the time and its metrics."""
    if runset.is_own_program:
        wall_time, *_ = SPEED
        return [wall_time, *other_metrics(runset)]
    return [*MEASURES.values(), *other_metrics(runset)]


def other_metrics(runset: RunSet) -> list[Measure]:
    """Returns the metrics of its runs; of trainings, those besides the primary one."""
    names: dict[str, None] = {}
    primary = set()
    for run in runset.runs:
        if not run.is_finished:
            continue
        result = result_of(run)
        primary.add(str(result.get("primary_metric")))
        if isinstance(result["metrics"], dict):
            names |= dict.fromkeys(result["metrics"])
    if not runset.is_own_program and len(primary) == 1:  # its column has the name
        names.pop(primary.pop(), None)
    return [_metric(name) for name in names]


def _metric(name: str) -> Measure:
    return Measure(
        f"metric_{name}",
        name,
        lambda r: r["metrics"][name],
        rank=3,
        figures=4,
        ranged=True,
    )


@dataclass(slots=True)
class Row:
    """A cell of a run set: its fields, its runs and what they measured."""

    cell: Cell
    runs: Sequence[MeasuredRun]
    devices: int | None
    state: str
    """Empty: all its runs finished."""
    common: Cell
    """Fields that are the same in all runs of the set; of a cell without runs, all that it would
    have."""
    measures: dict[str, Spread] = field(default_factory=dict)
    """Key of a measure -> its spread, where a run has it; of SCALED, where there is a baseline."""
    baseline: "Row | None" = None

    def median(self, key: str) -> float | None:
        spread = self.measures.get(key)
        if spread is None:
            return None
        return spread.median

    @property
    def finished(self) -> list[MeasuredRun]:
        return [run for run in self.runs if run.is_finished]

    def value(self, name: str) -> Any:
        """A field as its runs resolved it, such as the precision chosen for `auto`, else as they
        were configured; of a cell without runs, the planned one."""
        for run in self.finished:
            resolved = result_of(run).get(name)
            if resolved not in (None, "auto"):
                return resolved
        configured = None
        if self.runs:
            # its runs are repeats: any one will do
            configured = self.runs[0].value(name)
        configured = self.cell.get(name, configured)
        if configured in (None, "auto"):
            return self.common.get(name, configured)
        return configured


SCALED = ("speedup", "efficiency")
"""Measures that follow from a row and its baseline."""


def rows_of(runset: RunSet) -> list[Row]:
    """Returns a row for every cell, sorted by the other fields, then by devices."""
    common = _common(runset.runs)
    measures = measures_of(runset)
    rows = []
    for cell, runs in runset.cells:
        fields = common
        if not runs and runset.study:
            fields = planned(runset.study, cell, common)
        devices = _devices(runs, fields | cell)
        state = state_of(runs, runset.repeats)
        row = Row(cell, runs, devices, state, fields)
        finished = row.finished
        for measure in measures:
            values = [_read(measure, run) for run in finished]
            numbers = [value for value in values if value is not None]
            if numbers:
                row.measures[measure.key] = Spread.of(*numbers)
        rows.append(row)
    # Stable, by devices first: rows that a speedup compares then stand below each other, its
    # baseline first.
    rows.sort(key=lambda row: row.devices or 0)
    rows.sort(key=lambda row: _sortable(others(row, runset.fields)))
    # The throughput of a training says how it scales even where nobody declared its work to be
    # fixed. The time of a program of the user's own does not: its work is unknown.
    is_training_without_scaling = runset.scaling is None and not runset.is_own_program
    if runset.scaling in ("strong", "weak") or is_training_without_scaling:
        for group in _comparable(rows, runset.fields):
            measured = [row for row in group if row.devices and _speed(row, runset)]
            for row in group:
                _scale(row, measured, runset)
    return rows


def others(row: Row, fields: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a row that do not say on how many devices it is."""
    return {name: row.cell.get(name) for name in fields if name not in DEVICE_FIELDS}


def _sortable(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns values of mixed types in a form that can be sorted: numbers first."""
    keys: list[tuple[str, Any]] = []
    for value in values.values():
        if isinstance(value, (int, float)):
            keys.append(("", value))  # "" sorts before every name of a type
        else:
            keys.append((type(value).__name__, str(value)))
    return keys


def _common(runs: Sequence[MeasuredRun]) -> Cell:
    """Returns the fields that are the same in all runs; `auto` as resolved, if that is the same."""
    if not runs:
        return {}
    differing = set(varied(runs))
    common = {}
    for name, value in fields_of(runs[0]).items():
        if name in differing:
            continue
        common[name] = value
        if value == "auto":
            resolved = set()
            for run in runs:
                if run.result and name in run.result:
                    resolved.add(str(run.result[name]))
            # On other devices `auto` may have become something else.
            if len(resolved) == 1:
                common[name] = resolved.pop()
    return common


def _read(measure: Measure, run: MeasuredRun) -> float | None:
    """Reads a run's value; None where its result lacks it, or has no finite number there."""
    try:
        value = float(measure.read(result_of(run)))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # result.json may be of another version, or edited by hand
    if measure.per_evaluation:
        value /= run.evaluations
    return value if math.isfinite(value) else None


def _devices(runs: Sequence[MeasuredRun], fields: Cell) -> int | None:
    """Returns the ranks of a cell: as its runs recorded them, else as its configuration asks for
    them."""
    for run in runs:
        if run.result and isinstance(run.result["world_size"], int):
            return run.result["world_size"]
        if run.environment.ranks:
            return len(run.environment.ranks)
    # Runs that failed before their ranks met recorded none.
    value_of = runs[0].value if runs else fields.get
    nodes, *per_node = [value_of(name) for name in DEVICE_FIELDS]
    # not "auto", not None
    counts = [count for count in per_node if isinstance(count, int)]
    if not isinstance(nodes, int) or not counts or not counts[0]:
        return None
    return nodes * counts[0]


def state_of(runs: Sequence[MeasuredRun], repeats: int) -> str:
    """Describes the runs of a cell: "missing", "failed: reason", "1 of 3 failed"; "" where all have
    finished."""
    total = max(len(runs), repeats)
    states = [_state(run) for run in runs if not run.is_finished]
    # Repeats that the study has and nobody submitted yet.
    states += [("missing", "")] * (total - len(runs))
    counts = Counter(state for state, _ in states)
    reasons = [reason for _, reason in states if reason]
    suffix = f": {reasons[-1]}" if reasons else ""  # that of the newest run
    # All in one state: the numbers would say nothing.
    if len(counts) == 1 and counts.total() == total:
        (state,) = counts
        return f"{state}{suffix}"
    parts = []
    for name, count in counts.items():
        parts.append(f"{count} of {total} {name}")
    return ", ".join(parts) + suffix


def _state(run: MeasuredRun) -> tuple[str, str]:
    """Returns the state of a run that has no result, and the reason where it failed."""
    state = run.state.state
    if state == "finished":
        return "without result", "finished, but it has no result.json"
    if state != "failed":
        return state, ""
    reason = run.state.reason
    if not reason:
        failure = RunDir(run.path).root_failure()
        reason = failure.message if failure else ""
    first_line, *_ = reason.splitlines() or [""]
    return state, first_line


# --- speedup and efficiency -----------------------------------------------------------------------


def _comparable(rows: Iterable[Row], fields: Sequence[str]) -> Iterable[list[Row]]:
    """Returns the rows in groups that differ in devices and batch sizes alone."""
    groups = defaultdict(list)
    for row in rows:
        values = others(row, fields)
        for name in BATCH_FIELDS:
            values.pop(name, None)
        # Values may be lists, which are keys of no dictionary.
        groups[repr(values)].append(row)
    return groups.values()


def _scale(row: Row, measured: Sequence[Row], runset: RunSet) -> None:
    base = _baseline(row, measured)
    if base is None or not row.devices or not base.devices:
        return
    row.baseline = base
    speed = _speed(row, runset)
    if speed:
        # of a baseline it is never 0: see `_baseline`
        speedup = speed / _speed(base, runset)
        efficiency = speedup * base.devices / row.devices
        row.measures["speedup"] = Spread.of(speedup)
        row.measures["efficiency"] = Spread.of(efficiency)


def _speed(row: Row, runset: RunSet) -> float:
    """Returns the work a second of all devices of a row; 0: unknown."""
    devices = row.devices or 0
    if runset.scaling == "strong" or runset.is_own_program:
        # Of a program of the user's own, no phases are known.
        time = "wall_s" if runset.is_own_program else "train_s"
        seconds = row.median(time)
        if not seconds:
            return 0.0
        # Strong scaling: every row did the same work. Weak: as much for each device.
        work = 1 if runset.scaling == "strong" else devices
        return work / seconds
    return devices * (row.median("train_samples_per_s_per_device") or 0.0)


def _baseline(row: Row, measured: Sequence[Row]) -> Row | None:
    """Returns the row with the fewest devices of those that have a speed and equal this one in
    all else.

    Of rows with as few devices, the one with the nearest batch size, per process or global: fewer
    devices count more than an equal batch size, as in published tables.
    """

    def distance(other: Row) -> tuple[int, float]:
        process_batch, global_batch = batches_of(row)
        other_process_batch, other_global_batch = batches_of(other)
        process_distance = _batch_distance(process_batch, other_process_batch)
        global_distance = _batch_distance(global_batch, other_global_batch)
        return other.devices or 0, min(process_distance, global_distance)

    return min(measured, key=distance, default=None)


def _batch_distance(a: float, b: float) -> float:
    """Returns how far two batch sizes are apart; 0 where one is unknown."""
    if a <= 0 or b <= 0:
        return 0.0
    return abs(math.log(a / b))  # half as large is as far away as twice as large


def number_of(value: Any) -> float:
    """Returns a value of a file as a number; 0 if it is none."""
    return float(value) if is_number(value) else 0.0


def batches_of(row: Row) -> tuple[float, float]:
    """Returns the samples of an optimizer step: per process, and global."""
    global_batch = number_of(row.value(GLOBAL_BATCH_SIZE))
    if global_batch and row.devices:
        return global_batch / row.devices, global_batch
    micro_steps = number_of(row.value("gradient_accumulation_steps")) or 1
    per_process = number_of(row.value("batch_size")) * micro_steps
    return per_process, per_process * (row.devices or 0)


# --- as tables ------------------------------------------------------------------------------------


def in_order(fields: Sequence[str]) -> list[str]:
    """Returns fields in the order of the tables: those of the devices last."""
    return sorted(fields, key=lambda name: name in DEVICE_FIELDS)


def label(row: Row, fields: Sequence[str]) -> str:
    """Returns the fields of a row as text."""
    parts = []
    for name in in_order(fields):
        setting = name.replace("_", " ")
        value = row.cell.get(name)
        # A run of one task has no settings of another.
        if value is not None:
            parts.append(f"{setting} {setting_text(value)}")
    return ", ".join(parts) or "all"  # a set of a single cell has no fields


def metric_name(rows: Iterable[Row]) -> str:
    """Returns the primary metric of the rows' task; "metric" if they differ, or no run names it."""
    names = set()
    for row in rows:
        for run in row.finished:
            names.add(str(result_of(run).get("primary_metric") or "metric"))
    return names.pop() if len(names) == 1 else "metric"
