"""The findings of a comparison of two sides. Without numpy: the command line names these types."""

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or a fact in which the sides differ."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A quantity of both sides, and the verdict."""

    what: str
    a: str
    b: str
    verdict: str
    method: str = ""
    estimate: float | None = None
    """Speed of B over that of A, or metric of B minus that of A; None: it cannot be told."""
    low: float | None = None
    high: float | None = None


class ComparisonFacts(TypedDict):
    """The comparison of two runs, or of two folders of repeats."""

    a: list[str]
    """Run directories of the first side."""
    b: list[str]
    differences: list[Difference]
    """In configuration, versions, hosts, code."""
    confidence: float
    """Of all intervals."""
    findings: list[Finding]
    notes: list[str]
