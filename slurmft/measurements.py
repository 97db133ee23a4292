"""Measured runs as rows of the scaling model: from run directories, and from published tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.errors import UsageError
from slurmft.runs import Run
from slurmft.scaling import TOTAL, Row, Workload

_IDENTITY = (
    "task", "preset", "model", "data", "max_length", "precision", "backend", "ipex", "profile",
    "partition",
)  # fmt: skip
"""Fields in which runs are of one series only if they are the same: no cost may depend on one."""

_RESOLUTION_S = {
    "startup": 0.5,
    "train": 0.02,
    "evaluate": 0.02,
    "metric": 2e-3,
    "broadcast": 2e-4,
    "rest": 0.5,
}
"""How far phases of equal runs differ, however short they are: file systems, thread wake-ups."""

_SAMPLES = {
    "emotion": (16_000, 2_000),
    "mrpc": (3_668, 408),
    "qqp": (363_846, 40_430),
    "squad": (88_524, 10_784),
}
"""Training and validation samples of the published data sets, from their cards on the hub; SQuAD's
are windows of 384 tokens with a stride of 128, as transformers' run_qa.py counts them."""

_EDR_GBIT_S = 100.0

_CHART_STEPS = {"train": 7.0, "evaluate": 14.0, "metric": 0.03, "broadcast": 2e-6}
"""Resolution of the published charts, as `read_off` says: samples/s, samples/s, s, s."""


@dataclass(frozen=True, slots=True)
class Series:
    """Rows of one workload on one kind of device: what one fit takes."""

    name: str
    rows: tuple[Row, ...]
    devices_per_node: int
    network_gbit_s: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader should know of the rows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Label of a row -> the first metric, where it is known."""

    @property
    def device_counts(self) -> list[int]:
        """All that were measured, ascending."""
        return sorted({row.devices for row in self.rows})


def series_of(runs: Sequence[Run]) -> dict[str, Series]:
    """Name -> series, of all runs that have finished; the name says what differs between them.

    Raises:
        UsageError: none has finished.
    """
    finished = [run for run in runs if run.is_finished]
    if not finished:
        states = ", ".join(sorted({run.state["state"] for run in runs}))
        raise UsageError(
            f"none of {len(runs)} run(s) has finished: {states}",
            "wait for one (slurmft follow RUN), or go on with it: slurmft resume RUN",
        )
    notes: list[str] = []
    rows: dict[Path, Row] = {}
    for run in finished:
        try:
            rows[run.path] = row_of(run)
        except UsageError as error:
            notes.append(f"left out: {error.message}")
    if not rows:
        raise UsageError(f"none of {len(finished)} finished run(s) can be used: {notes[0][10:]}")
    left = len(runs) - len(finished)
    finished = [run for run in finished if run.path in rows]
    identities = [{name: _resolved(run, name) for name in _IDENTITY} for run in finished]
    differing = [n for n in _IDENTITY if len({repr(i[n]) for i in identities}) > 1]
    groups: dict[str, list[Run]] = {}
    if left:
        notes.append(f"{left} run(s) that have not finished are left out")
    for run, identity in zip(finished, identities, strict=True):
        name = " ".join(str(identity[n]) for n in dict.fromkeys(("task", *differing)))
        groups.setdefault(name, []).append(run)
    return {
        name: _series(name, group, [rows[run.path] for run in group], tuple(notes))
        for name, group in groups.items()
    }


def _resolved(run: Run, name: str) -> Any:
    """What a run really used, where its configuration may say auto."""
    return (run.result or {}).get(name) or run.value(name)


def _series(name: str, runs: Sequence[Run], rows: Sequence[Row], notes: tuple[str, ...]) -> Series:
    restarted = [run.name for run in runs if (run.result or {}).get("attempts", 1) > 1]
    if restarted:
        notes += (f"started more than once, start-up and rest not used: {', '.join(restarted)}",)
    if any(row.nodes > len(run.hosts) > 0 for row, run in zip(rows, runs, strict=True)):
        notes += ("nodes were simulated on one host: this says nothing of real nodes",)
    return Series(
        name,
        tuple(rows),
        devices_per_node=max(row.devices // row.nodes for row in rows),
        notes=notes,
        metrics={run.name: metric for run in runs if (metric := _metric(run)) is not None},
    )


def _metric(run: Run) -> float | None:
    """The first metric, where it is a number."""
    metrics = (run.result or {})["metrics"]
    first = next(iter(metrics.values()), None) if isinstance(metrics, dict) else None
    return first if isinstance(first, (int, float)) and math.isfinite(first) else None


def row_of(run: Run) -> Row:
    """A finished run.

    Raises:
        UsageError: its result lacks what the model needs, or holds what cannot be.
    """
    try:
        row = _row(run)
        counts = (row.devices, row.nodes, row.work.train_samples)
        times = row.seconds.values()
        if min(counts) < 1 or "train" not in row.seconds or not all(map(math.isfinite, times)):
            raise ValueError("no such run can be")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise UsageError(
            f"the result of {str(run.path)!r} lacks times, samples or devices, or they cannot be"
        ) from None
    return row


def _row(run: Run) -> Row:
    result = run.result
    assert result is not None
    devices = result["world_size"]
    epochs = len({r.get("epoch") for r in run.records("epoch")})
    epochs = epochs or run.value("epochs") or 1
    per_step = devices * (run.value("batch_size") or 1)
    micro_steps = max(1, round(result["global_batch_size"] / per_step))
    work = Workload(
        train_samples=round(result["train_samples"] / epochs),
        batch_size=max(1, round(result["global_batch_size"] / (devices * micro_steps))),
        epochs=epochs,
        micro_steps=micro_steps,
        evaluate_samples=round(result["evaluate_samples"] / epochs),
        eval_batch_size=run.value("eval_batch_size") or 256,
        parameters=result["parameters"],
    )
    seconds = dict(result["phases_s"])
    if result.get("attempts", 1) == 1:
        rest = result["wall_s"] - result["startup_s"] - sum(seconds.values())
        seconds |= {"startup": result["startup_s"], "rest": rest}
    seconds = {name: s for name, s in seconds.items() if name in _RESOLUTION_S and s > 0}
    return Row(
        label=run.name,
        work=work,
        devices=devices,
        nodes=result["nodes"],
        seconds=seconds,
        resolution_s=_RESOLUTION_S,
    )


# --- published tables -----------------------------------------------------------------------------


def published(path: Path) -> dict[str, Series]:
    """Name -> series of a published table: results/published/*.json.

    Raises:
        UsageError: the file cannot be read, or holds no such table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError:
        raise _foreign(path) from None
    try:
        found = list(_charts(table) if "gpus" in table else _times(table))
        rows = [row for series in found for row in series.rows]
        if any(row.devices < 1 or row.nodes < 1 or row.work.train_samples < 1 for row in rows):
            raise ValueError("no device, or nothing to do")
        if not all(0 < s < math.inf for row in rows for s in row.seconds.values()):
            raise ValueError("a time that cannot be")
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        raise _foreign(path) from None
    return {series.name: series for series in found}


def _foreign(path: Path) -> UsageError:
    return UsageError(
        f"{str(path)!r} holds no table of measured runs",
        "give run directories, or a table as in results/published, with columns, rows and setup",
    )


def _network_gbit_s(table: Mapping[str, Any]) -> float | None:
    """The line rate between nodes, where the publication names it."""
    if "EDR" in table["setup"].get("interconnect", ""):
        return _EDR_GBIT_S
    named = re.search(r"([\d.]+) Gbit/s", table["name"])
    return float(named[1]) if named else None


def _times(table: Mapping[str, Any]) -> Iterable[Series]:
    """Tables with a row for each run and its time: of GPUs, or of nodes, each one device."""
    setup, names = table["setup"], table["columns"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for values in table["rows"]:
        row = dict(zip(names, values, strict=True))
        groups.setdefault(row.get("task") or row.get("system") or setup["dataset"], []).append(row)
    for name, rows in groups.items():
        data = f"{name} {setup.get('dataset', '')} {table['name']}".lower()
        samples = _SAMPLES[next((known for known in _SAMPLES if known in data), "")]
        found = tuple(_timed(row, setup, samples) for row in rows)
        yield Series(
            name,
            found,
            setup.get("gpus_per_node", 1),
            _network_gbit_s(table),
            metrics={f.label: r["accuracy"] for f, r in zip(found, rows, strict=True)}
            if "accuracy" in names
            else {},
        )


def _timed(row: Mapping[str, Any], setup: Mapping[str, Any], samples: tuple[int, int]) -> Row:
    if "gpus" in row:
        devices, batch = row["gpus"], row["batch_size_per_gpu"]
        nodes = -(-devices // setup["gpus_per_node"])
        label = f"{devices} GPU(s), batch {batch}"
    else:  # processes of a node share it, and their number is not the same on every one
        devices = nodes = row["nodes"]
        batch = setup["batch_size_per_process"] * setup.get("processes_per_node_distributed", 1)
        label = f"{nodes} node(s)"
    work = Workload(
        train_samples=samples[0],
        batch_size=batch,
        epochs=setup["epochs"],
        evaluate_samples=samples[1],
        eval_batch_size=setup.get("eval_batch_size", batch),
    )
    return Row(label=label, work=work, devices=devices, nodes=nodes, seconds={TOTAL: row["time_s"]})


def _charts(table: Mapping[str, Any]) -> Iterable[Series]:
    """The benchmark's charts: a series for each phase and setting, over the numbers of GPUs."""
    setup, gpus = table["setup"], table["gpus"]
    network_gbit_s = _network_gbit_s(table)

    def series(name: str, phase: str, values: Sequence[float], batch: int) -> Series:
        work = Workload(
            train_samples=setup["train_samples"],
            batch_size=batch if phase == "train" else 256,
            evaluate_samples=setup["eval_samples"],
            eval_batch_size=256 if phase == "train" else batch,
        )
        samples = work.train_samples if phase == "train" else work.evaluate_samples
        rows = []
        for devices, value in zip(gpus, values, strict=True):
            is_rate = phase in ("train", "evaluate")
            seconds = samples / (devices * value) if is_rate else value
            resolution_s = seconds * _CHART_STEPS[phase] / value / 12**0.5  # uniform
            row = Row(
                label=f"{devices} GPU(s)",
                work=work,
                devices=devices,
                nodes=-(-devices // setup["gpus_per_node"]),
                seconds={phase: seconds},
                resolution_s={phase: resolution_s},
            )
            rows.append(row)
        return Series(name, tuple(rows), setup["gpus_per_node"], network_gbit_s)

    for name, values in table["train_samples_per_s_per_gpu"].items():
        yield series(f"train-{name}", "train", values, int(name.partition("-")[2]))
    for batch, values in table["eval_samples_per_s_per_gpu"].items():
        yield series(f"evaluate-{batch}", "evaluate", values, int(batch))
    for batch, values in table["metric_compute_s"].items():
        yield series(f"metric-{batch}", "metric", values, int(batch))
    seconds = [ms / 1000 for ms in table["broadcast_ms"]]
    yield series("broadcast", "broadcast", seconds, 256)
