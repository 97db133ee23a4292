"""Checks, their rows, and the table that documentation shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECTIONS = {
    "trainings": "Losses of each step",
    "batches": "Packed batches",
    "schedules": "Schedules and weight decay",
    "metrics": "Metrics",
    "models": "Saved models",
    "resumes": "Resumed runs",
    "programs": "Your own programs",
}
"""Section -> its title in the table."""


@dataclass(frozen=True)
class Row:
    """What was compared with what, and how much it differs at most."""

    check: str
    reference: str
    difference: float


@dataclass(frozen=True)
class Check:
    """A function that yields rows of a section."""

    section: str
    limit: float
    """Differences up to this are rounding."""
    needs: tuple[str, ...]
    """Packages of the references."""
    compare: Callable[[Path], Iterable[Row]]
    """Gets an empty folder."""


CHECKS: dict[str, Check] = {}
"""Name -> check, in the order of the table."""

Comparison = Callable[[Path], Iterable[Row]]


def check(
    section: str, limit: float, *needs: str
) -> Callable[[Comparison], Comparison]:
    """Registers a function as a check."""

    def register(compare: Comparison) -> Comparison:
        CHECKS[compare.__name__] = Check(section, limit, needs, compare)
        return compare

    return register


def largest(one: Iterable[float], other: Iterable[float]) -> float:
    """Returns the largest difference of two series of equal length."""
    pairs = zip(one, other, strict=True)
    values = [abs(a - b) for a, b in pairs]
    # NaN is larger than nothing: max would pass over it.
    assert all(map(math.isfinite, values)), values
    return max(values)


def shown(value: float) -> str:
    """Returns a difference as the table shows it."""
    if value == 0:
        return "0"
    return f"{value:.0e}"


def lines(checks: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the table.

    Args:
        checks: `checks` of references.json.
    """
    yield "| check | reference | largest difference |"
    yield "|---|---|---|"
    for section, title in SECTIONS.items():
        parts = [each["rows"] for each in checks.values() if each["section"] == section]
        if parts:
            yield f"| **{title}** | | |"
        for row in itertools.chain(*parts):
            value = shown(row["difference"])
            yield f"| {row['check']} | {row['reference']} | {value} |"
