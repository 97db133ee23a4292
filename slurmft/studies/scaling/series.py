"""Measured runs as rows of the scaling model: from run directories, and from published tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.files import fits
from slurmft.runs.scan import MeasuredRun
from slurmft.studies.published import PublishedTable, load
from slurmft.studies.scaling.model import TOTAL, Row, Workload

_IDENTITY = (
    "task", "preset", "model", "data", "max_length", "precision", "backend", "grad_comm", "profile",
    "partition",
)  # fmt: skip
"""Fields that are the same in all runs of a series, as costs may depend on them."""

_RESOLUTION_S = {
    "startup": 0.5,
    "train": 0.02,
    "evaluate": 0.02,
    "metric": 2e-3,
    "broadcast": 2e-4,
    "rest": 0.5,
}
"""How much phases of equal runs differ, however short: file systems, thread wake-ups."""

_SAMPLES = {
    "emotion": (16_000, 2_000),
    "mrpc": (3_668, 408),
    "qqp": (363_846, 40_430),
    "squad": (88_524, 10_784),
}
"""Training and validation samples of the published data sets, from their cards on the hub; SQuAD's
are windows of 384 tokens with a stride of 128, as transformers' run_qa.py counts them."""

_EDR_GBIT_S = 100.0

_CHARTS = {
    "train_samples_per_s_per_gpu": ("train", 7.0),
    "eval_samples_per_s_per_gpu": ("evaluate", 14.0),
    "metric_compute_s": ("metric", 0.03),
    "broadcast_ms": ("broadcast", 2e-3),
}
"""Published chart -> its phase, and its resolution as `read_off` says, in the chart's own unit."""
_CHART_BATCH_SIZE = 256
"""Of the phases whose batch size a chart does not vary."""


@dataclass(frozen=True, slots=True)
class Series:
    """Rows of one workload on one kind of device: what one fit takes."""

    name: str
    rows: tuple[Row, ...]
    devices_per_node: int
    network_gbit_s: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader should know of the rows."""

    @property
    def device_counts(self) -> list[int]:
        """All that were measured, ascending."""
        return sorted({row.devices for row in self.rows})


def series_of(runs: Sequence[MeasuredRun]) -> dict[str, Series]:
    """Name -> series, of all finished runs; the name has what differs between them.

    Raises:
        UsageError: none has finished.
    """
    finished = [run for run in runs if run.is_finished]
    if not finished:
        states = ", ".join(sorted({run.state["state"] for run in runs}))
        raise UsageError(
            f"none of {len(runs)} run(s) has finished: {states}",
            "wait for one (slurmft follow RUN), or resume it: slurmft resume RUN",
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
    if left := len(runs) - len(finished):
        notes.append(f"{left} run(s) that have not finished are left out")
    groups = _by_series([run for run in finished if run.path in rows])
    return {
        name: _series(name, group, [rows[run.path] for run in group], tuple(notes))
        for name, group in groups.items()
    }


def _by_series(finished: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Name of a series -> its runs."""
    identities = [{name: _resolved(run, name) for name in _IDENTITY} for run in finished]
    differing = [n for n in _IDENTITY if len({repr(i[n]) for i in identities}) > 1]
    groups: dict[str, list[MeasuredRun]] = {}
    for run, identity in zip(finished, identities, strict=True):
        name = " ".join(str(identity[n]) for n in dict.fromkeys(("task", *differing)))
        groups.setdefault(name, []).append(run)
    return groups


def _resolved(run: MeasuredRun, name: str) -> Any:
    """What a run used, where its configuration may say auto."""
    return (run.result or {}).get(name) or run.value(name)


def _series(
    name: str, runs: Sequence[MeasuredRun], rows: Sequence[Row], notes: tuple[str, ...]
) -> Series:
    restarted = [r.name for r in runs if fits(r.result, {"attempts": range(2, 2**31)})]
    if restarted:
        notes += (f"restarted, so start-up and rest are not used: {', '.join(restarted)}",)
    if any(row.nodes > len(run.hosts) > 0 for row, run in zip(rows, runs, strict=True)):
        notes += ("nodes were simulated on one host: real nodes will differ",)
    return Series(
        name,
        tuple(rows),
        devices_per_node=max(row.devices // row.nodes for row in rows),
        notes=notes,
    )


def row_of(run: MeasuredRun) -> Row:
    """A finished run.

    Raises:
        UsageError: its result lacks what the model needs, or has impossible values.
    """
    try:
        row = _row(run)
        counts = (row.devices, row.nodes, row.work.train_samples)
        times = row.seconds.values()
        if min(counts) < 1 or "train" not in row.seconds or not all(map(math.isfinite, times)):
            raise ValueError("impossible run")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise UsageError(
            f"the result of {str(run.path)!r} lacks times, samples or devices, or they are invalid"
        ) from None
    return row


def _row(run: MeasuredRun) -> Row:
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


def published_series(path: Path) -> dict[str, Series]:
    """Name -> series of a file of published tables: results/published/*.json.

    Raises:
        UsageError: the file cannot be read, or has no measured times as in results/published.
    """
    found: dict[str, Series] = {}
    for table in load(path):
        groups: dict[str, list[Row]] = {}
        for name, row in _rows(table):
            groups.setdefault(name, []).append(row)
        for name, group in groups.items():
            found[name] = Series(
                name,
                tuple(group),
                table.setup.get("gpus_per_node", 1),
                _network_gbit_s(table),
            )
    if not found:
        raise _foreign(str(path))
    return found


def _rows(table: PublishedTable) -> list[tuple[str, Row]]:
    """The series and the row of the model of every row of a published table, in their order; none
    if it has no times.

    Raises:
        UsageError: its columns or setup are not as in results/published.
    """
    if table.part and table.part not in _CHARTS:
        return []
    make = _of_chart if table.part else _of_time
    try:
        found = [make(table, row) for row in map(table.named, table.rows)]
        for _, row in found:
            if row.devices < 1 or row.nodes < 1 or row.work.train_samples < 1:
                raise ValueError("no device, or no samples")
            if not all(0 < s < math.inf for s in row.seconds.values()):
                raise ValueError("an impossible time")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        raise _foreign(table.file) from None


def _foreign(name: str) -> UsageError:
    return UsageError(
        f"{name!r} holds no table of measured runs",
        "give run directories, or a table as in results/published, with columns, rows and setup",
    )


def _network_gbit_s(table: PublishedTable) -> float | None:
    """The line rate between nodes, where the publication names it."""
    if "EDR" in str(table.setup.get("interconnect", "")):
        return _EDR_GBIT_S
    named = re.search(r"([\d.]+) Gbit/s", table.work)
    return float(named[1]) if named else None


def _of_time(table: PublishedTable, row: Mapping[str, Any]) -> tuple[str, Row]:
    """A row of a table of runs with their times, on GPUs, or on nodes, which count as devices."""
    setup = table.setup
    name = row.get("task") or row.get("system") or setup["dataset"]
    data = f"{name} {setup.get('dataset', '')} {table.work}".lower()
    samples = _SAMPLES[next((known for known in _SAMPLES if known in data), "")]
    if "gpus" in row:
        devices, batch = row["gpus"], row["batch_size_per_gpu"]
        nodes = -(-devices // setup["gpus_per_node"])
        label = f"{devices} GPU(s), batch {batch}"
    else:  # the number of processes differs between nodes
        devices = nodes = row["nodes"]
        batch = setup["batch_size_per_process"] * setup.get("processes_per_node_distributed", 1)
        label = f"{nodes} node(s)"
    work = Workload(
        train_samples=samples[0],
        batch_size=batch,
        epochs=setup["epochs"],
        evaluate_samples=samples[1],
    )
    seconds = {TOTAL: row["time_s"]}
    return name, Row(label=label, work=work, devices=devices, nodes=nodes, seconds=seconds)


def _of_chart(table: PublishedTable, row: Mapping[str, Any]) -> tuple[str, Row]:
    """A bar of a chart: there is a series for each setting, over the numbers of GPUs."""
    phase, step = _CHARTS[table.part]
    setup, devices, value = table.setup, row["gpus"], row[table.part]
    label = "".join(f"-{row[name]}" for name in table.columns[:-1] if name != "gpus")
    batch = int(label.rpartition("-")[2]) if phase == "train" else _CHART_BATCH_SIZE
    work = Workload(
        train_samples=setup["train_samples"],
        batch_size=batch,
        evaluate_samples=setup["eval_samples"],
    )
    seconds = _seconds(phase, value, work, devices)
    return f"{phase}{label}", Row(
        label=f"{devices} GPU(s)",
        work=work,
        devices=devices,
        nodes=-(-devices // setup["gpus_per_node"]),
        seconds={phase: seconds},
        resolution_s={phase: seconds * step / value / 12**0.5},  # uniform
    )


def _seconds(phase: str, value: float, work: Workload, devices: int) -> float:
    """A value of a chart in seconds."""
    if phase in ("train", "evaluate"):  # samples/s of a device
        samples = work.train_samples if phase == "train" else work.evaluate_samples
        return samples / (devices * value)
    return value / 1000 if phase == "broadcast" else value
