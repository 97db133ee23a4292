"""The folder of a study, STUDIES_DIR/NAME: its lock, its files, and what is removed from it.

It holds run directories in `runs/`, copies of the study file and of the published figures, and the
scripts and logs of job arrays in `arrays/`.
"""

import contextlib
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

from slurmft import locks
from slurmft.cluster.status import job_of
from slurmft.core import permissions
from slurmft.core.credentials import redact
from slurmft.core.errors import UsageError
from slurmft.core.files import write_text
from slurmft.core.filesystem import absolute
from slurmft.runs.rundir import RunDir
from slurmft.studies import spec
from slurmft.studies.progress import find_runs
from slurmft.studies.spec import Study


class HeldError(UsageError):
    """Another command holds the lock of the study's folder."""


def folder_of(study: Study, studies_dir: str) -> Path:
    """The folder of a study: the one that it was read from, or STUDIES_DIR/NAME."""
    home = study.path.parent
    if study.path.name == spec.FILE and home.name == study.name:
        return home
    return absolute(studies_dir) / study.name


@contextlib.contextmanager
def exclusive(folder: Path, share_with_group: bool = False) -> Iterator[None]:
    """Locks the study's folder: no other command, on any node, submits or cancels meanwhile.

    What this process writes from then on is private, or readable for the group. The lock is by
    lockf, which shared file systems keep between nodes; it ends with the process.

    Raises:
        HeldError: another command holds it.
        UsageError: the folder cannot be written.
        NotOwnError: it is another user's, or others can write it.
    """
    path = folder / ".lock"
    try:
        permissions.make_folder(folder, share_with_group, exist_ok=True)
        permissions.settle(share_with_group)
        with permissions.own_folder(folder):
            (folder / "runs").mkdir(exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(
            f"cannot write the study folder {str(folder)!r}: {error.strerror or error}",
            "give a folder that you can write, which the nodes see: --studies-dir",
        ) from None
    with file:
        _hold(file.fileno(), folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def _hold(descriptor: int, folder: Path) -> None:
    try:
        locks.lock(descriptor, "lockf")
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise HeldError(
            f"another `slurmft study run` or `cancel` is at work in {str(folder)!r}: {holder}",
            "wait until it ends, or end it there; slurmft study status shows its progress",
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot lock {str(folder / '.lock')!r}: {error.strerror}",
            "give a folder on a file system with POSIX locks: --studies-dir",
        ) from None


def is_shared(folder: Path) -> bool:
    """Whether a study's folder was made for the group to read."""
    return bool(folder.stat().st_mode & stat.S_IRGRP)


def check_name(study: Study, folder: Path) -> None:
    """Raises UsageError if the folder belongs to another study."""
    copy = folder / spec.FILE
    try:
        found = tomllib.loads(copy.read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError):
        return  # a new folder, or an unreadable copy, which is written anew
    if found != study.name:
        raise UsageError(
            f"{str(folder)!r} is the folder of the study {found!r}, not {study.name!r}",
            "give another --studies-dir, or another name in the study file",
        )


def keep_copies(study: Study, folder: Path) -> None:
    """Copies the study file, and the published tables that it names, to the study's folder."""
    copy = folder / spec.FILE
    if study.path != copy:
        write_text(copy, redact(study.text))
    if study.published and study.published != folder / spec.PUBLISHED:
        write_text(folder / spec.PUBLISHED, study.published.read_text(encoding="utf-8"))


def discard_cut_off(folder: Path) -> None:
    """Removes run directories whose submission was killed before it noted a job.

    If a job was submitted nevertheless, it ends at once: its script is gone.
    """
    for run in find_runs(folder)[0]:
        never = run.state["state"] in ("submitted", "unknown") and run.result is None
        if run.study and never and not job_of(run)[1]:
            RunDir(run.path).discard()
