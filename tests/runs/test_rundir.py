"""The run directory: readers never see half a file."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_folder, write_json, write_text
from slurmft.runs.records import RecordReader, RecordWriter
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig


def make(tmp_path: Path) -> RunDir:
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(runs_dir=str(tmp_path / "runs"))
    )
    return RunDir.create(config)


def test_name_has_task_time_and_a_random_part(tmp_path: Path) -> None:
    names = {make(tmp_path).path.name for _ in range(5)}
    assert len(names) == 5
    for name in names:
        task, day, clock, random = name.split("-")
        assert (task, len(day), len(clock), len(random)) == ("synthetic", 8, 6, 4)


def test_config_comes_back(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert RunDir.open(run.path).load_config().program == TrainConfig.resolve().program()


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        RunDir.open(tmp_path)


def test_runs_dir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        make(tmp_path)


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"n": 0, "text": "x" * 100_000})
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            write_text(path, json.dumps({"n": n, "text": "x" * 100_000}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert len(json.loads(path.read_text())["text"]) == 100_000
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["state.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "model", fill)
    assert os.listdir(tmp_path) == []


def test_records_are_read_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    reader = RecordReader(path)
    assert list(reader.read()) == []
    writer = RecordWriter(path)
    writer.write({"event": "a"}, {"event": "b"})
    with open(path, "a") as file:
        file.write('{"event": "ha')
    assert [r["event"] for r in reader.read()] == ["a", "b"]
    assert list(reader.read()) == []
    with open(path, "a") as file:
        file.write('lf"}\nno json\n[]\n{"event": "c"}\n')
    assert [r["event"] for r in reader.read()] == ["half", "c"]


def test_final_state_stays(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.set_state("running")
    run.set_state("failed", "rank 1 raised", 1)
    run.set_state("finished", exit_code=0)
    state = run.get_state()
    assert (state["state"], state["reason"], state["exit_code"]) == ("failed", "rank 1 raised", 1)
    assert [s["state"] for s in state["history"]] == ["submitted", "running", "failed"]


def test_root_failure_is_not_secondary(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.root_failure() is None
    run.add_failure("rank 0 on n1", SlurmftError("connection closed by peer"), secondary=True)
    run.add_failure("rank 3 on n2", SlurmftError("out of memory"))
    root = run.root_failure()
    assert root is not None
    assert root["where"] == "rank 3 on n2"
