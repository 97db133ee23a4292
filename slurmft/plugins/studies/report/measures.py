"""What runs measured: those of a study, or of none, as one table with a row for every cell: medians
and spreads.

The cells and repeats of a study are read from its `study.toml`; without it, only the existing runs
are known.
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slurmft.core.decode import matches
from slurmft.core.errors import UsageError
from slurmft.core.files import is_number
from slurmft.plugins.studies import cells, spec
from slurmft.plugins.studies.cells import BATCH_FIELDS, DEVICE_FIELDS, fields_of, varied
from slurmft.plugins.studies.spec import GLOBAL_BATCH_SIZE, Cell, Study
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

# --- sets of runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSet:
    """The runs of one table, grouped by cell."""

    name: str
    title: str
    fields: Sequence[str]
    """What its cells differ in."""
    cells: Sequence[tuple[Cell, Sequence[MeasuredRun]]]
    """Values of the fields, and the runs with them; no run: they are missing."""
    repeats: int = 1
    """Runs that a cell should have, at least."""
    scaling: str | None = None
    """strong: the same work in all cells; weak: the same work per device; None: unknown."""
    study: Study | None = None
    """Its study file, if it can be read."""
    problems: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[MeasuredRun]:
        return [run for _, found in self.cells for run in found]

    @property
    def is_own(self) -> bool:
        """Whether its runs are of a program of the user's own."""
        return any(run.is_own for run in self.runs)


@dataclass(frozen=True)
class _StudyOfRun:
    """What a run of a study says of it."""

    name: str
    cell: dict[str, Any]


def group_by_study(runs: Sequence[MeasuredRun], title: str = "") -> list[RunSet]:
    """The runs (oldest first) by study, oldest study first; then those of no study, a set for each
    program, with this title."""
    studies: dict[tuple[str, Path | None], list[MeasuredRun]] = {}
    others: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        program, study = run.config["program"], run.study
        if program.get("kind") == "predict":
            continue  # it has trained nothing
        if study and matches(study, _StudyOfRun):
            # The nearest folder with a study.toml; not above that of its runs' folder.
            above = (path for path in list(run.path.parents)[:3] if (path / spec.FILE).is_file())
            studies.setdefault((study["name"], next(above, None)), []).append(run)
        else:
            others.setdefault(str(program.get("name")) if run.is_own else "", []).append(run)
    made = [_of_study(name, folder, found) for (name, folder), found in studies.items()]
    for kind, found in others.items():
        words = f"{title or 'Runs'}: {kind}" if len(others) > 1 and kind else title
        fields = varied(found)
        groups = [
            ({name: fields_of(repeats[0]).get(name) for name in fields}, repeats)
            for repeats in cells.cells(found)
        ]
        made.append(RunSet("runs", words or "Runs", fields, groups))
    return made


def _of_study(name: str, folder: Path | None, runs: list[MeasuredRun]) -> RunSet:
    problems: list[str] = []
    study = _read_study(name, folder, problems) if folder else None
    cells: dict[str, tuple[Cell, list[MeasuredRun]]] = {}
    for cell in [*(study.cells if study else ()), *((run.study or {})["cell"] for run in runs)]:
        cells.setdefault(spec.key_of(cell), (cell, []))
    best: dict[tuple[str, str], MeasuredRun] = {}  # of each repeat: a finished run, or the newest
    for run in runs:
        found = run.study or {}
        key = spec.key_of(found["cell"]), repr(found.get("repeat", run.name))
        if key not in best or run.is_finished or not best[key].is_finished:
            best[key] = run
    for (cell_key, _), run in best.items():
        cells[cell_key][1].append(run)
    fields = list(dict.fromkeys(f for cell, _ in cells.values() for f in cell))
    varied = [f for f in fields if len({repr(c.get(f)) for c, _ in cells.values()}) > 1]
    return RunSet(
        name=name,
        title=study.title if study else name,
        fields=varied,
        cells=list(cells.values()),
        repeats=study.repeats if study else 1,
        scaling=study.scaling if study else None,
        study=study,
        problems=problems,
    )


def _read_study(name: str, folder: Path, problems: list[str]) -> Study | None:
    """The study file in a folder; None, with a problem noted, if it cannot be used."""
    try:
        study = spec.read_study(folder, with_published=False)
        if study.name != name:
            raise UsageError(f"{folder / spec.FILE} is of the study {study.name!r}")
    except UsageError as error:
        problems.append(f"missing runs are unknown: {error.message}")
        return None
    return study


def planned(study: Study, cell: Cell, common: Mapping[str, Any]) -> Cell:
    """The fields that a run of a cell would have, as far as they are known; `common` are the same
    in all existing runs: the study file lacks flags."""
    values = study.fixed | spec.typed(cell)
    found = {k: v for k, v in {**common, **values}.items() if v is not None}
    if GLOBAL_BATCH_SIZE in values:
        found.pop("batch_size", None)  # it is for other numbers of processes
        with contextlib.suppress(UsageError):  # the number of processes is not known
            found["batch_size"] = spec.divide_batch(values, found)["batch_size"]
    return found


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
        """How far the farthest of the repeats is from the median, in percent of that."""
        farthest = max(self.high - self.median, self.median - self.low)
        return 100 * farthest / abs(self.median) if self.median else 0.0

    @classmethod
    def of(cls, *values: float) -> Self:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity of a run, and how it is shown."""

    key: str
    label: str
    read: Callable[[dict[str, Any]], float]
    """The value in a run's result; an error means that it has none."""
    rank: int = 0
    """See `formats.Column`."""
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
    """Of a value of all devices, that of one."""
    return lambda r: float(r[name] / r["world_size"])


_TRAIN = Measure("train_s", "train (s)", _phase("train"), ranged=True)
SPEED = (
    Measure("wall_s", "time (s)", lambda r: r["wall_s"], rank=4, ranged=True),
    _TRAIN,
    Measure("train_samples_per_s_per_device", "train samples/s per device",
            _a_device("train_samples_per_s"), ranged=True),
    Measure("train_samples_per_s", "train samples/s", lambda r: r["train_samples_per_s"], rank=5),
    Measure("evaluate_samples_per_s_per_device", "evaluate samples/s per device",
            _a_device("evaluate_samples_per_s"), rank=5),
)  # fmt: skip
METRIC = Measure("metric", "metric", lambda r: r["metrics"][r["primary_metric"]], decimals=4)
"""The task's primary metric; its column has the metric's name."""
TIMES = (
    Measure("startup_s", "start-up (s)", lambda r: r["startup_s"]),
    _TRAIN,
    *(Measure(f"{p}_s", f"{p} (s)", _phase(p)) for p in ("evaluate", "metric", "broadcast")),
    Measure("rest_s", "rest (s)",  # loading of model and data after start-up, and saving
            lambda r: r["wall_s"] - r["startup_s"] - sum(r["phases_s"].values())),
    Measure("peak_memory_gib", "peak memory (GiB)", lambda r: max(r["peak_memory_bytes"]) / 2**30),
    Measure("train_tokens_per_s_per_device", "train tokens/s per device",
            _a_device("train_tokens_per_s"), rank=1),
    Measure("train_model_tflop_per_s_per_device", "model TFLOP/s per device",
            _a_device("train_model_tflop_per_s"), rank=2),
    Measure("mfu", "MFU", lambda r: _a_device("train_model_tflop_per_s")(r) / r["peak_tflop_per_s"],
            rank=1),
    Measure("parameters_m", "parameters (M)", lambda r: r["parameters"] / 1e6, rank=3),
    Measure("trained_parameters_m", "of these train (M)", lambda r: r["trained_parameters"] / 1e6,
            rank=3),
    Measure("imports_s", "imports of the slowest node (s)", lambda r: r["imports_s"]["max"],
            rank=3),
    Measure("metric_s_per_evaluation", "metric (s) per evaluation", _phase("metric"), rank=2,
            per_evaluation=True),
    Measure("broadcast_ms_per_evaluation", "broadcast (ms) per evaluation",
            lambda r: 1000 * r["phases_s"]["broadcast"], rank=2, per_evaluation=True),
)  # fmt: skip
MEASURES = {m.key: m for m in (*SPEED, METRIC, *TIMES)}


def measures_of(runset: RunSet) -> list[Measure]:
    """What its runs measure: of a program of the user's own, the time and its metrics."""
    most = [SPEED[0]] if runset.is_own else list(MEASURES.values())
    return most + other_metrics(runset)


def other_metrics(runset: RunSet) -> list[Measure]:
    """The metrics of its runs; of trainings, those besides the primary one."""
    results = [result_of(run) for run in runset.runs if run.is_finished]
    found = [r["metrics"] for r in results if isinstance(r["metrics"], dict)]
    names = dict.fromkeys(name for metrics in found for name in metrics)
    primary = {str(r.get("primary_metric")) for r in results}
    if not runset.is_own and len(primary) == 1:  # its column has the name
        names.pop(primary.pop(), None)
    return [_metric(name) for name in names]


def _metric(name: str) -> Measure:
    return Measure(
        f"metric_{name}", name, lambda r: r["metrics"][name], rank=3, figures=4, ranged=True
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
        found = self.measures.get(key)
        return found.median if found else None

    @property
    def finished(self) -> list[MeasuredRun]:
        return [run for run in self.runs if run.is_finished]

    def value(self, name: str) -> Any:
        """A field as its runs resolved it, such as the precision chosen for `auto`, else as they
        were configured; of a cell without runs, the planned one."""
        resolved = [result_of(run)[name] for run in self.finished if name in result_of(run)]
        asked = self.cell.get(name, self.runs[0].value(name) if self.runs else None)
        known = resolved[0] if resolved else asked
        return self.common.get(name, known) if known in (None, "auto") else known


SCALED = ("speedup", "efficiency")
"""Measures that follow from a row and its baseline."""


def rows_of(runset: RunSet) -> list[Row]:
    """A row for every cell, sorted by the other fields, then by devices."""
    common, measures = _common(runset.runs), measures_of(runset)
    rows = []
    for cell, runs in runset.cells:
        known = common if runs or not runset.study else planned(runset.study, cell, common)
        devices, state = _devices(runs, known | cell), state_of(runs, runset.repeats)
        rows.append(row := Row(cell, runs, devices, state, known))
        for measure in measures:
            if values := [v for run in row.finished if (v := _read(measure, run)) is not None]:
                row.measures[measure.key] = Spread.of(*values)
    rows.sort(key=lambda row: (_sortable(others(row, runset.fields)), row.devices or 0))
    if runset.scaling in ("strong", "weak") or (runset.scaling is None and not runset.is_own):
        for row in rows:
            _scale(row, rows, runset)
    return rows


def others(row: Row, fields: Sequence[str]) -> dict[str, Any]:
    """The fields of a row that do not say on how many devices it is."""
    return {f: row.cell.get(f) for f in fields if f not in DEVICE_FIELDS}


def _sortable(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Values of mixed types in a fixed order."""
    numbers = (int, float)
    return [
        ("", v) if isinstance(v, numbers) else (type(v).__name__, str(v)) for v in values.values()
    ]


def _common(runs: Sequence[MeasuredRun]) -> Cell:
    """The fields that are the same in all runs; `auto` as resolved, if that is the same."""
    differ = set(varied(runs))
    same = {k: v for k, v in fields_of(runs[0]).items() if k not in differ} if runs else {}
    for name in [k for k, v in same.items() if v == "auto"]:
        resolved = {str(r.result[name]) for r in runs if r.result and name in r.result}
        if len(resolved) == 1:
            same[name] = resolved.pop()
    return same


def _read(measure: Measure, run: MeasuredRun) -> float | None:
    """A run's value; None where its result lacks it, or has no finite number there."""
    try:
        value = float(measure.read(result_of(run)))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    if measure.per_evaluation:
        value /= run.evaluations
    return value if math.isfinite(value) else None


def _devices(runs: Sequence[MeasuredRun], fields: Cell) -> int | None:
    """Ranks of a cell: as its runs recorded them, else as its configuration asks for them."""
    for run in runs:
        if run.result and isinstance(run.result["world_size"], int):
            return run.result["world_size"]
        if run.environment.ranks:
            return len(run.environment.ranks)
    nodes, *each = (runs[0].value(f) if runs else fields.get(f) for f in DEVICE_FIELDS)
    processes = next((n for n in each if isinstance(n, int)), None)
    return nodes * processes if isinstance(nodes, int) and processes else None


def state_of(runs: Sequence[MeasuredRun], repeats: int) -> str:
    """ "missing", "failed: reason", "1 of 3 failed"; "" where all runs have finished."""
    total = max(len(runs), repeats)
    states = [_state(run) for run in runs if not run.is_finished]
    states += [("missing", "")] * (total - len(runs))
    counts = Counter(state for state, _ in states)
    reason = next((f": {text}" for _, text in reversed(states) if text), "")
    if len(counts) == 1 and counts.total() == total:
        return f"{next(iter(counts))}{reason}"
    return ", ".join(f"{n} of {total} {state}" for state, n in counts.items()) + reason


def _state(run: MeasuredRun) -> tuple[str, str]:
    """The state of a run that has no result, and the reason where it failed."""
    state = run.state.state
    if state == "finished":
        return "without result", "finished, but it has no result.json"
    if state != "failed":
        return state, ""
    failure = RunDir(run.path).root_failure()
    reason = run.state.reason or (failure.message if failure else "")
    return state, (reason.splitlines() or [""])[0]


# --- speedup and efficiency -----------------------------------------------------------------------


def _scale(row: Row, rows: Sequence[Row], runset: RunSet) -> None:
    base = _baseline(row, rows, runset)
    if base is None or not row.devices or not base.devices:
        return
    row.baseline = base
    if speed := _speed(row, runset):
        speedup = speed / _speed(base, runset)
        row.measures["speedup"] = Spread.of(speedup)
        row.measures["efficiency"] = Spread.of(speedup * base.devices / row.devices)


def _speed(row: Row, runset: RunSet) -> float:
    """Work a second, of all devices of a row; 0: unknown."""
    devices = row.devices or 0
    if runset.scaling == "strong" or runset.is_own:
        seconds = row.median("wall_s" if runset.is_own else "train_s")
        work = 1 if runset.scaling == "strong" else devices
        return work / seconds if seconds else 0.0
    return devices * (row.median("train_samples_per_s_per_device") or 0.0)


def _baseline(row: Row, rows: Iterable[Row], runset: RunSet) -> Row | None:
    """The row with the fewest devices among rows equal in all else.

    Of rows with as few devices, the one with the nearest batch size, per process or global: fewer
    devices count more than an equal batch size, as in published tables.
    """

    def rest(r: Row) -> dict[str, Any]:
        return {k: v for k, v in others(r, runset.fields).items() if k not in BATCH_FIELDS}

    def distance(r: Row) -> tuple[int, float]:
        pairs = zip(batches_of(row), batches_of(r), strict=True)
        return r.devices or 0, min(abs(math.log(a / b)) if a > 0 and b > 0 else 0 for a, b in pairs)

    found = [r for r in rows if r.devices and _speed(r, runset) and rest(r) == rest(row)]
    return min(found, key=distance, default=None)


def number_of(value: Any) -> float:
    """A value of a file as a number; 0 if it is none."""
    return float(value) if is_number(value) else 0.0


def batches_of(row: Row) -> tuple[float, float]:
    """Samples of an optimizer step: per process, and global."""
    micro_steps = number_of(row.value("gradient_accumulation_steps")) or 1
    per_process = number_of(row.value("batch_size")) * micro_steps
    return per_process, per_process * (row.devices or 0)


# --- as tables ------------------------------------------------------------------------------------


def in_order(fields: Sequence[str]) -> list[str]:
    """Fields in the order of the tables: those of the devices last."""
    return sorted(fields, key=lambda f: f in DEVICE_FIELDS)


def label(row: Row, fields: Sequence[str]) -> str:
    """The fields of a row in words."""
    words = (f"{f.replace('_', ' ')} {row.cell.get(f)}" for f in in_order(fields))
    return ", ".join(words) or "all"


def metric_name(rows: Iterable[Row]) -> str:
    """The primary metric of the rows' task; where they differ, or no run names it: "metric"."""
    names = {
        str(result_of(run).get("primary_metric") or "metric") for r in rows for run in r.finished
    }
    return names.pop() if len(names) == 1 else "metric"
