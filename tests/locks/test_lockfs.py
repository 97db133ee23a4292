"""The file system of the lock tests does what GPFS and Lustre do."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.lockfs import TwoNodes

pytestmark = pytest.mark.processes

LOCK = """
import fcntl, os, struct, sys
path, kind, way = sys.argv[1:]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
blocking = 0 if way == "wait" else fcntl.LOCK_NB
try:
    if kind == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX | blocking)
    elif kind == "lockf":
        fcntl.lockf(fd, fcntl.LOCK_EX | blocking)
    else:
        F_OFD_SETLK, F_OFD_SETLKW = 37, 38
        command = F_OFD_SETLKW if way == "wait" else F_OFD_SETLK
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
except BlockingIOError:
    print("busy", flush=True)
    sys.exit()
print("locked", flush=True)
if way == "hold":
    sys.stdin.read()
if way == "reopen":
    os.close(os.open(path, os.O_RDONLY))
    print("reopened", flush=True)
    sys.stdin.read()
"""
"""Locks a file as told; holds the lock until its input ends, if told so; never unlocks."""

KINDS = ["flock", "lockf", "ofd"]


def start(path: Path, kind: str, way: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LOCK, str(path), kind, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def holder(path: Path, kind: str, way: str = "hold") -> Iterator[subprocess.Popen[str]]:
    with start(path, kind, way) as process:
        try:
            assert line(process) == "locked"
            yield process
        finally:
            process.kill()


def attempt(path: Path, kind: str) -> str:
    with start(path, kind, "try") as process:
        return line(process)


def becomes_free(path: Path, kind: str) -> bool:
    """Locks of open file descriptions go shortly after the close, like on any network."""
    end = time.monotonic() + PATIENCE_S
    while attempt(path, kind) == "busy":
        if time.monotonic() > end:
            return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_exclusion(two_nodes: tuple[Path, Path], kind: str) -> None:
    here, there = (node / f"exclusion {kind}" for node in two_nodes)
    with holder(here, kind):
        assert attempt(here, kind) == "busy"
        assert attempt(there, kind) == ("locked" if kind == "flock" else "busy")
        if kind != "flock":  # byte ranges are one kind of lock
            assert {attempt(path, k) for path in (here, there) for k in KINDS[1:]} == {
                "busy"
            }


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
@pytest.mark.parametrize("kind", KINDS)
def test_release_at_the_end_of_the_process(
    two_nodes: tuple[Path, Path], kind: str, end: str
) -> None:
    here, there = (node / f"release {kind} {end}" for node in two_nodes)
    with holder(here, kind) as process:
        if end == "SIGKILL":
            process.kill()
        process.communicate()
        assert becomes_free(there, kind)
        assert becomes_free(here, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_close_of_another_descriptor(two_nodes: tuple[Path, Path], kind: str) -> None:
    here = two_nodes[0] / f"reopen {kind}"
    with holder(here, kind, "reopen") as process:
        assert line(process) == "reopened"
        assert attempt(here, kind) == ("locked" if kind == "lockf" else "busy")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_waiting(two_nodes: tuple[Path, Path], kind: str) -> None:
    here, there = (node / f"waiting {kind}" for node in two_nodes)
    with holder(here, kind) as process:
        # more than libfuse has threads
        waiting = [start(there, kind, "wait") for _ in range(15)]
        killed = waiting.pop()
        killed.kill()
        killed.communicate(timeout=PATIENCE_S)
        (two_nodes[1] / "responsive").write_text("yes")
        assert all(waiter.poll() is None for waiter in waiting)
        process.communicate()
        assert [waiter.communicate(timeout=PATIENCE_S)[0] for waiter in waiting] == [
            "locked\n"
        ] * 14


def test_leaked_locks(two_nodes: tuple[Path, Path], tmp_path: Path) -> None:
    with TwoNodes(tmp_path, leak_ofd=True) as leaking:
        here, there = (node / "leak" for node in leaking.nodes)
        assert attempt(here, "lockf") == attempt(there, "lockf") == "locked"
        assert attempt(here, "ofd") == "locked"
        time.sleep(0.3)
        assert attempt(there, "ofd") == attempt(here, "ofd") == "busy"
    assert not any(os.path.ismount(node) for node in leaking.nodes)


def test_files(two_nodes: tuple[Path, Path]) -> None:
    here, there = (node / "files" for node in two_nodes)
    here.mkdir()
    (here / "old").write_bytes(b"some text")
    (here / "old").rename(here / "new")
    assert (there / "new").read_bytes() == b"some text"
    os.truncate(there / "new", 4)
    os.chmod(there / "new", 0o640)
    os.utime(there / "new", (1, 2))
    found = (here / "new").stat()
    assert (found.st_size, found.st_mode & 0o777, found.st_mtime) == (4, 0o640, 2)
    os.link(here / "new", here / "hard")
    os.symlink("new", here / "soft")
    assert sorted(os.listdir(there)) == ["hard", "new", "soft"]
    assert (there / "soft").read_bytes() == (there / "hard").read_bytes() == b"some"
    with (here / "new").open("r+b") as file:
        (there / "new").unlink()
        (there / "hard").unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as mapped:
            mapped[:4] = b"mmap"
        os.fsync(file.fileno())
        assert file.read(4) == b"mmap"
    assert os.listdir(here) == ["soft"]
    (there / "soft").unlink()
    there.rmdir()
    assert not here.exists()
