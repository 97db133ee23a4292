"""Published tables as measured runs of the scaling model: how well does it predict them?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.plugins.studies.published import PublishedTable, load
from slurmft.plugins.studies.scaling.model import (
    TOTAL,
    Interval,
    Prediction,
    Row,
    Workload,
)
from slurmft.plugins.studies.scaling.series import Series

_SAMPLES = {
    "emotion": (16_000, 2_000),
    "mrpc": (3_668, 408),
    "qqp": (363_846, 40_430),
    "squad": (88_524, 10_784),
}
"""Training and validation samples of the published data sets, from their cards on the hub; SQuAD's
are windows of 384 tokens with a stride of 128, as transformers' run_qa.py counts them."""

_CHARTS = {
    "train_samples_per_s_per_gpu": ("train", 7.0),
    "eval_samples_per_s_per_gpu": ("evaluate", 14.0),
    "metric_compute_s": ("metric", 0.03),
    "broadcast_ms": ("broadcast", 2e-3),
}
"""Published chart -> its phase, and its resolution as `read_off` says, in the chart's own unit."""
_CHART_BATCH_SIZE = 256
"""Of the phases whose batch size a chart does not vary."""


def published_series(path: Path) -> dict[str, Series]:
    """Name -> series of a file of published tables: results/published/*.json."""
    found: dict[str, Series] = {}
    for table in load(path):
        groups: dict[str, list[Row]] = {}
        for name, row in _rows(table):
            groups.setdefault(name, []).append(row)
        for name, group in groups.items():
            found[name] = Series(
                name, tuple(group), table.setup.get("gpus_per_node", 1)
            )
    return found


def _rows(table: PublishedTable) -> list[tuple[str, Row]]:
    """The series and the row of the model of every row of a published table, in their order; none
    if it has no times."""
    if table.part and table.part not in _CHARTS:
        return []
    make = _of_chart if table.part else _of_time
    return [make(table, row) for row in table.rows]


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
        batch = setup["batch_size_per_process"] * setup.get(
            "processes_per_node_distributed", 1
        )
        label = f"{nodes} node(s)"
    work = Workload(
        train_samples=samples[0],
        batch_size=batch,
        epochs=setup["epochs"],
        evaluate_samples=samples[1],
    )
    seconds = {TOTAL: row["time_s"]}
    return name, Row(
        label=label, work=work, devices=devices, nodes=nodes, seconds=seconds
    )


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


def phase_s(prediction: Prediction, name: str) -> Interval:
    """The time of one phase, or the TOTAL, as it would be measured."""
    if name == TOTAL:
        return prediction.total_s
    return Interval.of(prediction.phases_s[name] * prediction.noise)
