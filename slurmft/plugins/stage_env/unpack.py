"""The staged Python environment of a node: unpacked, used, removed (`--stage-env`).

If anything fails, the node uses the shared environment, which has the same content.
`slurmft.plugins.stage_env.pack` packs and sends the environment.
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slurmft.core import interpreter, ownership, process, removal
from slurmft.core.trusted import (
    Door,
    NotOwnError,
    renaming_in,
    renaming_on_the_way,
    sha256_of,
)
from slurmft.node import copies

NAME = "slurmft-env"
"""Begins the names of archives and folders on a node's disk, which the user's other jobs share."""
_OURS = re.compile(rf"{NAME}-{os.getuid()}-.+")
_LOCK = ".slurmft-lock"
OLD = ".old"
"""Suffix of folders that are being removed."""
# How long an archive may wait for its node's task, which then removes it.
_YOUNG_S = 1800
_LONGEST_ERROR = 300
ARCHIVE = Door(
    "a packed environment",
    "`RUNS_DIR/.environments-UID/`, `slurmft-env-UID-*` on a node's disk",
    "the Python and the packages of `--stage-env`; each archive is compared with its sum",
    cure="remove it, or give other folders: --runs-dir, --stage-dir",
)


@dataclass(frozen=True, slots=True)
class Sent:
    """An archive on the nodes' own disks."""

    folder: str
    """The shared folder that it is of."""
    sha256: str


class StageError(Exception):
    """An environment cannot be staged; the run uses the shared one."""


@contextlib.contextmanager
def environment(
    archives: Mapping[str, Sent],
    variables: Mapping[str, str],
    is_stopped: Callable[[], bool],
) -> Iterator[tuple[str, dict[str, str]]]:
    """Unpacks archives, and removes what was unpacked after the block.

    Yields the Python to start torchrun with, and the variables that belong to it: those of the
    unpacked environment, or this process's own where that fails.

    Args:
        archives: path on this node -> the archive; slurmft's environment is the first.
        variables: of this process.
        is_stopped: True where the job is to stop: unpacking is given up.
    """
    python = interpreter.PYTHON
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        first_archive = next(iter(archives))  # slurmft's: the folder is named after it
        folder = Path(unpacked(first_archive))
        try:
            check_disk(folder.parent)
            unpacked_copies = _unpack_all(archives, folder, stack, is_stopped)
            python = f"{folder}/bin/python"
            prefix = "VIRTUAL_ENV"
            if "CONDA_PREFIX" in variables:
                prefix = "CONDA_PREFIX"
            environment[prefix] = str(folder)
            search_path = variables.get("PATH", os.defpath)
            environment["PATH"] = f"{folder}/bin:{search_path}"
            environment[copies.VARIABLE] = json.dumps(unpacked_copies)
        except (OSError, StageError) as error:
            warning = f"warning: --stage-env: {error}: using the shared environment"
            print(warning, file=sys.stderr, flush=True)
            # Not in a task's way any more, and the disk may be full.
            for archive in archives:
                _discard(Path(archive))
        # In the background: the work must not wait for it.
        start_removal(leftovers(folder.parent))
        yield python, environment


def _unpack_all(
    archives: Mapping[str, Sent],
    folder: Path,
    stack: contextlib.ExitStack,
    is_stopped: Callable[[], bool],
) -> dict[str, str]:
    """Unpacks the archives into a folder, the first of them at its top; returns shared folder ->
    its copy. The stack removes them."""
    began_at = time.monotonic()
    targets = {}
    for number, sent in enumerate(archives.values()):
        target = str(folder)
        if number > 0:
            target += f"/.{number}"
        targets[sent.folder] = target
    # Callbacks run in reverse order: the folder goes before its lock is released.
    stack.enter_context(_lock_new(folder))
    stack.callback(_remove, archives, folder)
    for archive, sent in archives.items():
        _unpack(Path(archive), sent.sha256, Path(targets[sent.folder]), is_stopped)
        _discard(Path(archive))  # at once, for its space
    # When all copies are there: the links of one lead into another.
    for target in targets.values():
        _settle(Path(target), targets)
    unpack_s = time.monotonic() - began_at
    print(f"slurmft: environment unpacked in {unpack_s:.1f} s")
    return targets


def unpacked(archive: str) -> str:
    """Returns the folder into which an archive is unpacked."""
    return archive.removesuffix(".tar")


@contextlib.contextmanager
def _lock_new(folder: Path) -> Iterator[None]:
    """Makes a folder, and locks it while this process is alive; later, others may remove it."""
    folder.mkdir(mode=0o700)  # fails if it exists
    with open(folder / _LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _unpack(
    archive: Path, sha256: str, folder: Path, is_stopped: Callable[[], bool]
) -> None:
    """Unpacks an archive if it is the one that was sent, and nobody else's.

    tar itself writes nothing outside of the folder: a link that leads out of it, as to the Python
    of an environment, is made after all files.
    """
    # /tmp is for all users: the archive may have been replaced. What is opened here is unpacked.
    try:
        descriptor = ARCHIVE.open_in_shared(archive)
    except NotOwnError as error:
        raise StageError(error.message) from None
    with open(descriptor, "rb") as content, ThreadPoolExecutor(1) as pool:
        # Beside tar, which takes longer. Nobody else can write the file.
        digest = pool.submit(sha256_of, descriptor, is_stopped)
        _extract(content, archive, folder, is_stopped)
        if digest.result() != sha256:
            raise StageError(f"{archive} is not what was sent: it has another sha256")


def _extract(
    content: BinaryIO, archive: Path, folder: Path, is_stopped: Callable[[], bool]
) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)  # it stays closed to others
    command = ["tar", "-C", str(folder), "--no-overwrite-dir", "-xf", "-"]
    with process.start(command, stdin=content, stderr=subprocess.PIPE) as tar:
        try:
            # On a disk that others have filled, tar complains of each file: more than a pipe holds.
            _, output = process.read_bounded(tar, 0, is_stopping=is_stopped)
        finally:
            # Without effect where it has ended.
            tar.kill()
        if is_stopped():
            raise StageError("the job is to stop")
        problem = output.decode(errors="replace").strip()
    if tar.returncode:
        # Its last lines say why it ended; those before may be of each file.
        end_of_problem = problem[-_LONGEST_ERROR:]
        raise StageError(f"{archive} cannot be unpacked: {end_of_problem}")


def _settle(folder: Path, targets: Mapping[str, str]) -> None:
    """Makes an environment work in its new place."""
    python = f"{folder}/bin/python"
    if (folder / "bin" / "conda-unpack").exists():
        _output(python, f"{folder}/bin/conda-unpack")
    elif (folder / "pyvenv.cfg").exists():
        _rename(folder, targets)
    else:
        return  # an installation of Python finds itself
    prefix = _output(python, "-c", "import sys; print(sys.prefix)")
    if os.path.realpath(prefix) != os.path.realpath(folder):
        raise StageError(f"the prefix of its Python is {prefix!r}, not {folder}")


def _rename(folder: Path, targets: Mapping[str, str]) -> None:
    """Lets the links, scripts and settings of an environment name the copies of what is staged."""
    # The longest first: one shared folder may be in another one.
    longest_first = sorted(targets, key=len, reverse=True)
    escaped = [re.escape(name) for name in longest_first]
    names = "|".join(escaped)
    # Before a slash only: /env must not match /env2.
    in_text = re.compile(f"({names})(?=/)")
    at_start = re.compile(f"^({names})(?=/)")

    def copy_of(match: re.Match[str]) -> str:
        return targets[match[0]]

    # A list, before the first change: links are made again below.
    paths = [folder / "pyvenv.cfg", *(folder / "bin").iterdir()]
    for path in paths:
        if path.is_symlink():
            target = at_start.sub(copy_of, os.readlink(path))
            # In one step: there is no other link of this name in between.
            aside = removal.aside_of(path)
            aside.symlink_to(target)
            os.replace(aside, path)
        elif path.is_file():
            content = path.read_bytes()
            is_settings = path.suffix == ".cfg"
            is_script = content.startswith(b"#!")  # others are programs of the machine
            if is_settings or is_script:
                # fsdecode: a path in it may be no UTF-8.
                text = in_text.sub(copy_of, os.fsdecode(content))
                path.write_bytes(os.fsencode(text))


def _output(*command: str) -> str:
    done = process.run(command, None)
    if done.returncode:
        problem = done.stderr.strip()
        end_of_problem = problem[-_LONGEST_ERROR:]
        raise StageError(f"{command[0]} fails: {end_of_problem}")
    return done.stdout.strip()


def check_disk(folder: Path) -> None:
    """Raises StageError where somebody else can rename what is unpacked into a folder: theirs would
    run, and another folder of this user's would be removed."""
    renaming = renaming_in(folder)
    if renaming is not None:
        raise StageError(
            f"{renaming.who} can rename what is in {str(renaming.folder)!r}: see --stage-dir"
        )


def leftovers(folder: Path) -> list[Path]:
    """Lists what ended tasks of this user have not removed. Nothing runs from it."""
    paths: list[Path] = []
    # What others have given such a name is not even renamed.
    if renaming_in(folder) is not None:
        return paths
    for path in folder.glob(f"{NAME}-{os.getuid()}-*"):
        # OSError: another task has just removed it, or is alive and has it locked.
        with contextlib.suppress(OSError):
            # In /tmp, another user may have given a file or a link such a name.
            status = ownership.status(path, follow_symlinks=False)
            if status.st_uid != os.getuid():
                continue
            if path.suffix == OLD:
                paths.append(path)
            elif path.is_dir():
                # Not by age: a job may run for weeks. The kernel frees the lock of a killed task.
                with open(path / _LOCK) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    paths.append(_retire(path))
            else:  # an archive: nobody holds a lock of it
                age_s = time.time() - path.stat().st_mtime
                if age_s > _YOUNG_S:
                    paths.append(path)
    return paths


def _retire(folder: Path) -> Path:
    """Renames a folder, so that others remove it if this process does not finish that."""
    new_name = folder.name + OLD
    return folder.rename(folder.with_name(new_name))


def _remove(archives: Iterable[str], folder: Path) -> None:
    """Removes archives and the folder of what was unpacked, and waits until they are gone."""
    paths = [Path(archive) for archive in archives]
    with contextlib.suppress(OSError):
        paths.append(_retire(folder))
    start_removal(paths).join()


def _discard(path: Path) -> None:
    # By its name alone: others can have given that to something else of this user's.
    if renaming_on_the_way(path) is None:
        removal.discard(path, _OURS)


def start_removal(paths: list[Path]) -> threading.Thread:
    """Starts to remove files and folders; a slow disk may take minutes. What is left when this
    process ends is a leftover for the next job."""

    def remove_all() -> None:
        for path in paths:
            _discard(path)

    thread = threading.Thread(target=remove_all, daemon=True)
    thread.start()
    return thread
