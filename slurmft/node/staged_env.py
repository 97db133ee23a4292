"""The staged Python environment of a node: unpacked, used, removed (`--stage-env`).

If anything fails, the node uses the shared environment, which has the same content.
`slurmft.cluster.slurm.stage_env` packs and sends the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slurmft.core import process

ARCHIVE = "SLURMFT_STAGE"
"""Variable with the archive's path on the nodes, for their tasks; unset: there is none."""
STAGED = "SLURMFT_STAGED"
"""Variable of the ranks where they run from such: JSON, shared folder -> its copy on this node."""

NAME = "slurmft-env"
_YOUNG_S = 1800
"""How long an archive may wait for its node's task, which then removes it."""


class StageError(Exception):
    """An environment cannot be staged; the run uses the shared one."""


@contextlib.contextmanager
def environment(
    shared: str, variables: Mapping[str, str], is_stopped: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The Python to start torchrun with, and the variables that belong to it: those of the staged
    environment while the block runs, if there is one and it works, else this process's own.

    Args:
        shared: the environment that is staged: that of the ranks.
        variables: this process's.
        is_stopped: whether the job is to stop; unpacking is given up then.
    """
    archive = variables.get(ARCHIVE)
    folder = Path(unpacked(archive)) if archive else None
    with contextlib.ExitStack() as stack:
        if archive and folder:
            began = time.monotonic()
            try:
                stack.enter_context(_own(folder))
                _unpack(Path(archive), folder, is_stopped)
                _settle(folder, shared)
                Path(archive).unlink()
                print(f"slurmft: environment unpacked in {time.monotonic() - began:.1f} s")
            except (OSError, StageError) as error:
                words = f"warning: --stage-env: {error}: using the shared environment"
                print(words, file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    Path(archive).unlink()
            else:
                # In the background: the work must not wait for it.
                stack.callback(process.end, removal(leftovers(folder.parent)))
                found = {STAGED: json.dumps({shared: str(folder)})}
                if shared != sys.prefix:  # of a program, whose processes take it themselves
                    yield sys.executable, found
                    return
                name = "CONDA_PREFIX" if "CONDA_PREFIX" in variables else "VIRTUAL_ENV"
                path = f"{folder}/bin:{variables.get('PATH', os.defpath)}"
                yield f"{folder}/bin/python", found | {"PATH": path, name: str(folder)}
                return
        yield sys.executable, {}


def unpacked(archive: str) -> str:
    return archive.removesuffix(".tar")


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Makes a folder that belongs to this process while it is alive; later, others remove it."""
    folder.mkdir(mode=0o700)  # fails if it exists
    with _locked(folder):
        try:
            yield
        finally:
            removal([folder]).wait()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError where another process has it locked."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _unpack(archive: Path, folder: Path, is_stopped: Callable[[], bool]) -> None:
    if archive.lstat().st_uid != os.getuid():
        raise StageError(f"{archive} belongs to another user")
    # The folder itself stays closed to others.
    command = ["tar", "-C", str(folder), "--no-overwrite-dir", "-xf", str(archive)]
    with process.start(command, stderr=subprocess.PIPE) as tar:
        while not is_stopped() and tar.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tar.wait(0.2)
        if is_stopped():
            tar.kill()
            raise StageError("the job is to stop")
        words = tar.stderr.read().decode(errors="replace").strip() if tar.stderr else ""
    if tar.returncode:
        raise StageError(f"{archive} cannot be unpacked: {words[-300:]}")


def _settle(folder: Path, shared: str) -> None:
    """Makes the environment work in its new place; its scripts name the Python there."""
    if (folder / "bin" / "conda-unpack").exists():
        _output(f"{folder}/bin/python", f"{folder}/bin/conda-unpack")
    for script in (folder / "bin").iterdir():
        if script.is_file() and (text := script.read_bytes()).startswith(b"#!"):
            script.write_bytes(text.replace(os.fsencode(f"{shared}/"), os.fsencode(f"{folder}/")))
    prefix = _output(f"{folder}/bin/python", "-c", "import sys; print(sys.prefix)")
    if os.path.realpath(prefix) != os.path.realpath(folder):
        raise StageError(f"the prefix of its Python is {prefix!r}, not {folder}")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"{command[0]} fails: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def leftovers(folder: Path) -> list[Path]:
    """What ended tasks of this user have not removed, and what nothing runs from."""
    found = []
    for path in folder.glob(f"{NAME}-{os.getuid()}-*"):
        with contextlib.suppress(OSError), _locked(path):
            if time.time() - path.stat().st_mtime > _YOUNG_S:
                found.append(path)
    return found


def removal(paths: list[Path]) -> subprocess.Popen[bytes]:
    # Not by Python, which is slower: a slow disk may take minutes.
    return process.start(["rm", "-rf", *map(str, paths)], stderr=subprocess.DEVNULL)
