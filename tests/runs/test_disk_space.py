"""What a full disk means to a run: what is missing, and what could go."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.program import Program
from slurmft.runs import disk_space
from slurmft.runs.rundir import RunDir
from tests.support.small_disk import fill

pytestmark = pytest.mark.processes


@pytest.fixture
def run(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(small_disk / "hf"))
    program = Program(kind="script", name="plain", module="plain")
    return RunDir.create(
        RunConfig(program=program, job=JobConfig(runs_dir=str(small_disk)))
    )


def write(path: Path, kib: int) -> Path:
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(kib * 1024))
    return path


def test_full_disk_is_known_by_its_error(small_disk: Path) -> None:
    folder = small_disk / "folder"
    write(folder / "file", 1)
    fill(small_disk)
    with pytest.raises(OSError, match="28") as raised:
        write(small_disk / "other" / "file", 8)
    assert disk_space.is_full(raised.value)
    with pytest.raises(shutil.Error) as several:  # it has no number of its own
        shutil.copytree(folder, small_disk / "copy")
    assert disk_space.is_full(several.value)
    assert disk_space.is_full(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "model"))
    library = "Error while serializing: "
    library += 'IoError(Os { code: 28, message: "No space left on device" })'
    assert disk_space.is_full(ValueError(library))
    assert not disk_space.is_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))


def test_what_is_missing_and_what_could_go(run: RunDir) -> None:
    """Of other runs of the user: the largest first; nothing small, and nothing of the run's own."""
    top = run.path.parent
    write(run.checkpoints / "step-00000001" / "model", 128)
    small = write(top / "small" / "tokens" / "tokens.npy", 16)
    free = os.statvfs(top).f_bavail * os.statvfs(top).f_frsize
    error = disk_space.no_room(run, "the model", 3 * 2**20)
    assert error.message == (
        f"no room for the model: it needs 3.0 MiB; the tmpfs at {top} has {free / 1024:.1f} KiB "
        "free, your quota perhaps less"
    )
    assert error.hint == (
        "make room: no other run of yours has much there; slurmft clean "
        f"--runs-dir {top} shows what nobody needs"
    )
    small.unlink()


def test_largest_of_a_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    program = Program(kind="script", name="plain", module="plain")
    runs = tmp_path / "runs"
    run = RunDir.create(RunConfig(program=program, job=JobConfig(runs_dir=str(runs))))
    for name, folder, kib in (
        ("a", "checkpoints/step-00000001", 3072), ("b", "tokens", 1024), ("b", "checkpoints", 1023),
        ("c", "checkpoints", 2048), ("theirs", "checkpoints", 9000), ("c", "tokens", 1025),
    ):  # fmt: skip
        write(runs / name / folder / "file", kib)
    write(run.checkpoints / "step-00000001" / "model", 8000)
    if os.geteuid() == 0:
        os.chown(runs / "theirs" / "checkpoints", 12345, 12345)
    else:
        shutil.rmtree(runs / "theirs")
    assert disk_space.largest(run) == [
        (3072 * 1024, runs / "a" / "checkpoints"),
        (2048 * 1024, runs / "c" / "checkpoints"),
        (1025 * 1024, runs / "c" / "tokens"),
    ]
    assert disk_space.largest(run, 9)[-1] == (2**20, runs / "b" / "tokens")
    cache = write(
        tmp_path / "hf" / f"slurmft-tokens-{os.geteuid()}" / "key" / "tokens.npy", 5000
    )
    assert disk_space.largest(run, 1) == [(5000 * 1024, cache.parent.parent)]
