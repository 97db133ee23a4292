"""What a full disk means to a run: what is missing, and how to make room."""

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


@pytest.fixture
def run(small_disk: Path) -> RunDir:
    program = Program(kind="script", name="plain", module="plain")
    return RunDir.create(RunConfig(program=program, job=JobConfig(runs_dir=str(small_disk))))


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
    library = (
        'Error while serializing: IoError(Os { code: 28, message: "No space left on device" })'
    )
    assert disk_space.is_full(ValueError(library))
    assert not disk_space.is_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))


def test_what_is_missing_and_how_to_make_room(run: RunDir) -> None:
    top = run.path.parent
    free = os.statvfs(top).f_bavail * os.statvfs(top).f_frsize
    error = disk_space.no_room(run, "the model", 3 * 2**20)
    assert error.message == (
        f"no room for the model: it needs 3.0 MiB; the tmpfs at {top} has {free / 1024:.1f} KiB "
        "free, your quota perhaps less"
    )
    assert error.hint == (
        f"make room; what nobody needs any more, and its sizes: slurmft clean --runs-dir {top}"
    )
