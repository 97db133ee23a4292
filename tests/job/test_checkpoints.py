"""Checkpoint folders: whole or not there, verified, pruned."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import removal
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.core.trusted import NotOwnError
from slurmft.job import checkpoints
from slurmft.job.checkpoints import BadCheckpointError, Checkpoints, checkpoint_name
from slurmft.runs.rundir import RunDir
from tests.support.lockfs import TwoNodes
from tests.support.small_disk import fill


def new_run(folder: Path) -> RunDir:
    program = Program(kind="script", name="plain", module="plain")
    return RunDir.create(
        RunConfig(program=program, job=JobConfig(runs_dir=str(folder)))
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def write(store: Checkpoints, step: int, best: bool = False) -> None:
    with store.write(checkpoint_name(step), best) as folder:
        (folder / "parts").mkdir()
        (folder / "parts" / "weights").write_bytes(b"\0" * 1000)
        (folder / "state.json").write_text(f'{{"step": {step}}}')


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["parts/weights", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_damage_is_found_and_the_one_before_is_taken(
    run: RunDir, name: str, harm: object
) -> None:
    store = Checkpoints(run, every_s=0, keep=3)
    for step in (1, 2):
        write(store, step)
    checkpoints.verify(run.checkpoints / "step-00000002")
    assert callable(harm)
    harm(run.checkpoints / "step-00000002" / name)
    with pytest.raises(BadCheckpointError):
        checkpoints.verify(run.checkpoints / "step-00000002")
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) == run.checkpoints / "step-00000001"
    assert len(warnings) == 1
    assert "step-00000002 is damaged" in warnings[0]
    # the bad one is put aside, not removed
    assert run.checkpoint_names() == ["step-00000001"]
    assert len(list(run.checkpoints.glob("bad-*"))) == 1


def test_where_none_is_whole_the_run_starts_anew(run: RunDir) -> None:
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) is None
    assert warnings == []
    write(Checkpoints(run, every_s=0, keep=3), 1)
    flip(run.checkpoints / "step-00000001" / "state.json")
    assert checkpoints.newest(run, warnings.append) is None
    assert "starts from its beginning" in warnings[-1]


@pytest.mark.processes
@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_a_file_system_that_fails_is_no_reason_to_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where already the listing fails: the client of a mount has died."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with TwoNodes(tmp_path) as two:
        run = new_run(two.nodes[0])
        write(Checkpoints(run, every_s=0, keep=3), 1)
        two.crash(0)
        with pytest.raises(
            SlurmftError, match="checkpoints': Transport endpoint is not"
        ) as error:
            checkpoints.newest(run, lambda warning: pytest.fail(warning))
        assert pauses == [1, 2, 3, 4]  # before the file system's end, which waits, too
    assert "slurmft resume" in str(error.value.hint)


def test_names_sort_by_progress(run: RunDir) -> None:
    names = [
        "step-00000009",
        "step-00000010",
        "step-00000010-e00000512",
        "step-00000010-evaluated",
    ]
    for name in reversed([*names, "step-00000011"]):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.checkpoint_names() == [*names, "step-00000011"]


def test_prune_keeps_the_newest_and_the_best(run: RunDir) -> None:
    store = Checkpoints(run, every_s=0, keep=2)
    for step in range(1, 6):
        write(store, step, best=step == 2)
    assert run.checkpoint_names() == ["step-00000002", "step-00000004", "step-00000005"]
    assert not list(run.checkpoints.glob(".*"))


def test_attempt_that_slurm_gave_up_writes_no_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.attempt, {"number": 2, "job": "7", "hosts": ["n1"]})
    monkeypatch.setenv(ATTEMPT, "1")
    with pytest.raises(OSError, match="later attempt"):
        write(Checkpoints(run, every_s=0, keep=2), 1)
    assert run.checkpoint_names() == []
    monkeypatch.setenv(ATTEMPT, "2")
    write(Checkpoints(run, every_s=0, keep=2), 1)
    assert run.checkpoint_names() == ["step-00000001"]


def test_one_that_fails_is_not_seen_and_the_next_is_due_after_a_pause(
    run: RunDir,
) -> None:
    store = Checkpoints(run, every_s=1e-9, keep=2)
    assert store.is_due()

    def fail() -> None:
        with store.write("step-00000001") as folder:
            (folder / "half").touch()
            assert not store.is_due()  # while it is written
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        fail()
    assert not list(run.checkpoints.iterdir())
    assert not store.is_due()  # not at every step
    write(store, 2)


def test_leftovers_of_a_kill_are_removed(run: RunDir) -> None:
    for name in (
        ".step-00000001.slurmft-123-ab01",
        "bad-step-00000001-5",
        "step-00000002",
    ):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "model").touch()
    # a file that a client of NFS holds open
    (run.checkpoints / ".nfs0000000004").touch()
    checkpoints.remove_leftovers(run)
    names = [".nfs0000000004", "bad-step-00000001-5", "step-00000002"]
    # somebody may look
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names
    checkpoints.remove_leftovers(run, bad=True)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        names[0],
        names[2],
    ]


def test_manifest_names_every_file_with_size_and_sum(run: RunDir) -> None:
    write(Checkpoints(run, every_s=0, keep=2), 1)
    files = json.loads(
        (run.checkpoints / "step-00000001" / "manifest.json").read_text()
    )["files"]
    assert sorted(files) == ["parts/weights", "state.json"]
    zeros = hashlib.sha256(bytes(1000)).hexdigest()
    assert files["parts/weights"] == {"bytes": 1000, "sha256": zeros}


def test_one_that_others_can_have_put_there_is_passed_over(
    run: RunDir, tmp_path: Path
) -> None:
    """Also behind a link out of a run that is closed to others."""
    store = Checkpoints(run, every_s=0, keep=5)
    for step in (1, 2):
        write(store, step)
    elsewhere = tmp_path / "disk"
    run.checkpoints.rename(elsewhere)
    run.checkpoints.symlink_to(elsewhere)
    run.path.chmod(0o700)
    elsewhere.chmod(0o755)
    (elsewhere / "step-00000002").chmod(0o777)
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) == run.checkpoints / "step-00000001"
    (warning,) = warnings
    assert "step-00000002 is passed over: refused" in warning
    elsewhere.chmod(0o2775)
    for _ in range(2):
        # From the beginning, it would replace what is there.
        with pytest.raises(NotOwnError, match="others can write"):
            checkpoints.newest(run, warnings.append)
    assert run.checkpoint_names() == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "parts/weights has lost or gained bytes"),
        (flip, "parts/weights has another checksum than when it was written"),
        (Path.unlink, "FileNotFoundError: "),
    ],
)
def test_damage_is_told_in_words(
    run: RunDir, harm: Callable[[Path], None], words: str
) -> None:
    write(Checkpoints(run, every_s=0, keep=2), 1)
    path = run.checkpoints / "step-00000001"
    harm(path / "parts" / "weights")
    with pytest.raises(BadCheckpointError, match=words):
        checkpoints.verify(path)
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append) is None
    (aside,) = run.checkpoints.iterdir()
    assert words in warnings[0]
    assert warnings[0].endswith(f"; put aside as {aside.name}")
    assert warnings[1:] == ["no checkpoint is whole: the run starts from its beginning"]


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"files": []}', '{"files": {"state.json": {}}}', ""]
)
def test_manifest_that_is_none(run: RunDir, text: str) -> None:
    write(Checkpoints(run, every_s=0, keep=2), 1)
    (run.checkpoints / "step-00000001" / "manifest.json").write_text(text)
    with pytest.raises(BadCheckpointError):
        checkpoints.verify(run.checkpoints / "step-00000001")


@pytest.mark.parametrize("failures", [0, 1, 4, 5])
def test_read_is_tried_five_times(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """With growing pauses, and not after a success: what a shared file system takes to recover."""
    pauses, tries = list[float](), list[Path]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    write(Checkpoints(run, every_s=0, keep=2), 1)
    whole = checkpoints.verify

    def verify(path: Path) -> None:
        tries.append(path)
        if len(tries) <= failures:
            raise OSError(errno.ESTALE, "Stale file handle")
        whole(path)

    monkeypatch.setattr(checkpoints, "verify", verify)
    path = run.checkpoints / "step-00000001"
    if failures < 5:
        assert checkpoints.newest(run, pytest.fail) == path
    else:
        with pytest.raises(
            SlurmftError, match=f"cannot read '{path}': Stale file"
        ) as error:
            checkpoints.newest(run, pytest.fail)
        assert f"slurmft resume {run.path}" in str(error.value.hint)
    assert pauses == [1, 2, 3, 4][:failures]
    assert len(tries) == min(5, failures + 1)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (0, None, []),
        (0, 2, [2]),
        (1, None, [4]),
        (2, 1, [1, 3, 4]),
        (2, 4, [3, 4]),
        (4, None, [1, 2, 3, 4]),
        (9, 1, [1, 2, 3, 4]),
    ],
)
def test_prune(run: RunDir, keep: int, best: int | None, left: list[int]) -> None:
    store = Checkpoints(run, every_s=0, keep=9)
    for step in (3, 1, 4, 2):
        write(store, step)
    checkpoints.prune(run, keep, checkpoint_name(best) if best else None)
    assert run.checkpoint_names() == [checkpoint_name(step) for step in left]
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a group of others")
def test_prune_on_a_disk_where_a_group_can_rename(run: RunDir, tmp_path: Path) -> None:
    """What this run has written goes; what only has such a name stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    os.chown(disk, -1, 4242)
    disk.chmod(0o2775)
    run.checkpoints.symlink_to(disk)
    (disk / checkpoint_name(0)).mkdir()
    (disk / checkpoint_name(0) / "thesis.tex").write_text("mine")
    store = Checkpoints(run, every_s=0, keep=2)
    for step in (1, 2, 3, 4):
        write(store, step)
    kept = [checkpoint_name(step) for step in (0, 3, 4)]
    assert run.checkpoint_names() == kept


@pytest.mark.parametrize("best", [True, False])
def test_only_a_better_one_is_the_best(run: RunDir, best: bool) -> None:
    store = Checkpoints(run, every_s=0, keep=9)
    write(store, 1, best=True)
    write(store, 2, best=best)
    assert store.best == checkpoint_name(2 if best else 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the module sees: the only element."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_due_by_the_clock(run: RunDir, clock: list[float]) -> None:
    store = Checkpoints(run, every_s=60, keep=2)
    for seconds, due in ((0, False), (59.5, False), (60, True), (90, True)):
        clock[0] = 1000 + seconds
        assert store.is_due() == due
    store.schedule()
    assert not store.is_due()
    clock[0] += 60
    with store.write(checkpoint_name(1)):
        assert not store.is_due()  # one is being written
        clock[0] += 7
    assert store.seconds == 7
    assert store.best is None
    assert store.is_due()


def test_none_is_due_by_the_clock_if_not_asked_for(
    run: RunDir, clock: list[float]
) -> None:
    store = Checkpoints(run, every_s=0, keep=2)
    clock[0] += 1e9
    assert not store.is_due()


def test_pause_after_one_that_failed(run: RunDir, clock: list[float]) -> None:
    store = Checkpoints(run, every_s=3600, keep=2)
    with pytest.raises(OSError, match="No space"), store.write(checkpoint_name(1)):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert store.seconds == 0
    for seconds, due in ((0, False), (29, False), (30, True)):
        clock[0] = 1000 + seconds
        assert store.is_due() == due


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; the others go."""
    remove = removal.remove

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == checkpoint_name(1):
            raise PermissionError(errno.EPERM, "it is held", str(path))
        remove(path, *arguments, **options)

    monkeypatch.setattr(removal, "remove", refuse)
    store = Checkpoints(run, every_s=0, keep=1)
    for step in range(1, 5):
        write(store, step)
    assert run.checkpoint_names() == [checkpoint_name(1), checkpoint_name(4)]
    warnings = [line for line in run.records.read_text().splitlines() if "held" in line]
    assert len(warnings) == 1
    assert "an older checkpoint cannot be removed, and stays: " in warnings[0]


@pytest.mark.processes
def test_full_disk_leaves_what_was_there(small_disk: Path) -> None:
    """Also the best one, and nothing half written; with room, the next is written."""
    run = new_run(small_disk)
    store = Checkpoints(run, every_s=0, keep=1)
    write(store, 1, best=True)
    ballast = fill(small_disk)
    with (
        pytest.raises(OSError, match="No space left"),
        store.write(checkpoint_name(2), best=True),
    ):
        pass
    assert store.best == checkpoint_name(1)
    assert [path.name for path in run.checkpoints.iterdir()] == [checkpoint_name(1)]
    checkpoints.verify(run.checkpoints / checkpoint_name(1))
    ballast.unlink()
    write(store, 3)
    assert run.checkpoint_names() == [checkpoint_name(1), checkpoint_name(3)]


def test_old_ones_that_cannot_be_removed_are_no_failure(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(run, every_s=0, keep=1)
    write(store, 1)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "prune", refuse)
        write(store, 2)
    assert run.checkpoint_names() == [checkpoint_name(1), checkpoint_name(2)]
    write(store, 3)
    assert run.checkpoint_names() == [checkpoint_name(3)]


def test_wait_for_the_one_being_written(run: RunDir) -> None:
    store = Checkpoints(run, every_s=0, keep=1)
    began, go_on = threading.Event(), threading.Event()

    def save() -> None:
        with store.write(checkpoint_name(1)):
            began.set()
            go_on.wait()

    thread = threading.Thread(target=save)
    thread.start()
    began.wait()
    store.wait(0.01)  # it gives up
    assert run.checkpoint_names() == []
    threading.Timer(0.1, go_on.set).start()
    store.wait(60)
    assert run.checkpoint_names() == [checkpoint_name(1)]
    thread.join()
