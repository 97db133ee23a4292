"""Requests: commands that came from elsewhere, by `--on`. A request makes one run only, however
often it comes."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slurmft.core import permissions, removal, trusted
from slurmft.core.files import parse_json
from slurmft.runs.rundir import RunDir

ON = "SLURMFT_ON"
"""Variable with the name of the cluster, in such a command."""
REQUEST = "SLURMFT_REQUEST"
"""Variable with the facts of the submission, in JSON."""


def facts() -> dict[str, Any]:
    """Returns the facts of the submission: request (an id), command, sender, git; else nothing."""
    try:
        value = parse_json(os.environ.get(REQUEST, "{}"))
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return value


def run_of(runs_dir: Path, request: str) -> RunDir | None:
    """Returns the run that a request has made, if it did so before."""
    for path in runs_dir.glob(f"*-{request[:6]}"):  # as `RunDir.create` names it
        run = RunDir(path)
        # Own, too: another user's run, in a shared folder, may name the same request.
        if run.read_submission().request == request and run.is_own():
            return run
    return None


@contextlib.contextmanager
def alone(runs_dir: Path, request: str) -> Iterator[None]:
    """Lets one process at a time submit what a request asks for: the first may still be at it."""
    with alone_with(runs_dir / f".request-{request[:6]}"):
        yield


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Lets one process at a time do what it does while it holds a file, and removes that at the
    end, with the folders that were made for it and are empty."""
    folders = permissions.make_above(path)
    with _locked(path) as file:
        try:
            yield
        finally:
            inode = os.fstat(file.fileno()).st_ino
            removal.discard(path, removal.exactly(path.name), inode=inode)
            for folder in folders:
                removal.discard_empty(folder)


def _locked(path: Path) -> IO[bytes]:
    """Opens and locks a file that whoever had it before removes."""
    while True:
        file = open(trusted.own_lock_file(path), "ab")  # noqa: SIM115 - the caller closes it
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError:  # no locks here
            return file
        try:
            locked_file = os.fstat(file.fileno())
            named_file = os.stat(path)
            is_current = os.path.samestat(locked_file, named_file)
        except FileNotFoundError:
            is_current = False
        if is_current:
            return file
        file.close()  # its lock keeps nobody out: others open a new file
