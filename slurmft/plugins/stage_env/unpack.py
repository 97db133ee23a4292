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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from slurmft.core import process
from slurmft.node import copies

NAME = "slurmft-env"
_LOCK = ".slurmft-lock"
OLD = ".old"
_YOUNG_S = 1800
"""How long an archive may wait for its node's task, which then removes it."""


class StageError(Exception):
    """An environment cannot be staged; the run uses the shared one."""


@contextlib.contextmanager
def environment(
    archives: Mapping[str, str], variables: Mapping[str, str], is_stopped: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Unpacks archives (archive here -> the shared folder that it is of; slurmft's environment is
    the first). Yields the Python to start torchrun with, and the variables that belong to it: those
    of the unpacked environment, or this process's own where that fails. Unpacking is given up where
    the job is to stop."""
    python = sys.executable
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(unpacked(next(iter(archives))))
        try:
            unpacked_copies = _unpack_all(archives, folder, stack, is_stopped)
            path = f"{folder}/bin:{variables.get('PATH', os.defpath)}"
            kind = "CONDA_PREFIX" if "CONDA_PREFIX" in variables else "VIRTUAL_ENV"
            environment = {
                copies.VARIABLE: json.dumps(unpacked_copies),
                "PATH": path,
                kind: str(folder),
            }
            python = f"{folder}/bin/python"
        except (OSError, StageError) as error:
            words = f"warning: --stage-env: {error}: using the shared environment"
            print(words, file=sys.stderr, flush=True)
            for archive in archives:
                with contextlib.suppress(OSError):
                    Path(archive).unlink()
        # In the background: the work must not wait for it.
        stack.callback(process.end, removal(leftovers(folder.parent)))
        yield python, environment


def _unpack_all(
    archives: Mapping[str, str],
    folder: Path,
    stack: contextlib.ExitStack,
    is_stopped: Callable[[], bool],
) -> dict[str, str]:
    """Unpacks the archives into a folder, the first of them at its top; returns shared folder ->
    its copy. The stack removes them."""
    began = time.monotonic()
    targets = {p: f"{folder}/.{n}" if n else str(folder) for n, p in enumerate(archives.values())}
    stack.enter_context(_own(folder))
    stack.callback(_remove_own, archives, folder)
    for archive, shared in archives.items():
        _unpack(Path(archive), Path(targets[shared]), is_stopped)
        Path(archive).unlink()
    for target in targets.values():
        _settle(Path(target), targets)
    print(f"slurmft: environment unpacked in {time.monotonic() - began:.1f} s")
    return targets


def unpacked(archive: str) -> str:
    return archive.removesuffix(".tar")


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Makes a folder that belongs to this process while it is alive; later, others remove it."""
    folder.mkdir(mode=0o700)  # fails if it exists
    with open(folder / _LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _unpack(archive: Path, folder: Path, is_stopped: Callable[[], bool]) -> None:
    if archive.lstat().st_uid != os.getuid():
        raise StageError(f"{archive} belongs to another user")
    folder.mkdir(mode=0o700, exist_ok=True)  # it stays closed to others
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


def _settle(folder: Path, targets: Mapping[str, str]) -> None:
    """Makes an environment work in its new place; an installation finds itself."""
    if (folder / "bin" / "conda-unpack").exists():
        _output(f"{folder}/bin/python", f"{folder}/bin/conda-unpack")
    elif (folder / "pyvenv.cfg").exists():
        _rename(folder, targets)
    else:
        return
    prefix = _output(f"{folder}/bin/python", "-c", "import sys; print(sys.prefix)")
    if os.path.realpath(prefix) != os.path.realpath(folder):
        raise StageError(f"the prefix of its Python is {prefix!r}, not {folder}")


def _rename(folder: Path, targets: Mapping[str, str]) -> None:
    """Lets the links, scripts and settings of an environment name the copies of what is staged."""
    names = "|".join(map(re.escape, sorted(targets, key=len, reverse=True)))
    for path in (folder / "pyvenv.cfg", *(folder / "bin").iterdir()):
        if path.is_symlink():
            target = re.sub(f"^({names})(?=/)", lambda match: targets[match[0]], os.readlink(path))
            path.unlink()
            path.symlink_to(target)
        elif path.is_file() and (path.suffix == ".cfg" or path.open("rb").read(2) == b"#!"):
            text = os.fsdecode(path.read_bytes())
            text = re.sub(f"({names})(?=/)", lambda match: targets[match[0]], text)
            path.write_bytes(os.fsencode(text))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"{command[0]} fails: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def leftovers(folder: Path) -> list[Path]:
    """What ended tasks of this user have not removed, and what nothing runs from."""
    found = []
    for path in folder.glob(f"{NAME}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if path.suffix == OLD:
                found.append(path)
            elif path.is_dir():
                with open(path / _LOCK) as file:  # locked while its task is alive
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(_retired(path))
            elif time.time() - path.stat().st_mtime > _YOUNG_S:
                found.append(path)
    return found


def _retired(folder: Path) -> Path:
    """Renames a folder, so that others remove it if this process does not finish that."""
    return folder.rename(folder.with_name(folder.name + OLD))


def _remove_own(archives: Iterable[str], folder: Path) -> None:
    paths = [Path(archive) for archive in archives]
    with contextlib.suppress(OSError):
        paths.append(_retired(folder))
    removal(paths).wait()


def removal(paths: list[Path]) -> subprocess.Popen[bytes]:
    # Not by Python, which is slower: a slow disk may take minutes.
    return process.start(["rm", "-rf", *map(str, paths)], stderr=subprocess.DEVNULL)
