"""Ranks of programs form one process group on CPUs; where they do not, it is reported."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from slurmft.core.config import JobConfig
from slurmft.node import connections, signals
from slurmft.programs import process_group
from slurmft.programs.description import OwnProgram
from slurmft.programs.process import OwnProcess
from slurmft.programs.process_group import GroupWatch
from slurmft.programs.start_point import StartPoint
from tests.conftest import records
from tests.programs.test_own_program import here, lines_of, run
from tests.support.made_runs import write_run
from tests.support.own_programs import write

__all__ = ["here"]  # a fixture: each test has a folder of its own, and is in it

LIBRARIES = """\
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import TrainingArguments
accelerator = Accelerator()
rows = [row for batch in accelerator.prepare(DataLoader(list(range(8)))) for row in batch.tolist()]
print("Accelerate", accelerator.num_processes, rows)
print("Trainer", TrainingArguments("out").world_size)
"""
"""Scripts of Accelerate and Trainer ask for no device and no process group."""

ALONE = "import time; time.sleep(12); print('trained')"

UNSEALED = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(10)
"""


@pytest.mark.processes
def test_libraries_train_one_model(here: Path) -> None:
    write(here, "train.py", LIBRARIES)
    done = run("--nodes", "2", "--", "train.py")
    assert done.code == 0, done.err
    assert not records(done.run, "warning")
    for rank, rows in enumerate(([0, 2, 4, 6], [1, 3, 5, 7])):
        output = lines_of(done.run, rank)
        assert f"Accelerate 2 {rows}" in output
        assert "Trainer 2" in output


@pytest.mark.processes
def test_strict_ends_copies_that_train_alone(here: Path) -> None:
    write(here, "train.py", ALONE)
    done = run("--nodes", "2", "--strict", "--", "train.py")
    assert done.code == 1
    assert "0 of 2 ranks have joined a process group" in done.err
    assert "--per process is for" in done.err
    assert done.run.get_state().state == "failed"


@pytest.mark.processes
@pytest.mark.extra("programs")
@pytest.mark.parametrize("flags", [(), ("--strict",)])
def test_a_store_without_seals_is_reported(here: Path, flags: tuple[str, ...]) -> None:
    """Once; --strict ends the program."""
    write(here, "joins.py", UNSEALED)
    write(
        here,
        "launch.py",
        "import os, sys; os.execv(sys.executable, [sys.executable, '-I', 'joins.py'])",
    )
    done = run("--nodes", "2", *flags, "--", "launch.py")
    assert done.code == int(bool(flags)), done.err
    if flags:
        assert "the store of the process group is not sealed" in done.err
        return
    [warning] = records(done.run, "warning")
    assert "the store of the process group is not sealed" in warning["text"]


@pytest.mark.processes
@pytest.mark.extra("programs")
def test_copies_that_train_alone_are_reported(here: Path) -> None:
    write(here, "train.py", ALONE)
    done = run("--nodes", "2", "--", "train.py")
    assert done.code == 0
    [warning] = records(done.run, "warning")
    assert "0 of 2 ranks have joined a process group" in warning["text"]
    assert not records(
        run("--nodes", "2", "--per", "process", "--", "train.py").run, "warning"
    )


def test_a_group_counts_when_all_ranks_are_in_its_store() -> None:
    """The store is torch's own."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    watch = GroupWatch(2, store.port)
    assert not watch.look()
    second = TCPStore("127.0.0.1", store.port, 2, wait_for_workers=False)
    assert watch.look()
    del second
    assert watch.look()  # it has been there
    assert watch.problem(at_end=True) is None


def test_others_on_the_port_are_no_ranks() -> None:
    """Of a port that listens, and of one that this host is connected to elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        watch = GroupWatch(1, port)
        assert not watch.look()
        with socket.create_connection(("127.0.0.1", port)) as client:
            own_port = client.getsockname()[1]
            connection, _ = server.accept()
            with connection:
                assert watch.look()
                # Each end is in the table, but only one of them is the server's.
                assert not GroupWatch(2, port).look()
                assert not GroupWatch(2, own_port).look()


STORE = "0100007F:2710"
ELSEWHERE = "0200A8C0:A000"


@pytest.mark.parametrize(
    ("server", "clients", "count"),
    [
        ("own", ["own", "own"], 2),
        ("own", ["own", "another"], 1),
        # Who has taken the port, and connects to himself.
        ("another", ["another", "another"], 0),
        ("another", ["own", "own"], 0),
        # Of another host: whose it is shows there alone.
        ("own", ["own", "elsewhere"], 2),
    ],
)
def test_connections_of_other_users_are_no_ranks(
    tmp_path: Path, server: str, clients: list[str], count: int
) -> None:
    uids = {"own": os.getuid(), "another": os.getuid() + 1}
    lines = ["sl local_address rem_address st tx_queue:rx_queue tr retrnsmt uid"]

    def add(local: str, remote: str, user: str) -> None:
        lines.append(f"0: {local} {remote} 01 0:0 0:0 0 {uids[user]} 0 0")

    for number, client in enumerate(clients):
        address = f"0100007F:A00{number}"
        if client == "elsewhere":
            address = ELSEWHERE
        # As an IPv6 socket that serves IPv4, too.
        add(
            f"0000000000000000FFFF0000{STORE}",
            f"0000000000000000FFFF0000{address}",
            server,
        )
        if client in uids:
            add(address, STORE, client)
    table = tmp_path / "tcp"
    table.write_text("\n".join(lines))
    assert connections.clients_of(10000, [table]) == count


@pytest.mark.parametrize(
    ("at_end", "seconds", "is_reported"),
    [(False, 170, False), (False, 190, True), (True, 5, False), (True, 20, True)],
)
def test_patience(
    monkeypatch: pytest.MonkeyPatch, at_end: bool, seconds: float, is_reported: bool
) -> None:
    watch = GroupWatch(4, 1)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
    problem = watch.problem(at_end)
    assert (problem is not None) == is_reported


@pytest.mark.processes
def test_patience_begins_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the ranks still choose the checkpoint that they start from."""
    monkeypatch.setattr(process_group, "_SHORTEST_S", 1)
    monkeypatch.setattr(signals, "listen", lambda on_signal: None)
    monkeypatch.setattr(StartPoint, "choose", lambda self: time.sleep(1.1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    job = write_run(tmp_path / "run")
    program = OwnProgram(
        argv=("true",), file="true", folder=str(tmp_path), per="torchrun"
    )
    assert OwnProcess(job, program, 0, JobConfig()).run() == 0
    assert not records(job, "warning")


@pytest.mark.parametrize(
    ("rank", "variables", "is_watched"),
    [
        (0, {"WORLD_SIZE": "2", "MASTER_PORT": "1234"}, True),
        (1, {"WORLD_SIZE": "2", "MASTER_PORT": "1234"}, False),
        (0, {"WORLD_SIZE": "1", "MASTER_PORT": "1234"}, False),
        (0, {}, False),
    ],
)
def test_watched_by_rank_0_alone(
    rank: int, variables: dict[str, str], is_watched: bool
) -> None:
    assert (GroupWatch.of_rank(rank, variables) is not None) == is_watched
