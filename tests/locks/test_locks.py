"""The lock shim: that it holds between nodes, in one process, in all versions of filelock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from slurmft import locks
from slurmft.core import filesystem
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import FileSystem
from slurmft.locks import LockShimError
from tests.conftest import HOSTILE
from tests.support import PATIENCE_S, evaluate_on_nodes

pytestmark = pytest.mark.processes

SHIMMED = ("lockf", "ofd", "soft")


@pytest.fixture
def unshimmed() -> Iterator[None]:
    """Leaves filelock as it was."""
    yield
    locks._shim.use("flock")  # what filelock does by itself


def python(script: str, *arguments: str, **variables: str) -> str:
    """What a Python script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- one process, and others of its node ----------------------------------------------------------

OTHER = """
import sys, filelock
from slurmft import locks
locks.install(sys.argv[2])
lock = filelock.FileLock(sys.argv[1])
try:
    lock.acquire(timeout=0)
    print("free", flush=True)
except filelock.Timeout:
    print("locked")
"""


def other_process(path: Path, primitive: str) -> str:
    return python(OTHER, str(path), primitive).strip()


@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_a_second_lock_object_neither_gets_nor_drops_the_lock(
    primitive: str, tmp_path: Path
) -> None:
    locks.install(primitive)
    path = tmp_path / HOSTILE / "x.lock"
    path.parent.mkdir()
    with filelock.FileLock(path):
        second = filelock.FileLock(path)
        with pytest.raises(filelock.Timeout):
            second.acquire(timeout=0)
        del second
        assert other_process(path, primitive) == "locked"
    assert other_process(path, primitive) == "free"
    with filelock.FileLock(path, timeout=0):
        pass


@pytest.mark.parametrize(("first", "second"), [("lockf", "ofd"), ("ofd", "lockf")])
@pytest.mark.usefixtures("unshimmed")
def test_lockf_and_ofd_exclude_each_other_on_a_node(
    first: str, second: str, tmp_path: Path
) -> None:
    locks.install(first)
    with filelock.FileLock(tmp_path / "x.lock"):
        assert other_process(tmp_path / "x.lock", second) == "locked"


@pytest.mark.parametrize(("primitive", "rest"), [("lockf", "free"), ("ofd", "locked")])
@pytest.mark.usefixtures("unshimmed")
def test_closing_another_descriptor_drops_a_lock_of_lockf_alone(
    primitive: str, rest: str, tmp_path: Path
) -> None:
    """docs/file-locks.md warns of it: the kernel does it."""
    locks.install(primitive)
    with filelock.FileLock(tmp_path / "x.lock"):
        (tmp_path / "x.lock").read_bytes()
        assert other_process(tmp_path / "x.lock", primitive) == rest


@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_lock_ends_with_its_process(primitive: str, tmp_path: Path) -> None:
    script = OTHER + "\nimport os; os._exit(0)"
    assert python(script, str(tmp_path / "x.lock"), primitive).strip() == "free"
    locks.install(primitive)
    with filelock.FileLock(tmp_path / "x.lock", timeout=60):
        pass


@pytest.mark.usefixtures("unshimmed")
def test_who_gets_a_lock_looks_again_for_what_its_holder_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS asks its server again for absent names when their folder is opened."""
    locks.install("lockf")
    path, blobs = tmp_path / ".locks/models--x/y.lock", tmp_path / "models--x/blobs"
    for folder in (path.parent, blobs):
        folder.mkdir(parents=True)
    opened: set[Path] = set()

    def seen(name: str, *flags: int) -> int:
        opened.add(Path(name))
        return _open(name, *flags)

    monkeypatch.setattr(os, "open", seen)
    with filelock.FileLock(path):
        assert {path.parent, blobs} <= opened


_open = os.open


@pytest.mark.usefixtures("unshimmed")
def test_lock_that_vanishes_while_it_is_taken_is_not_held_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """filelock closes a locked descriptor whose file was unlinked, and starts over."""
    locks.install("lockf")
    path = tmp_path / "x.lock"
    real = locks.lock

    def lock_unlinked(fd: int, *rest: Any) -> Any:
        monkeypatch.setattr(locks, "lock", real)
        path.unlink()
        return real(fd, *rest)

    monkeypatch.setattr(locks, "lock", lock_unlinked)
    with filelock.FileLock(path, timeout=60):
        assert len(locks._shim.held) == 1
    assert not locks._shim.held


@pytest.mark.usefixtures("unshimmed")
def test_primitive_may_change_while_a_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    real = locks.unlock

    def unlock(fd: int, primitive: str, held: Any) -> None:
        given_up.append(primitive)
        real(fd, primitive, held)

    monkeypatch.setattr(locks, "unlock", unlock)
    locks.install("lockf")
    with filelock.FileLock(tmp_path / "x.lock"):
        locks.arm("ofd")
    assert given_up[-1] == "lockf"
    assert other_process(tmp_path / "x.lock", "lockf") == "free"


@pytest.mark.usefixtures("unshimmed")
def test_acquire_that_is_interrupted_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right after the lock was taken, before filelock knows."""
    locks.install("lockf")
    path, real = tmp_path / "x.lock", locks.lock

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(locks, "lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filelock.FileLock(path).acquire()
    monkeypatch.setattr(locks, "lock", real)
    with filelock.FileLock(path, timeout=0):
        pass


@pytest.mark.parametrize("primitive", ["lockf", "soft"])
@pytest.mark.usefixtures("unshimmed")
def test_child_does_not_own_its_parents_lock(primitive: str, tmp_path: Path) -> None:
    """It cannot take it, does not drop it at its end, and may have it afterwards."""
    locks.install(primitive)
    path = tmp_path / "x.lock"
    lock = filelock.FileLock(path)
    with lock:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                filelock.FileLock(path).acquire(timeout=0)
            except filelock.Timeout:
                os.read(reader, 1)  # the parent has given it up
                with filelock.FileLock(path, timeout=60):
                    os._exit(0)
            os._exit(1)
        assert other_process(path, primitive) == "locked"
    os.write(writer, b"x")
    assert os.waitpid(pid, 0)[1] == 0


FORK = """
import os, sys, threading, filelock
from slurmft import locks
locks.install("lockf")
entered, leave = threading.Event(), threading.Event()
def hold():
    with locks._shim.mutex_of(sys.argv[1]):  # in the middle of an acquire
        entered.set()
        leave.wait()
thread = threading.Thread(target=hold)
thread.start()
entered.wait()
pid = os.fork()
if pid == 0:
    with filelock.FileLock(sys.argv[1], timeout=60):
        os._exit(0)
leave.set()
thread.join()
assert os.waitpid(pid, 0)[1] == 0
"""


def test_fork_while_another_thread_locks(tmp_path: Path) -> None:
    python(FORK, str(tmp_path / "x.lock"))


RELEASE = """
import os, sys, threading, filelock
from slurmft import locks
locks.install("lockf")
path = sys.argv[1]
first, second = filelock.FileLock(path), filelock.FileLock(path)
close, taken = os.close, threading.Event()
def slow_close(fd):
    if fd in fds:  # between the unlock and the close of the first
        taken.wait(0.5)
    close(fd)
first.acquire()
fds = list(locks._shim.held)
os.close = slow_close
def take():
    second.acquire(timeout=60)
    taken.set()
thread = threading.Thread(target=take)
thread.start()
first.release()
thread.join()
child = "import sys, fcntl; fcntl.lockf(open(sys.argv[1], 'r+'), 6)"
import subprocess
code = subprocess.run([sys.executable, "-c", child, path], stderr=subprocess.DEVNULL).returncode
assert code != 0, "the close of the first has dropped the lock of the second"
"""


def test_release_does_not_drop_a_lock_that_another_thread_takes_meanwhile(
    tmp_path: Path,
) -> None:
    python(RELEASE, str(tmp_path / "x.lock"))


# --- descriptors, folders and servers that change underneath --------------------------------------


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


@pytest.mark.parametrize("number", ["reused", "new"])
@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_lock_of_a_descriptor_ends_when_it_is_closed(
    primitive: str, number: str, tmp_path: Path
) -> None:
    """`lock_descriptor` has callers that only close, as flock allows."""
    locks.install(primitive)
    path = tmp_path / "x.lock"
    first = opened(path)
    assert filelock.lock_descriptor(first, blocking=False)
    assert other_process(path, primitive) == "locked"
    os.close(first)
    if number == "new":
        other_file = opened(tmp_path / "other")
        assert other_file == first
    second = opened(path)
    assert (second == first) == (number == "reused")
    assert filelock.lock_descriptor(second, blocking=False)
    assert other_process(path, primitive) == "locked"
    filelock.unlock_descriptor(second)
    assert other_process(path, primitive) == "free"
    os.close(second)
    if number == "new":
        os.close(other_file)
    assert not locks._shim.held


@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_path_of_a_descriptor_that_was_closed_is_free(
    primitive: str, tmp_path: Path
) -> None:
    locks.install(primitive)
    path = tmp_path / "x.lock"
    descriptor = opened(path)
    assert filelock.lock_descriptor(descriptor, blocking=False)
    os.close(descriptor)
    with filelock.FileLock(path, timeout=0):
        assert other_process(path, primitive) == "locked"
    assert other_process(path, primitive) == "free"
    assert not list(tmp_path.glob("*.soft"))


@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_descriptor_that_is_locked_may_be_locked_again(
    primitive: str, tmp_path: Path
) -> None:
    locks.install(primitive)
    descriptor = opened(tmp_path / "x.lock")
    assert filelock.lock_descriptor(descriptor, blocking=False)
    assert filelock.lock_descriptor(descriptor, blocking=False)
    filelock.unlock_descriptor(descriptor)
    os.close(descriptor)
    assert other_process(tmp_path / "x.lock", primitive) == "free"


@pytest.mark.parametrize("primitive", SHIMMED)
@pytest.mark.usefixtures("unshimmed")
def test_unlock_that_fails_may_be_tried_again(
    primitive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks.install(primitive)
    descriptor, real = opened(tmp_path / "x.lock"), locks.unlock

    def failing(*_: Any) -> None:
        monkeypatch.setattr(locks, "unlock", real)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert filelock.lock_descriptor(descriptor, blocking=False)
    monkeypatch.setattr(locks, "unlock", failing)
    with pytest.raises(OSError, match="Input/output error"):
        filelock.unlock_descriptor(descriptor)
    filelock.unlock_descriptor(descriptor)
    assert other_process(tmp_path / "x.lock", primitive) == "free"
    os.close(descriptor)


MOVED = """
import os, sys, subprocess, threading, filelock
from slurmft import locks
folder, elsewhere, primitive, case, other = sys.argv[1:]
locks.install(primitive)

def other_process(path):
    done = subprocess.run([sys.executable, "-c", other, path, primitive], stdout=subprocess.PIPE)
    return done.stdout.decode().strip()

polls = 0
polled = threading.Condition()

def count():
    global polls
    with polled:
        polls += 1
        polled.notify_all()
    return False

def await_polls(number):
    with polled:
        assert polled.wait_for(lambda: polls >= number, 60)

def poll():
    lock = filelock.FileLock("x.lock", poll_interval=0.01)
    lock.acquire(timeout=60, cancel_check=count)
    print("taken", flush=True)
    lock.release()

os.chdir(folder)
here = filelock.FileLock("x.lock")
if case == "held here":
    here.acquire()
    release = here.release
else:  # by another process; a lock of the same name is held in the other folder
    holder = subprocess.Popen(
        [sys.executable, "-c", other + "\\nsys.stdin.read()", folder + "/x.lock", primitive],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"free\\n"
    there = filelock.FileLock(elsewhere + "/x.lock")
    there.acquire()
    release = holder.communicate
thread = threading.Thread(target=poll)
thread.start()
await_polls(2)
os.chdir(elsewhere)
await_polls(polls + 3)
print(other_process(folder + "/x.lock"), flush=True)
release()
thread.join()
"""


@pytest.mark.parametrize("case", ["held here", "held elsewhere"])
@pytest.mark.parametrize("primitive", SHIMMED)
def test_relative_path_is_that_of_the_folder_where_the_waiting_began(
    primitive: str, case: str, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    printed = python(MOVED, *map(str, folders), primitive, case, OTHER)
    assert printed.split() == ["locked", "taken"]


@pytest.mark.parametrize("primitive", ["auto", *SHIMMED])
@pytest.mark.usefixtures("unshimmed")
def test_slow_open_of_one_lock_holds_up_no_other(
    primitive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is down answers after minutes."""
    locks.install(primitive)
    held = filelock.FileLock(tmp_path / "held.lock", thread_local=False)
    held.acquire()
    began, is_up = threading.Event(), threading.Event()

    def slow(name: Any, *rest: Any, **named: Any) -> int:
        if str(name).endswith("slow.lock"):
            began.set()
            is_up.wait(PATIENCE_S)
        return _open(name, *rest, **named)

    def lock_slowly() -> None:
        with filelock.FileLock(tmp_path / "slow.lock"):
            pass

    def lock_others() -> None:
        held.release()
        with filelock.FileLock(tmp_path / "other.lock", timeout=0):
            pass

    monkeypatch.setattr(os, "open", slow)
    waiting = threading.Thread(target=lock_slowly)
    waiting.start()
    assert began.wait(PATIENCE_S)
    others = threading.Thread(target=lock_others)
    others.start()
    others.join(10)
    was_held_up = others.is_alive()
    is_up.set()
    waiting.join(PATIENCE_S)
    others.join(PATIENCE_S)
    assert not was_held_up
    assert not locks._shim.held


# --- who is covered -------------------------------------------------------------------------------

COVERED = """
import sys
order, name = sys.argv[1:3]
from slurmft import locks
if order == "before":
    locks.install("lockf")
if name == "huggingface_hub":
    from huggingface_hub.utils import WeakFileLock as lock
elif name == "subclass":
    import filelock
    class Mine(filelock.FileLock): pass
    lock = Mine
else:
    from datasets.utils._filelock import FileLock as lock
if order == "after":
    locks.install("lockf")
with lock(sys.argv[3]):
    assert [held.primitive for held in locks._shim.held.values()] == ["lockf"], locks._shim.held
assert not locks._shim.held
"""


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["huggingface_hub", "datasets", "subclass"])
def test_libraries_and_subclasses_bound_before_or_after(
    name: str, order: str, tmp_path: Path
) -> None:
    python(COVERED, order, name, str(tmp_path / "x.lock"))


def wheel(requirement: str, folder: Path, request: pytest.FixtureRequest) -> Path:
    """A release from the package index, unpacked."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
    ]
    done = subprocess.run(
        [*pip, "-d", str(folder), requirement],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode and not request.config.getoption("--slurm"):
        pytest.skip(
            f"cannot download {requirement}: {done.stderr.strip().splitlines()[-1]}"
        )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


VERSION = """
import sys, filelock
from slurmft import locks
locks.install("lockf")
assert filelock.__file__.startswith(sys.argv[1]), filelock.__file__
path = sys.argv[1] + "/x.lock"
with filelock.FileLock(path):
    assert [held.primitive for held in locks._shim.held.values()] == ["lockf"]
    try:
        filelock.FileLock(path).acquire(timeout=0)
        raise SystemExit("a second object got the lock")
    except filelock.Timeout:
        pass
    import subprocess
    try:
        child = "import sys, fcntl; fcntl.lockf(open(sys.argv[1], 'r+'), 6)"  # EX, NB
        subprocess.run([sys.executable, "-c", child, path], check=True, stderr=subprocess.DEVNULL)
        raise SystemExit("another process got the lock")
    except subprocess.CalledProcessError:
        pass
assert not locks._shim.held
"""


SOFT = """
import os, sys, threading, filelock
from slurmft import locks
locks.install("soft")
assert filelock.__file__.startswith(sys.argv[1]), filelock.__file__
path = sys.argv[1] + "/soft.lock"
lock = filelock.FileLock(path)
lock.acquire()
pid = os.fork()
if pid == 0:
    del lock
    sys.exit(0)
os.waitpid(pid, 0)
try:
    filelock.FileLock(path).acquire(timeout=0)
    raise SystemExit("the end of a child has dropped its parent's lock")
except filelock.Timeout:
    pass
lock.release()
filelock.FileLock(path).acquire(timeout=0)
"""


@pytest.mark.extra("versions")
@pytest.mark.parametrize("version", ["3.4.0", "3.12.4", "3.20.3", "4.0.0", "4.3.1"])
def test_versions_of_filelock(
    version: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = wheel(f"filelock=={version}", tmp_path, request)
    python(VERSION, str(folder), PYTHONPATH=str(folder))
    python(SOFT, str(folder), PYTHONPATH=str(folder))


@pytest.mark.extra("versions")
@pytest.mark.parametrize("order", ["before", "after"])
def test_lock_vendored_in_datasets_2_0_0(
    order: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its own file alone: the whole of it wants a Python and libraries of its time."""
    folder = wheel("datasets==2.0.0", tmp_path, request)
    for init in ("datasets/__init__.py", "datasets/utils/__init__.py"):
        (folder / init).write_text("")
    script = """
        import sys
        from slurmft import locks
        order, path = sys.argv[1:]
        if order == "before":
            locks.install("lockf")
        import datasets.utils.filelock as vendored
        if order == "after":
            locks.install("lockf")
        assert vendored.__version__ == "3.0.12"
        with vendored.FileLock(path):
            assert [held.primitive for held in locks._shim.held.values()] == ["lockf"]
            try:
                vendored.FileLock(path).acquire(timeout=0)
                raise SystemExit("a second object got the lock")
            except vendored.Timeout:
                pass
        assert not locks._shim.held
    """
    python(script, order, str(tmp_path / "x.lock"), PYTHONPATH=str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class UnixFileLock: pass", "does not know this version of filelock.unix"),
        ("fcntl = None", "does not know this version of filelock"),
    ],
)
def test_an_unknown_filelock_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "filelock").mkdir()
    (tmp_path / "filelock" / "__init__.py").write_text("from filelock.unix import *")
    (tmp_path / "filelock" / "unix.py").write_text(text)
    script = """
        from slurmft import locks
        try:
            locks.install()
        except locks.LockShimError as error:
            print(error.message)
    """
    assert words in python(script, PYTHONPATH=str(tmp_path))


def test_a_filelock_that_does_not_call_flock_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filelock, "FileLock", lambda path: contextlib.nullcontext())
    with pytest.raises(
        LockShimError, match=f"no effect on filelock {filelock.__version__}"
    ):
        locks.install("flock")


def test_unknown_primitive() -> None:
    with pytest.raises(UsageError, match="unknown lock primitive 'lokf'") as error:
        locks.install("lokf")
    assert error.value.hint == "did you mean lockf?"


# --- between nodes --------------------------------------------------------------------------------


def test_evaluate_between_two_nodes_and_its_traps(two_nodes: tuple[Path, Path]) -> None:
    cases = [
        ("four processes", "flock"),
        ("four processes", "bare lockf"),
        ("four processes", "auto"),
        ("four processes", "ofd"),
        ("four processes", "soft"),
        ("two metrics", "bare lockf"),
        ("two metrics", "auto"),
        ("threads", "bare lockf"),
        ("threads", "auto"),
    ]
    plan = json.dumps({"caches": list(map(str, two_nodes)), "cases": cases})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.evaluate_on_nodes", plan],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(what, kind): answer for what, kind, answer in lines}
    right = {"samples": evaluate_on_nodes.SAMPLES, "accuracy": 0.75}
    for kind in ("auto", "ofd", "soft"):
        assert found["four processes", kind] == right, kind
    # The traps, which the shim is there for: without it they are still open.
    assert "Expected to find locked file" in found["four processes", "flock"]
    assert found["four processes", "bare lockf"] != right
    assert found["two metrics", "auto"] == [1.0, 0.5]
    assert found["two metrics", "bare lockf"] != [1.0, 0.5]
    assert found["threads", "auto"] == 1
    assert found["threads", "bare lockf"] > 1


# --- which one where ------------------------------------------------------------------------------

MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:26 / /home rw shared:2 - nfs4 server:/export/home rw,vers=4.2
31 30 0:27 / /home/a\040b rw shared:3 - gpfs fs1 rw
32 22 0:28 / /tmp rw - tmpfs tmpfs rw
33 22 8:16 / /san rw - ocfs2 /dev/sdb rw
""".strip()


@pytest.mark.parametrize(
    ("path", "kind", "primitive"),
    [
        ("/usr/lib", "ext4", "flock"),
        ("/", "ext4", "flock"),
        ("/home", "nfs4", "lockf"),
        ("/home/a b/hf", "gpfs", "lockf"),
        ("/homeless", "ext4", "flock"),
        ("/tmp/x", "tmpfs", "flock"),
        ("/san/hf", "ocfs2", "flock"),  # which is shared, and keeps lockf local
    ],
)
def test_default_by_file_system(path: str, kind: str, primitive: str) -> None:
    found = filesystem.find(MOUNTS.split("\n"), path)
    assert found.type == kind
    assert locks.default(found) == primitive


def test_odd_mounts() -> None:
    odd = [*MOUNTS.split("\n"), "33 22 0:29 / /x\u2028y rw - nfs server:/z rw"]
    assert filesystem.find(odd, "/x\u2028y/z").type == "nfs"
    nothing_over_it = ["31 30 0:27 / /home rw - gpfs fs1 rw"]  # the root of a chroot
    assert locks.default(filesystem.find(nothing_over_it, "/usr")) == "lockf"


def test_no_home_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert locks.primitive_for("/proc") == "lockf"


def test_record_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = filesystem.of(tmp_path)
    record = locks.record_path(here)
    record.parent.mkdir(parents=True)
    assert locks.primitive_for(tmp_path) == locks.default(here)
    record.write_text('{"primitive": "ofd"}')
    assert locks.primitive_for(tmp_path / "not" / "there") == "ofd"
    record.write_text('{"primitive": "magic"}')
    assert locks.primitive_for(tmp_path) == locks.default(here)
    for damaged in ("half a rec", '["lockf"]', "[" * 5000, '{"primitive": ["lockf"]}'):
        record.write_text(damaged)
        assert locks.primitive_for(tmp_path) == locks.default(here)
    assert locks.record_path(FileSystem(type="nfs", source="a", mount="/b")) != record


# --- python -m slurmft.locks run ------------------------------------------------------------------


def run_locks(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurmft.locks", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | variables,
        check=False,
    )


SCRIPT = """
import multiprocessing, subprocess, sys
import filelock
from slurmft import locks

def installed(*_):
    import filelock
    return locks.installed()

if __name__ == "__main__":
    child = "import filelock, slurmft.locks; print(slurmft.locks.installed())"
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(installed, [0])[0]
    print(installed(), out.strip(), spawned, sys.argv[1:], __name__)
"""


def test_script_and_its_children_have_the_shim(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    done = run_locks(
        "run", "--primitive", "ofd", "--", str(folder / "script.py"), "--x", "a b"
    )
    assert done.stdout == "ofd ofd ofd ['--x', 'a b'] __main__\n", done.stderr


def test_a_sites_own_sitecustomize_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the site')")
    variables = locks.environment("lockf", {"PYTHONPATH": str(tmp_path)})
    script = "import filelock; from slurmft import locks; print(locks.installed())"
    assert python(script, **variables) == "the site\nlockf\n"
    # not once more for each child
    assert locks.environment("lockf", variables) == variables


def test_a_bad_primitive_does_not_hide_the_sites_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the site')")
    variables = locks.environment("lokf", {"PYTHONPATH": str(tmp_path)})
    assert python("", **variables) == "the site\n"


def test_module_and_exit_code(tmp_path: Path) -> None:
    assert run_locks("run", "--", "-m", "json.tool", "--help").returncode == 0
    (tmp_path / "bad.py").write_text("raise SystemExit(7)")
    assert run_locks("run", "--", str(tmp_path / "bad.py")).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "script.py"], "no -- before the script"),
        (["run", "--"], "no script to run"),
        (["run", "--", "nowhere.py"], "no such script: 'nowhere.py'"),
        (["run", "--primitve", "x", "--", "y"], "did you mean --primitive?"),
        (["run", "--primitive", "--", "y"], "--primitive takes one value"),
        (["rum", "--", "y"], "did you mean run?"),
    ],
)
def test_bad_command_lines(arguments: list[str], words: str) -> None:
    done = run_locks(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
