"""Checkpoints as files: whole or not there, verified, pruned, and never in the way of the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from slurmft.core.config import JobConfig, RunConfig
from slurmft.job import Job
from slurmft.job.checkpoints import verify
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train import checkpoint
from slurmft.train.checkpoint import Buffers, Saver, Snapshot
from slurmft.train.config import TrainConfig
from slurmft.train.state import join_optimizer, rng_state, set_rng_state, split_optimizer
from tests.support import CHECKOUT

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    job = JobConfig(runs_dir=str(tmp_path))
    return RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))


def snapshot(step: int, value: float = 1.0, size: int = 1000) -> Snapshot:
    tensors = {"model": {"w": torch.full((size,), value)}, "predicted": {"n": torch.empty(0)}}
    return Snapshot("", {"step": step}, tensors)


def warnings_of(run: RunDir) -> list[str]:
    return [r["text"] for r in RecordReader(run.records).read("warning")]


def test_round_trip(run: RunDir) -> None:
    assert Saver(Job(run)).save(snapshot(3, 0.5), patience_s=0)
    found = checkpoint.read(run.checkpoints / "step-00000003")
    assert found.state == {"step": 3}
    assert torch.equal(found.tensors["model"]["w"], torch.full((1000,), 0.5))
    assert found.tensors["predicted"]["n"].numel() == 0


def test_full_disk(small_disk: Path) -> None:
    """The save fails with a warning, what is there stays, and the next save works again."""
    job = JobConfig(runs_dir=str(small_disk), keep_checkpoints=3)
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    saver = Saver(Job(run))
    assert saver.save(snapshot(1), patience_s=0)
    too_large = snapshot(2, size=2**20)
    assert not saver.save(too_large, patience_s=0)
    warnings = warnings_of(run)
    assert len(warnings) == 1
    assert "no checkpoint of step 2: " in warnings[0]
    assert "No space left" in warnings[0]
    assert "make room" in warnings[0]
    assert run.checkpoint_names() == ["step-00000001"]
    verify(run.checkpoints / "step-00000001")
    assert not list(run.checkpoints.glob(".*"))
    assert saver.save(snapshot(3), patience_s=0)


def test_vanished_file_system(run: RunDir) -> None:
    saver = Saver(Job(run))
    gone = run.path.rename(run.path.with_name("gone"))
    saver.start(snapshot(1))
    saver.wait()
    gone.rename(run.path)
    assert "no checkpoint of step 1" in warnings_of(run)[0]
    assert "make room" not in warnings_of(run)[0]
    assert saver.save(snapshot(2), patience_s=0)


def test_buffers_are_copies_in_one_place() -> None:
    buffers, tensor = Buffers(), torch.zeros(4)
    first = buffers.copy({"f": {"t": tensor}})["f"]["t"]
    tensor += 1
    assert first.tolist() == [0.0] * 4
    second = buffers.copy({"f": {"t": tensor}})["f"]["t"]
    assert second.data_ptr() == first.data_ptr()


def test_random_generators_come_back() -> None:
    import random

    np.random.standard_normal()
    random.gauss(0, 1)
    state = rng_state(CPU)

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.standard_normal()),
            float(torch.rand(1)),
        ]

    expected = draw()
    draw()
    set_rng_state(state, CPU)
    assert draw() == expected


def test_optimizer_comes_back() -> None:
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(()))]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    weights[0].grad = torch.ones(3)
    optimizer.step()
    tensors, rest = split_optimizer(optimizer)
    other = torch.optim.AdamW(weights, lr=0.5)
    join_optimizer(other, tensors, rest)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_safetensors_are_all_there_is(run: RunDir) -> None:
    """Nothing that would be unpickled; submitit's jobs are, with the worker's checks."""
    assert Saver(Job(run)).save(snapshot(1), patience_s=0)
    suffixes = {path.suffix for path in (run.checkpoints / "step-00000001").iterdir()}
    assert suffixes == {".safetensors", ".json"}
    found = subprocess.run(
        [
            *("grep", "-rnE", "--exclude=submitit_worker.py"),
            *(r"torch\.(load|save)\(|pickle\.", "slurmft"),
        ],
        capture_output=True, text=True, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    assert found.stdout == ""
