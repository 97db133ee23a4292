"""What a full disk means to a run: what is missing, and what could go."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slurmft.core import filesystem
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, run_main
from slurmft.core.program import Program
from slurmft.job.process import explain
from slurmft.runs import disk_space, rundir
from slurmft.runs.rundir import RunDir
from slurmft.train.loop import setup
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
    with pytest.raises(OSError, match="Not enough free") as of_numpy:
        np.save(small_disk / "array.npy", np.zeros(2**24))
    assert disk_space.is_full(of_numpy.value)
    assert filesystem.full(small_disk) is None
    fill(small_disk)
    assert "has 0 bytes free" in str(filesystem.full(small_disk))
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


def test_a_file_system_that_counts_nothing_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some of FUSE do, for object stores."""
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([0] * 10))
    assert filesystem.full(tmp_path) is None


@pytest.mark.parametrize(
    ("number", "words", "cure"),
    [
        (
            errno.ENOSPC,
            "has no free inodes: it takes no more files, though ",
            "make room",
        ),
        (errno.EDQUOT, "Disk quota exceeded: your quota on the tmpfs at ", "make room"),
        (errno.EROFS, "Read-only file system: the tmpfs at ", "another place"),
        (errno.EIO, "Input/output error: the tmpfs at ", "try later"),
    ],
)
def test_what_a_disk_lacks(
    small_disk: Path, number: int, words: str, cure: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In every message: of commands, of ranks, of a new run, of the words to readers."""
    if number == errno.ENOSPC:
        usage = SimpleNamespace(f_bavail=2**20, f_frsize=200, f_files=9, f_favail=0)
        monkeypatch.setattr(os, "statvfs", lambda path: usage)
    run = RunDir(small_disk / "run")

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number), str(run.state))

    assert run_main(fail) == 1
    text = capsys.readouterr().err
    assert f"error: '{run.state}' cannot be written: {os.strerror(number)}: " in text
    assert (words in text, cure in text.splitlines()[1]) == (True, True)
    raised = OSError(number, os.strerror(number), str(run.state))
    of_rank = explain(raised, run, 0)
    refused = run.unwritable(raised)
    for error in (of_rank, refused):
        assert (words in error.message, cure in (error.hint or "")) == (True, True)
    assert refused.hint is not None
    assert "--runs-dir" in refused.hint
    monkeypatch.setattr(rundir, "write_json", fail)
    run.set_state("running")
    assert words in capsys.readouterr().err


def test_tokens_that_a_full_disk_does_not_take(run: RunDir) -> None:
    """Once, in two lines: no restart of the ranks helps, and nothing is left."""
    fill(run.path.parent)

    def fill_tokens(folder: Path, *_: Any) -> None:
        np.save(folder / "tokens.npy", np.zeros(2**20))

    task: Any = None
    with pytest.raises(
        SlurmftError, match="no room for the tokens: the tmpfs at"
    ) as error:
        setup._make_tokens(run.tokens, task, task, fill_tokens)
    assert not error.value.retry
    assert "slurmft clean" in str(error.value.hint)
    assert not run.tokens.exists()


def test_what_is_missing_and_what_could_go(run: RunDir) -> None:
    """Of other runs of the user: the largest first; nothing small, and nothing of the run's own."""
    top = run.path.parent
    write(run.checkpoints / "step-00000001" / "model", 128)
    small = write(top / "small" / "tokens" / "tokens.npy", 16)
    free = os.statvfs(top).f_bavail * os.statvfs(top).f_frsize
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    error = disk_space.no_room(run, "the model", full, 3 * 2**20)
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
