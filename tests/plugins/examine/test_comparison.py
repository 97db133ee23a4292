"""Comparisons between nodes: slow ones, and the host or link that broken pairs have in common."""

from __future__ import annotations

import pytest

from slurmft.plugins.examine.comparison import blame, partners, rounds, shares_of_median


def test_shares_of_the_median() -> None:
    assert shares_of_median({"n1": 10, "n2": 8, "n3": 4, "n4": 12})["n3"] == 0.4
    assert shares_of_median({"n1": 10, "n2": 5}) == {"n1": 1.0, "n2": 0.5}
    assert shares_of_median({"n1": 10}) == {}
    assert shares_of_median({"n1": 0, "n2": 0}) == {}


def ring(size: int) -> list[tuple[str, str]]:
    return [(f"n{i}", f"n{(i + 1) % size}") for i in range(size)]


@pytest.mark.parametrize(
    ("broken", "hosts"),
    [
        ([1], ["n2"]),
        ([1, 2], ["n2"]),
        ([4], ["n0"]),
        ([0, 1], ["n1"]),
        ([2, 3], ["n3"]),
    ],
)
def test_the_host_that_broken_pairs_of_a_ring_have_in_common(
    broken: list[int], hosts: list[str]
) -> None:
    pairs = ring(5)
    assert [each.host for each in blame(pairs, [pairs[i] for i in broken])] == hosts


def test_few_hosts_explain_all_broken_pairs() -> None:
    others = ["n1", "n2", "n4"]
    (unreachable,) = blame([], [(other, "n3") for other in others])
    assert (unreachable.host, unreachable.cannot_reach) == ("n3", others)
    assert not unreachable.unreached
    (isolated,) = blame([], [("n3", other) for other in others])
    assert (isolated.host, isolated.unreached) == ("n3", others)
    two = blame([], [("n1", "n3"), ("n2", "n3"), ("n4", "n1")])
    assert [each.host for each in two] == ["n3", "n1"]
    (both_ways,) = blame([], [("n1", "n3"), ("n2", "n3"), ("n3", "n4")])
    assert both_ways.cannot_reach == ["n1", "n2"]
    assert both_ways.unreached == ["n4"]


def test_a_link_is_broken_only_if_both_ends_reach_others() -> None:
    pairs = ring(4)
    (link,) = blame(pairs, pairs[:1])
    assert link.is_link
    assert link.host == "n1"
    assert blame(pairs, pairs[:1], suspects_start=True)[0].host == "n0"
    (node,) = blame(pairs[:2], pairs[:1])  # n0 has no other pair
    assert not node.is_link
    (node,) = blame(pairs, pairs[:2])
    assert not node.is_link


@pytest.mark.parametrize(
    ("count", "most"), [(1, 0), (2, 1), (8, 7), (9, 4), (64, 6), (1000, 10)]
)
def test_what_a_node_tries_grows_with_the_logarithm(count: int, most: int) -> None:
    names = [f"n{i}" for i in range(count)]
    chosen = partners(names)
    assert {len(goals) for goals in chosen.values()} == {most}
    assert all(len({*goals, start}) == most + 1 for start, goals in chosen.items())
    goals = [goal for each in chosen.values() for goal in each]
    assert {goals.count(name) for name in names} == {most}


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_rounds_have_every_link_of_the_ring_and_no_node_twice(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    all_rounds = rounds(names)
    for pairs in all_rounds:
        ends = [name for pair in pairs for name in pair]
        assert len(ends) == len(set(ends))
    assert sorted(pair for pairs in all_rounds for pair in pairs) == sorted(
        (name, names[(i + 1) % count]) for i, name in enumerate(names)
    )
