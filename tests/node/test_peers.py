"""What the tasks of a job tell each other, over real connections."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT, Failure
from slurmft.node import memory_kills, signals
from slurmft.node import supervisor as node_supervisor
from slurmft.node.memory_kills import MemoryKills
from slurmft.node.peers import FAILED, HANG, WAIT, Peers
from slurmft.node.rendezvous import (
    LISTEN,
    LOST_STORE,
    NO_PORT,
    answer_checks,
    check_reachable,
)
from slurmft.node.supervisor import Child, Supervisor
from slurmft.node.task import record_torchrun_failure
from slurmft.node.watchdog import Watchdog
from slurmft.runs.rundir import RunDir
from tests.support import PATIENCE_S, until
from tests.support.made_runs import calls_of_rank, write_rank_calls

WAIT_S = PATIENCE_S


def head_and_port() -> tuple[Peers, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    return answer_checks(port, "7.0", "s", ["127.0.0.1"]), port


def join(port: int) -> Peers:
    return check_reachable("n2", "127.0.0.1", port, "7.0", "s", WAIT_S)[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(ATTEMPT, "1")
    program = Program(kind="test", name="test", module="tests.none")
    return RunDir.create(
        RunConfig(program=program, job=JobConfig(runs_dir=str(tmp_path)))
    )


def test_connections_that_are_gone_at_once_make_nobody_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a scan, which ends each with a RST."""
    pauses: list[float] = []
    head, port = head_and_port()
    monkeypatch.setattr("slurmft.node.peers.time.sleep", pauses.append)
    for _ in range(400):
        with socket.socket() as stranger:
            # Closed without a goodbye.
            linger = struct.pack("ii", 1, 0)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            stranger.connect(("127.0.0.1", port))
    node = join(port)
    head.tell(FAILED)
    assert node.heard(FAILED, WAIT_S)
    assert pauses == []


def test_all_hear_what_one_tells() -> None:
    head, port = head_and_port()
    nodes = [join(port) for _ in range(20)]
    assert not any(node.heard(FAILED) for node in nodes)
    nodes[3].tell(FAILED)
    assert all(node.heard(FAILED, WAIT_S) for node in (head, *nodes))
    assert not any(node.heard(HANG) for node in (head, *nodes))
    head.tell(HANG)
    assert all(node.heard(HANG, WAIT_S) for node in nodes)
    late = join(port)
    assert late.heard(FAILED, WAIT_S)
    assert late.heard(HANG, WAIT_S)


def test_a_word_that_was_taken_may_be_told_again() -> None:
    """Ranks may hang, move, and hang again."""
    head, port = head_and_port()
    tells, hears = join(port), join(port)
    for _ in range(2):
        tells.tell(HANG)
        assert hears.heard(HANG, WAIT_S)
        assert all(each.take(HANG) for each in (head, tells, hears))
        assert not hears.take(HANG)


def test_strangers_and_those_who_left_do_no_harm() -> None:
    head, port = head_and_port()
    node, gone = join(port), socket.create_connection(("127.0.0.1", port))
    gone.close()
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 40)
    head.tell(HANG)
    assert node.heard(HANG, WAIT_S)
    assert not head.heard(FAILED)
    stranger.close()


def test_strangers_who_answer_nothing_leave_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slurmft.node.peers._MOST_STRANGERS", 20)
    head, port = head_and_port()
    node = join(port)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    late = join(port)
    head.tell(HANG)
    assert node.heard(HANG, WAIT_S)
    assert late.heard(HANG, WAIT_S)
    # It reads to the end where it was dropped.
    for stranger in strangers[:-21]:
        stranger.settimeout(WAIT_S)
        assert len(stranger.makefile("rb").read()) == 33
    for stranger in strangers:
        stranger.close()


def test_a_line_without_end_is_not_listened_to() -> None:
    _, port = head_and_port()
    with (
        socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        stranger.sendall(bytes(50 * 2**20))


CROWD = """\
import resource, socket, sys
from slurmft.node import supervisor
from slurmft.node.rendezvous import answer_checks

def head(supervisor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    peers = answer_checks(port, "7.0", "s", ["127.0.0.1"])
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(600)]
    heard = [link.makefile("rb").readline() for link in links]
    print(sum(len(line) == 33 for line in heard))  # a challenge
    return 0

supervisor.run_task(sys.argv[1], head)
"""


@pytest.mark.processes
def test_more_tasks_than_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    """Both ends of 600 connections, where 1,024 files may be open at first."""
    program = f"ulimit -S -n 1024; exec {sys.executable} -c '{CROWD}' {tmp_path}"
    command = ["bash", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.returncode) == ("600\n", 0), done.stderr


@pytest.mark.parametrize("tasks", [1, 2, 4, 5, 16, 64, 256, 1000, 4000])
def test_all_tasks_together_look_seldom(tasks: int) -> None:
    """Each look is one file that is opened and read."""
    pauses_s = [node_supervisor.look_pause_s(tasks, task == 0) for task in range(tasks)]
    assert sum(1 / pause_s for pause_s in pauses_s) <= 2
    assert min(pauses_s) == 2.0


class Supervised:
    """A task whose child runs Python code, in a thread."""

    def __init__(
        self,
        run: RunDir,
        peers: Peers,
        code: str = "import time; time.sleep(100)",
        rdzv_timeout_s: float = WAIT_S,
    ) -> None:
        self.supervisor = Supervisor(run)
        self.supervisor.peers = peers
        child = Child(
            command=[sys.executable, "-c", code],
            record_failure=lambda *_: 9,
            tasks=2,
            others=1,
            rdzv_timeout_s=rdzv_timeout_s,
            records_stop=True,
        )
        self.code = -1
        self._thread = threading.Thread(target=self._run, args=(child,))
        self._thread.start()

    def _run(self, child: Child) -> None:
        signals.block()  # for the child
        watchdog = Watchdog(0)
        self.code = self.supervisor.supervise(child, {}, 1, watchdog)
        watchdog.close()

    def end(self) -> int:
        self._thread.join(WAIT_S)
        return self.code


@pytest.mark.processes
def test_failed_node_ends_the_others_in_a_stop(run: RunDir) -> None:
    """Before, it does not: torchrun may restart its ranks."""
    run.set_state("running", "")
    _, port = head_and_port()
    other, task = join(port), Supervised(run, join(port))
    other.tell(FAILED)
    time.sleep(1.5)
    assert task.code == -1
    task.supervisor.stop(signal.SIGTERM)
    assert task.end() == Exit.FAILED
    assert run.get_state().reason == "a task has failed"


@pytest.mark.processes
def test_a_child_that_ends_at_once_was_stopped(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the supervisor has looked again."""
    monkeypatch.setattr(node_supervisor, "_POLL_S", WAIT_S)
    run.set_state("running", "")
    ends = f"import signal; exit(signal.sigwait([{signals.RELAYED:d}]))"
    task = Supervised(run, Peers(), ends)
    until(lambda: task.supervisor._process)
    task.supervisor.stop(signal.SIGTERM)
    assert task.end() == 9
    state = run.get_state()
    assert (state.state, state.reason) == ("stopping", "the job received SIGTERM")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "ran_out", "is_left"),
    [
        ("", True, True),
        ("", None, True),
        ("", False, False),
        ("exit(1)", True, False),
    ],
)
def test_task_that_ends_well_after_memory_ran_out_leaves_a_mark(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    ran_out: bool | None,
    is_left: bool,
) -> None:
    """Slurm says of it that memory ran out, and no exit code."""
    monkeypatch.setattr(memory_kills.MemoryKills, "more", lambda _: ran_out)
    run.submitit.mkdir(exist_ok=True)
    Supervised(run, Peers(), code, rdzv_timeout_s=0).end()
    assert run.ended_well(1, 1).exists() == is_left


@pytest.mark.processes
@pytest.mark.parametrize("how", ["comes", "fails", "stopped", "never comes"])
def test_head_of_a_short_program_is_there_for_a_late_node(
    how: str, run: RunDir
) -> None:
    """Its task would find nobody at the port of the rendezvous."""
    head, port = head_and_port()
    rdzv_timeout_s = WAIT_S
    if how == "never comes":
        rdzv_timeout_s = 2
    task = Supervised(run, head, "pass", rdzv_timeout_s)
    until(lambda: task.supervisor._process)
    assert task.supervisor._process is not None
    task.supervisor._process.wait(WAIT_S)
    time.sleep(1)
    assert task.code == -1
    match how:
        case "comes":
            node = join(port)
            assert not node.heard(FAILED)
        case "fails":
            head.tell(FAILED)
        case "stopped":
            task.supervisor.stop(signal.SIGTERM)
    assert task.end() == Exit.OK


@pytest.mark.processes
def test_head_tells_of_a_task_that_failed_before_it_was_connected(run: RunDir) -> None:
    head, port = head_and_port()
    node, task = join(port), Supervised(run, head)
    run.add(Failure.of("node n9", SlurmftError("it has no GPU")))
    task.supervisor.stop(signal.SIGTERM)
    assert task.end() == Exit.FAILED
    assert node.heard(FAILED, WAIT_S)


@pytest.mark.processes
def test_a_hang_on_one_node_is_seen_on_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped = threading.Event()
    monkeypatch.setattr(Watchdog, "dump", lambda self, run: dumped.set())
    _, port = head_and_port()
    other, task = join(port), Supervised(run, join(port))
    other.tell(HANG)
    assert dumped.wait(WAIT_S)
    task.supervisor.stop(signal.SIGTERM)
    other.tell(FAILED)
    task.end()


@pytest.mark.processes
def test_the_head_tells_once_that_ranks_wait(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[RunDir] = []

    def write(self: Watchdog, run: RunDir) -> None:
        written.append(run)
        write_rank_calls(run, 0, calls_of_rank(waits_s=301.0 + len(written)))

    monkeypatch.setattr(Watchdog, "has_new_wait", lambda self: True)
    monkeypatch.setattr(Watchdog, "keep_present_calls", write)
    monkeypatch.setattr(node_supervisor, "_OTHERS_S", 0)
    head, port = head_and_port()
    node, task = join(port), Supervised(run, head)
    assert node.heard(WAIT, WAIT_S)
    until(lambda: len(written) > 1)
    task.supervisor.stop(signal.SIGTERM)
    node.tell(FAILED)
    task.end()
    (line,) = run.records.read_text().splitlines()
    text = json.loads(line)["text"]
    assert text.startswith(
        "ranks wait for each other: 1 rank has waited 5:02 min in all-reduce"
    )


def test_cause_on_another_node_is_awaited_without_files(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose ranks said nothing names no cause of its own where another one has one."""
    monkeypatch.setattr(node_supervisor, "_CAUSE_WAIT_S", 0.5)
    log = run.logs / "node-001.log"
    log.touch()
    alone = Supervisor(run)
    assert record_torchrun_failure(alone, 1, log, 0) == Exit.FAILED
    (failure,) = run.all_failures()
    assert failure.message == "torchrun ended with exit code 1"
    for path in run.failures.iterdir():
        path.unlink()
    _, port = head_and_port()
    other, supervisor = join(port), Supervisor(run)
    supervisor.peers = join(port)
    run.add(Failure.of("rank 9 on n9", SlurmftError("the loss is nan")))
    other.tell(FAILED)
    assert supervisor.peers.heard(FAILED, WAIT_S)
    assert record_torchrun_failure(supervisor, 1, log, 0) == Exit.FAILED
    assert len(run.all_failures()) == 1


def test_host_is_not_to_blame_where_torchrun_ran_out_of_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run.logs / "node-001.log"
    log.touch()
    supervisor = Supervisor(run)
    supervisor.peers.tell(FAILED)
    monkeypatch.setattr(MemoryKills, "more", lambda *_: True)
    record_torchrun_failure(supervisor, -signal.SIGKILL, log, 0)
    (failure,) = run.all_failures()
    assert "the kernel reports that memory ran out" in failure.message
    assert (failure.bad_host, failure.retry, failure.out_of_memory) == (
        None,
        True,
        True,
    )


@pytest.mark.processes
def test_a_torchrun_without_a_port_is_started_again(run: RunDir) -> None:
    command = [sys.executable, "-P", "-m", "slurmft.node.torchrun", "--nnodes", "1"]
    command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    # Of documentation alone: nobody can listen there.
    command += ["--rdzv-endpoint", "n1:29400", "--rdzv-conf", "is_host=true"]
    environment = os.environ | {LISTEN: "n1=192.0.2.99"}
    log = run.logs / "node-000.log"
    with open(log, "wb") as file:
        done = subprocess.run(
            [*command, "--module", "this"],
            env=environment,
            stdout=file,
            stderr=file,
            timeout=PATIENCE_S,
        )
    assert "cannot listen on port 29400" in log.read_text()
    record_torchrun_failure(Supervisor(run), done.returncode, log, 0)
    (failure,) = run.all_failures()
    assert (failure.message, failure.retry) == ("torchrun could open no port", True)
    assert failure.bad_host is None


@pytest.mark.parametrize(("limit", "most"), [(-1, 2048), (512, 256), (10**6, 2048)])
def test_strangers_by_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    """RLIM_INFINITY is -1."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert Peers()._most_strangers == most


@pytest.mark.parametrize("code", [Exit.RENDEZVOUS, NO_PORT, LOST_STORE])
@pytest.mark.parametrize("starter", ["torchrun", "the process that starts the program"])
def test_exit_codes_of_torchrun_are_those_of_torchrun_alone(
    run: RunDir, starter: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that does without it may end with the same ones."""
    monkeypatch.setattr(node_supervisor, "_CAUSE_WAIT_S", 0.1)
    log = run.logs / "node-000.log"
    log.touch()
    record_torchrun_failure(Supervisor(run), code, log, 0, starter)
    (failure,) = run.all_failures()
    is_of_program = failure.message == f"{starter} ended with exit code {code}"
    assert is_of_program == (starter != "torchrun")
    # Else a node that dies before the first checkpoint would end the run.
    assert failure.retry != is_of_program


@pytest.mark.parametrize("stopping", [False, True])
def test_host_is_not_to_blame_for_a_kill_after_the_stop(
    run: RunDir, stopping: bool
) -> None:
    """Slurm's SIGKILL to what does not end in time; of torchrun first, and then of its task."""
    log = run.logs / "node-001.log"
    log.touch()
    supervisor = Supervisor(run)
    supervisor.peers.tell(FAILED)
    supervisor.stop_signal = signal.SIGTERM if stopping else 0
    record_torchrun_failure(supervisor, -signal.SIGKILL, log, 0)
    (failure,) = run.all_failures()
    assert failure.message == "torchrun was killed by SIGKILL"
    assert (failure.secondary, bool(failure.bad_host)) == (stopping, not stopping)
