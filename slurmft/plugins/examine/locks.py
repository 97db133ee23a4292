"""`slurmft doctor locks`: which kinds of file locks hold in a folder, between nodes."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.cluster.slurm import allocation, commands
from slurmft.core.agents import AgentError, Agents
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.filesystem import FileSystem
from slurmft.core.text import aligned
from slurmft.plugins.examine import lock_probe
from slurmft.plugins.examine.lock_probe import Finding, Findings
from slurmft.plugins.examine.nodes import Site

_START_S, _ANSWER_S = 60.0, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What the nodes found."""

    hosts: list[str]
    file_system: FileSystem
    findings: Findings | None
    """None: the nodes see different folders."""

    def choice(self) -> str | None:
        """The primitive to use; None where nodes share no folder. ProbeError where none holds."""
        return None if self.findings is None else lock_probe.choose(self.findings, self.file_system)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        facts: dict[str, Any] = {"hosts": self.hosts, "file_system": str(self.file_system)}
        facts["one_folder"] = self.findings is not None
        if self.findings is not None:
            findings = {name: dataclasses.asdict(found) for name, found in self.findings.items()}
            facts |= {"choice": self.choice(), "findings": findings}
        return facts


def probe_job(job: JobConfig, nodes: int | None) -> JobConfig:
    """The job to measure with: a core on each of two nodes, or as many as the allocation has.
    UsageError where so many cannot be had."""
    if not commands.available():
        if nodes not in (None, 1):
            raise UsageError(f"--nodes {nodes}, but there is no Slurm here")
        return dataclasses.replace(job, nodes=1)
    inside = allocation.allocated_nodes()
    nodes = inside or 2 if nodes is None else nodes
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} must be at least 1")
    if inside and nodes > inside:
        raise UsageError(f"--nodes {nodes}, but this allocation has {inside}")
    return dataclasses.replace(job, nodes=nodes, cpus_per_task=1)


def measure(site: Site, nodes: int, folder: Path) -> Measurement:
    """Compares all kinds of locks on the first nodes of a site; AgentError where one does not
    answer."""
    names = list(site.hosts)[:nodes]
    with Agents({name: site.commands[name] for name in names}, site.env) as agents:
        places = agents.ask("place", {name: {"folder": str(folder)} for name in names}, _START_S)
        for name, place in places.items():
            if isinstance(place, AgentError):
                raise AgentError(f"{name}: {place.message}")
        here = FileSystem(**places[names[0]]["file_system"])
        ask = lock_probe.ask_agents(agents, names, folder, _ANSWER_S)
        return Measurement(
            hosts=[places[name]["host"] for name in names],
            file_system=here,
            findings=lock_probe.probe(ask, nodes, here),
        )


def table(found: Measurement) -> list[str]:
    """The findings, a line for each primitive."""
    if found.findings is None:
        return []
    titles = ("", "this node", "other nodes", "unlock", "exit", "SIGKILL")
    rows = [(name, *_cells(finding)) for name, finding in found.findings.items()]
    seen_from = f"{found.file_system}, seen from {', '.join(found.hosts)}"
    return [seen_from, "", *aligned([titles, *rows]), ""]


def _cells(finding: Finding) -> list[str]:
    if finding.error:
        return [finding.error, *[""] * 4]
    excludes = {True: "excludes", False: "DOES NOT EXCLUDE", None: "unknown"}
    releases = {True: "releases", False: "STAYS LOCKED", None: "unknown"}
    ends = (finding.on_unlock, finding.on_exit, finding.on_kill)
    places = (finding.on_node, finding.between_nodes)
    return [*(excludes[each] for each in places), *(releases[each] for each in ends)]


def conclude(found: Measurement) -> list[str]:
    """Records the choice, if nodes were compared; what follows from it. ProbeError where no kind of
    lock holds."""
    choice = found.choice()
    if found.findings is None or choice is None:
        return [
            f"not one folder: {', '.join(found.hosts)} each have their own there "
            f"({found.file_system})",
            "locks need not hold between nodes; nothing is recorded",
        ]
    if len(found.hosts) == 1:
        return [
            f"one node cannot know what holds between nodes; default here: {choice}",
            "measure between two: salloc --nodes 2 slurmft doctor locks DIR",
        ]
    lines = [f"choice: {choice}"]
    try:
        path = lock_probe.record(found.file_system, found.findings, len(found.hosts))
        lines.append(f"recorded for {found.file_system}; your runs use it: {path}")
    except (OSError, RuntimeError) as error:
        lines.append(f"not recorded ({error}): give --file-locks {choice} to runs")
    if choice == "soft":
        lines.append("warning: a process that is killed leaves its soft locks on other nodes")
    return lines
