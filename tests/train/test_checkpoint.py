"""Checkpoints as files: whole or not there, verified, pruned, and never in the way of the run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.files import write_json
from slurmft.runs.rundir import RunDir
from slurmft.train import checkpoint
from slurmft.train.checkpoint import BadCheckpointError, Buffers, Saver, Snapshot, read_newest
from slurmft.train.config import TrainConfig
from slurmft.train.state import join_optimizer, rng_state, set_rng_state, split_optimizer
from tests.support import CHECKOUT
from tests.support.faults import SmallDisk

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    job = JobConfig(runs_dir=str(tmp_path))
    made = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    made.checkpoints.mkdir()
    return made


def snapshot(step: int, value: float = 1.0, size: int = 1000) -> Snapshot:
    tensors = {"model": {"w": torch.full((size,), value)}, "predicted": {"n": torch.empty(0)}}
    return Snapshot(f"step-{step:08d}", {"step": step}, tensors)


def test_round_trip(run: RunDir) -> None:
    checkpoint.write(run, snapshot(3, 0.5), attempt=0)
    found = checkpoint.read(run.checkpoints / "step-00000003")
    assert found.state == {"step": 3}
    assert torch.equal(found.tensors["model"]["w"], torch.full((1000,), 0.5))
    assert found.tensors["predicted"]["n"].numel() == 0


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_damage_is_found_and_the_one_before_is_taken(run: RunDir, name: str, harm: object) -> None:
    for step in (1, 2):
        checkpoint.write(run, snapshot(step), attempt=0)
    assert callable(harm)
    harm(run.checkpoints / "step-00000002" / name)
    with pytest.raises(BadCheckpointError):
        checkpoint.read(run.checkpoints / "step-00000002")
    warnings: list[str] = []
    found = read_newest(run, warnings.append)
    assert found is not None
    assert found.state["step"] == 1
    assert len(warnings) == 1
    assert "step-00000002 is damaged" in warnings[0]
    assert run.checkpoint_names() == ["step-00000001"]  # the bad one is put aside, not removed
    assert len(list(run.checkpoints.glob("bad-*"))) == 1


def test_names_sort_by_progress(run: RunDir) -> None:
    names = ["step-00000009", "step-00000010", "step-00000010-e00000512", "step-00000010-evaluated"]
    for name in reversed([*names, "step-00000011"]):
        (run.checkpoints / name).mkdir()
    assert run.checkpoint_names() == [*names, "step-00000011"]


def test_prune_keeps_the_newest_and_the_best(run: RunDir) -> None:
    for step in range(1, 6):
        checkpoint.write(run, snapshot(step), attempt=0)
    checkpoint.prune(run, keep=2, best="step-00000002")
    assert run.checkpoint_names() == ["step-00000002", "step-00000004", "step-00000005"]
    assert not list(run.checkpoints.glob(".*"))


def test_attempt_that_slurm_gave_up_writes_no_checkpoint(run: RunDir) -> None:
    write_json(run.attempt, {"number": 2})
    with pytest.raises(OSError, match="later attempt"):
        checkpoint.write(run, snapshot(1), attempt=1)
    checkpoint.write(run, snapshot(1), attempt=2)
    assert run.checkpoint_names() == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    with SmallDisk(tmp_path / "small", 1) as folder:
        yield folder


def test_full_disk(small_disk: Path) -> None:
    """The save fails with a warning, what is there stays, and the next save works again."""
    job = JobConfig(runs_dir=str(small_disk))
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    saver = Saver(run, attempt=0, every_s=0, keep=3)
    assert saver.save(snapshot(1), time.monotonic(), patience_s=0)
    too_large = snapshot(2, size=2**20)
    assert not saver.save(too_large, time.monotonic(), patience_s=0)
    warnings = list(saver.messages())
    assert len(warnings) == 1
    assert "no checkpoint of step 2: " in warnings[0]
    assert "No space left" in warnings[0]
    assert run.checkpoint_names() == ["step-00000001"]
    checkpoint.read(run.checkpoints / "step-00000001")
    assert not list(run.checkpoints.glob(".*"))
    assert saver.save(snapshot(3), time.monotonic(), patience_s=0)


def test_vanished_file_system(run: RunDir) -> None:
    saver = Saver(run, attempt=0, every_s=1e-9, keep=3)
    gone = run.path.rename(run.path.with_name("gone"))
    saver.start(snapshot(1), time.monotonic())
    saver.wait()
    assert "no checkpoint of step 1" in next(saver.messages())
    assert not saver.is_due()  # not at every step, but after a pause
    gone.rename(run.path)
    assert saver.save(snapshot(2), time.monotonic(), patience_s=0)


def test_leftovers_of_a_kill_are_removed(run: RunDir) -> None:
    (run.checkpoints / ".step-00000001.123.ab").mkdir()
    checkpoint.remove_leftovers(run)
    assert not list(run.checkpoints.iterdir())


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
    checkpoint.write(run, snapshot(1), attempt=0)
    suffixes = {path.suffix for path in (run.checkpoints / "step-00000001").iterdir()}
    assert suffixes == {".safetensors", ".json"}
    found = subprocess.run(
        ["grep", "-rnE", "--exclude=pickled.py", r"torch\.(load|save)\(|pickle\.", "slurmft"],
        capture_output=True, text=True, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    assert found.stdout == ""
