"""Checkpoints as files: whole or not there, verified, pruned, and never in the way of the run."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.job import Job
from slurmft.job.checkpoints import verify
from slurmft.node import heartbeat
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.loop import checkpoint, saving
from slurmft.train.loop.checkpoint import Checkpoint, Saver
from slurmft.train.loop.checkpointing import Checkpointing
from slurmft.train.loop.generators import rng_state, set_rng_state
from slurmft.train.loop.position import Position
from slurmft.train.loop.saving import PatientSave
from slurmft.train.loop.state import State
from slurmft.train.parallel.optim import join_optimizer, split_optimizer
from tests.support import CHECKOUT

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    job = JobConfig(runs_dir=str(tmp_path))
    return RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))


def made(step: int, value: float = 1.0, size: int = 1000) -> Checkpoint:
    tensors = {
        "model": {"w": torch.full((size,), value)},
        "predicted": {"n": torch.empty(0)},
    }
    return Checkpoint(
        step, "", {"world_size": 1}, {"position": {"step": step}}, tensors
    )


def saver_of(run: RunDir) -> Saver:
    """Of one rank."""
    world: Any = SimpleNamespace(
        is_main=True, on_main=lambda work: work(), share_object=lambda value: value
    )
    return Saver(Job(run), world)


def warnings_of(run: RunDir) -> list[str]:
    return [r["text"] for r in RecordReader(run.records).read_values("warning")]


def test_round_trip(run: RunDir) -> None:
    assert saver_of(run).save(made(3, 0.5), patience_s=0)
    found = checkpoint.read(run.checkpoints / "step-00000003")
    assert found.name == "step-00000003"
    assert found.setup == {"world_size": 1}
    position = found.state_of("position")
    assert position.values == {"step": 3}
    assert position.checkpoint == run.checkpoints / found.name
    assert torch.equal(position.tensors["model"]["w"], torch.full((1000,), 0.5))
    assert position.tensors["predicted"]["n"].numel() == 0


@pytest.mark.parametrize("form", [{}, {"form": 1}, {"form": 99}])
def test_checkpoint_of_another_version_is_refused(
    run: RunDir, form: dict[str, int]
) -> None:
    """In two lines, with what to do."""
    folder = run.checkpoints / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 3, "parts": {}, **form}))
    with pytest.raises(UsageError) as error:
        checkpoint.read(folder)
    assert error.value.message.startswith(
        "step-00000003 was written by another version"
    )
    assert error.value.hint == (
        "resume the run with the version that started it, or submit a new run"
    )


@pytest.mark.processes
def test_full_disk(small_disk: Path) -> None:
    """The save fails with a warning, what is there stays, and the next save works again."""
    job = JobConfig(runs_dir=str(small_disk), keep_checkpoints=3)
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    saver = saver_of(run)
    assert saver.save(made(1), patience_s=0)
    too_large = made(2, size=2**20)
    assert not saver.save(too_large, patience_s=0)
    warnings = warnings_of(run)
    assert len(warnings) == 1
    text = "no checkpoint of step 2: no room for it: it needs 4.0 MiB; the tmpfs at"
    assert text in warnings[0]
    assert "; the next start has an older one, or none: make room" in warnings[0]
    assert run.checkpoint_names() == ["step-00000001"]
    verify(run.checkpoints / "step-00000001")
    assert not list(run.checkpoints.glob(".*"))
    assert saver.save(made(3), patience_s=0)


class Saves:
    """A training at its end, alone, whose saves fail so often."""

    def __init__(self, run: RunDir, errors: list[Exception]) -> None:
        self.errors, self.tries = errors, 0
        self.warnings: list[str] = []
        self.kept: list[int] = []
        job: Any = SimpleNamespace(
            run_dir=run.path, begin_phase=lambda: None, alive=lambda phase: None,
            should_stop=lambda: False, warn=self.warnings.append,
            remove_checkpoints=lambda keep: self.kept.append(keep),
        )  # fmt: skip
        world: Any = SimpleNamespace(on_main=lambda f: f())
        self.patient = PatientSave(job, world, "the model", 2**20)

    def run(self) -> None:
        def save() -> None:
            self.tries += 1
            if self.tries <= len(self.errors):
                raise self.errors[self.tries - 1]

        self.patient.run(save)


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_BY_LIBRARY = SafetensorError(
    'IoError(Os { code: 28, message: "No space left on device" })'
)


@pytest.mark.parametrize(
    ("errors", "gave_way", "warnings"),
    [([], 0, 0), ([FULL], 1, 0), ([FULL_BY_LIBRARY] * 2, 2, 1), ([FULL] * 5, 5, 1)],
)
def test_save_at_the_end_is_tried_until_there_is_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], gave_way: int,
    warnings: int,
) -> None:  # fmt: skip
    """Older checkpoints give way first, before anybody is warned."""
    monkeypatch.setattr(saving, "_RETRY_S", 0)
    saves = Saves(run, errors)
    saves.run()
    assert saves.tries == len(errors) + 1
    assert saves.kept == [1] * gave_way
    assert len(saves.warnings) == warnings


def test_save_at_the_end_that_never_works_ends_in_words(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_PATIENCE_S", -1)
    with pytest.raises(
        SlurmftError, match=r"no room for the model: it needs 1\.0 MiB"
    ) as error:
        Saves(run, [FULL] * 9).run()
    assert str(error.value.hint).startswith("make room: ")
    broken = Saves(run, [OSError(errno.EACCES, "Permission denied")])
    with pytest.raises(OSError, match="Permission denied"):  # no matter of room
        broken.run()
    assert (broken.tries, broken.kept) == (1, [])


def test_vanished_file_system(run: RunDir) -> None:
    saver = saver_of(run)
    gone = run.path.rename(run.path.with_name("gone"))
    saver.start(made(1))
    saver.wait()
    gone.rename(run.path)
    assert "no checkpoint of step 1" in warnings_of(run)[0]
    assert "make room" not in warnings_of(run)[0]
    assert saver.save(made(2), patience_s=0)


def test_random_generators_come_back() -> None:
    import random

    np.random.standard_normal()
    random.gauss(0, 1)
    state = json.loads(json.dumps(rng_state(CPU)))

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


@pytest.mark.processes
def test_safetensors_are_all_there_is(run: RunDir) -> None:
    """Nothing that would be unpickled."""
    assert saver_of(run).save(made(1), patience_s=0)
    suffixes = {path.suffix for path in (run.checkpoints / "step-00000001").iterdir()}
    assert suffixes == {".safetensors", ".json"}
    found = subprocess.run(
        [
            *("grep", "-rnE"),
            *(r"torch\.(load|save)\(|pickle\.", "slurmft"),
        ],
        capture_output=True, text=True, check=False, cwd=CHECKOUT,
    )  # fmt: skip
    assert found.stdout == ""


def test_weights_and_metrics_of_the_best_evaluation_come_back(run: RunDir) -> None:
    """On a rank that saves nothing, too: it evaluates the test split with them."""
    weights = {"w": torch.ones(3)}
    before = {"step": 2, "metrics": {"accuracy": 0.9}, "by_class": {"joy": {}}}
    parts = {"position": before, "learner": {}}
    tensors = {"model": weights}
    job = Job(run)
    saver = saver_of(run)
    saver.start(Checkpoint(2, "-evaluated", parts=parts, tensors=tensors), best=True)
    saver.wait()
    shared: list[Any] = []
    loaded: list[State] = []

    def share_tensors(own: Any) -> Any:
        shared.append(own)
        return weights

    world: Any = SimpleNamespace(
        is_main=False, on_main=lambda work: work(), share_tensors=share_tensors
    )
    job.keep_as_best("step-00000002-evaluated")
    setup: Any = SimpleNamespace(job=job, world=world)
    learner: Any = SimpleNamespace(load_weights=loaded.append)
    position = Position(step=4, metrics={"accuracy": 0.5})
    Checkpointing(setup, saver, {}).return_to_best(learner, position)
    assert len(shared) == 1
    assert torch.equal(loaded[0].tensors["model"]["w"], weights["w"])
    assert position.metrics == {"accuracy": 0.9}
    assert position.by_class == {"joy": {}}
    assert position.step == 4


def test_best_evaluation_that_cannot_be_read_is_left_alone(run: RunDir) -> None:
    job = Job(run)
    world: Any = SimpleNamespace(is_main=True, on_main=lambda work: work())
    setup: Any = SimpleNamespace(job=job, world=world)
    position = Position(metrics={"accuracy": 0.5})
    Checkpointing(setup, saver_of(run), {}).return_to_best(None, position)  # type: ignore[arg-type]
    assert position.metrics == {"accuracy": 0.5}
    assert warnings_of(run) == [
        "the model is the last one, not the best: it could not be saved"
    ]


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_after_a_save_ranks_do_what_they_did_before(run: RunDir, phase: str) -> None:
    """Else a hang in the step that follows would be found six times later, and called a save."""
    path = run.path / "beat"
    job = Job(run, heart=heartbeat.Heart(path))
    job.step(7)
    job.alive(phase)
    phases = []

    def note_phase(*_: object) -> None:
        beat = heartbeat.read(path)
        assert beat is not None
        phases.append(beat.phase)

    position = State(values={"step": 7, "phase": phase})
    parts: Any = {"position": SimpleNamespace(state=lambda: position)}
    saver: Any = SimpleNamespace(wait=lambda: None, start=note_phase)
    setup: Any = SimpleNamespace(job=job, world=SimpleNamespace(is_main=False))
    Checkpointing(setup, saver, parts).save()
    note_phase()
    assert phases == ["save", phase]
