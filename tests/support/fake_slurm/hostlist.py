"""Slurm's host lists: "n[1-3,7],m2"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


def expand(hostlist: str) -> list[str]:
    """Returns the hosts of a list, in its order."""
    return [host for part in _parts(hostlist) for host in _expand_part(part)]


def compress(hosts: Sequence[str]) -> str:
    """Returns the list of hosts that differ in their last number, as Slurm writes it."""
    split = [re.fullmatch(r"(.*?)(\d+)", host) for host in hosts]
    if len(hosts) < 2 or not all(split):
        return ",".join(hosts)
    prefixes = {match[1] for match in split if match}
    if len(prefixes) > 1:
        return ",".join(hosts)
    numbers = sorted(int(match[2]) for match in split if match)
    return f"{prefixes.pop()}[{compress_numbers(numbers)}]"


def compress_numbers(numbers: Sequence[int]) -> str:
    """Returns "0-2,5" for 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def expand_numbers(text: str) -> list[str]:
    """Returns "01", "02" and "5" for "01-02,5": zeros before a number are kept."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [
            str(n).zfill(width) for n in range(int(first), int(last or first) + 1)
        ]
    return numbers


def _parts(hostlist: str) -> Iterator[str]:
    """The parts between the commas that stand outside of brackets."""
    yield from re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist)


def _expand_part(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    before, after = part[: match.start()], part[match.end() :]
    return [
        host
        for number in expand_numbers(match[1])
        for host in _expand_part(f"{before}{number}{after}")
    ]
