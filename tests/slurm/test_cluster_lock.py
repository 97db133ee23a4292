"""Who may start and end the one cluster of a machine: the tests that need no cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE_S, until
from tests.support.cluster import Cluster, ClusterError, lock, system

pytestmark = pytest.mark.processes

HOLD = """
import sys, time
from pathlib import Path
from tests.support.cluster import lock, system

lock.LOCK = Path(sys.argv[1])
with lock.held(sys.argv[2]):
    print(system.spawn(["sleep", "60"], "sleep", Path("/dev/null"), {}), flush=True)
    time.sleep(float(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of our own: the real one is the machine's."""
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    return lock.LOCK


class Other:
    """Another process that holds the lock, and has a daemon that outlives it."""

    def __init__(self, file: Path, purpose: str, seconds: float) -> None:
        command = [sys.executable, "-c", HOLD, str(file), purpose, str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.daemon = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.kill(self.daemon, signal.SIGKILL)


@pytest.fixture
def session(file: Path) -> Iterator[Other]:
    """A living session."""
    with Other(file, lock.SESSION, 60) as other:
        yield other


def take() -> None:
    with lock.held(lock.UP, timeout_s=0.2):
        pass


def test_a_session_is_not_waited_for(session: Other) -> None:
    began = time.monotonic()
    with pytest.raises(ClusterError) as error, lock.held(lock.SESSION, timeout_s=100):
        pass
    assert time.monotonic() - began < 50
    assert f"in use by process {session.process.pid} since " in str(error.value)
    assert "(session): " in str(error.value)
    assert sys.executable in str(error.value)


def test_a_killed_session_blocks_nobody(session: Other) -> None:
    session.kill()
    # it may not have begun
    until(lambda: system.argv_of(session.daemon) == ["sleep", "60"])
    take()


def test_up_and_down_are_waited_for(file: Path) -> None:
    with Other(file, lock.UP, 0.5) as other, lock.held(lock.SESSION, timeout_s=60):
        other.process.wait(60)
    with lock.held(lock.DOWN):
        pass
    assert file.read_text() == ""


def test_an_up_that_takes_too_long(file: Path) -> None:
    with Other(file, lock.UP, 60) as other:
        name = f"held by process {other.process.pid} since "
        with pytest.raises(ClusterError, match=f"waited 0.2 s for .* {name}"):
            take()


def test_nobody_is_named_wrongly(file: Path, session: Other) -> None:
    """The name of a dead one may stand in the file, or none at all."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = {"pid": gone.pid, "purpose": lock.SESSION, "since": "", "command": "pytest"}
    for text in (json.dumps(dead), "", "{", '["x"]', '{"pid": 1}'):
        file.write_text(text)
        with pytest.raises(ClusterError, match="held by a process that left no name"):
            take()


class Still(Cluster):
    """A cluster that does nothing but say so."""

    did: list[str]

    def _up(self) -> None:
        self.did = [*getattr(self, "did", []), "up"]
        if self.site.grace_time_s == 0:
            raise ClusterError("it does not start")

    def _tear_down(self) -> None:
        self.did = [*getattr(self, "did", []), "down"]


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "require", lambda: None)


def test_a_cluster_is_its_sessions(no_programs: None) -> None:
    first, second = Still(), Still()
    with first:
        with pytest.raises(ClusterError, match=f"in use by process {os.getpid()} "):
            second.up()
        with pytest.raises(ClusterError, match="in use by"):
            second.down()
        with pytest.raises(ClusterError, match="in use by"), second:
            pass
        assert not hasattr(second, "did")
        assert first.did == ["up"]
    assert first.did == ["up", "down"]
    take()


def test_a_cluster_by_hand_is_replaced(no_programs: None) -> None:
    by_hand, session = Still(), Still()
    by_hand.up()
    with session:
        pass
    assert session.did == ["up", "down"]


def test_a_failed_start_leaves_no_lock(no_programs: None) -> None:
    with pytest.raises(ClusterError, match="does not start"), Still(grace_time_s=0):
        pass
    take()


def test_a_failed_test_leaves_no_lock(no_programs: None) -> None:
    cluster = Still()
    with pytest.raises(RuntimeError), cluster:
        raise RuntimeError("a test")
    assert cluster.did == ["up", "down"]
    take()


@pytest.mark.slurm
def test_nobody_ends_the_cluster_of_these_tests(
    cluster: Cluster,
) -> None:
    for command in ("up", "down"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.cluster", command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 1
        assert (
            f"error: the test cluster is in use by process {os.getpid()} "
            in done.stderr
        )
    assert "*" not in "".join(cluster.node_states().values())
