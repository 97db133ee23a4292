"""Jobs of 64 nodes, and the doctor among them, on the test cluster. With --lab; as root."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.config import JobConfig
from slurmft.plugins.examine import examination
from slurmft.plugins.examine.checks import Level
from slurmft.plugins.examine.examination import examine_cluster
from tests.lab.nodes import await_end, start, times
from tests.lab.roll_call import LATE_S
from tests.support.cluster import Cluster, network

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NODES = 64


@pytest.fixture(scope="module")
def many() -> Iterator[Cluster]:
    with Cluster(nodes=NODES, cpus_per_node=1) as made:
        yield made


@pytest.fixture
def idle(many: Cluster) -> Cluster:
    many.run(["scancel", "--user=root"])
    many.wait_idle(200)
    return many


def test_every_node_meets(idle: Cluster, tmp_path: Path) -> None:
    run = start(idle, NODES, tmp_path)
    assert await_end(run) == "finished", run.get_state()
    found = times(run)
    print(found.row())
    assert len(found.connected_s) == len(found.met_s) == NODES
    assert not run.all_failures()


def test_one_fails(idle: Cluster, tmp_path: Path) -> None:
    """It is named, once; all nodes end."""
    run = start(idle, NODES, tmp_path, fails=16, stays_s=300)
    assert await_end(run) == "failed"
    assert run.get_state().reason == "rank 16 on n17: this rank fails"
    roots = [f.where for f in run.all_failures() if not f.secondary]
    assert roots == ["rank 16 on n17"]
    assert not run.bad_hosts()


def test_one_is_slow(idle: Cluster, tmp_path: Path) -> None:
    """The others wait for it."""
    run = start(idle, NODES, tmp_path, late=22)
    assert await_end(run) == "finished", run.get_state()
    assert min(times(run).met_s) > LATE_S


def test_doctor_names_a_bad_node_a_bad_link_and_a_slow_node(
    idle: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n5 may not use the range of the rendezvous, n7 has no route to n8, n20 is slow."""
    for limit in ("_START_S", "_ANSWER_S", "_REACH_S"):  # one machine for 64 nodes
        monkeypatch.setattr(examination, limit, 60.0)
    monkeypatch.setenv("SLURM_CONF", idle.env["SLURM_CONF"])
    inside = ["nsenter", f"--net={network.namespace('n7')}"]
    route = [*inside, "ip", "rule", "add", "to", network.address("n8"), "unreachable"]
    subprocess.run(route, check=True)
    try:
        with idle.closed_ports("n5"), idle.slow("n20", "5mbit"):
            found = wrong(tmp_path)
    finally:
        subprocess.run(
            [*inside, "ip", "rule", "del", "to", network.address("n8")], check=True
        )
    print("\n".join(found))
    assert any(x.startswith("n5: cannot reach") for x in found)
    assert any(
        "n8: n7 cannot reach it" in x and "both reach other nodes" in x for x in found
    )
    assert any(x.startswith("n20: all its links are slow") for x in found)


def wrong(runs_dir: Path) -> list[str]:
    """What the doctor finds among all nodes, but for this host."""
    job: Any = JobConfig(
        nodes=NODES, cpus_per_task=1, runs_dir=str(runs_dir), time="10"
    )
    began = time.monotonic()
    report = examine_cluster(
        job, with_nodes=True, limit_s=400, wait_s=60, quick=True, say=lambda text: None
    )
    print(f"{NODES} nodes examined in {time.monotonic() - began:.0f} s")
    checks = [
        c for c in report.checks if c.about in ("ports", "names", "links", "nodes")
    ]
    return [c.line for c in checks if c.level != Level.OK]
