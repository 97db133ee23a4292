"""The examination of a cluster: the checks of this host, then of its nodes, all asked at once."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurmft.cluster.slurm import allocation, commands
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.text import some
from slurmft.node import sealed
from slurmft.plugins.examine import (
    comparison,
    lock_probe,
    login,
    network_rules,
    node_rules,
    speed_rules,
)
from slurmft.plugins.examine.agents import AgentError, Agents
from slurmft.plugins.examine.checks import (
    Check,
    Report,
    failure,
    merged,
    ok,
    problems,
    warning,
)
from slurmft.plugins.examine.comparison import Pair
from slurmft.plugins.examine.host import software
from slurmft.plugins.examine.lock_operations import LockOperations
from slurmft.plugins.examine.measurements import Measurements, SpeedReport
from slurmft.plugins.examine.report import LinkReport, NodeReport
from slurmft.plugins.examine.site import Site, open_site

T = TypeVar("T")

# How long an agent may take to start and to report.
_START_S = 20.0
_ANSWER_S = 8.0
# How long a node tries to reach its partners.
_REACH_S = 4.0
# How long an answer may be under way, beside what is measured.
_UNDER_WAY_S = 4.0
# How long each pair of neighbours sends, and how often where a link looks slow.
_SEND_S = 0.3
_SEND_TRIES = 2
# How long the agents may take to end torchrun at the time limit.
_MARGIN_S = 2.0
# With less time left, devices and collectives are not measured.
_LEAST_SPEEDS_S = 5.0

# The folders that are checked on nodes.
_ON_NODES = ("runs", "cache", "tmp", "shm")


def examine_cluster(
    job: JobConfig,
    *,
    with_nodes: bool,
    limit_s: float,
    wait_s: float,
    quick: bool,
    say: Callable[[str], None],
) -> Report:
    """Examines this host; and nodes, where they are asked for or an allocation has them.

    Args:
        job: how a run would use the cluster.
        limit_s: for the nodes' part; what is not measured by then is left out.
        wait_s: how long a new allocation may wait in the queue.
        quick: leaves out devices and collectives.
        say: is called with what is under way.
    """
    began = time.monotonic()
    report = Report()
    say("examining this host ...")
    report.checks += login.examine_this_host(job)
    with_slurm = commands.available() and job.cluster != "local"
    # else the first check says why not
    has_nodes = with_slurm or job.cluster != "slurm"
    is_inside = with_slurm and allocation.allocated_nodes() is not None
    if has_nodes and (with_nodes or is_inside):
        try:
            with open_site(job, wait_s, with_slurm, say) as site:
                report.queued_s = site.queued_s
                say(f"examining {len(site.hosts)} node(s) ...")
                deadline = time.monotonic() + limit_s
                with Agents(site.commands, site.env) as agents:
                    folders = login.folders(job.runs_dir)
                    Examination(site, agents, job, folders, deadline, report).run(quick)
        except SlurmftError as error:
            report.checks.append(failure("allocation", error.message, error.hint))
    report.seconds = time.monotonic() - began - report.queued_s
    return report


@dataclass
class Examination:
    """An examination of a site's nodes; `run` does it."""

    site: Site
    agents: Agents
    job: JobConfig
    folders: dict[str, Path]
    deadline: float
    """On time.monotonic(): what is not measured by then is left out."""
    report: Report
    """Takes the checks and the measurements."""

    @property
    def _measured(self) -> Measurements:
        return self.report.measured

    @property
    def _nodes(self) -> dict[str, NodeReport]:
        """The reports of the nodes that answer."""
        return self.report.measured.nodes

    def run(self, quick: bool) -> None:
        """Runs one part after another; a part that fails leaves the others alone. `quick` leaves
        out devices and collectives."""
        self._inspect()
        parts = [self._systems, self._network, self._folders]
        if not quick:
            parts.append(self._speeds)
        if not self._nodes:
            return
        for part in parts:
            try:
                for check in part():
                    self.report.checks.append(check)
            except (SlurmftError, OSError) as error:
                about = part.__name__.strip("_")
                self.report.checks.append(failure(about, one_line(error)))

    def _left_s(self, limit_s: float) -> float:
        left_s = self.deadline - time.monotonic()
        # At the deadline, too, a question has half a second: none would always be a time-out.
        return max(0.5, min(limit_s, left_s))

    def _ask(
        self,
        operation: str,
        arguments: Mapping[str, Mapping[str, Any]],
        limit_s: float,
        about: str,
        kind: type[T],
        hint: str | None = None,
    ) -> dict[str, T]:
        """Asks nodes for an operation; returns the answers, decoded as `kind`. Errors become
        failures under `about`."""
        answers = self.agents.ask(operation, arguments, self._left_s(limit_s), kind)
        errors = []
        good_answers = {}
        for node in arguments:
            answer = answers[node]
            if isinstance(answer, AgentError):
                errors.append((node, failure(about, answer.message, hint)))
            else:
                good_answers[node] = answer
        # Nodes with the same error are one line.
        self.report.checks += merged(errors)
        return good_answers

    # --- the nodes ---

    def _inspect(self) -> None:
        folders = {purpose: str(path) for purpose, path in self.folders.items()}
        folders.pop("tmp", None)  # each node has its own
        question = {"folders": folders, "job": self.job.values()}
        hint = "exclude it (--sbatch exclude=NODE for runs) and tell the site"
        requests = dict.fromkeys(self.site.hosts, question)
        nodes = self._ask("inspect", requests, _START_S, "nodes", NodeReport, hint)
        self._measured.nodes = nodes
        if len(nodes) == len(requests):
            names = some(list(nodes))
            self.report.checks.append(ok("nodes", f"{names} answer"))

    def _systems(self) -> Iterator[Check]:
        systems = {}
        for node, report in self._nodes.items():
            if report.system:
                systems[node] = report.system
        yield from node_rules.cores(systems, self.job.cpus_per_task)
        yield from node_rules.devices(systems, self.job.gpus_per_node)
        yield from node_rules.gpus(self._nodes)
        yield from node_rules.memory(systems)
        yield from node_rules.versions(systems, software())
        yield node_rules.hub(systems)

    # --- the network ---

    def _network(self) -> Iterator[Check]:
        # A host that answers with another token is not the node of that name.
        secret = secrets.token_hex(8)
        tokens = {node: f"{node} {secret}" for node in self._nodes}
        requests = {}
        for node, token in tokens.items():
            requests[node] = {"token": token}
        ports = self._ask("listen", requests, _ANSWER_S, "ports", dict[str, int])
        self._measured.ports = ports
        yield from self._fabric(list(ports))
        links = self._reach(tokens)
        self._measured.links = links
        yield from network_rules.reach(links)
        # What follows would only wait for the other nodes.
        self._measured.usable = network_rules.usable(list(links), links)
        yield from network_rules.clocks_of_links(links)
        yield from self._rates()

    def _fabric(self, names: Sequence[str]) -> list[Check]:
        hosts = [self.site.hosts[name] for name in names]
        requests = {}
        for rank, name in enumerate(names):
            requests[name] = {
                "hosts": hosts,
                "rank": rank,
                "interface": self.job.interface,
            }
        kind: Any = str | None
        chosen = self._ask("socket_interface", requests, _ANSWER_S, "fabric", kind)
        self._measured.interfaces = chosen
        networks = {}
        for name in chosen:
            system = self._nodes[name].system
            networks[name] = system.networks if system else ()
        return network_rules.fabric(networks, chosen)

    def _reach(self, tokens: Mapping[str, str]) -> dict[str, dict[str, LinkReport]]:
        """Lets the nodes try to reach their partners; returns from -> to -> the connections."""
        hosts = self.site.hosts
        ports: dict[str, dict[str, int]] = {}
        for node, all_ports in self._measured.ports.items():
            ports[node] = {}
            # torchrun's is left free.
            for name in ("rendezvous", "ephemeral"):
                ports[node][name] = all_ports[name]
        requests = {}
        for start, goals in comparison.partners(list(ports)).items():
            peers = {}
            for goal in goals:
                peers[hosts[goal]] = (tokens[goal], ports[goal])
            requests[start] = {"peers": peers, "timeout_s": _REACH_S}
        kind = dict[str, LinkReport]
        answers = self._ask("reach", requests, _REACH_S + _UNDER_WAY_S, "network", kind)
        # Agents know the names of the fabric; the report has Slurm's.
        node_of = {hosts[node]: node for node in ports}
        links: dict[str, dict[str, LinkReport]] = {}
        for start, link_to in answers.items():
            links[start] = {}
            for host, link in link_to.items():
                links[start][node_of[host]] = link
        return links

    def _rates(self) -> list[Check]:
        """Measures the links between neighbours in a ring; no node is in two pairs at the same
        time. Measures again where one looks slow: something else may have used the link."""
        rates: dict[Pair, float] = {}
        checks: list[Check] = []
        for _ in range(_SEND_TRIES):
            for pairs in comparison.rounds(self._measured.usable):
                for pair, rate in self._send(pairs).items():
                    rates[pair] = max(rate, rates.get(pair, 0.0))
            checks = list(network_rules.links(rates))
            if not problems(checks):
                break
        for (start, goal), rate in rates.items():
            self._measured.links_bytes_s[f"{start} to {goal}"] = rate
        return checks

    def _send(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Returns the bytes per second of these pairs, all of which send at the same time."""
        requests = {}
        for start, goal in pairs:
            requests[start] = {
                "host": self.site.hosts[goal],
                "port": self._measured.ports[goal]["ephemeral"],
                "seconds": _SEND_S,
                "timeout_s": _REACH_S,
            }
        rates = self._ask("send", requests, _ANSWER_S, "links", float)
        rate_of = {}
        for start, goal in pairs:
            if start in rates:  # else it failed, which `_ask` has reported
                rate_of[start, goal] = rates[start]
        return rate_of

    # --- folders and locks ---

    def _folders(self) -> Iterator[Check]:
        for purpose in _ON_NODES:
            yield from node_rules.folders(purpose, self._nodes)
            if purpose in ("runs", "cache") and len(self._nodes) > 1:
                yield from self._sharing(purpose, self.folders[purpose])

    def _sharing(self, purpose: str, folder: Path) -> list[Check]:
        """Checks that all nodes see what this host writes; if so, which locks hold there."""
        # The folder may be made only by the first run: the one above it is of the same file system.
        candidates = [folder, *folder.parents]
        place = next(path for path in candidates if path.is_dir())
        mark = f"{secrets.token_hex(6)}-seen"
        here = LockOperations()
        if here.lock(str(place), "write", "-", mark) != "yes":
            return []  # the check of the folder says why
        question = {
            "folder": str(place),
            "operation": "see",
            "primitive": "-",
            "name": mark,
        }
        requests = dict.fromkeys(self._nodes, question)
        try:
            seen = self._ask("lock", requests, _ANSWER_S, purpose, str)
        finally:
            # Also where no node answers: the folder is the user's own.
            here.lock(str(place), "clear", "-", mark)
        blind = []
        for node, answer in seen.items():
            if answer != "yes":
                blind.append(node)
        if not blind:
            return self._locks(purpose, place)
        if purpose == "runs":
            hint = "choose a --runs-dir on a file system that all nodes share"
            text = f"what this host writes in {place} is not seen there"
            return [failure(purpose, text, hint, hosts=blind)]
        text = f"{some(blind)} have a {place} of their own: each node fills its own"
        return [ok(purpose, text)]

    def _locks(self, purpose: str, place: Path) -> list[Check]:
        about = f"{purpose} locks"
        if self.site.simulated:
            return [ok(about, "not measured: one machine")]
        names = list(self._nodes)
        file_system = self._nodes[names[0]].folders[purpose].file_system
        if file_system is None or not file_system.is_shared:
            return [ok(about, f"not measured: {file_system}, not shared by its type")]
        left_s = self._left_s(_ANSWER_S)
        ask = lock_probe.ask_agents(self.agents, names, place, left_s)
        findings = lock_probe.probe(ask, len(names), file_system, thorough=False)
        if findings is None:
            return []
        choice = lock_probe.choose(findings, file_system)
        # What holds is in the report also where nothing can be recorded, as without a home folder.
        with suppress(OSError, RuntimeError):
            lock_probe.record(file_system, findings, len(names))
        text = f"{choice} holds between {some(names)} on {file_system}"
        for name, finding in findings.items():
            if name != choice and not finding.good:
                text += f"; {name} does not"
        return [ok(about, text, choice=choice)]

    # --- devices and collectives ---

    def _speeds(self) -> Iterator[Check]:
        usable = self._measured.usable
        if not usable:
            return
        left_s = self.deadline - time.monotonic() - _MARGIN_S
        if left_s < _LEAST_SPEEDS_S:
            text = "not measured: the time limit was reached"
            yield warning("speeds", text, "allow more time: --within 120")
            return
        question = {
            "hosts": [self.site.hosts[node] for node in usable],
            "port": self._measured.ports[usable[0]]["torchrun"],
            "id": self.site.job_id,
            "secret": sealed.new_secret(),
            "job": self.job.values() | {"nodes": len(usable)},
            "timeout_s": left_s,
        }
        requests = {}
        for rank, node in enumerate(usable):
            requests[node] = {**question, "rank": rank}
        answer_s = left_s + _MARGIN_S
        speeds = self._ask("speeds", requests, answer_s, "speeds", SpeedReport)
        self._measured.speeds = speeds
        missing = [node for node in self._nodes if node not in usable]
        if missing:
            text = f"measured without {some(missing)}"
            yield warning("speeds", text, "the checks of names and ports say why")
        yield from speed_rules.torchrun(speeds)
        # Simulated nodes disturb each other: they share a machine.
        yield from speed_rules.matmul(speeds, compares=not self.site.simulated)
        if usable[0] in speeds:
            yield from speed_rules.all_reduce(speeds[usable[0]])
