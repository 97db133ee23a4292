"""The verdict of a preflight: the head applies the rules of doctor to the reports of all nodes."""

import statistics
from collections.abc import Sequence

from slurmft.core.text import shown
from slurmft.plugins.examine import network_rules, node_rules
from slurmft.plugins.examine.checks import Check, Level, failure
from slurmft.plugins.examine.report import NodeReport

# The folders of a node that a preflight checks.
_FOLDERS = ("tmp", "shm")
_LONGEST_TEXT = 200
# How long a report may be under way: times of reports are so uncertain.
_DELAY_S = 1.0


def judge(
    reports: Sequence[tuple[float, NodeReport]], names: Sequence[str]
) -> list[Check]:
    """Applies the rules of doctor to the reports of a job's nodes.

    Args:
        reports: the time at which each came, by the head's clock, and the report.
        names: all nodes of the job.
    """
    nodes = {report.host: report for _, report in reports}
    links = {name: node.links for name, node in nodes.items()}
    speeds = {}
    for name, node in nodes.items():
        if node.tflop_s:  # else it was not measured in time, which is no fault
            speeds[name] = [node.tflop_s]
    checks = []
    for name in names:
        if name not in nodes:
            checks.append(failure("nodes", "it has not reported in time", hosts=[name]))
    checks += node_rules.gpus(nodes)
    for purpose in _FOLDERS:
        checks += node_rules.folders(purpose, nodes)
    checks += node_rules.products(speeds, "matrix products")
    checks += network_rules.clocks(_clock_offsets(reports))
    checks += network_rules.reach(links)
    return checks


def _clock_offsets(
    reports: Sequence[tuple[float, NodeReport]],
) -> dict[str, tuple[float, float]]:
    """Compares the clocks by the times at which reports came. The median clock is right, even if
    it is not the head's."""
    ahead_s = {}
    for arrived_s, report in reports:
        ahead_s[report.host] = report.time_s - arrived_s
    median_s = statistics.median(ahead_s.values())
    offsets = {}
    for host, host_ahead_s in ahead_s.items():
        offsets[host] = (host_ahead_s - median_s, _DELAY_S)
    return offsets


def failures_by_host(checks: Sequence[Check]) -> dict[str, str]:
    """Returns the hosts to exclude, each with all that is wrong with it."""
    texts: dict[str, list[str]] = {}
    for check in checks:
        if check.level == Level.FAILURE:
            for host in check.hosts:
                # A text may quote what a driver printed.
                text = shown(check.text, _LONGEST_TEXT)
                texts.setdefault(host, []).append(text)
    return {host: "; ".join(each) for host, each in texts.items()}


def speeds(checks: Sequence[Check]) -> str:
    """Returns the nodes' speeds, in words."""
    for check in checks:
        if check.about == "matmul" and check.level == Level.OK:
            return check.text
    return "speed unknown"
