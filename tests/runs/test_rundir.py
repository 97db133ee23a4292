"""The run directory: readers never see half a file."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from slurmft.core import permissions
from slurmft.core.below import Below
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import new_folder, write_json, write_text
from slurmft.core.run_files import Failure
from slurmft.core.trusted import NotOwnError
from slurmft.runs import resolve, rundir
from slurmft.runs.records import RecordReader, RecordWriter
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.support.small_disk import fill


def make(tmp_path: Path) -> RunDir:
    config = RunConfig(
        program=TrainConfig.resolve().program(),
        job=JobConfig(runs_dir=str(tmp_path / "runs")),
    )
    return RunDir.create(config)


def test_a_name_that_is_too_long_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        resolve.find("x" * 5000, tmp_path)


def test_name_has_task_time_and_a_random_part(tmp_path: Path) -> None:
    names = {make(tmp_path).path.name for _ in range(5)}
    assert len(names) == 5
    for name in names:
        task, day, clock, random = name.split("-")
        assert (task, len(day), len(clock), len(random)) == ("synthetic", 8, 6, 6)


def test_two_runs_that_draw_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later draws again; what is in the folder of the first stays."""
    parts = iter(["aaaaaa", "aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(rundir, "_random_part", lambda: next(parts))
    monkeypatch.setattr(time, "strftime", lambda form: "20261120-093012")
    first = make(tmp_path)
    (first.checkpoints / "step-00000005").mkdir(parents=True)
    second = make(tmp_path)
    assert first.path.name == "synthetic-20261120-093012-aaaaaa"
    assert second.path.name == "synthetic-20261120-093012-bbbbbb"
    assert first.checkpoint_names() == ["step-00000005"]


@pytest.mark.processes
def test_run_that_cannot_be_made_leaves_nothing(small_disk: Path) -> None:
    """A full disk; what others have there stays."""
    (small_disk / "other").mkdir()
    fill(small_disk)
    job = JobConfig(runs_dir=str(small_disk))
    with pytest.raises(
        UsageError,
        match=r"cannot write the run directory.*No space left.*: the tmpfs at .* has 0 bytes free",
    ):
        RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    assert sorted(os.listdir(small_disk)) == ["ballast", "other"]


def test_config_comes_back(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert (
        RunDir.open(run.path).load_config().program == TrainConfig.resolve().program()
    )


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        RunDir.open(tmp_path)


def test_runs_dir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match="cannot write the run directory"):
        make(tmp_path)


def test_runs_dir_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a centre's site file gives it to all users: the second one was told of no owner."""
    owner = tmp_path.owner()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    error = RunDir(tmp_path / "runs/synthetic").unwritable(
        PermissionError(errno.EACCES, "Permission denied")
    )
    assert f"denied: {str(tmp_path)!r} belongs to {owner} (mode 700)" in str(error)
    assert 'runs_dir = "/FOLDER/$USER/runs"' in str(error.hint)


def test_runs_dir_below_a_folder_that_everybody_can_write(tmp_path: Path) -> None:
    """Its jobs would be refused on their nodes, after the queue."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NotOwnError, match=r"others can write '.*shared' \(mode 0777\)"):
        make(shared / "me")
    assert list(shared.iterdir()) == []
    shared.chmod(0o1777)
    assert make(shared / "me").config.exists()


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
    def fill() -> None:
        with new_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill()
    assert os.listdir(tmp_path) == []


def test_records_are_read_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    reader = RecordReader(path)
    assert list(reader.read_values()) == []
    writer = RecordWriter(path)
    writer.write({"event": "a"}, {"event": "b"})
    with open(path, "a") as file:
        file.write('{"event": "ha')
    assert [r["event"] for r in reader.read_values()] == ["a", "b"]
    assert list(reader.read_values()) == []
    with open(path, "a") as file:
        file.write('lf"}\nno json\n[]\n{"event": "c"}\n')
    assert [r["event"] for r in reader.read_values()] == ["half", "c"]


@pytest.mark.parametrize("half", ['{"event": "ha', '{"event": "ha\n{"event": "x'])
def test_record_after_half_a_line_is_a_line_of_its_own(
    tmp_path: Path, half: str
) -> None:
    """A kill cut the last line short: the next attempt's first record is not lost with it."""
    path = tmp_path / "records.jsonl"
    RecordWriter(path).write({"event": "a"})
    with open(path, "a") as file:
        file.write(half)
    RecordWriter(path).write({"event": "c"})
    RecordWriter(path).write({"event": "b"})  # nothing to end: no empty line
    assert [r["event"] for r in RecordReader(path).read_values()] == ["a", "c", "b"]
    assert "\n\n" not in path.read_text()


@pytest.mark.processes
def test_records_that_a_full_disk_cut_short(small_disk: Path) -> None:
    """What did not fit is written with the next record; so it is where the process ended."""
    path = small_disk / "records.jsonl"
    writer = RecordWriter(path)
    writer.write({"event": "a"})
    ballast = fill(small_disk)
    # the first page has room for its beginning
    writer.write({"event": "b", "text": "x" * 10_000})
    assert not path.read_text().endswith("\n")
    ballast.unlink()
    other = RecordWriter(path)
    other.write({"event": "c"})
    assert [r["event"] for r in RecordReader(path).read_values()] == ["a", "c"]


def test_final_state_stays(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.set_state("running")
    run.set_state("failed", "rank 1 raised", 1)
    run.set_state("finished", exit_code=0)
    state = run.get_state()
    assert (state.state, state.reason, state.exit_code) == (
        "failed",
        "rank 1 raised",
        1,
    )
    assert [s.state for s in state.history] == ["submitted", "running", "failed"]


@pytest.mark.processes
def test_what_is_only_told_goes_to_stderr_where_the_disk_is_full(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing raises; the words are not lost, and secrets are hidden. The old state stays whole."""
    job = JobConfig(runs_dir=str(small_disk))
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    run.set_state("running")
    ballast = fill(small_disk)
    run.set_state("requeued", "stopped; the newest checkpoint is step-00000005", 75)
    run.mark_started(1, 2)
    token = "hf_" + "a" * 34
    failure = run.add(
        Failure.of("rank 3 on n1", SlurmftError(f"no room; {token}", code=7))
    )
    assert (failure.where, failure.code) == ("rank 3 on n1", 7)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert (
        f"state.json cannot be written (No space left on device: the tmpfs at {small_disk} "
        "has 0 bytes free, your quota perhaps less): requeued: stopped;" in told[0]
    )
    assert "started.json" in told[1]
    assert "rank 3 on n1: no room;" in told[2]
    assert token not in told[2]
    assert run.get_state().state == "running"
    assert run.all_failures() == []
    with pytest.raises(OSError, match="No space left"):  # a submission must be recorded
        run.set_state("submitted", "resumed")
    ballast.unlink()
    run.set_state("requeued")
    assert [s.state for s in run.history()] == ["submitted", "running", "requeued"]


def test_what_is_only_told_of_a_run_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path)
    run.discard()
    run.set_state("failed", "the loss is nan")
    assert (
        "No such file or directory): failed: the loss is nan" in capsys.readouterr().err
    )
    assert not run.path.exists()


def test_a_run_that_is_discarded_leaves_no_folder_above_it(tmp_path: Path) -> None:
    top = tmp_path / "scratch" / "runs"
    make(top).discard()
    assert list(tmp_path.iterdir()) == []
    # What was there before, or is used meanwhile, stays.
    first = make(top)
    make(top).discard()
    (top / "other").touch()
    first.discard()
    assert [path.name for path in top.iterdir()] == ["other"]


def test_a_run_whose_folder_cannot_be_made_leaves_no_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, share_with_group: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(permissions, "make_folder", fail)
    with pytest.raises(UsageError, match="cannot write the run directory"):
        make(tmp_path / "scratch" / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_open_anew", [False, True])
def test_folder_that_took_the_place_of_a_run_is_not_discarded(
    tmp_path: Path, is_open_anew: bool
) -> None:
    run = make(tmp_path)
    theses = tmp_path / "theses"
    theses.mkdir(mode=0o700)
    (theses / "thesis.tex").write_text("mine")
    run.path.rename(tmp_path / "away")
    theses.rename(run.path)
    if is_open_anew:
        run = RunDir(run.path)
    run.discard()
    assert (run.path / "thesis.tex").read_text() == "mine"
    run.path.rename(theses)
    (tmp_path / "away").rename(run.path)
    run.discard()
    assert not run.path.exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_takes_the_place_of_a_new_folder_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A run that its group may read would have a private folder opened to that."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / ".ssh").mkdir()

    def exchange(top: Path) -> Below:
        top.rename(tmp_path / "away")
        if kind == "link":
            top.symlink_to(private)
        else:
            private.rename(top)
        return Below(top)

    monkeypatch.setattr(permissions, "Below", exchange)
    place = tmp_path / "run"
    with pytest.raises(OSError, match=r"replaced meanwhile|a link is on the way"):
        permissions.make_folder(place, share_with_group=True)
    assert place.stat().st_mode & 0o7777 == 0o700


def test_what_takes_the_place_of_a_new_folder_above_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All could look into a private folder that has its name for a moment."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "diary").touch()
    above = tmp_path / "runs"

    def exchange(top: Path) -> Below:
        top.rename(tmp_path / "away")
        private.rename(top)
        return Below(top)

    monkeypatch.setattr(permissions, "Below", exchange)
    permissions.make_above(above / "run")
    assert (above / "diary").exists()
    assert above.stat().st_mode & 0o7777 == 0o700
    # As another process, which writes into it at once, makes no difference to its mode.
    assert (tmp_path / "away").stat().st_mode & 0o7777 == 0o755


def test_link_that_takes_the_place_of_a_new_run_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its configuration was asked for; it is written by what was opened then."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)

    def exchange(path: Path, text: str) -> None:
        (run,) = (tmp_path / "runs").iterdir()
        run.rename(tmp_path / "away")
        run.symlink_to(elsewhere)
        write_text(path, text)

    monkeypatch.setattr(rundir, "write_text", exchange)
    make(tmp_path)
    assert list(elsewhere.iterdir()) == []
    assert (tmp_path / "away" / "config.json").is_file()
    assert (tmp_path / "away" / "state.json").is_file()


@pytest.mark.parametrize("name", ["thesis.tex", ".ssh"])
def test_folder_that_takes_the_place_of_a_new_run_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    theses = tmp_path / "theses"
    theses.mkdir(mode=0o700)
    (theses / name).write_text("mine")
    make_folder = permissions.make_folder

    def replaced(path: Path, share_with_group: bool) -> None:
        make_folder(path, share_with_group)
        path.rename(tmp_path / "away")
        theses.rename(path)

    monkeypatch.setattr(permissions, "make_folder", replaced)
    with pytest.raises(UsageError, match="it was replaced meanwhile"):
        make(tmp_path)
    (path,) = (tmp_path / "runs").iterdir()
    assert [file.name for file in path.iterdir()] == [name]


def test_reason_with_the_name_of_a_file_that_is_no_utf_8(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.set_state("requeued", "cannot read '/data/caf\udce9.csv'")  # raises nothing


def test_root_failure_is_not_secondary(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.root_failure() is None
    run.add(
        Failure.of(
            "rank 0 on n1", SlurmftError("connection closed by peer"), secondary=True
        )
    )
    run.add(Failure.of("rank 3 on n2", SlurmftError("out of memory")))
    root = run.root_failure()
    assert root is not None
    assert root.where == "rank 3 on n2"


def test_newest_of_very_many_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "MOST_FILES", 3)
    run = make(tmp_path)
    for number in range(5):
        failure = Failure.of(f"rank {9 - number} on n1", SlurmftError(str(number)))
        run.add(failure)
    assert [failure.message for failure in run.all_failures()] == ["2", "3", "4"]


def test_configuration_of_another_version(tmp_path: Path) -> None:
    """Unknown options are passed over; what cannot be understood is named in two lines."""
    run = make(tmp_path)
    config = json.loads(run.config.read_text())
    config["job"]["teleport"] = True
    config["submission"]["slurmft"] = "0.0.1"
    run.config.write_text(json.dumps(config))
    assert run.load_config().job.nodes == config["job"]["nodes"]
    config["job"]["nodes"] = "many"
    run.config.write_text(json.dumps(config))
    with pytest.raises(SlurmftError) as error:
        run.load_config()
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("hint: slurmft 0.0.1 has submitted it, and this is ")
