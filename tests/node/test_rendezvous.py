"""Node lists, ports, and reaching the head."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmft.cluster.ports import ports_of_attempt
from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit
from slurmft.core.run_files import ATTEMPT
from slurmft.node import rendezvous, sealed
from slurmft.node.rendezvous import Rendezvous, RendezvousError, TakenPortError
from tests.conftest import Done, slurmft
from tests.support import PATIENCE_S
from tests.support.made_runs import write_run


def test_ports_are_outside_the_ephemeral_range_and_nobody_can_guess_them() -> None:
    low, high = rendezvous.ephemeral_ports()
    choices = [rendezvous.candidate_ports() for _ in range(100)]
    # Of 20 out of more than 20,000, hardly ever one is that of another job.
    assert len({port for ports in choices for port in ports}) > 1800
    for ports in choices:
        assert len(set(ports)) == len(ports) == 20
        assert all(not low <= p <= high and 1024 < p < 65536 for p in ports)


def test_port_taken_by_a_stale_process_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = rendezvous.free_ports(3)
    monkeypatch.setattr(rendezvous, "candidate_ports", lambda: ports)
    with socket.create_server(("", ports[0])):
        assert rendezvous.free_ports(2) == ports[1:]


def test_all_ports_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """For good: it says whose processes have them."""
    monkeypatch.setattr(rendezvous, "_FREE_PORTS_S", 0.1)
    monkeypatch.setattr(rendezvous, "_FREE_PORTS_POLL_S", 0.05)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(rendezvous, "candidate_ports", lambda: [port])
        with pytest.raises(RendezvousError, match=f"are taken .*{port}") as error:
            rendezvous.free_ports()
    assert f"(uid {os.getuid()})" in str(error.value.hint)


def test_a_run_without_ports_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", state="submitted")

    def fail() -> list[int]:
        raise RendezvousError("these ports are taken", "taken by ann")

    monkeypatch.setattr(rendezvous, "free_ports", fail)
    with pytest.raises(RendezvousError):
        ports_of_attempt(run)
    state = run.get_state()
    assert state.state == "failed"
    assert state.reason == "these ports are taken (taken by ann)"


def test_all_ports_taken_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are tried until some are free."""
    monkeypatch.setattr(rendezvous, "_FREE_PORTS_POLL_S", 0)
    answers = iter([False] * 50)
    monkeypatch.setattr(rendezvous, "_can_bind", lambda port: next(answers, True))
    assert len(rendezvous.free_ports()) == 2


def test_of_node() -> None:
    joined = Rendezvous.of_node(
        JobConfig(nodes=3, host_suffix="-ib0"),
        {
            rendezvous.HOSTS: "n1,n2,n3",
            "SLURM_JOB_ID": "12",
            "SLURM_NODEID": "1",
            ATTEMPT: "2",
            rendezvous.PORT_VARIABLE: "12345,12346",
            sealed.SECRET: "s",
        },
    )
    assert joined.hosts == ("n1-ib0", "n2-ib0", "n3-ib0")
    assert (joined.head, joined.host, joined.is_head) == ("n1-ib0", "n2-ib0", False)
    assert (joined.port, joined.check_port) == (12345, 12346)
    assert joined.id == f"12.2.{sealed.tag('s')}"
    assert sealed.tag("s") != sealed.tag("t")


def test_of_simulated_node() -> None:
    """In a job of Slurm's, too."""
    joined = Rendezvous.of_node(
        JobConfig(nodes=2, host_suffix="-ib0"),
        {
            rendezvous.HOSTS: "127.0.0.1,127.0.0.2",
            rendezvous.LOCAL_NODE: "1",
            "SLURM_JOB_ID": "12",
            "SLURM_NODEID": "0",
            ATTEMPT: "3",
            rendezvous.PORT_VARIABLE: "12345,12346",
            sealed.SECRET: "s",
        },
    )
    assert (joined.head, joined.host, joined.interface) == (
        "127.0.0.1",
        "127.0.0.2",
        "lo",
    )
    assert (joined.port, joined.id) == (12345, f"local-12345.3.{sealed.tag('s')}")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", rendezvous.HOSTS: "n1", "SLURM_NODEID": "1"},
        {"SLURM_JOB_ID": "1", rendezvous.HOSTS: "n1"},  # no ports
        {
            "SLURM_JOB_ID": "1",
            rendezvous.HOSTS: "n1",
            rendezvous.PORT_VARIABLE: "12345",
            sealed.SECRET: "s",
        },
        {
            "SLURM_JOB_ID": "1",
            rendezvous.HOSTS: "n1,n2",
            rendezvous.PORT_VARIABLE: "12345,12346",
            sealed.SECRET: "s",
        },
        {
            "SLURM_JOB_ID": "1",
            rendezvous.HOSTS: "n1",
            rendezvous.PORT_VARIABLE: "12345,12346",
        },  # no secret
    ],
)
def test_of_node_never_guesses(variables: dict[str, str]) -> None:
    with pytest.raises(RendezvousError):
        Rendezvous.of_node(JobConfig(nodes=1), variables)


def unreachable(head: str, port: int) -> str:
    """What a node is told that cannot reach the head, after a try that may take its time."""
    now_s = [0.0]

    def sleep(_: float) -> None:
        now_s[0] += PATIENCE_S

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "time", clock)
        with pytest.raises(RendezvousError) as error:
            rendezvous.check_reachable(
                "n3", head, port, "12.0", "s", timeout_s=PATIENCE_S
            )
    assert (
        f"node n3 cannot reach the head node {head}, port {port}" in error.value.message
    )
    return error.value.message


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_head_that_does_not_resolve() -> None:
    assert "does not resolve" in unreachable("no-such-host.invalid", 29500)


def test_head_that_refuses() -> None:
    assert "refused" in unreachable("127.0.0.1", closed_port())


def test_head_of_another_job() -> None:
    port = closed_port()
    rendezvous.answer_checks(port, "12.0", "another secret")
    message = unreachable("127.0.0.1", port)
    assert "it does not have the secret of this job: is it another host?" in message


def test_head_that_is_no_job() -> None:
    """As sshd, which speaks first."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                server.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        message = unreachable("127.0.0.1", int(server.getsockname()[1]))
        assert "it answers 'SSH-2.0-OpenSSH', as no job does" in message


def test_head_that_starts_later() -> None:
    port = closed_port()
    late = threading.Timer(0.5, rendezvous.answer_checks, [port, "12.0", "s"])
    late.start()
    for node in ("n3", "n4"):
        rendezvous.check_reachable(
            node, "127.0.0.1", port, "12.0", "s", timeout_s=PATIENCE_S
        )


def test_interfaces() -> None:
    assert rendezvous.interface_of("127.0.0.1") == "lo"
    assert rendezvous.check_interface("lo", "n1") == "lo"
    with pytest.raises(RendezvousError) as error:
        rendezvous.check_interface("ib9", "n1")
    assert "node n1 has no network interface 'ib9'" in error.value.message
    assert "lo" in (error.value.hint or "")


# --- ports that another process takes in between --------------------------------------------------

OCCUPIES = """
import os, socket, sys
attempt = int(os.environ.get("SLURMFT_ATTEMPT", "0"))
is_head = os.environ.get("SLURMFT_LOCAL_NODE") == "0"
if is_head and attempt <= {attempts} and "slurmft.node.task" in sys.orig_argv:
    ports = os.environ["SLURMFT_RENDEZVOUS_PORTS"].split(",")
    taken = socket.create_server(("127.0.0.1", int(ports[(attempt - 1) % 2])))
"""


def run_beside_occupant(folder: Path, attempts: int, *flags: str) -> Done:
    """A job whose head finds one of its two ports taken at so many starts: first torchrun's."""
    folder.joinpath("occupies").mkdir()
    site = folder / "occupies" / "sitecustomize.py"
    site.write_text(OCCUPIES.format(attempts=attempts))
    env = {"PYTHONPATH": os.pathsep.join([str(site.parent), *sys.path])}
    flags = ("--batch-size", "8", "--max-steps", "1", *flags)
    job = ("--cluster", "local", "--runs-dir", str(folder))
    return slurmft("submit", "--follow", *job, *flags, env=env)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("attempts", "nodes"),
    [("1", "1"), pytest.param("2", "2", marks=pytest.mark.extra("mpi"))],
)
def test_another_start_takes_other_ports(
    attempts: str, nodes: str, tmp_path: Path
) -> None:
    """On two nodes the port of the reachability check, too."""
    done = run_beside_occupant(tmp_path, int(attempts), "--nodes", nodes)
    assert done.code == 0, done.err
    reasons = [each.reason for each in done.run.history() if each.state == "requeued"]
    assert len(reasons) == int(attempts)
    for reason in reasons:
        assert "cannot listen on " in reason


@pytest.mark.processes
def test_port_that_stays_taken(tmp_path: Path) -> None:
    done = run_beside_occupant(tmp_path, 1, "--max-requeues", "0")
    assert done.code == Exit.RENDEZVOUS
    message, hint = done.err.splitlines()[-2:]
    assert re.search(
        r"cannot listen on port \d+ of 127\.0\.0\.1: Address already", message
    )
    assert f"(uid {os.getuid()}); a new start takes other ports" in hint
    for log in done.run.logs.glob("*.log"):
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("listens_on", "address"),
    [(None, "127.0.0.1"), ("n1=127.0.0.1", "127.0.0.1"), ("", "::")],
)
def test_port_is_reserved_until_it_is_used(
    listens_on: str | None, address: str
) -> None:
    (port,) = rendezvous.free_ports(1)
    head = Rendezvous(hosts=("n1",), node_rank=0, port=port, check_port=1, id="1.0")
    variables = {}
    if listens_on is not None:
        variables[rendezvous.LISTEN] = listens_on
    reserved = head.reserve_port(variables)
    (descriptor,) = rendezvous.reserved_descriptors(reserved)
    try:
        assert rendezvous.reserved(reserved, port) == descriptor
        assert rendezvous.reserved(reserved, port + 1) is None
        with socket.socket(fileno=os.dup(descriptor)) as server:
            assert server.getsockname()[0] == address
        with pytest.raises(
            TakenPortError, match=f"cannot listen on port {port}"
        ) as error:
            head.reserve_port(variables)
        assert error.value.retry
    finally:
        os.close(descriptor)
    assert rendezvous.reserved_descriptors({}) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("address", ["", "127.0.0.1"])
@pytest.mark.parametrize("name", ["SO_REUSEADDR", "SO_REUSEPORT"])
def test_nobody_else_listens_on_a_port_that_is_held(address: str, name: str) -> None:
    with rendezvous.hold_anywhere(address) as held:
        port = held.getsockname()[1]
        os.seteuid(54321)
        try:
            another = socket.socket()
        finally:
            os.seteuid(0)
        with another:
            another.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
            with pytest.raises(OSError, match="in use"):
                another.bind(("127.0.0.1", port))
        os.close(rendezvous.listen(address, port, is_held=True))
