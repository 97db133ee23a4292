"""Comparisons between nodes: which one is slow, and which host or link broken pairs have in common.

Pure functions. A pair is (from, to).
"""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slurmft.core.text import some

Name = TypeVar("Name")
Pair = tuple[str, str]

# Up to so many nodes try to reach each other in all pairs.
_ALL_PAIRS = 8


@dataclass(frozen=True, slots=True)
class Blame:
    """Broken pairs that one host explains."""

    host: str
    """The host that most of them have in common; of a single pair, the goal, which does not
    answer."""
    pairs: tuple[Pair, ...]
    is_link: bool
    """True if both ends of the only broken link are well connected to other hosts."""

    @property
    def cannot_reach(self) -> list[str]:
        """The hosts that cannot reach the blamed one."""
        return [start for start, goal in self.pairs if goal == self.host]

    @property
    def unreached(self) -> list[str]:
        """The hosts that the blamed one cannot reach."""
        return [goal for start, goal in self.pairs if start == self.host]


def blame(
    tried: Collection[Pair],
    broken: Collection[Pair],
    *,
    suspects_start: bool = False,
) -> list[Blame]:
    """Explains the broken pairs among those that were tried by as few hosts as possible.

    Takes the host that most of the broken pairs have in common, then the one that most of the
    others have in common, and so on.

    Args:
        suspects_start: of a single pair the start is to blame, not the goal.
    """
    left = sorted(broken)  # the same blames whatever the order of the answers
    intact = set(tried) - set(broken)
    blames = []
    while left:
        counts: Counter[str] = Counter()
        suspects: Counter[str] = Counter()
        for start, goal in left:
            counts.update((start, goal))
            suspects[start if suspects_start else goal] += 1
        # Of two hosts with as many pairs, as the two of a single one, the likelier is to blame.
        host = max(counts, key=lambda end: (counts[end], suspects[end]))
        pairs = [pair for pair in left if host in pair]
        is_link = _is_link(pairs, intact)
        blames.append(Blame(host, tuple(pairs), is_link))
        left = [pair for pair in left if host not in pair]
    return blames


def _is_link(pairs: Sequence[Pair], intact: Collection[Pair]) -> bool:
    """Returns True if these pairs are one link between two well connected hosts."""
    ends = {end for pair in pairs for end in pair}
    if len(ends) != 2:
        return False
    # An end is well connected if a pair of it and a third host is intact.
    connected = set()
    for pair in intact:
        common = ends.intersection(pair)
        if len(common) == 1:
            connected |= common
    return connected == ends


def partners(names: Sequence[str]) -> dict[str, list[str]]:
    """Chooses whom each node tries to reach.

    Few nodes try all others. Of many, a node tries those 1, 2, 4, 8, ... places further on in a
    ring: what a node costs grows with the logarithm of their number, and each is in twice as many
    pairs, so that a bad node differs from a bad link.
    """
    count = len(names)
    if count > _ALL_PAIRS:
        bits = (count - 1).bit_length()
        steps = [2**bit for bit in range(bits)]  # all smaller than count: never itself
    else:
        steps = list(range(1, count))
    chosen = {}
    for place, name in enumerate(names):
        chosen[name] = [names[(place + step) % count] for step in steps]
    return chosen


def rounds(names: Sequence[str]) -> list[list[Pair]]:
    """Lists the neighbours in a ring, in rounds in which no node is in two pairs."""
    if len(names) < 2:
        return []
    next_names = [*names[1:], names[0]]
    ring = list(zip(names, next_names, strict=True))
    # An odd ring needs a round for its last pair alone.
    last = []
    if len(names) % 2 == 1:
        last = [ring.pop()]
    every_second = ring[::2]
    those_between = ring[1::2]
    return [pairs for pairs in (every_second, those_between, last) if pairs]


def shares_of_median(values: Mapping[Name, float]) -> dict[Name, float]:
    """Returns each value as a share of the median. Empty for less than two values.

    Of two values the larger is the median: one of the pair is slow, the other one shows it.
    """
    if len(values) < 2:
        return {}
    median = statistics.median_high(values.values())
    if median <= 0:
        return {}
    return {name: value / median for name, value in values.items()}


def group_by_value(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Returns value -> the names that have it, the most common value first."""
    groups: dict[Any, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    most_common_first = sorted(
        groups,
        key=lambda value: len(groups[value]),
        reverse=True,
    )
    return {value: groups[value] for value in most_common_first}


def by_value(values: Mapping[str, Any]) -> str:
    """Writes values with the names that have them: "n1, n3: this; n2: that"."""
    texts = []
    for value, names in group_by_value(values).items():
        texts.append(f"{some(names)}: {value}")
    return "; ".join(texts)
