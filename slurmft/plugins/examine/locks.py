"""`slurmft doctor locks`: the kinds of file locks that hold in a folder, between nodes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from slurmft.cluster.slurm import allocation, commands
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import FileSystem
from slurmft.core.text import aligned
from slurmft.plugins.examine import lock_probe
from slurmft.plugins.examine.agents import AgentError, Agents
from slurmft.plugins.examine.lock_probe import Finding, Findings
from slurmft.plugins.examine.report import NodeReport
from slurmft.plugins.examine.site import Site

# How long agents may take to start and to report, and each lock operation after that.
_START_S = 60.0
_ANSWER_S = 30.0


class MeasurementFacts(TypedDict):
    """Which kinds of file locks hold between nodes in a folder."""

    hosts: list[str]
    file_system: str
    one_folder: bool
    """The nodes see the same folder. Without it there are no findings."""
    choice: NotRequired[str | None]
    """The kind of lock that runs use there."""
    findings: NotRequired[dict[str, Annotated[dict[str, Any], Finding]]]
    """Kind of lock -> what was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The findings of the nodes."""

    hosts: list[str]
    file_system: FileSystem
    findings: Findings | None
    """None: the nodes see different folders."""

    def choice(self) -> str | None:
        """Returns the primitive to use; None where the nodes share no folder. ProbeError where none
        holds."""
        if self.findings is None:
            return None
        return lock_probe.choose(self.findings, self.file_system)

    def as_dict(self) -> MeasurementFacts:
        """Returns the measurement for --json."""
        facts = MeasurementFacts(
            hosts=self.hosts,
            file_system=str(self.file_system),
            one_folder=self.findings is not None,
        )
        if self.findings is not None:
            facts["choice"] = self.choice()
            findings = {}
            for name, finding in self.findings.items():
                findings[name] = asdict(finding)
            facts["findings"] = findings
        return facts


def probe_job(job: JobConfig, nodes: int | None) -> JobConfig:
    """Returns the job to measure with: a core on each of two nodes, or as many as the allocation
    has.

    Raises:
        UsageError: so many nodes cannot be had.
    """
    if not commands.available():
        if nodes not in (None, 1):
            raise UsageError(f"--nodes {nodes}, but there is no Slurm here")
        return replace(job, nodes=1)
    inside = allocation.allocated_nodes()
    if nodes is None:
        nodes = inside or 2  # one node cannot know what holds between nodes
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} must be at least 1")
    if inside and nodes > inside:
        raise UsageError(f"--nodes {nodes}, but this allocation has {inside}")
    return replace(job, nodes=nodes, cpus_per_task=1)


def measure(site: Site, nodes: int, folder: Path) -> Measurement:
    """Compares all kinds of locks on the first nodes of a site.

    Raises:
        AgentError: a node does not answer.
    """
    # An allocation may have more nodes than are to be compared.
    names = list(site.hosts)[:nodes]
    commands_of = {name: site.commands[name] for name in names}
    with Agents(commands_of, site.env) as agents:
        question = {"folders": {"locks": str(folder)}}
        requests = dict.fromkeys(names, question)
        answers = agents.ask("inspect", requests, _START_S, NodeReport)
        for name, answer in answers.items():
            # Without one of the nodes nothing is known of locks between it and the others.
            if isinstance(answer, AgentError):
                raise AgentError(f"{name}: {answer.message}")
        reports: list[NodeReport] = [answers[name] for name in names]
        seen_by_first = reports[0].folders["locks"]
        if seen_by_first.file_system is None:
            raise AgentError(f"{names[0]}: {seen_by_first.problem}")
        ask = lock_probe.ask_agents(agents, names, folder, _ANSWER_S)
        findings = lock_probe.probe(ask, nodes, seen_by_first.file_system)
    return Measurement(
        hosts=[report.host for report in reports],
        file_system=seen_by_first.file_system,
        findings=findings,
    )


def table(measurement: Measurement) -> list[str]:
    """Writes the findings, a line for each primitive."""
    if measurement.findings is None:
        return []
    # Excluded by whom; released by what.
    rows = [("", "this node", "other nodes", "unlock", "exit", "SIGKILL")]
    for name, finding in measurement.findings.items():
        rows.append((name, *_cells(finding)))
    all_hosts = ", ".join(measurement.hosts)
    head = f"{measurement.file_system}, seen from {all_hosts}"
    return [head, "", *aligned(rows), ""]


def _cells(finding: Finding) -> tuple[str, str, str, str, str]:
    # It cannot be used here at all: of nodes and ends of processes nothing was measured.
    if finding.error:
        return (finding.error, "", "", "", "")
    excludes = {True: "excludes", False: "DOES NOT EXCLUDE", None: "unknown"}
    releases = {True: "releases", False: "STAYS LOCKED", None: "unknown"}
    return (
        excludes[finding.on_node],
        excludes[finding.between_nodes],
        releases[finding.on_unlock],
        releases[finding.on_exit],
        releases[finding.on_kill],
    )


def conclude(measurement: Measurement) -> list[str]:
    """Records the choice, if nodes were compared; returns lines that say what follows from it.

    Raises:
        ProbeError: no kind of lock holds.
    """
    choice = measurement.choice()
    hosts = measurement.hosts
    file_system = measurement.file_system
    if measurement.findings is None or choice is None:
        all_hosts = ", ".join(hosts)
        return [
            f"not one folder: {all_hosts} each have their own there ({file_system})",
            "locks need not hold between nodes; nothing is recorded",
        ]
    if len(hosts) == 1:
        # Nothing is recorded: the record would be used on several nodes.
        return [
            f"one node cannot know what holds between nodes; default here: {choice}",
            "measure between two: salloc --nodes 2 slurmft doctor locks DIR",
        ]
    lines = [f"choice: {choice}"]
    try:
        path = lock_probe.record(file_system, measurement.findings, len(hosts))
        lines.append(f"recorded for {file_system}; your runs use it: {path}")
    # RuntimeError: a user without a home, in which the record would lie.
    except (OSError, RuntimeError) as error:
        lines.append(f"not recorded ({error}): give --file-locks {choice} to runs")
    if choice == "soft":
        lines.append(
            "warning: a process that is killed leaves its soft locks on other nodes"
        )
    return lines
