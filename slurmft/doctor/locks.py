"""`slurmft doctor`: what a cluster is like, measured on its nodes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from slurmft.core.errors import Exit
from slurmft.core.filesystem import FileSystem
from slurmft.core.text import aligned
from slurmft.locks import probe
from slurmft.locks.probe import Ask, Finding, Findings


def examine(ask: Ask, nodes: int, as_json: bool = False) -> int:
    """Measures, records and prints.

    Raises:
        ProbeError: no kind of lock holds, or an agent gives no answer.
    """
    places = [json.loads(ask(agent, "place")) for agent in range(nodes)]
    hosts, here = [place[0] for place in places], FileSystem.of_fields(places[0][1:])
    found = probe.probe(ask, nodes, here)
    facts: dict[str, Any] = {"hosts": hosts, "file_system": str(here), "one_folder": bool(found)}
    if found is None:
        lines = [
            f"not one folder: {', '.join(hosts)} each have their own there ({here})",
            "locks need not hold between nodes; nothing is recorded",
        ]
    else:
        if not as_json:  # before an error that nothing holds
            print(f"{here}, seen from {', '.join(hosts)}\n\n{table(found)}\n")
        choice = probe.choose(found, here)
        findings = {name: dataclasses.asdict(finding) for name, finding in found.items()}
        facts |= {"choice": choice, "findings": findings}
        lines = conclusion(here, found, nodes, choice)
    print(json.dumps(facts) if as_json else "\n".join(lines))
    return Exit.OK


def conclusion(here: FileSystem, found: Findings, nodes: int, choice: str) -> list[str]:
    """What follows from the findings; records them if nodes were compared."""
    if nodes == 1:
        return [
            f"one node cannot know what holds between nodes; default here: {choice}",
            "measure it in an allocation of two: salloc --nodes 2 slurmft doctor locks DIR",
        ]
    lines = [f"choice: {choice}"]
    try:
        path = probe.record(here, found, nodes)
        lines.append(f"recorded for {here}, and used by your runs: {path}")
    except (OSError, RuntimeError) as error:
        lines.append(f"not recorded ({error}): give --file-locks {choice} to runs")
    if choice == "soft":
        lines.append("warning: a process that is killed leaves its soft locks on other nodes")
    return lines


def table(found: Findings) -> str:
    """The findings, a line for each primitive."""
    titles = ("", "this node", "other nodes", "unlock", "exit", "SIGKILL", "cost")
    return "\n".join(aligned([titles, *(_row(name, finding) for name, finding in found.items())]))


def _row(name: str, finding: Finding) -> tuple[str, ...]:
    if finding.error:
        return (name, finding.error, *[""] * 5)

    def cell(value: bool | None, yes: str, no: str) -> str:
        return "unknown" if value is None else yes if value else no

    excludes = ("excludes", "DOES NOT EXCLUDE")
    released = ("releases", "STAYS LOCKED")
    return (
        name,
        cell(finding.on_node, *excludes),
        cell(finding.between_nodes, *excludes),
        *(cell(v, *released) for v in (finding.on_unlock, finding.on_exit, finding.on_kill)),
        "" if finding.cost_us is None else f"{finding.cost_us:.0f} us",
    )
