"""The diagnostic rules: what follows from the nodes' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from slurmft.plugins.examine import rules
from slurmft.plugins.examine.checks import Check, Level


def wrong(found: Iterable[Check]) -> list[str]:
    """What is not ok, in words."""
    return [f"{c.level}: {c.text}" for c in found if c.level != Level.OK]


def test_slow_ones() -> None:
    assert rules.slow_ones({"n1": 10, "n2": 9.5, "n3": 4, "n4": 10.5}, 0.8) == {"n3": 0.4}
    assert rules.slow_ones({"n1": 10, "n2": 5}, 0.8) == {"n2": 0.5}
    assert rules.slow_ones({"n1": 10}, 0.8) == {}
    assert rules.slow_ones({"n1": 0, "n2": 0}, 0.8) == {}


def test_few_lines_name_all_broken_pairs() -> None:
    others = ["n1", "n2", "n4"]
    assert rules.blame((o, "n3") for o in others) == [(others, ["n3"])]
    assert rules.blame(("n3", o) for o in others) == [(["n3"], others)]
    both = [("n1", "n3"), ("n2", "n3"), ("n4", "n1")]
    assert rules.blame(both) == [(["n1", "n2"], ["n3"]), (["n4"], ["n1"])]
    three = {("n1", "n3"), ("n2", "n3"), ("n3", "n4")}
    assert rules.healthy(["n1", "n2", "n3", "n4"], three) == ["n1", "n2", "n4"]
    assert rules.healthy(["n1", "n2"], set()) == ["n1", "n2"]


def reached(names: list[str], broken: Callable[[str, str], bool]) -> dict[str, Any]:
    """What the nodes say that try to reach their partners, where some pairs are broken."""

    def answer(start: str, goal: str) -> dict[str, Any]:
        why = "timed out" if broken(start, goal) else None
        return {"address": goal, "problem": None, "ports": {"ephemeral": why}}

    partners = rules.partners(names)
    return {start: {goal: answer(start, goal) for goal in partners[start]} for start in names}


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (8, 7), (9, 4), (64, 6), (1000, 10)])
def test_what_a_node_tries_grows_with_the_logarithm(count: int, most: int) -> None:
    names = [f"n{i}" for i in range(count)]
    found = rules.partners(names)
    assert {len(goals) for goals in found.values()} == {most}
    assert all(len({*goals, start}) == most + 1 for start, goals in found.items())
    goals = [goal for own in found.values() for goal in own]
    assert {goals.count(name) for name in names} == {most}


@pytest.mark.parametrize("count", [8, 9, 64, 1000])
def test_bad_node_and_bad_link_are_told_apart(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    assert not wrong(rules.reach(reached(names, lambda a, b: False)))
    seen = reached(names, lambda a, b: "n3" in (a, b))
    found = wrong(rules.reach(seen))
    assert len(found) == 2
    assert all("n3 cannot reach" in x or "cannot reach n3" in x for x in found)
    assert "both reach" not in str(found)
    assert rules.healthy(names, rules.broken_pairs(seen)) == [n for n in names if n != "n3"]
    seen = reached(names, lambda a, b: {a, b} == {"n3", "n7"})
    found = wrong(rules.reach(seen))
    end = "on an ephemeral port: timed out; both reach other nodes"
    both = [f"failure: n3 cannot reach n7 {end}", f"failure: n7 cannot reach n3 {end}"]
    assert sorted(found) == (both if count == 8 else both[:1])


def test_two_nodes_have_no_other_one() -> None:
    seen = reached(["n1", "n2"], lambda a, b: a == "n1")
    (found,) = wrong(rules.reach(seen))
    assert found == "failure: n1 cannot reach n2 on an ephemeral port: timed out"


def test_all_pairs_are_broken() -> None:
    names = [f"n{i}" for i in range(1000)]
    (found,) = wrong(rules.reach(reached(names, lambda a, b: True)))
    assert "n7 and 992 more cannot reach each other on an ephemeral port: timed out" in found


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_rounds_have_every_link_of_the_ring_and_no_node_twice(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    found = rules.rounds(names)
    for pairs in found:
        ends = [name for pair in pairs for name in pair]
        assert len(ends) == len(set(ends))
    assert sorted(pair for pairs in found for pair in pairs) == sorted(
        (name, names[(i + 1) % count]) for i, name in enumerate(names)
    )


def fact(**changes: Any) -> dict[str, Any]:
    """A node, as its agent tells it."""
    hardware = {"slurm_cpus": 8, "quota_cpus": None, "gpus": [], "model": "CPU", "flags": ["avx2"]}
    hardware |= {"memory_mib": 1000} | changes.pop("hardware", {})
    software = {"Python": "3.11.7 (/env/bin/python)", "torch": "2.13.0"}
    known = {"cores": 8, "mask_cpus": 8, "available_mib": 900, "hub": True}
    return known | {"hardware": hardware, "software": software} | changes


def test_cores_that_slurm_grants_but_does_not_give() -> None:
    assert not wrong(rules.cores({"n1": fact(), "n2": fact()}, 8))
    found = wrong(rules.cores({"n1": fact(), "n2": fact(mask_cpus=1, cores=1)}, None))
    assert found[0].startswith("warning: n2: 1 core(s) to compute on; Slurm counts 8 CPU(s)")
    assert found[1] == "warning: not the same on all nodes: n1: 8; n2: 1"
    assert wrong(rules.cores({"n1": fact()}, 16))
    assert wrong(rules.cores({"n1": fact(hardware={"quota_cpus": 2.0})}, None))


def test_nodes_that_are_not_alike() -> None:
    gpu = {"model": "H100"}
    two = {"n1": fact(hardware={"gpus": [gpu, gpu]}), "n2": fact(hardware={"gpus": [gpu]})}
    found = wrong(rules.devices(two, 2))
    assert found[0] == "failure: n2: fewer GPUs than the 2 requested"
    assert "n1: 2 x H100; n2: 1 x H100" in found[1]
    small = {"n1": fact(), "n2": fact(hardware={"memory_mib": 500}), "n3": fact()}
    found = wrong(rules.memory(small))
    assert found == ["warning: n2 has 500 MiB, 50% of the median"]
    here = fact()["software"]
    assert not wrong(rules.versions({"n1": fact(), "n2": fact()}, here))
    other = fact(software=here | {"torch": "2.8.0"})
    found = wrong(rules.versions({"n1": fact(), "n2": other}, here))
    assert found == ["failure: torch differs: n1, this host: 2.13.0; n2: 2.8.0"]
    found = wrong(rules.hub({"n1": fact(), "n2": fact(hub=False)}))
    assert found == ["warning: n2 do not reach it, others do"]


def test_a_faster_fabric_that_would_not_be_taken() -> None:
    eth, ib = ["eth0", False, 1000, "eth0 (1 Gbit/s)"], ["ib0", True, 100000, "ib0 (InfiniBand)"]
    judge = rules.fabric
    said = judge({"n1": [ib, eth], "n2": [eth]}, {"n1": "eth0", "n2": "eth0"})[0]
    assert said.level == Level.WARNING
    assert "n1: ib0 (InfiniBand)" in said.text
    assert "--interface" in str(said.hint)
    assert not wrong(judge({"n1": [ib, eth]}, {"n1": "ib0"}))
    assert not wrong(judge({"n1": [eth]}, {"n1": "lo"}))


def test_one_slow_node_is_named() -> None:
    rates = {("n1", "n2"): 1e9, ("n2", "n3"): 1e8, ("n3", "n4"): 1.1e8, ("n4", "n1"): 1.2e9}
    found = wrong(rules.links(rates))
    assert found == ["warning: n3 is slow: 0.88 Gbit/s, 9% of the median"]
    rates |= {("n2", "n3"): 1e9}
    end = "both are fast with other nodes"
    found = wrong(rules.links(rates))
    assert found == [f"warning: n3 to n4 is slow: 0.88 Gbit/s, 9% of the median; {end}"]

    def rank(fp32: float) -> dict[str, Any]:
        return {"tflop_s": {"fp32": fp32, "bf16": 9.0}}

    ranks = {"n1": [rank(5.0)], "n2": [rank(2.0)], "n3": [rank(4.9)]}
    found = wrong(rules.matmul(ranks))
    assert found == ["warning: n2 is slow in fp32: 2 TFLOP/s, 41% of the median"]
    both = {"n1": [rank(5.0), rank(5.0)], "n2": [rank(5.0), rank(1.0)]}
    assert "n2 process 1 is slow in fp32" in wrong(rules.matmul(both))[0]


def test_collectives_that_do_not_end() -> None:
    def answer(problem: str | None, late: bool, ranks: int) -> dict[str, Any]:
        return {"problem": problem, "late": late, "ranks": [{}] * ranks}

    judge = rules.torchrun
    assert judge({"n1": answer(None, False, 1)}) == []
    hung, dead = answer("torchrun did not end", True, 1), answer("Error: no ib0", False, 0)
    assert wrong(judge({"n1": hung, "n2": dead})) == ["failure: n2: Error: no ib0"]
    assert wrong(judge({"n1": hung, "n2": hung}))[0].startswith("failure: n1, n2: the processes")
    slow = answer("torchrun did not end", True, 0)
    assert wrong(judge({"n1": hung, "n2": slow}))[0].startswith("warning: n2: no process finished")


def test_clocks() -> None:
    def found_of(*ahead_s: float, trip_s: float = 0.002) -> list[str]:
        """What is wrong with the clocks of n1, n2, ..."""
        nodes = {f"n{i}": s for i, s in enumerate(ahead_s, start=1)}
        seen = {
            here: {n: {"ahead_s": s - mine, "round_trip_s": trip_s} for n, s in nodes.items()}
            for here, mine in nodes.items()
        }
        return sorted(wrong(rules.clocks(seen)), reverse=True)

    assert not found_of(0.0, 0.1, -0.1)
    assert found_of(0.0, 0.0, 0.0, 2.0, -40.0) == [
        "warning: n4 is 2.0 s ahead of the others (give or take 0.001 s)",
        "failure: n5 is 40.0 s behind the others (give or take 0.001 s)",
    ]
    assert len(found_of(0.0, 2.0)) == 2  # of two nobody knows which one is wrong
    assert not found_of(0.0, 2.0, trip_s=5.0)  # not known
    assert rules.clocks({}) == []
