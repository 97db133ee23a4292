"""The preflight: what a node finds, whom the head blames, and what becomes of the job."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.program import Program
from slurmft.node.peers import Peers
from slurmft.node.rendezvous import LOCAL_NODE, answer_checks, check_reachable
from slurmft.plugins.examine import preflight
from slurmft.plugins.examine.matmul import best_tflop_s
from tests.conftest import Done, records, slurmft
from tests.support import PATIENCE_S

NAMES = [f"n{number}" for number in range(1, 6)]


def run(folder: Path, *flags: str) -> Done:
    """A program of the user's on simulated nodes, with a preflight."""
    (folder / "hello.py").write_text("print('hello')\n")
    more = ("--cluster", "local", "--runs-dir", str(folder), "--follow", "--preflight", "on")
    return slurmft("run", *more, *flags, "--per", "node", "--", str(folder / "hello.py"))


def report(rank: int, **more: Any) -> tuple[float, dict[str, Any]]:
    """Of a good node, which came a moment after it was sent."""
    good = {"rank": rank, "host": NAMES[rank], "time": 1000.0, "problems": [], "tflop_s": 2.0}
    return 1000.1, good | {"cannot_reach": None} | more


def bad(*changed: tuple[float, dict[str, Any]], without: int | None = None) -> dict[str, str]:
    """What is found where these reports replace the good ones."""
    reports = {rank: report(rank) for rank in range(5) if rank != without}
    reports |= {each["rank"]: (when, each) for when, each in changed}
    return preflight.bad_nodes(list(reports.values()), NAMES)


def test_good_nodes_pass() -> None:
    assert bad() == {}
    assert bad(report(1, tflop_s=1.1), report(2, time=975.0), report(3, tflop_s=None)) == {}


def test_what_a_node_says_of_itself_counts() -> None:
    assert bad(report(3, problems=["this", "that"])) == {"n4": "this; that"}


def test_a_slow_node() -> None:
    assert bad(report(2, tflop_s=0.8)) == {
        "n3": "it multiplies matrices at 40% of the others' pace"
    }


@pytest.mark.parametrize("rank", [0, 3])
def test_a_clock_that_is_off(rank: int) -> None:
    """The head's own, too, by which the others' are read."""
    if rank == 0:
        others = [(1900.1, r) for _, r in (report(other) for other in range(1, 5))]
        found = bad((1900.1, report(0, time=1900.1)[1]), *others)
    else:
        found = bad(report(rank, time=1900.0))
    assert found == {NAMES[rank]: "its clock is 900 s off"}


def test_a_node_that_does_not_report() -> None:
    found = bad(report(2, cannot_reach="node n3 cannot reach n4"), without=3)
    assert found == {"n4": "it has not reported in time; node n3 cannot reach n4"}


@pytest.mark.parametrize(
    ("broken", "to_blame"),
    [([1], 2), ([1, 2], 2), ([4], 0), ([0, 1], 1), ([2, 3], 3)],
)
def test_whom_broken_links_have_in_common(broken: list[int], to_blame: int) -> None:
    found = bad(*(report(rank, cannot_reach="no route") for rank in broken))
    assert found == {NAMES[to_blame]: "no route"}


def test_ecc_errors() -> None:
    said = "0, 0, No, No\n1, 3, No, No\n2, [N/A], [N/A], [N/A]\n3, 0, Yes, No\n4, 0, No, Yes\n"
    assert preflight.ecc_problems(said) == [
        "GPU 1 has 3 uncorrected ECC error(s) since it was reset",
        "GPU 3 needs a reset: rows are to be remapped",
        "GPU 4: its memory cannot be remapped any more",
    ]


def test_xids_of_a_day_that_no_program_makes() -> None:
    log = """\
[    3.141592] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.
[200000.100000] NVRM: Xid (PCI:0000:65:00): 13, pid=4242, Graphics Exception
[200001.100000] NVRM: Xid (PCI:0000:65:00): 48, pid=4242, An uncorrectable double bit error
[200001.200000] NVRM: Xid (PCI:0000:65:00): 48, pid=4242, An uncorrectable double bit error
"""
    assert preflight.xid_problems(log, now_s=200_100) == [
        "GPU at 0000:65:00: Xid 48, double-bit ECC error"
    ]


def test_fewer_gpus_than_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert preflight._too_few_gpus() == ["3 of the 4 GPUs that Slurm has granted are there"]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "3")
    assert preflight._too_few_gpus() == []


def test_speed_is_that_of_the_fastest_product() -> None:
    now, products_s = 0.0, iter([5.0, 0.03, 0.15, 0.02, *[0.1] * 9])

    def multiply() -> None:
        nonlocal now
        now += next(products_s)

    found = best_tflop_s(multiply, width=1000, seconds=0.3, clock=lambda: now)
    assert found == pytest.approx(2e9 / 0.02 / 1e12)


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
    config = RunConfig(program=program, job=JobConfig(nodes=nodes, preflight=asked))
    environment = {LOCAL_NODE: "0"} if simulated else {}
    assert preflight.is_due(config, environment) is due


def test_reports_of_64_tasks_reach_the_head() -> None:
    """Whole, in pieces, and beside what strangers send."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    head = answer_checks(port, "7.0", ["127.0.0.1"])
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"report {broken\nreport " + b"x" * 100_000)
    pieces = socket.create_connection(("127.0.0.1", port))
    for part in (b"rep", b'ort {"rank"', b": 64}\nfai", b"l"):
        pieces.sendall(part)
        time.sleep(0.05)

    def tell(rank: int) -> None:
        peers[rank].report({"rank": rank, "text": "x" * 3000})

    peers: list[Peers] = [
        check_reachable("n2", "127.0.0.1", port, "7.0", PATIENCE_S)[1] for _ in range(64)
    ]
    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    found = head.reports(65, PATIENCE_S)
    assert sorted(facts["rank"] for _, facts in found) == list(range(65))
    assert not head.heard("fail")
    stranger.close()


def test_simulated_nodes_pass(tmp_path: Path) -> None:
    done = run(tmp_path, "--nodes", "3")
    assert done.code == 0, done.err
    assert "preflight: 3 node(s) in " in done.out
    assert done.run.get_state().state == "finished"


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
