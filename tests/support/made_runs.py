"""Run directories as slurmft writes them, without a run: for tests of what reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.files import write_json
from slurmft.core.options import build
from slurmft.core.run_files import Call, CallGroup, Calls, RankCalls, Submission
from slurmft.runs.records import RecordWriter, StepWindows
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.recipes import fill

PROVENANCE: dict[str, Any] = {
    "time": "2026-11-21T10:00:00+00:00",
    "host": "login",
    "user": "ada",
    "folder": "/home/ada",
    "command": "slurmft submit",
    "site_file": None,
    "slurmft": "0.1",
    "python": "3.11.7",
    "git": {"commit": "0123456789abcdef", "dirty": False},
}


def write_run(
    path: Path,
    *,
    state: str = "finished",
    result: dict[str, Any] | None = None,
    step_s: float = 0.1,
    submission: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    **fields: Any,
) -> RunDir:
    """A run of 20 steps; its times follow from `step_s`, the time of a step.

    Args:
        path: its run directory.
        state: the last state; only a finished run has a result.
        result: values of result.json that differ from the usual.
        step_s: seconds of a step.
        submission: values of the submission that differ from the usual, such as study.
        versions: versions of packages.
        fields: of the configuration: nodes=4, batch_size=64, ...
    """
    values = fill(fields)
    job = build(JobConfig, values | {"runs_dir": str(path.parent)})
    told = Submission(**(PROVENANCE | (submission or {})))
    config = RunConfig(
        program=build(TrainConfig, values).program(), job=job, submission=told
    )
    run = RunDir(path)
    for folder in (path, run.logs, run.failures):
        folder.mkdir(parents=True)
    run.config.write_text(config.to_json())
    run.set_state("submitted")
    run.set_state("running")
    world_size = job.nodes * (job.nproc_per_node or 1)
    train = TrainConfig.of(config.program)
    batch = train.step_size(world_size)
    facts = _facts(config, world_size, batch)
    ranks = [
        {
            "rank": r,
            "node": str(r * job.nodes // world_size),
            "threads": 1,
            "device": "CPU",
        }
        | {"host": f"n{r * job.nodes // world_size + 1}"}
        for r in range(world_size)
    ]
    known = {"slurmft": "0.1", "torch": "2.13.0"} | (versions or {})
    write_json(run.environment, {"versions": known, "python": "3.11.7", "ranks": ranks})
    records = [{"event": "start"} | facts]
    for step in range(1, 21):
        record = {
            "event": "step",
            "step": step,
            "epoch": step / 20,
            "learning_rate": 1e-3,
        }
        record |= {"loss": 2.0 / step, "time": 1000 + step * step_s}
        if step % 5 == 0:
            record |= {"samples_per_s": batch / step_s, "left_s": (20 - step) * step_s}
            record["total_steps"] = 20
        records.append(record)
    run.records.write_text(
        "".join(json.dumps({"time": 1000.0} | r) + "\n" for r in records)
    )
    if state == "finished":
        write_json(run.result, _result(facts, batch, step_s) | (result or {}))
    if state not in ("submitted", "running"):
        run.set_state(state, "", 0 if state == "finished" else 1)
    return run


def _facts(config: RunConfig, world_size: int, batch: int) -> dict[str, Any]:
    train = TrainConfig.of(config.program)
    return {
        "task": train.task, "preset": train.preset, "model": train.model, "parameters": 22_000_000,
        "world_size": world_size, "nodes": config.job.nodes, "backend": "gloo",
        "precision": "fp32" if train.precision == "auto" else train.precision,
        "global_batch_size": batch, "total_steps": 20,
    }  # fmt: skip


def _result(facts: dict[str, Any], batch: int, step_s: float) -> dict[str, Any]:
    train_s, rate = 20 * step_s, batch / step_s
    return facts | {
        "metrics": {"accuracy": 0.9},
        "primary_metric": "accuracy",
        "loss": 0.1,
        "steps": 20,
        "phases_s": {
            "train": train_s,
            "evaluate": 1.0,
            "metric": 0.02,
            "broadcast": 0.001,
        },
        "train_samples": 20 * batch,
        "train_samples_per_s": rate,
        "train_tokens_per_s": rate * 20,
        "train_padded_tokens_per_s": rate * 30,
        "evaluate_samples": 1000,
        "evaluate_samples_per_s": 1000.0,
        "peak_memory_bytes": [2**30] * facts["world_size"],
        "startup_s": 5.0,
        "wall_s": train_s + 7.0,
        "attempts": 1,
    }


def write_long_records(
    path: Path, *, steps: int, evaluated_after: Sequence[int] = (), log_every: int = 10
) -> None:
    """Appends what a run of so many steps records, 100 a second, in place of what is there."""
    windows, writer = StepWindows(), RecordWriter(path)
    os.truncate(path, 0)
    start = {
        "event": "start",
        "task": "emotion",
        "world_size": 4,
        "nodes": 2,
        "precision": "bf16",
    }
    start |= {"backend": "gloo", "global_batch_size": 64, "parameters": 1_500_000}
    writer.write(start | {"total_steps": steps})
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row = {
            "event": "step",
            "step": step,
            "time": 1e9 + step / 100,
            "epoch": step / steps,
        }
        row |= {
            "learning_rate": 1e-3 * (1 - step / steps),
            "loss": 1 / step + 0.123456789,
        }
        if step % log_every == 0:
            row |= {"samples_per_s": 1000 + 1 / step, "left_s": (steps - step) / 100}
            row["total_steps"] = steps
        rows.append(row)
        if step in evaluated_after:
            epoch = evaluated_after.index(step) + 1
            facts = {
                "step": step,
                "epoch": epoch,
                "loss": 0.1,
                "metrics": {"accuracy": 0.9},
            }
            rows.append({"event": "epoch"} | facts | {"phases_s": {"train": 1.0}})
            rows.append({"event": "warning", "text": "something is odd"})
            rows.append({"event": "ranks", "step": step, "own_ms": [10.0] * 4,
                         "memory_mib": [1000] * 4})  # fmt: skip
        if step % 1000 == 0 or step == steps:
            plain = [row for row in rows if row["event"] == "step"]
            others = [row for row in rows if row["event"] != "step"]
            writer.write(*windows.take(plain), *others)
            rows = []


def write_trained(path: Path, model: Path, **fields: Any) -> RunDir:
    """A finished run whose saved model is a copy of a model's folder; for `fields` see
    `write_run`."""
    run = write_run(path, model=str(model), **fields)
    shutil.copytree(model, run.model)
    return run


def calls_of_rank(idle_s: float | None = None, waits_s: float | None = None) -> Calls:
    """The collectives of one rank of two; it waits in the last one, unless `waits_s` is None."""
    call = Call(
        group="gloo:0",
        number=7,
        operation="all_reduce",
        bytes=4,
        waits=waits_s is not None,
        seconds=waits_s or 0.0,
    )
    return Calls(
        world_size=2,
        lost_peer=False,
        is_full=False,
        where="",
        groups={"gloo:0": CallGroup(last=7, ranks=[0, 1])},
        calls=[call],
        idle_s=idle_s,
    )


def write_rank_calls(run: RunDir, rank: int, calls: Calls) -> None:
    """Writes what a rank of the first attempt has told."""
    state = RankCalls(
        rank=rank,
        host="n1",
        attempt=1,
        process="S",
        step=0,
        phase="output",
        calls=calls,
    )
    write_json(run.rank_calls(rank), state)
