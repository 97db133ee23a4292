"""Builds lockfs.c and mounts it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from tests.support import PATIENCE_S

SOURCE = Path(__file__).with_name("lockfs.c")
MOUNT_S = PATIENCE_S
UNMOUNT_S = 10


class LockfsError(Exception):
    """The file system cannot be built or mounted."""


class TwoNodes:
    """One shared folder, mounted twice below `folder`: its two clients.

    Used as a context manager; at the end nothing is mounted and nothing runs any more.
    """

    def __init__(self, folder: Path, *, leak_ofd: bool = False, user: int = 0) -> None:
        """`user`: the number of the user who has mounted it, in the kernel's eyes."""
        self.back = folder / "back"
        """The shared folder itself, as no node sees it."""
        self.nodes = (folder / "node1", folder / "node2")
        """The folder as each of the two nodes sees it."""
        self._options = ["--leak-ofd"] if leak_ofd else []
        self._as_user = ["setpriv", f"--ruid={user}"] if user else []
        self._mounts: list[tuple[Path, subprocess.Popen[str]]] = []

    def __enter__(self) -> TwoNodes:
        program = _build()
        self.back.mkdir(parents=True)
        try:
            for node in self.nodes:
                node.mkdir()
                self._mount(program, node)
        except BaseException:
            self._unmount()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unmount()

    def crash(self, number: int) -> None:
        """The client of a node dies; its mount answers with errors from then on."""
        process = self._mounts[number][1]
        process.kill()
        process.wait()

    def _mount(self, program: Path, node: Path) -> None:
        process = subprocess.Popen(
            [*self._as_user, program, self.back, node, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._mounts.append((node, process))
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            said = (
                process.stdout.readline() if selector.select(MOUNT_S) else "no answer"
            )
        if said != "ready\n":
            raise LockfsError(f"{node} could not be mounted: {said.strip()}")

    def _unmount(self) -> None:
        while self._mounts:
            node, process = self._mounts.pop()
            if not _fusermount(node):
                # somebody is in it still: it unmounts itself all the same
                process.terminate()
            try:
                process.wait(UNMOUNT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if os.path.ismount(node):
                _fusermount(node, "-z")
            if process.stdout is not None:
                process.stdout.close()


def missing() -> str | None:
    """Why it cannot work on this machine."""
    if os.geteuid() != 0:
        return "lockfs must be mounted by root"
    for program in ("gcc", "pkg-config", "fusermount3"):
        if shutil.which(program) is None:
            return f"lockfs needs {program}"
    if subprocess.run(
        ["pkg-config", "--exists", "fuse3"], check=False, timeout=20
    ).returncode:
        return "lockfs needs libfuse3-dev"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"lockfs needs /dev/fuse: {error.strerror}"
    return None


def _build() -> Path:
    """The compiled program; built once for each version of its source."""
    version = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"slurmft-lockfs-{os.geteuid()}" / version
    program.parent.mkdir(mode=0o700, exist_ok=True)
    if program.parent.stat().st_uid != os.geteuid():
        raise LockfsError(f"{program.parent} belongs to somebody else")
    if not program.exists():
        flags = shlex.split(_run(["pkg-config", "--cflags", "--libs", "fuse3"]))
        new = program.with_name(f"{version}.{os.getpid()}")
        _run(
            [
                "gcc",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-o",
                str(new),
                str(SOURCE),
                *flags,
            ]
        )
        new.rename(program)
    return program


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False
    )
    if done.returncode:
        raise LockfsError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _fusermount(node: Path, *options: str) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = ["fusermount3", "-u", *options, str(node)]
        done = subprocess.run(
            command, capture_output=True, timeout=UNMOUNT_S, check=False
        )
        return done.returncode == 0
    return False
