"""Node lists, ports, and reaching the head."""

from __future__ import annotations

import socket
import threading

import pytest

from slurmft.core.config import JobConfig
from slurmft.core.run_files import ATTEMPT
from slurmft.node import rendezvous
from slurmft.node.rendezvous import Rendezvous, RendezvousError
from tests.support import PATIENCE_S


def test_ports_are_outside_the_ephemeral_range_and_differ_between_jobs() -> None:
    low, high = rendezvous.ephemeral_ports()
    ports = [rendezvous.candidate_ports(str(job))[0] for job in range(1000, 1100)]
    assert len(set(ports)) == len(ports)
    for job in ("7", "123456", "99_3"):
        assert all(
            not low <= p <= high and 1024 < p < 65536
            for p in rendezvous.candidate_ports(job)
        )


def test_port_taken_by_a_stale_process_is_passed_over() -> None:
    first = rendezvous.free_ports("4711")[0]
    with socket.create_server(("", first)):
        assert first not in rendezvous.free_ports("4711")
        assert set(rendezvous.free_ports("4711")) < set(
            rendezvous.candidate_ports("4711")
        )


def test_all_ports_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_can_bind", lambda port: False)
    with pytest.raises(RendezvousError, match="are taken"):
        rendezvous.free_ports("1")


def test_of_node() -> None:
    joined = Rendezvous.of_node(
        JobConfig(nodes=3, host_suffix="-ib0"),
        {
            rendezvous.HOSTS: "n1,n2,n3",
            "SLURM_JOB_ID": "12",
            "SLURM_NODEID": "1",
            "SLURM_RESTART_COUNT": "2",
            rendezvous.PORT_VARIABLE: "12345,12346",
        },
    )
    assert joined.hosts == ("n1-ib0", "n2-ib0", "n3-ib0")
    assert (joined.head, joined.host, joined.is_head) == ("n1-ib0", "n2-ib0", False)
    assert (joined.port, joined.check_port, joined.id) == (12345, 12346, "12.2")


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
        },
    )
    assert (joined.head, joined.host, joined.interface) == (
        "127.0.0.1",
        "127.0.0.2",
        "lo",
    )
    assert (joined.port, joined.id) == (12345, "local-12345.3")


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
        },
        {
            "SLURM_JOB_ID": "1",
            rendezvous.HOSTS: "n1,n2",
            rendezvous.PORT_VARIABLE: "12345,12346",
        },
    ],
)
def test_of_node_never_guesses(variables: dict[str, str]) -> None:
    with pytest.raises(RendezvousError):
        Rendezvous.of_node(JobConfig(nodes=1), variables)


def unreachable(head: str, port: int) -> str:
    """What a node is told that cannot reach the head."""
    with pytest.raises(RendezvousError) as error:
        rendezvous.check_reachable("n3", head, port, "12.0", timeout_s=1.0)
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
    rendezvous.answer_checks(port, "11.0")
    assert "it answers '11.0', not '12.0'" in unreachable("127.0.0.1", port)


def test_head_that_starts_later() -> None:
    port = closed_port()
    late = threading.Timer(0.5, rendezvous.answer_checks, [port, "12.0"])
    late.start()
    rendezvous.check_reachable("n3", "127.0.0.1", port, "12.0", timeout_s=PATIENCE_S)
    rendezvous.check_reachable("n4", "127.0.0.1", port, "12.0", timeout_s=PATIENCE_S)


def test_interfaces() -> None:
    assert rendezvous.interface_of("127.0.0.1") == "lo"
    assert rendezvous.check_interface("lo", "n1") == "lo"
    with pytest.raises(RendezvousError) as error:
        rendezvous.check_interface("ib9", "n1")
    assert "node n1 has no network interface 'ib9'" in error.value.message
    assert "lo" in (error.value.hint or "")
