"""What changed between submission and start is noticed, told, and recorded."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

import slurmft
from slurmft.cli import status as cli_status
from slurmft.core import fingerprint
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit
from slurmft.core.run_files import Submission
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login import model_card
from slurmft.train.login.configure import configure
from tests.conftest import assert_two_lines, records
from tests.conftest import slurmft as command
from tests.support import until
from tests.support.models import write_emotion
from tests.train.test_trainer import EXACT, emotion

LARGE = 40 * 2**20


def change(path: Path, before: dict[str, object]) -> str:
    program = TrainConfig.resolve().program()
    program = dataclasses.replace(program, inputs={str(path): before})
    return fingerprint.changes(RunConfig(program=program, job=JobConfig())).get(
        str(path), ""
    )


def test_changes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("a" * 3000)
    before = fingerprint.of(path)
    os.utime(path, (1, 1))
    assert change(path, before) == ""
    path.write_text("a" * 2999 + "b")
    assert change(path, before) == "same size, other content"
    path.write_text("a" * 3001)
    assert change(path, before) == "size 3,001 bytes, another"
    path.write_text("a" * 9000)
    assert change(path, before) == "size 2.9 KiB -> 8.8 KiB"
    path.unlink()
    assert change(path, before) == "gone"


@pytest.mark.parametrize("place", [0, 2**16 - 1, LARGE // 2, LARGE - 1])
def test_changes_of_a_large_file(place: int, tmp_path: Path) -> None:
    """Sampled: what the samples miss shows in the time."""
    path = tmp_path / "train.jsonl"
    with open(path, "wb") as file:
        file.truncate(LARGE)
    os.utime(path, (1, 1))
    before = fingerprint.of(path)
    assert change(path, before) == ""
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"x")
    sampled = "same size, other content"
    expected = {LARGE // 2: {sampled, "written again; size and samples are the same"}}
    assert change(path, before) in expected.get(place, {sampled})


def test_changes_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    (tmp_path / "checkpoint-1").mkdir()
    before = fingerprint.of(tmp_path)
    assert before["bytes"] == 5
    (tmp_path / "checkpoint-1" / "model.safetensors").write_bytes(b"other")
    (tmp_path / ".lock").touch()
    assert change(tmp_path, before) == ""
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    assert change(tmp_path, before) == "same size, other content"


def test_changes_of_slurmft() -> None:
    program = TrainConfig.resolve().program()
    for code, version, found in (
        (fingerprint.of_code(), "0", {}),
        ("other", slurmft.__version__, {"slurmft": "other modules"}),
        ("other", "0.0", {"slurmft": f"was 0.0, is {slurmft.__version__}"}),
    ):
        config = RunConfig(
            program=program,
            job=JobConfig(),
            submission=Submission(code=code, slurmft=version),
        )
        assert fingerprint.changes(config) == found


@pytest.mark.processes
def test_a_change_is_told_once_and_stays_known(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_emotion(tmp_path / "data", 30, 10)
    flags = {
        "task": "emotion",
        "data": str(data),
        "model": str(tiny_model),
        "batch_size": 2,
    }
    run = RunDir.create(configure(flags | {"runs_dir": str(tmp_path / "runs")}))

    def begin(restarts: int) -> None:
        attempts.begin(run, ["n1"], "7", restarts)

    begin(0)
    with open(data / "train.jsonl", "a") as file:
        file.write('{"text": "joy", "label": 1}\n' * 60)
    begin(1)
    told = capsys.readouterr().err
    assert told.startswith("slurmft: changed since submission: train.jsonl (size ")
    assert told.endswith(" KiB, from attempt 2 on)\n")
    begin(2)
    assert capsys.readouterr().err == ""
    (warning,) = records(run, "warning")
    assert warning["text"] == told.strip().removeprefix("slurmft: ")
    known = json.loads(run.attempt.read_text())["changed"]
    assert list(known) == [str(data / "train.jsonl")]
    result = {
        "metrics": {},
        "steps": 1,
        "wall_s": 1.0,
        "nodes": 1,
        "world_size": 1,
        "loss": 1.0,
    }
    result |= {"train_samples_per_s": 1.0, "changed_since_submission": known}
    card = model_card.text(TrainConfig.of(run.load_config().program), result, {}, "run")
    assert "Changed between submission and start: train.jsonl (size " in card
    assert str(tmp_path) not in card
    assert cli_status.main([str(run.path)]) == 0
    assert (
        "changed      since submission: train.jsonl (size " in capsys.readouterr().out
    )


@pytest.mark.processes
def test_data_changed_while_the_job_waited(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run says so, and ends; a resume on other tokens than a checkpoint's is refused."""
    data, runs = write_emotion(tmp_path / "data", 60, 10), tmp_path / "runs"
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    flags = ("--batch-size", "2", "--checkpoint-every-steps", "5", "--setup", wait)
    source = ("--runs-dir", str(runs), "--cluster", "local", "--nodes", "1", *EXACT)
    epochs = ("--epochs", "200")
    done = command("submit", *source, *emotion(data, tiny_model), *flags, *epochs)
    assert done.code == 0, done.err
    run = RunDir.open(next(runs.iterdir()))
    text = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(text.replace("joy", "joyful"))
    words = "since submission: train.jsonl ("
    assert cli_status.main([str(run.path)]) == 0
    assert words in capsys.readouterr().out
    (tmp_path / "go").touch()
    until(run.checkpoint_names)
    assert command("cancel", str(run.path)).code == 0
    assert command("follow", str(run.path)).code == Exit.CANCELLED
    assert f"changed {words}" in records(run, "warning")[0]["text"]
    assert cli_status.main([str(run.path)]) == 0
    assert words in capsys.readouterr().out
    run.tokens.rename(tmp_path / "gone")
    (data / "train.jsonl").write_text(text)
    resumed = command("resume", str(run.path), "--follow")
    assert_two_lines(resumed, "was trained on other tokens than")


@pytest.mark.processes
def test_packages_of_a_python_that_prints(tmp_path: Path) -> None:
    """Something of its own at its start; or nothing that can be read."""
    python = tmp_path / "python"
    for text, found in (("hello", {"a": "1"}), ("hello\\n{", {})):
        end = "" if found == {} else '\\n{"a": "1"}'
        python.write_text(f"#!/bin/sh\nprintf '{text}{end}\\n'\n")
        python.chmod(0o755)
        assert fingerprint.packages(str(python)) == found
