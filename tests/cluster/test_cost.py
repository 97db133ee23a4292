"""What runs cost, by their own records, and what to ask for next time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from slurmft.cluster import cost
from slurmft.cluster.fact_types import Cost
from slurmft.core.files import write_json
from slurmft.runs.scan import MeasuredRun
from slurmft.show import costs
from tests.support.made_runs import write_run

GIB = 2**30
COST: dict[str, Any] = {
    "node_hours": 2.5, "gpu_hours": 10.0, "cpu_hours": 0.0, "energy_j": 7.2e6, "longest_s": 3700,
    "peak_memory_bytes": 9 * GIB, "asked_memory_bytes": 64 * GIB, "source": "x",
}  # fmt: skip


def made(folder: Path, history: list[tuple[str, float]], **job: Any) -> MeasuredRun:
    """A run of two nodes that two jobs of no known scheduler had."""
    states = [
        {"state": s, "time": t, "reason": "", "exit_code": None} for s, t in history
    ]
    ranks = [
        {"rank": n, "host": f"n{n}", "hardware": {"cpus": "0-3,8", "gpus": [{}, {}]}}
        for n in range(2)
    ]
    files: dict[str, Any] = {
        "config.json": {
            "program": {"kind": "x"},
            "job": {"nodes": 2} | job,
            "submission": {},
        },
        "state.json": states[-1] | {"history": states},
        "job.json": {"cluster": "slurm", "id": "7", "where": "another"},
        "environment.json": {"ranks": ranks},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return MeasuredRun.read(folder)


@pytest.mark.processes
def test_all_attempts_count(tmp_path: Path) -> None:
    """Time in the queue between them does not."""
    history = [
        ("submitted", 0),
        ("running", 100),
        ("stopping", 3600),
        ("requeued", 3700),
    ]
    run = made(tmp_path, [*history, ("running", 9000), ("failed", 10800)])
    (found,) = cost.costs_of([run])
    assert found["node_hours"] == pytest.approx(2 * 1.5)
    assert found["cpu_hours"] == pytest.approx(10 * 1.5)
    assert found["gpu_hours"] == pytest.approx(4 * 1.5)
    assert found["longest_s"] == 3600
    assert found["energy_j"] is found["peak_memory_bytes"] is None
    assert (
        costs.words(found)
        == "3.00 node-hours, 6.00 GPU-hours, 15.00 CPU-hours; energy unknown"
    )


@pytest.mark.processes
def test_moment_between_two_attempts_in_an_allocation_counts(tmp_path: Path) -> None:
    """The job has its nodes all the while."""
    history = [("submitted", 0), ("running", 100), ("requeued", 3400)]
    made(tmp_path, [*history, ("running", 3700), ("failed", 5500)])
    record = json.loads((tmp_path / "state.json").read_text())
    record["history"][2]["in_allocation"] = True
    (tmp_path / "state.json").write_text(json.dumps(record))
    (found,) = cost.costs_of([MeasuredRun.read(tmp_path)])
    assert found["node_hours"] == pytest.approx(2 * 1.5)


@pytest.mark.processes
def test_attempts_count_by_their_own_nodes(tmp_path: Path) -> None:
    """Each start of --nodes MIN-MAX has as many as are free, and a resume as many as it asks
    for."""
    history = [
        ("running", 0.0),
        ("requeued", 3600.0),
        ("running", 7200.0),
        ("failed", 9000.0),
    ]
    start = {
        "event": "start", "task": "t", "world_size": 8, "precision": "fp32", "backend": "gloo",
        "parameters": 1, "global_batch_size": 1, "total_steps": 9,
    }  # fmt: skip
    records = [start | {"time": 60, "nodes": 4}, start | {"time": 7260, "nodes": 2}]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (tmp_path / "records.jsonl").write_text(lines)
    (found,) = cost.costs_of([made(tmp_path, history)])
    assert found["node_hours"] == pytest.approx(4 * 1.0 + 2 * 0.5)
    assert found["gpu_hours"] == pytest.approx(2 * 5.0)


def test_words() -> None:
    assert costs.words(COST) == (
        "2.50 node-hours, 10.00 GPU-hours; 9.0 GiB of 64.0 GiB a node; energy 2 kWh"
    )
    lines = costs.table(
        ["a", "b"], [COST, COST | {"gpu_hours": None, "energy_j": None}]
    )
    assert lines[2].split() == [
        "b",
        "2.50",
        "-",
        "0.00",
        "9.0",
        "GiB",
        "of",
        "64.0",
        "GiB",
        "unknown",
    ]
    assert lines[3].split() == [
        "in",
        "all",
        "5.00",
        "≥",
        "10.00",
        "0.00",
        "≥",
        "2",
        "kWh",
    ]


@pytest.mark.parametrize(
    ("job", "more", "words"),
    [
        (
            {"mem": "64G"},
            {},
            "asked for 64.0 GiB a node, used 9.0 GiB: --mem 14G would do",
        ),
        ({}, {}, ""),  # the site gives so much
        ({"mem": "64G"}, {"peak_memory_bytes": 40 * GIB}, ""),
        ({"mem": "64G"}, {"peak_memory_bytes": None}, ""),
    ],
)
def test_advice(
    tmp_path: Path, job: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    run = made(tmp_path, [("submitted", 0), ("failed", 1)], **job)
    assert cost.advice(cast(Cost, COST | more), run) == words


@pytest.mark.parametrize(
    ("limit", "stops", "longest_s", "is_told"),
    [
        ("10", 3, 480, True),
        ("10", 2, 480, False),
        ("10", 3, 60, False),
        ("120", 3, 6000, False),
    ],
)
def test_a_limit_that_is_too_short(
    tmp_path: Path, limit: str, stops: int, longest_s: float, is_told: bool
) -> None:
    history = [("running", 0.0), ("stopping", 1.0), ("requeued", 2.0)] * stops
    run = made(tmp_path, history, time=limit)
    words = cost.advice(cast(Cost, COST | {"longest_s": longest_s}), run)
    text = ""
    if is_told:
        text = f"stopped {stops} times, at the limit of --time {limit}: of a longer one"
    assert words.startswith(text)
    assert bool(words) == is_told


@pytest.mark.parametrize("limit", ["abc", "9" * 5000, 7.5, [], "0", None])
def test_a_limit_that_is_none_has_no_advice(tmp_path: Path, limit: Any) -> None:
    """A colleague's run must not end the report of all."""
    run = write_run(tmp_path / "r")
    config = json.loads(run.config.read_text())
    config["job"]["time"] = limit
    write_json(run.config, config)
    assert cost.advice(cast(Cost, COST), MeasuredRun.read(run.path)) == ""
