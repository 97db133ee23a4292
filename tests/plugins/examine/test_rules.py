"""The rules: from the nodes' reports to checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest

from slurmft.core.filesystem import Room
from slurmft.node.hardware import Network
from slurmft.plugins.examine import network_rules, node_rules, speed_rules
from slurmft.plugins.examine.checks import Check, Level, problems
from slurmft.plugins.examine.comparison import partners
from slurmft.plugins.examine.measurements import RankReport, SpeedReport
from slurmft.plugins.examine.report import FolderReport, LinkReport
from tests.plugins.examine.nodes import DISK, GIB, H100, node, system


def wrong(checks: Iterable[Check]) -> list[str]:
    """What is not ok, in words."""
    return [f"{check.level}: {check.line}" for check in problems(checks)]


# --- nodes ----------------------------------------------------------------------------------------


def test_cores_that_slurm_grants_but_does_not_give() -> None:
    assert not wrong(node_rules.cores({"n1": system(), "n2": system()}, 8))
    one_core = system(cpu_count=1, cores=1)
    lines = wrong(node_rules.cores({"n1": system(), "n2": one_core}, None))
    assert lines[0].startswith(
        "warning: n2: 1 core(s) to compute on; Slurm counts 8 CPU(s)"
    )
    assert lines[1] == "warning: not the same on all nodes: n1: 8; n2: 1"
    assert wrong(node_rules.cores({"n1": system()}, 16))
    assert wrong(node_rules.cores({"n1": system(quota_cpus=2.0)}, None))


def test_nodes_that_are_not_alike() -> None:
    two = {"n1": system(gpus=(H100, H100)), "n2": system(gpus=(H100,))}
    lines = wrong(node_rules.devices(two, 2))
    assert lines[0] == "failure: n2: fewer GPUs than the 2 requested"
    assert "n1: 2 x H100; n2: 1 x H100" in lines[1]
    small = {"n1": system(), "n2": system(memory_mib=500), "n3": system()}
    assert wrong(node_rules.memory(small)) == [
        "warning: n2: 500 MiB, 50% of the median"
    ]
    here = system().software
    assert not wrong(node_rules.versions({"n1": system(), "n2": system()}, here))
    other = system(software=here | {"torch": "2.8.0"})
    lines = wrong(node_rules.versions({"n1": system(), "n2": other}, here))
    assert lines == ["failure: torch differs: n1, this host: 2.13.0; n2: 2.8.0"]
    hub = node_rules.hub({"n1": system(), "n2": system(reaches_hub=False)})
    assert wrong([hub]) == ["warning: n2 do not reach it, others do"]


def test_gpus_that_fail_or_are_not_there() -> None:
    assert (
        node_rules.gpus({"n1": node(gpus_granted=4, gpus_visible=4), "n2": node()})
        == []
    )
    broken = node(
        gpus_granted=4, gpus_visible=3, gpu_errors=("GPU 1: Xid 48", "GPU 2: Xid 79")
    )
    same = node(gpu_errors=("GPU 2: Xid 79",))
    assert wrong(node_rules.gpus({"n1": broken, "n2": same})) == [
        "failure: n1: 3 of the 4 GPUs that Slurm has granted are there",
        "failure: n1: GPU 1: Xid 48",
        "failure: n1, n2: GPU 2: Xid 79",
    ]


def test_room() -> None:
    full = Room(free_bytes=50 * GIB, free_inodes=10**6, problem="Disk quota exceeded")
    check = node_rules.check_room("runs", "/x", full)
    assert (check.level, check.text) == (
        Level.FAILURE,
        "/x: cannot be written: Disk quota exceeded",
    )
    assert "--runs-dir" in str(check.hint)
    for little in (
        Room(free_bytes=GIB, free_inodes=None, problem=None),
        Room(free_bytes=50 * GIB, free_inodes=12, problem=None),
    ):
        assert node_rules.check_room("runs", "/x", little).level == Level.WARNING
    shm = Room(free_bytes=GIB, free_inodes=10**6, problem=None)
    assert node_rules.check_room("shm", "/dev/shm", shm).level == Level.OK


def test_folders_of_nodes() -> None:
    dead = FolderReport(path="/tmp", problem="no answer in 12 s")
    full = FolderReport(
        path="/tmp",
        file_system=DISK,
        room=Room(free_bytes=0, free_inodes=9, problem="No space left on device"),
    )
    nodes = {
        "n1": node(),
        "n2": node(folders={"tmp": dead}),
        "n3": node(folders={"tmp": full}),
    }
    assert wrong(node_rules.folders("tmp", nodes)) == [
        "failure: n2: /tmp: no answer: no answer in 12 s",
        "failure: n3: /tmp on ext4 at /: cannot be written: No space left on device",
    ]
    (good,) = node_rules.folders("tmp", {"n1": node(), "n2": node()})
    assert (good.about, good.text) == (
        "tmp on nodes",
        "/tmp: at least 50.0 GiB free on all nodes",
    )
    assert node_rules.folders("runs", nodes) == []


@pytest.mark.parametrize(
    ("rate", "level"),
    [(5.0, "ok"), (4.1, "ok"), (3.9, "warning"), (2.6, "warning"), (2.0, "failure")],
)
def test_a_slow_device(rate: float, level: str) -> None:
    rates = {"n1": [5.0], "n2": [rate], "n3": [4.9]}
    levels = [str(check.level) for check in node_rules.products(rates, "fp32")]
    assert levels == [level, "ok"] if level != "ok" else ["ok"]


def test_slow_devices_are_named() -> None:
    lines = wrong(node_rules.products({"n1": [5.0], "n2": [2.0], "n3": [4.9]}, "fp32"))
    assert lines == ["failure: n2: slow in fp32: 2 TFLOP/s, 41% of the median"]
    both = {"n1": [5.0, 5.0], "n2": [5.0, 1.0]}
    assert (
        "n2: process 1 is slow in fp32" in wrong(node_rules.products(both, "fp32"))[0]
    )
    assert node_rules.products({}, "fp32") == []


# --- the network ----------------------------------------------------------------------------------


def reached(
    names: list[str], broken: Callable[[str, str], bool]
) -> dict[str, dict[str, LinkReport]]:
    """The connections of nodes that try to reach their partners, where some pairs are broken."""

    def link(start: str, goal: str) -> LinkReport:
        return LinkReport(
            ports={"ephemeral": "timed out" if broken(start, goal) else None}
        )

    chosen = partners(names)
    return {
        start: {goal: link(start, goal) for goal in chosen[start]} for start in names
    }


@pytest.mark.parametrize("count", [8, 9, 64, 1000])
def test_bad_node_and_bad_link_are_told_apart(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    assert not wrong(network_rules.reach(reached(names, lambda a, b: False)))
    links = reached(names, lambda a, b: "n3" in (a, b))
    lines = wrong(network_rules.reach(links))
    assert len(lines) == 2
    assert all(line.startswith("failure: n3: ") for line in lines)
    assert "both reach" not in str(lines)
    assert network_rules.usable(names, links) == [
        name for name in names if name != "n3"
    ]
    lines = wrong(
        network_rules.reach(reached(names, lambda a, b: {a, b} == {"n3", "n7"}))
    )
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert "n3" in line
        assert "n7" in line
        assert line.endswith("on an ephemeral port: timed out; both reach other nodes")


def test_two_nodes_have_no_other_one() -> None:
    links = reached(["n1", "n2"], lambda a, b: a == "n1")
    (line,) = wrong(network_rules.reach(links))
    assert line == "failure: n2: n1 cannot reach it on an ephemeral port: timed out"


def test_all_pairs_are_broken() -> None:
    names = [f"n{i}" for i in range(1000)]
    (line,) = wrong(network_rules.reach(reached(names, lambda a, b: True)))
    assert (
        "n7 and 992 more cannot reach each other on an ephemeral port: timed out"
        in line
    )


def test_a_name_that_does_not_resolve() -> None:
    bad = LinkReport(problem="Name or service not known")
    good = LinkReport(ports={"rendezvous": None})
    links = {
        "n1": {"n2": bad, "n3": good},
        "n2": {"n1": good},
        "n3": {"n2": bad, "n1": good},
    }
    lines = wrong(network_rules.reach(links))
    assert lines == ["failure: n2: n1, n3 cannot resolve it: Name or service not known"]


def test_a_faster_fabric_that_would_not_be_taken() -> None:
    ethernet = Network(name="eth0", infiniband=False, speed_mbit_s=1000)
    infiniband = Network(name="ib0", infiniband=True, speed_mbit_s=100_000)
    networks = {"n1": [infiniband, ethernet], "n2": [ethernet]}
    check = network_rules.fabric(networks, {"n1": "eth0", "n2": "eth0"})[0]
    assert check.level == Level.WARNING
    assert "n1: ib0 (InfiniBand, 100 Gbit/s)" in check.text
    assert "--interface" in str(check.hint)
    assert not wrong(
        network_rules.fabric({"n1": [infiniband, ethernet]}, {"n1": "ib0"})
    )
    assert not wrong(network_rules.fabric({"n1": [ethernet]}, {"n1": "lo"}))
    assert not wrong(network_rules.fabric({"n1": []}, {"n1": None}))


def test_one_slow_node_or_link_is_named() -> None:
    rates = {
        ("n1", "n2"): 1e9,
        ("n2", "n3"): 1e8,
        ("n3", "n4"): 1.1e8,
        ("n4", "n1"): 1.2e9,
    }
    lines = wrong(network_rules.links(rates))
    assert lines == [
        "warning: n3: all its links are slow: 0.88 Gbit/s, 9% of the median"
    ]
    rates |= {("n2", "n3"): 1e9}
    end = "both are fast with other nodes"
    lines = wrong(network_rules.links(rates))
    assert lines == [f"warning: n3 to n4 is slow: 0.88 Gbit/s, 9% of the median; {end}"]


def test_clocks() -> None:
    def lines_of(*ahead_s: float, trip_s: float = 0.002) -> list[str]:
        """What is wrong with the clocks of n1, n2, ..."""
        nodes = {f"n{i}": s for i, s in enumerate(ahead_s, start=1)}
        links = {
            start: {
                goal: LinkReport(ahead_s=there_s - here_s, round_trip_s=trip_s)
                for goal, there_s in nodes.items()
            }
            for start, here_s in nodes.items()
        }
        return sorted(wrong(network_rules.clocks_of_links(links)), reverse=True)

    assert not lines_of(0.0, 0.1, -0.1)
    assert lines_of(0.0, 0.0, 0.0, 2.0, -40.0) == [
        "warning: n4: its clock is 2.0 s ahead of the others (give or take 0.001 s)",
        "failure: n5: its clock is 40.0 s behind the others (give or take 0.001 s)",
    ]
    assert len(lines_of(0.0, 2.0)) == 2  # of two nobody knows which one is wrong
    assert not lines_of(0.0, 2.0, trip_s=5.0)  # not known
    assert network_rules.clocks({}) == []


# --- devices and collectives ----------------------------------------------------------------------


def test_collectives_that_do_not_end() -> None:
    rank = RankReport(device="CPU", threads=1, tflop_s={"fp32": 1.0, "bf16": 2.0})

    def speed(problem: str | None, is_late: bool, ranks: int) -> SpeedReport:
        return SpeedReport(problem=problem, is_late=is_late, ranks=(rank,) * ranks)

    judge = speed_rules.torchrun
    assert judge({"n1": speed(None, False, 1)}) == []
    hung = speed("torchrun did not end", True, 1)
    dead = speed("Error: no ib0", False, 0)
    assert wrong(judge({"n1": hung, "n2": dead})) == ["failure: n2: Error: no ib0"]
    assert wrong(judge({"n1": hung, "n2": hung}))[0].startswith(
        "failure: n1, n2: the processes"
    )
    slow = speed("torchrun did not end", True, 0)
    assert wrong(judge({"n1": hung, "n2": slow}))[0].startswith(
        "warning: n2: no process finished"
    )


def test_collectives_of_oneccl_that_do_not_end() -> None:
    """The usual reason is a provider of libfabric that does not leave the node."""
    rank = RankReport(device="CPU", threads=1, tflop_s={"fp32": 1.0})
    for backend, is_hinted in (("ccl", True), ("gloo", False), (None, False)):
        late = dataclasses.replace(rank, backend=backend)
        hung = SpeedReport(problem="torchrun did not end", is_late=True, ranks=(late,))
        (check,) = speed_rules.torchrun({"n1": hung, "n2": hung})
        assert check.hint is not None
        assert ("FI_PROVIDER" in check.hint) == is_hinted
        assert "--interface" in check.hint


def test_simulated_nodes_are_not_compared() -> None:
    def speed(fp32: float) -> SpeedReport:
        rank = RankReport(device="CPU", threads=1, tflop_s={"fp32": fp32, "bf16": 9.0})
        return SpeedReport(ranks=(rank,))

    speeds = {"n1": speed(5.0), "n2": speed(2.0)}
    assert len(wrong(speed_rules.matmul(speeds))) == 1
    assert not wrong(speed_rules.matmul(speeds, compares=False))
