"""Trackers: what they get, that runs go on in them, and that none can hold up a run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import build
from slurmft.plugins.trackers import trackers
from slurmft.plugins.trackers.adapters import ADAPTERS
from slurmft.plugins.trackers.options import TRACKERS, TrackerOptions
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, records, slurmft
from tests.support import PATIENCE_S

START = {"event": "start", "parameters": 5, "vocabulary": None, "precision": "fp32"}


def step(number: int, loss: float = 0.5) -> dict[str, Any]:
    record = {
        "event": "step",
        "step": number,
        "epoch": 0.1,
        "learning_rate": 0.1,
        "loss": loss,
    }
    return record | {"samples_per_s": 3.0}


def make_run(folder: Path, *names: str) -> RunDir:
    job = build(JobConfig, {"runs_dir": str(folder), "log_with": names})
    return RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))


@pytest.fixture(autouse=True)
def main_process() -> None:
    from accelerate import PartialState

    PartialState(cpu=True)


def read(run: RunDir, tag: str) -> list[tuple[int, float]]:
    """The values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.tracking / "tensorboard" / run.path.name)).Reload()
    return [(e.step, round(e.value, 3)) for e in found.Scalars(tag)]


def test_tensorboard_goes_on(tmp_path: Path) -> None:
    """What was done after the last checkpoint and is done again, is shown once."""
    run = make_run(tmp_path / HOSTILE, "tensorboard")
    first = trackers.Tracking(run)
    for record in (
        START,
        step(5, 0.9),
        {**step(6), "samples_per_s": 0.0},
        step(10, 0.8),
    ):
        first.take(record)
    first.take({"event": "epoch", "epoch": 1, "metrics": {"accuracy": 0.25}})
    first.close()
    assert list(first.messages()) == []
    again = trackers.Tracking(run)
    for record in (START, {"event": "resume", "step": 7}, step(10, 0.7), step(15, 0.6)):
        again.take(record)
    again.close()
    assert list(again.messages()) == []
    assert read(run, "train/loss") == [(5, 0.9), (6, 0.5), (10, 0.7), (15, 0.6)]
    assert read(run, "eval/accuracy") == []  # of step 10, which was done again
    (settings,) = run.tracking.rglob("hparams.yml")
    assert "batch_size: 32" in settings.read_text()
    assert "parameters: 5" in settings.read_text()


class Bad:
    """A tracker that fails at one point; `stuck` blocks the start."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def __call__(self, project: str, **settings: Any) -> Bad:
        return self

    def at(self, where: str) -> None:
        if self.fails_in == where:
            raise SystemExit("no server")

    def start(self) -> None:
        self.at("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.at("configuration")

    def log(self, values: dict[str, float], step: int) -> None:
        self.at("log")

    def finish(self) -> None:
        self.at("finish")


@pytest.mark.parametrize("where", ["start", "configuration", "log", "finish"])
def test_tracker_that_fails_is_a_warning(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Bad(where))
    found = trackers.Tracking(make_run(tmp_path, "tensorboard"))
    found.take(START)
    found.take(step(1))
    found.take(step(2))
    found.close()
    assert list(found.messages()) == [
        "--log-with tensorboard: it failed (SystemExit: no server); the run continues without it"
    ]


def test_tracker_that_hangs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    class Stuck(Bad):
        def start(self) -> None:
            end.wait()

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Stuck(""))
    monkeypatch.setattr(trackers, "_START_S", -1)
    found = trackers.Tracking(make_run(tmp_path, "tensorboard"))
    for number in range(1, 3000):  # more than may wait for it
        found.take(step(number))
    found.close(timeout_s=0.01)
    assert "it does not start" in next(found.messages())
    assert list(found.messages()) == []
    end.set()


@pytest.mark.processes
def test_run_whose_tracker_fails(tmp_path: Path) -> None:
    """It finishes, and says so; what works, works. The ranks leave no process behind."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "mlflow.py").write_text("raise RuntimeError('no such server')\n")
    where = (
        "--cluster",
        "local",
        "--nproc-per-node",
        "1",
        "--runs-dir",
        str(tmp_path / "runs"),
    )
    flags = (
        "--max-steps",
        "4",
        "--log-every",
        "2",
        "--batch-size",
        "4",
        "--precision",
        "fp32",
    )
    env = {"PYTHONPATH": os.pathsep.join([str(broken), *sys.path])}
    more = ("--eval-batch-size", "512", "--log-with", "tensorboard,mlflow")
    done = slurmft("submit", "--follow", *where, *flags, *more, env=env, imported=True)
    assert done.code == 0, done.err
    (warning,) = [r["text"] for r in records(done.run, "warning")]
    assert warning.startswith(
        "--log-with mlflow: it failed (RuntimeError: no such server)"
    )
    losses = [r["loss"] for r in records(done.run, "step")]
    assert read(done.run, "train/loss") == [
        (2, round(losses[1], 3)),
        (4, round(losses[3], 3)),
    ]
    assert read(done.run, "eval/accuracy")[0][1] == round(
        done.result["metrics"]["accuracy"], 3
    )
    assert f"tensorboard --logdir {done.run.tracking}" in done.out


def test_names_are_those_of_accelerate() -> None:
    assert set(TRACKERS) == {*LOGGER_TYPE_TO_CLASS} == {*ADAPTERS}


class Recorder(Bad):
    """A tracker that notes how it is started, and has an id wherever one is looked for."""

    calls: ClassVar[list[dict[str, Any]]] = []

    def __call__(self, project: str, **settings: Any) -> Bad:
        self.calls.append({"project": project} | settings)
        self.run = self.active_run = self.writer = self.task = self
        self.info = self
        self.id = self.run_id = self.hash = "id-1"
        return self

    def get_key(self) -> str:
        return "id-1"


@pytest.mark.parametrize(
    ("name", "resumes_by"),
    [
        ("tensorboard", {"purge_step": 8}),
        ("wandb", {"resume": "allow"}),
        ("mlflow", {"run_id": "id-1"}),
        ("trackio", {"resume": "allow"}),
        ("aim", {"run_hash": "id-1"}),
        ("clearml", {"continue_last_task": "id-1"}),
        ("dvclive", {"resume": True}),
        ("swanlab", {"mode": "offline"}),
    ],
)
def test_a_resumed_run_continues_the_run_of_its_tracker(
    name: str,
    resumes_by: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Recorder(""))
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=lambda: None))
    run = make_run(tmp_path, name)
    for start in (START, {"event": "resume", "step": 7}):
        tracking = trackers.Tracking(run)
        tracking.take(start)
        tracking.take(step(10))
        tracking.close()
        assert list(tracking.messages()) == []
    first, second = Recorder.calls
    assert first["project"] == second["project"]
    assert first.get("id") == second.get("id")
    assert resumes_by.items() <= second.items()


@pytest.mark.extra("trackers")
def test_comet_goes_on(tmp_path: Path) -> None:
    """Offline, under one key; without the code and its git remote."""
    run = make_run(tmp_path / "runs", "comet_ml")
    program = (
        "import sys, json; from pathlib import Path; from accelerate import PartialState\n"
        "from slurmft.plugins.trackers import trackers; from slurmft.runs import rundir\n"
        "PartialState(cpu=True)\n"
        "found = trackers.Tracking(rundir.RunDir(Path(sys.argv[1])))\n"
        "for record in json.loads(sys.argv[2]): found.take(record)\n"
        "found.close(60); print(json.dumps(list(found.messages())))"
    )
    attempts: list[list[dict[str, Any]]] = [
        [
            START,
            step(5, 0.9),
            {"event": "epoch", "epoch": 1, "metrics": {"accuracy": 0.25}},
        ],
        [START, {"event": "resume", "step": 5}, step(10, 0.7)],
    ]
    for records_of in attempts:
        command = [sys.executable, "-c", program, str(run.path), json.dumps(records_of)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"
    found: dict[str, dict[int, float]] = {"train/loss": {}, "eval/accuracy": {}}
    archives = sorted(run.tracking.glob("comet_ml/*.zip"))
    assert len({path.name.partition("-")[0] for path in archives}) == 1  # its key
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            text = archive.read("messages.json").decode()
        assert "git_metadata" not in text
        for line in text.splitlines():
            metric = json.loads(line).get("payload", {}).get("metric", {})
            if metric and metric["metricName"] in found:
                found[metric["metricName"]][metric["step"]] = metric["metricValue"]
    assert found == {"train/loss": {5: 0.9, 10: 0.7}, "eval/accuracy": {5: 0.25}}
    assert trackers.next_commands(run) == [
        f"comet upload {' '.join(map(str, archives))}"
    ]


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="did you mean wandb"):
        TrackerOptions(log_with=("tensorboard,wandbb",))
    assert TrackerOptions(log_with=("wandb, mlflow", "wandb")).names == (
        "wandb",
        "mlflow",
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match="the Python package wandb is not installed in"
    ) as error:
        trackers.check(JobConfig(plugins={"log_with": ("wandb",)}))
    assert "-m pip install wandb" in str(error.value)
    # The image may have it.
    trackers.check(JobConfig(plugins={"log_with": ("wandb",)}, container="image.sif"))


def test_what_to_type_after_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a b", "wandb", "tensorboard")
    (run.tracking / "wandb" / "offline-run-1").mkdir(parents=True)
    folder = f"'{run.tracking}"
    assert trackers.next_commands(run) == [
        f"wandb sync --append {folder}/wandb/offline-run-1'",
        f"tensorboard --logdir {folder}'",
    ]
