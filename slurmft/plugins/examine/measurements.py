"""Measurements of an examination: devices and collectives, and all that its report for support has.

Apart from the reports of nodes: every node of a preflight imports those.
"""

from dataclasses import dataclass, field

from slurmft.plugins.examine.report import LinkReport, NodeReport


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """A sum over all ranks, of one size, as one rank measured it."""

    size_bytes: int
    seconds: float
    """Median of the rounds."""
    bus_bytes_s: float
    """Bytes that each rank sends and receives in a second if the data goes around in a ring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Devices and collectives, as one rank measured them."""

    device: str
    threads: int
    tflop_s: dict[str, float]
    """Precision -> speed of matrix products."""
    backend: str | None = None
    """None: the ranks have not met."""
    all_reduce: tuple[AllReduce, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedReport:
    """Devices and collectives, as the ranks of one node measured them."""

    ranks: tuple[RankReport, ...]
    problem: str | None = None
    """The reason why torchrun failed, or None."""
    is_late: bool = False
    """True if torchrun reached the time limit."""


@dataclass(kw_only=True, slots=True)
class Measurements:
    """All that an examination measured on nodes, for the report to support."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    """The reports of the nodes that answer."""
    ports: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node -> the ports on which its agent listens, by purpose."""
    interfaces: dict[str, str | None] = field(default_factory=dict)
    """Node -> the interface that collectives would use."""
    links: dict[str, dict[str, LinkReport]] = field(default_factory=dict)
    """From -> to -> the connections."""
    usable: list[str] = field(default_factory=list)
    """The nodes that reach each other."""
    links_bytes_s: dict[str, float] = field(default_factory=dict)
    """Pair, as "n1 to n2" -> bytes per second."""
    speeds: dict[str, SpeedReport] = field(default_factory=dict)
    """Devices and collectives of the usable nodes."""
