"""What runs measured: a row for every cell, with medians and spreads over its repeats."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmft import forecasts
from slurmft.forecasts import Forecast
from slurmft.grid import Cell
from slurmft.rundir import RunDir
from slurmft.runs import MeasuredRun, is_number, varied
from slurmft.runsets import RunSet, planned
from slurmft.tabular import NOTHING, Column, Table, Value, decimals_of, rounded

DEVICE_FIELDS = ("nodes", "nproc_per_node", "gpus_per_node")
"""Fields of the configuration that say on how many devices a run is."""

PHASES = ("startup", "train", "evaluate", "metric", "broadcast", "rest")
"""Parts of a run's time; rest: model and data loading after the first step's start, saving."""

_NEAR = 0.02
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


def _result(run: MeasuredRun) -> dict[str, Any]:
    assert run.result is not None
    return run.result


def _phase(name: str) -> Callable[[MeasuredRun], float]:
    return lambda run: float(_result(run)["phases_s"][name])


def _rate(phase: str) -> Callable[[MeasuredRun], float]:
    """Samples/s of a device in a phase."""
    return lambda run: float(_result(run)[f"{phase}_samples_per_s"] / _result(run)["world_size"])


def _of_result(name: str) -> Callable[[MeasuredRun], float]:
    return lambda run: float(_result(run)[name])


def _imports_s(run: MeasuredRun) -> float:
    return float(_result(run)["imports_s"]["max"])


def _rest_s(run: MeasuredRun) -> float:
    found = _result(run)
    return float(found["wall_s"] - found["startup_s"] - sum(found["phases_s"].values()))


def _memory_gib(run: MeasuredRun) -> float:
    return float(max(_result(run)["peak_memory_bytes"])) / 2**30


def _first_metric(run: MeasuredRun) -> float:
    return float(next(iter(_result(run)["metrics"].values())))


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
            if name in _result(run):
                return _result(run)[name]
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
        pairs = zip(_batches(row), _batches(r), strict=True)
        return r.devices or 0, min(abs(math.log(a / b)) if a and b else 0 for a, b in pairs)

    found = [r for r in rows if r.devices and r.median("train_s") and rest(r) == rest(row)]
    return min(found, key=distance, default=None)


_BATCH = ("batch_size", "gradient_accumulation_steps")


def _number(value: Any) -> float:
    """What a foreign file may have as something else; 0: it does."""
    return float(value) if is_number(value) else 0.0


def _batches(row: Row) -> tuple[float, float]:
    """Samples of a step: of a process, of all."""
    size, steps = (row.value(field) for field in _BATCH)
    mine = _number(size) * (_number(steps) or 1)
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
        next(iter(_result(run)["metrics"]), "metric")
        for r in rows
        for run in r.finished
        if isinstance(_result(run)["metrics"], dict)
    }
    return str(names.pop()) if len(names) == 1 else "metric"


def speed_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Times, throughput, speedup, metric."""
    measures = [m for m in SPEED if m.key != "train_samples_per_s"]
    before, last = measures[:-1], measures[-1]
    columns = _leading(rows, runset.fields)
    for measure in before:
        columns.append((_column(measure), _shown(measure, rows)))
        if measure.key == FORECAST:
            columns += forecasts.columns("predicted train (s)", [r.forecast for r in rows])
    columns += _scaled(rows)
    columns.append((Column("metric", metric_name(rows), rank=METRIC.rank), _shown(METRIC, rows)))
    columns.append((_column(last), _shown(last, rows)))
    return _table(runset.title, columns, _notes(rows, runset))


def phase_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Where the time of a run goes, and its memory."""
    measures = [MEASURES[f"{p}_s"] for p in PHASES] + [
        m for m in TIMES if m.key.endswith("gib") or m.rank
    ]
    columns = _leading(rows, runset.fields)
    columns += [(_column(m, ranked=m.rank), _shown(m, rows, plain=True)) for m in measures]
    return _table(f"{runset.title}: phases of a run, medians", columns, ())


def data_table(rows: Sequence[Row], runset: RunSet) -> Table:
    """Everything, for CSV: median, smallest and largest of every measure."""
    columns: _Columns = [(Column("set"), [Value.of(runset.name)] * len(rows))]
    columns += _leading(rows, runset.fields)
    if not _state_column(rows):
        columns.append((Column("state"), [Value.of("finished")] * len(rows)))
    for measure in MEASURES.values():
        found = [row.measures.get(measure.key) for row in rows]
        for suffix, part in (("", "median"), ("_min", "low"), ("_max", "high")):
            values = [Value.of(s and getattr(s, part)) for s in found]
            columns.append((Column(measure.key + suffix), values))
    columns += forecasts.data_columns(f"predicted_{FORECAST}", [r.forecast for r in rows])
    for key in SCALED:
        columns.append((Column(key), [Value.of(row.scaled.get(key)) for row in rows]))
    columns.append(
        (
            Column("baseline"),
            [Value.of(r.baseline and label(r.baseline, runset.fields)) for r in rows],
        )
    )
    columns.append((Column("metric_name"), [Value.of(metric_name([row])) for row in rows]))
    columns.append((Column("runs"), [Value.of(" ".join(x.name for x in r.runs)) for r in rows]))
    return _table(runset.title, columns, ())


_Columns = list[tuple[Column, list[Value]]]


def _table(title: str, columns: _Columns, notes: Sequence[str]) -> Table:
    cells = zip(*(values for _, values in columns), strict=True)
    return Table(title, [column for column, _ in columns], [list(row) for row in cells], notes)


def _leading(rows: Sequence[Row], fields: Sequence[str]) -> _Columns:
    """What names a row: its fields, its devices, its finished runs, what became of the others."""
    made: _Columns = []
    for name in in_order(fields):
        values = [row.cell.get(name) for row in rows]
        numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        made.append((Column(name, numeric=numeric), [Value.of(v) for v in values]))
    made.append((Column("devices"), [Value.of(row.devices) for row in rows]))
    made.append((Column("n"), [Value.of(len(row.finished)) for row in rows]))
    return made + _state_column(rows)


def _column(measure: Measure, ranked: int | None = None) -> Column:
    return Column(measure.key, measure.label, rank=measure.rank if ranked is None else ranked)


def _shown(measure: Measure, rows: Sequence[Row], plain: bool = False) -> list[Value]:
    found = [row.measures.get(measure.key) for row in rows]
    decimals = measure.decimals
    if decimals is None:
        decimals = decimals_of(s.median for s in found if s)
    return [_value(s, decimals, measure.ranged and not plain) for s in found]


def _value(spread: Spread | None, decimals: int, ranged: bool) -> Value:
    if spread is None:
        return Value(None, NOTHING)
    text = rounded(spread.median, decimals)
    if ranged and spread.n > 1:
        text += f" ±{spread.percent:.0f}%"
    return Value(spread.median, text)


def _scaled(rows: Sequence[Row]) -> _Columns:
    """The columns that follow from several rows; none where all rows are their own baseline."""
    if not any(row.baseline not in (None, row) for row in rows):
        return []
    return [
        (column, [Value(v := row.scaled.get(key), rounded(v, 2)) for row in rows])
        for key, column in SCALED.items()
    ]


def _state_column(rows: Sequence[Row]) -> _Columns:
    if not any(row.state for row in rows):
        return []
    return [(Column("state", numeric=False), [state_value(row) for row in rows])]


def state_value(row: Row) -> Value:
    """The state of a row as it is shown; a long reason is in the notes."""
    text = row.state or "finished"
    return Value(text, text if len(text) <= _STATE else text[: _STATE - 3] + "...")


_STATE = 24
"""Characters of a state that fit into a text table."""


def _notes(rows: Sequence[Row], runset: RunSet) -> list[str]:
    """How the numbers were made, as far as it concerns these."""
    notes = ["a row is a cell, with medians of its n finished runs"]
    if any(s.n > 1 for row in rows for s in row.measures.values()):
        notes[0] += "; ±: the repeat that is farthest from the median (CSV: smallest and largest)"
    notes[0] += ". time: from the job's start to its end; train: optimizer steps only"
    if any(row.baseline not in (None, row) for row in rows):
        way = "training time" if runset.scaling == "strong" else "training throughput"
        notes.append(
            f"speedup: by {way}, against the row with the fewest devices that is equal in all else;"
            " efficiency: speedup by the ratio of devices"
        )
    notes += [
        f"{label(row, runset.fields)}: {row.state}" for row in rows if len(row.state) > _STATE
    ]
    notes += _foreign_baselines(rows, runset.fields)
    if runset.scaling == "strong" and (uneven := _uneven_work(rows)):
        notes.append(uneven)
    return notes


def _foreign_baselines(rows: Sequence[Row], fields: Sequence[str]) -> list[str]:
    """Rows whose baseline has another batch size."""
    found = [
        f"{label(row, fields)} is compared with {label(row.baseline, fields)}"
        for row in rows
        if row.baseline and not set(_batches(row)) & set(_batches(row.baseline))
    ]
    return [f"no row on fewer devices has this batch size: {'; '.join(found)}"] if found else []


def _uneven_work(rows: Sequence[Row]) -> str | None:
    for row in rows:
        for run in row.finished:
            base = (row.baseline.finished if row.baseline else [run])[0]
            mine, its = (_number(_result(r).get("train_samples")) for r in (run, base))
            if mine and its and abs(mine / its - 1) > _NEAR:
                return (
                    f"strong scaling wants the same work in all rows, but {run.name} trained "
                    f"{mine:.0f} samples and {base.name} {its:.0f}: the speedups say little"
                )
    return None
