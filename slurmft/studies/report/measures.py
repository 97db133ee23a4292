"""What runs measured: a row for every cell, with medians and spreads over its repeats."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun, is_number, varied
from slurmft.studies.report.forecast import Forecast
from slurmft.studies.report.formats import Column
from slurmft.studies.report.runset import RunSet, planned
from slurmft.studies.spec import Cell

DEVICE_FIELDS = ("nodes", "nproc_per_node", "gpus_per_node")
"""Fields of the configuration that say on how many devices a run is."""

PHASES = ("startup", "train", "evaluate", "metric", "broadcast", "rest")
"""Parts of a run's time; rest: model and data loading after the first step's start, saving."""

NEAR = 0.02
"""Work that differs by less than this part is the same: a last batch may be smaller."""


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
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Measure:
    """What a run can be asked for, and how it is shown."""

    key: str
    label: str
    read: Callable[[MeasuredRun], float]
    """The value of a run; errors mean that it has none."""
    rank: int = 0
    """See `tabular.Column`."""
    decimals: int | None = None
    """None: as many as the smallest value needs."""
    ranged: bool = False
    """The spread is shown beside the median."""


def result_of(run: MeasuredRun) -> dict[str, Any]:
    assert run.result is not None
    return run.result


def _phase(name: str) -> Callable[[MeasuredRun], float]:
    return lambda run: float(result_of(run)["phases_s"][name])


def _rate(phase: str) -> Callable[[MeasuredRun], float]:
    """Samples/s of a device in a phase."""
    return lambda run: float(
        result_of(run)[f"{phase}_samples_per_s"] / result_of(run)["world_size"]
    )


def _of_result(name: str) -> Callable[[MeasuredRun], float]:
    return lambda run: float(result_of(run)[name])


def _imports_s(run: MeasuredRun) -> float:
    return float(result_of(run)["imports_s"]["max"])


def _rest_s(run: MeasuredRun) -> float:
    found = result_of(run)
    return float(found["wall_s"] - found["startup_s"] - sum(found["phases_s"].values()))


def _memory_gib(run: MeasuredRun) -> float:
    return float(max(result_of(run)["peak_memory_bytes"])) / 2**30


def _first_metric(run: MeasuredRun) -> float:
    return float(next(iter(result_of(run)["metrics"].values())))


def _per_evaluation(phase: str, factor: float = 1) -> Callable[[MeasuredRun], float]:
    """Seconds (times a factor) of a phase in one evaluation."""
    return lambda run: _phase(phase)(run) * factor / run.evaluations


SPEED = (
    Measure("wall_s", "time (s)", _of_result("wall_s"), rank=4, ranged=True),
    Measure("train_s", "train (s)", _phase("train"), ranged=True),
    Measure(
        "train_samples_per_s_per_device", "train samples/s per device", _rate("train"), ranged=True
    ),
    Measure("train_samples_per_s", "train samples/s", _of_result("train_samples_per_s"), rank=5),
    Measure(
        "evaluate_samples_per_s_per_device",
        "evaluate samples/s per device",
        _rate("evaluate"),
        rank=5,
    ),
)
METRIC = Measure("metric", "metric", _first_metric, rank=2, decimals=4)
"""The task's first metric; its column has the metric's name."""
TIMES = (
    Measure("startup_s", "start-up (s)", _of_result("startup_s")),
    Measure("imports_s", "imports of the slowest node (s)", _imports_s),
    *(Measure(f"{p}_s", f"{p} (s)", _phase(p)) for p in PHASES[1:-1] if p != "train"),
    Measure("rest_s", "rest (s)", _rest_s),
    Measure("peak_memory_gib", "peak memory (GiB)", _memory_gib),
    Measure(
        "metric_s_per_evaluation", "metric (s) per evaluation", _per_evaluation("metric"), rank=1
    ),
    Measure(
        "broadcast_ms_per_evaluation",
        "broadcast (ms) per evaluation",
        _per_evaluation("broadcast", 1000),
        rank=1,
    ),
)
MEASURES = {m.key: m for m in (*SPEED, METRIC, *TIMES)}


@dataclass(slots=True)
class Row:
    """A cell of a set: its fields, its runs and what they measured."""

    cell: Cell
    runs: Sequence[MeasuredRun]
    devices: int | None
    state: str
    """Empty: all its runs finished."""
    common: Cell
    """Fields that are the same in all runs of the set; of a cell without runs, all that it would
    have."""
    measures: dict[str, Spread] = field(default_factory=dict)
    """By the key of a measure; without those that no run has."""
    scaled: dict[str, float] = field(default_factory=dict)
    """speedup and efficiency, where there is a row to compare with."""
    baseline: Row | None = None
    forecast: Forecast | None = None
    """Its training time, predicted from rows with fewer devices; None: nobody asked, or there are
    too few."""

    def median(self, key: str) -> float | None:
        found = self.measures.get(key)
        return found.median if found else None

    @property
    def finished(self) -> list[MeasuredRun]:
        return [run for run in self.runs if run.is_finished]

    def value(self, name: str) -> Any:
        """A field of its configuration; of a cell without runs what it would be."""
        if name in self.cell:
            return self.cell[name]
        return self.runs[0].value(name) if self.runs else self.common.get(name)

    def fact(self, name: str) -> Any:
        """What a run of it found out, such as the precision that `auto` became; else the field."""
        for run in self.finished:
            if name in result_of(run):
                return result_of(run)[name]
        asked = self.value(name)
        return self.common.get(name, asked) if asked in (None, "auto") else asked


SCALED = {
    "speedup": Column("speedup", "speedup"),
    "efficiency": Column("efficiency", "efficiency"),
}
"""Columns that follow from several rows."""

FORECAST = "train_s"
"""The measure that `Row.forecast` is of."""


def rows_of(runset: RunSet) -> list[Row]:
    """A row for every cell: by what they differ in besides devices, then by devices."""
    common = _common(runset.runs)
    rows = []
    for cell, runs in runset.cells:
        known = common if runs or not runset.study else planned(runset.study, cell, common)
        rows.append(_row(cell, runs, runset.repeats, known))
    rows.sort(key=lambda row: (_sortable(others(row, runset.fields)), row.devices or 0))
    if runset.scaling != "none":
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
    """The fields that are the same in all runs; for auto what it became, if that is the same."""
    differ = set(varied(runs))
    same = {k: v for k, v in runs[0].fields.items() if k not in differ} if runs else {}
    for name in [k for k, v in same.items() if v == "auto"]:
        became = {str(r.result[name]) for r in runs if r.result and name in r.result}
        if len(became) == 1:
            same[name] = became.pop()
    return same


def _row(cell: Cell, runs: Sequence[MeasuredRun], repeats: int, common: Cell) -> Row:
    row = Row(cell, runs, _devices(runs, common | cell), state_of(runs, repeats), common)
    for measure in MEASURES.values():
        found = Spread.of([v for run in row.finished if (v := _read(measure, run)) is not None])
        if found:
            row.measures[measure.key] = found
    return row


def _read(measure: Measure, run: MeasuredRun) -> float | None:
    """A run's value; None where its result lacks it, or holds what is no number."""
    try:
        value = measure.read(run)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration):
        return None
    return value if math.isfinite(value) else None


def _devices(runs: Sequence[MeasuredRun], fields: Cell) -> int | None:
    """Ranks of a cell: what its runs say, else what its configuration asks for."""
    for run in runs:
        if run.result and isinstance(run.result["world_size"], int):
            return run.result["world_size"]
        if ranks := run.environment.get("ranks"):
            return len(ranks)
    nodes, *each = (runs[0].value(f) if runs else fields.get(f) for f in DEVICE_FIELDS)
    processes = next((n for n in each if isinstance(n, int)), None)
    return nodes * processes if isinstance(nodes, int) and processes else None


def state_of(runs: Sequence[MeasuredRun], repeats: int) -> str:
    """What is not as it should be: "missing", "failed: reason", "1 of 3 failed"; or nothing."""
    total = max(len(runs), repeats)
    states = [_state(run) for run in runs if not run.is_finished]
    missing = total - len(runs)
    counts = Counter(state for state, _ in states)
    if missing:
        counts["missing"] = missing
    reason = next((f": {text}" for _, text in reversed(states) if text), "")
    if len(counts) == 1 and counts.total() == total:
        return f"{next(iter(counts))}{reason}"
    return ", ".join(f"{n} of {total} {state}" for state, n in counts.items()) + reason


def _state(run: MeasuredRun) -> tuple[str, str]:
    """The state of a run that has no result, and the reason where it failed."""
    state = str(run.state["state"])
    if state == "finished":
        return "without result", "finished, but result.json is not there"
    if state != "failed":
        return state, ""
    failure = RunDir(run.path).root_failure() or {}
    reason = str(run.state.get("reason") or failure.get("message") or "")
    return state, (reason.splitlines() or [""])[0]


# --- speedup and efficiency -----------------------------------------------------------------------


def _scale(row: Row, rows: Sequence[Row], runset: RunSet) -> None:
    base = _baseline(row, rows, runset.fields)
    if base is None or not row.devices or not base.devices:
        return
    row.baseline = base
    ratio = row.devices / base.devices
    if runset.scaling == "strong":
        its, mine = base.median("train_s"), row.median("train_s")
        speedup = its / mine if its and mine else None
    else:  # the same as the ratio of times where the work is the same
        mine, its = (r.median("train_samples_per_s_per_device") for r in (row, base))
        speedup = ratio * mine / its if mine and its else None
    if speedup is not None:
        row.scaled |= {"speedup": speedup, "efficiency": speedup / ratio}


def _baseline(row: Row, rows: Iterable[Row], fields: Sequence[str]) -> Row | None:
    """The row with the fewest devices among rows equal in all else.

    A batch size counts as equal if the global one is; if no such row has as few devices, another
    batch size is better than more devices, as in published tables.
    """

    def rest(r: Row) -> dict[str, Any]:
        return {k: v for k, v in others(r, fields).items() if k not in _BATCH}

    def distance(r: Row) -> tuple[int, float]:
        pairs = zip(batches_of(row), batches_of(r), strict=True)
        return r.devices or 0, min(abs(math.log(a / b)) if a and b else 0 for a, b in pairs)

    found = [r for r in rows if r.devices and r.median("train_s") and rest(r) == rest(row)]
    return min(found, key=distance, default=None)


_BATCH = ("batch_size", "gradient_accumulation_steps")


def number_of(value: Any) -> float:
    """What a foreign file may have as something else; 0: it does."""
    return float(value) if is_number(value) else 0.0


def batches_of(row: Row) -> tuple[float, float]:
    """Samples of a step: of a process, of all."""
    size, steps = (row.value(field) for field in _BATCH)
    mine = number_of(size) * (number_of(steps) or 1)
    return mine, mine * (row.devices or 0)


# --- as tables ------------------------------------------------------------------------------------


def in_order(fields: Sequence[str]) -> list[str]:
    """Fields as tables show them: what the devices are last."""
    return sorted(fields, key=lambda f: f in DEVICE_FIELDS)


def label(row: Row, fields: Sequence[str]) -> str:
    """The fields of a row in words."""
    words = (f"{f.replace('_', ' ')} {row.cell.get(f)}" for f in in_order(fields))
    return ", ".join(words) or "all"


def metric_name(rows: Iterable[Row]) -> str:
    """The first metric of the rows' task; where they differ, just "metric"."""
    names = {
        next(iter(result_of(run)["metrics"]), "metric")
        for r in rows
        for run in r.finished
        if isinstance(result_of(run)["metrics"], dict)
    }
    return str(names.pop()) if len(names) == 1 else "metric"
