"""The preflight: what a node finds, whom the head blames, and what becomes of the job."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.decode import decode
from slurmft.core.errors import UsageError
from slurmft.core.program import Program
from slurmft.node import sealed
from slurmft.node.peers import Peers
from slurmft.node.rendezvous import (
    LOCAL_NODE,
    Rendezvous,
    answer_checks,
    check_reachable,
    greet,
)
from slurmft.plugins.examine import gpu_errors, hooks, inspection, verdict
from slurmft.plugins.examine.matmul import best_tflop_s
from slurmft.plugins.examine.preflight import Preflight, ring_ports
from slurmft.plugins.examine.report import LinkReport, NodeReport
from tests.conftest import Done, records, slurmft
from tests.plugins.examine.nodes import node
from tests.support import PATIENCE_S

NAMES = [f"n{number}" for number in range(1, 6)]


def run(folder: Path, *flags: str) -> Done:
    """A program of the user's on simulated nodes, with a preflight."""
    (folder / "hello.py").write_text("print('hello')\n")
    more = (
        "--cluster",
        "local",
        "--runs-dir",
        str(folder),
        "--follow",
        "--preflight",
        "on",
    )
    return slurmft(
        "run", *more, *flags, "--per", "node", "--", str(folder / "hello.py")
    )


def bad(*reports: NodeReport, without: str | None = None) -> dict[str, str]:
    """The hosts to exclude where these reports replace those of good nodes, each of which came a
    moment after it was sent."""
    nodes = {name: node(name) for name in NAMES if name != without}
    nodes |= {report.host: report for report in reports}
    arrived = [(1000.1, report) for report in nodes.values()]
    return verdict.failures_by_host(verdict.judge(arrived, NAMES))


def test_good_nodes_pass() -> None:
    assert bad() == {}
    doubtful = (
        node("n2", tflop_s=1.1),
        node("n3", time_s=975.0),
        node("n4", tflop_s=None),
    )
    assert bad(*doubtful) == {}


def test_what_a_node_says_of_itself_counts() -> None:
    assert bad(node("n4", gpu_errors=("this", "that"))) == {"n4": "this; that"}
    few = node("n4", gpus_granted=4, gpus_visible=3)
    assert bad(few) == {"n4": "3 of the 4 GPUs that Slurm has granted are there"}


def test_a_slow_node() -> None:
    assert bad(node("n3", tflop_s=0.8)) == {
        "n3": "slow in matrix products: 0.8 TFLOP/s, 40% of the median"
    }


@pytest.mark.parametrize("rank", [0, 3])
def test_a_clock_that_is_off(rank: int) -> None:
    """The head's own, too, by which the others' are read."""
    if rank == 0:
        arrived = [(1900.1, node(name)) for name in NAMES[1:]]
        arrived.append((1900.1, node(NAMES[0], time_s=1900.0)))
        failures = verdict.failures_by_host(verdict.judge(arrived, NAMES))
    else:
        failures = bad(node(NAMES[rank], time_s=1900.0))
    text = "its clock is 900.0 s ahead of the others (give or take 1.000 s)"
    assert failures == {NAMES[rank]: text}


def link(reason: str | None) -> LinkReport:
    return LinkReport(ports={"rendezvous": reason})


def test_a_node_that_does_not_report() -> None:
    links = {"n1": link(None), "n4": link("timed out")}
    assert bad(node("n3", links=links), without="n4") == {
        "n4": "it has not reported in time; n3 cannot reach it on a rendezvous port: timed out"
    }


@pytest.mark.parametrize(
    ("broken", "to_blame"), [([1], 2), ([1, 2], 2), ([0, 1], 1), ([2, 3], 3)]
)
def test_the_host_that_broken_links_have_in_common(
    broken: list[int], to_blame: int
) -> None:
    """Every node has tried the next one of the ring; all have reached the head."""
    reports = []
    for rank, name in enumerate(NAMES):
        links = {} if rank == 0 else {NAMES[0]: link(None)}
        if rank + 1 < len(NAMES):
            links[NAMES[rank + 1]] = link("no route" if rank in broken else None)
        reports.append(node(name, links=links))
    assert list(bad(*reports)) == [NAMES[to_blame]]


def test_reports_survive_the_journey() -> None:
    report = node("n2", links={"n3": link("no route")}, gpu_errors=("a",))
    assert decode(json.loads(json.dumps(asdict(report))), NodeReport) == report


def test_ecc_errors() -> None:
    printed = "0, 0, No, No\n1, 3, No, No\n2, [N/A], [N/A], [N/A]\n3, 0, Yes, No\n4, 0, No, Yes\n"
    assert gpu_errors.parse_ecc(printed) == [
        "GPU 1 has 3 uncorrected ECC error(s) since it was reset",
        "GPU 3 needs a reset: rows are to be remapped",
        "GPU 4: its memory cannot be remapped any more",
    ]
    assert gpu_errors.parse_ecc("Warning: infoROM is corrupted\n0, 0, No, No\n") == []


def test_xids_of_a_day_that_no_program_makes() -> None:
    log = """\
[    3.141592] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.
[200000.100000] NVRM: Xid (PCI:0000:65:00): 13, pid=4242, Graphics Exception
[200001.100000] NVRM: Xid (PCI:0000:65:00): 48, pid=4242, An uncorrectable double bit error
[200001.200000] NVRM: Xid (PCI:0000:65:00): 48, pid=4242, An uncorrectable double bit error
"""
    assert gpu_errors.parse_xids(log, now_s=200_100) == [
        "GPU at 0000:65:00: Xid 48, double-bit ECC error"
    ]


@pytest.mark.processes
def test_fewer_gpus_than_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    report = inspection.inspect({})
    assert (report.gpus_visible, report.gpus_granted) == (3, 4)
    assert report.system is None
    assert report.folders["tmp"].room is not None


def test_speed_is_that_of_the_fastest_product() -> None:
    now, products_s = 0.0, iter([5.0, 0.03, 0.15, 0.02, *[0.1] * 9])

    def multiply() -> None:
        nonlocal now
        now += next(products_s)

    speed = best_tflop_s(multiply, width=1000, seconds=0.3, clock=lambda: now)
    assert speed == pytest.approx(2e9 / 0.02 / 1e12)


@pytest.mark.parametrize(
    ("asked", "nodes", "simulated", "due"),
    [
        ("auto", 7, False, False),
        ("auto", 8, False, True),
        ("auto", 64, True, False),
        ("on", 2, True, True),
        ("off", 64, False, False),
    ],
)
def test_when_it_is_due(asked: str, nodes: int, simulated: bool, due: bool) -> None:
    program = Program(kind="test", name="test", module="tests.none")
    config = RunConfig(
        program=program, job=JobConfig(nodes=nodes, plugins={"preflight": asked})
    )
    environment = {LOCAL_NODE: "0"} if simulated else {}
    assert hooks.is_due(config, environment) is due


@pytest.mark.parametrize(("asked", "cluster"), [("on", "local"), ("auto", "mpirun")])
def test_launchers_that_can_have_one(asked: str, cluster: str) -> None:
    hooks.Examine().check(JobConfig(plugins={"preflight": asked}), cluster)


def test_launchers_that_start_all_ranks_at_once_have_none() -> None:
    with pytest.raises(
        UsageError, match="--preflight on cannot be used with --cluster mpirun"
    ):
        hooks.Examine().check(JobConfig(plugins={"preflight": "on"}), "mpirun")


def test_reports_of_64_tasks_reach_the_head() -> None:
    """Whole, in pieces, and beside what strangers send."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    head = answer_checks(port, "7.0", "s", ["127.0.0.1"])
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"report {broken\nreport " + b"x" * 100_000)
    pieces = socket.create_connection(("127.0.0.1", port))
    channel, _ = greet(pieces, "s", PATIENCE_S)
    line = channel.seal('report ["preflight", {"rank": 64}]')
    for part in (line[:3], line[3:80], line[80:] + channel.seal("fail")[:-1]):
        pieces.sendall(part)
        time.sleep(0.05)

    def tell(rank: int) -> None:
        peers[rank].report("preflight", {"rank": rank, "text": "x" * 3000})

    peers: list[Peers] = [
        check_reachable("n2", "127.0.0.1", port, "7.0", "s", PATIENCE_S)[1]
        for _ in range(64)
    ]
    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    reports = head.reports("preflight", 65, PATIENCE_S)
    assert sorted(facts["rank"] for _, facts in reports) == list(range(65))
    assert not head.heard("fail")
    stranger.close()


def test_ports_that_somebody_takes_first_blame_no_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of the head's port shows in the connections of all nodes."""
    monkeypatch.setenv(sealed.SECRET, "s")
    hosts = ("127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        check_port = stranger.getsockname()[1]

        def links(rank: int) -> dict[str, LinkReport]:
            preflight = Preflight.__new__(Preflight)
            preflight._names = list(hosts)
            preflight._rendezvous = Rendezvous(
                hosts=hosts, node_rank=rank, port=0, check_port=check_port, id="7.0"
            )
            return preflight._links(wait_s=5)

        with socket.socket() as other, ThreadPoolExecutor() as pool:
            # Bound alone: whoever connects is refused at once.
            other.bind(("127.0.0.2", ring_ports("s", 1)[0]))
            reports = list(pool.map(links, (0, 1)))
    good = LinkReport(ports={"rendezvous": None})
    assert reports == [{"127.0.0.2": good}, {"127.0.0.1": good}]


@pytest.mark.processes
def test_simulated_nodes_pass(tmp_path: Path) -> None:
    done = run(tmp_path, "--nodes", "3")
    assert done.code == 0, done.err
    assert "preflight: 3 node(s) in " in done.out
    assert done.run.get_state().state == "finished"


@pytest.mark.processes
def test_bad_nodes_are_named_and_tried_twice_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated nodes have no others."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path, "--nodes", "2")
    assert done.code == 1
    assert "preflight: 0 of the 2 GPUs that Slurm has granted are there" in done.err
    state = done.run.get_state()
    assert state.state == "failed"
    assert state.reason.endswith("; 3 starts had bad nodes")
    assert done.run.bad_hosts() == ["127.0.0.1", "127.0.0.2"]
    texts = [each["text"] for each in records(done.run, "preflight")]
    assert len(texts) == 3
    assert all(text.endswith("; bad: 127.0.0.1, 127.0.0.2") for text in texts)
