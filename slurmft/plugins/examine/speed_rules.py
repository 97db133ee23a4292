"""Rules about devices and collectives, as the ranks under torchrun measured them. Pure
functions."""

from collections.abc import Iterator, Mapping

from slurmft.core.text import aligned, in_bytes
from slurmft.plugins.examine.checks import Check, failure, merged, ok, warning
from slurmft.plugins.examine.measurements import RankReport, SpeedReport
from slurmft.plugins.examine.node_rules import products

Speeds = Mapping[str, SpeedReport]
"""By node."""

_CCL_HANGS = (
    "oneCCL's libfabric may have a provider that does not reach other nodes: try "
    "FI_PROVIDER=tcp in the environment, --interface, or --backend gloo"
)
# A sum of that size measures the latency alone.
_LATENCY_BYTES = 8


def torchrun(speeds: Speeds) -> list[Check]:
    """Says why the measurement did not finish. Empty: it did."""
    ended = []
    for node, speed in speeds.items():
        if speed.problem and not speed.is_late:
            ended.append((node, failure("all-reduce", speed.problem)))
    if ended:
        # The others are late only because they waited for these.
        return merged(ended)
    late = [node for node, speed in speeds.items() if speed.is_late]
    not_started = [node for node in late if not speeds[node].ranks]
    if not_started:
        text = "no process finished loading torch and a matmul within the time limit"
        hint = "allow more time: --within 120; is the file system slow?"
        return [warning("speeds", text, hint, hosts=not_started)]
    if late:
        text = "the processes started, but their collectives did not finish in time"
        hint = "allow more time (--within 120); if that does not help, they hang: "
        backends = {rank.backend for node in late for rank in speeds[node].ranks}
        if "ccl" in backends:
            hint += _CCL_HANGS
        else:
            hint += "try --interface"
        return [failure("all-reduce", text, hint, hosts=late)]
    return []


def matmul(speeds: Speeds, *, compares: bool = True) -> Iterator[Check]:
    """Checks the speeds of the devices, for each precision.

    Args:
        compares: finds slow devices.
    """
    for precision in ("fp32", "bf16"):
        rates = {}
        for node, speed in speeds.items():
            rates[node] = [rank.tflop_s[precision] for rank in speed.ranks]
        checks = products(rates, precision)
        if not compares:
            checks = checks[-1:]  # the summary
        yield from checks


def all_reduce(speed: SpeedReport) -> list[Check]:
    """Writes the times of a node's first rank as a table."""
    for rank in speed.ranks:
        if rank.all_reduce:
            rows = list(_rows(rank))
            table = "\n".join(aligned(rows))
            return [ok("all-reduce", f"by {rank.backend}, fp32\n{table}")]
    return []


def _rows(rank: RankReport) -> Iterator[tuple[str, str, str]]:
    yield ("size", "time", "each rank sends")
    for row in rank.all_reduce:
        microseconds = 1e6 * row.seconds
        bandwidth = ""
        if row.size_bytes > _LATENCY_BYTES:
            bandwidth = f"{in_bytes(row.bus_bytes_s)}/s"
        yield (in_bytes(row.size_bytes), f"{microseconds:,.0f} us", bandwidth)
