"""`slurmft doctor`: an examination of the cluster from this host, and on its nodes: all of them are
asked at once, then `rules` compares their answers."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.cluster.slurm import allocation, commands
from slurmft.core.agents import AgentError, Agents
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.filesystem import FileSystem
from slurmft.core.text import some
from slurmft.plugins.examine import lock_probe, login, rules
from slurmft.plugins.examine.checks import Check, Level, Report, failure, ok, warning
from slurmft.plugins.examine.host import software
from slurmft.plugins.examine.lock_probe import LockOperations
from slurmft.plugins.examine.nodes import Site, open_site
from slurmft.plugins.examine.rules import Answers, group_by_value

_START_S, _ANSWER_S, _REACH_S = 20.0, 8.0, 4.0
_SEND_S, _SEND_TRIES = 0.3, 2


def examine_cluster(
    job: JobConfig,
    *,
    nodes_asked: bool,
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
        quick: without devices and collectives.
        say: is told what is under way.
    """
    began, report = time.monotonic(), Report()
    say("examining this host ...")
    report.checks += login.examine_this_host(job)
    with_slurm = commands.available() and job.cluster != "local"
    can_have_nodes = with_slurm or job.cluster != "slurm"  # else the first check says why not
    if can_have_nodes and (nodes_asked or (with_slurm and allocation.allocated_nodes())):
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
    """By time.monotonic(): what is not measured by then is not measured."""
    report: Report
    """Takes the checks, and all that is measured."""
    facts: Answers = field(default_factory=dict)
    """Of each node that answers."""

    def run(self, quick: bool) -> None:
        """One part after another; a part that fails leaves the others alone. The quick ones are
        those without devices and collectives."""
        self._ask_facts()
        parts = [self._nodes, self._network, self._folders]
        parts += [] if quick else [self._speeds]
        for part in parts if self.facts else ():
            try:
                for check in part():
                    self.report.checks.append(check)
            except (SlurmftError, OSError) as error:
                self.report.checks.append(failure(part.__name__.strip("_"), one_line(error)))

    def _left(self, limit_s: float) -> float:
        return max(0.5, min(limit_s, self.deadline - time.monotonic()))

    def _ask(
        self,
        operation: str,
        arguments: Mapping[str, Mapping[str, Any]],
        limit_s: float,
        about: str,
        hint: str | None = None,
    ) -> Answers:
        """The answers; errors become failures under `about`."""
        answers = self.agents.ask(operation, arguments, self._left(limit_s))
        errors = {n: a.message for n, a in answers.items() if isinstance(a, AgentError)}
        for text, names in group_by_value(errors).items():
            self.report.checks.append(failure(about, f"{some(names)}: {text}", hint))
        return {name: answers[name] for name in arguments if name not in errors}

    # --- the nodes ---

    def _ask_facts(self) -> None:
        folders = {k: str(v) for k, v in self.folders.items() if k != "tmp"}
        question = {"folders": folders, "job": dataclasses.asdict(self.job)}
        hint = "exclude it (--sbatch exclude=NODE for runs) and tell the site"
        asked = dict.fromkeys(self.site.hosts, question)
        self.facts = self._ask("facts", asked, _START_S, "nodes", hint)
        self.report.measured["nodes"] = self.facts
        if len(self.facts) == len(asked):
            self.report.checks.append(ok("nodes", f"{some(list(self.facts))} answer"))

    def _nodes(self) -> Iterator[Check]:
        yield from rules.cores(self.facts, self.job.cpus_per_task)
        yield from rules.devices(self.facts, self.job.gpus_per_node)
        yield from rules.memory(self.facts)
        yield from rules.versions(self.facts, software())
        yield from rules.hub(self.facts)

    # --- the network ---

    def _network(self) -> Iterator[Check]:
        token = secrets.token_hex(8)
        asked = {n: {"token": f"{n} {token}", "job_id": self.site.job_id} for n in self.facts}
        ports = self._ask("listen", asked, _ANSWER_S, "ports")
        self.report.measured["ports"] = ports
        yield from self._fabric(list(ports))
        peers = {
            n: {
                "token": f"{n} {token}",
                "ports": {k: found[k] for k in ("rendezvous", "ephemeral")},
            }
            for n, found in ports.items()
        }
        question = {
            start: {"peers": {self.site.hosts[n]: peers[n] for n in goals}, "timeout_s": _REACH_S}
            for start, goals in rules.partners(list(ports)).items()
        }
        answers = self._ask("reach", question, _REACH_S + 4, "network")
        names = {self.site.hosts[n]: n for n in ports}
        seen = {n: {names[h]: what for h, what in hosts.items()} for n, hosts in answers.items()}
        self.report.measured["reach"] = seen
        yield from rules.reach(seen)
        self.report.measured["usable"] = rules.healthy(list(seen), rules.broken_pairs(seen))
        yield from rules.clocks(seen)
        yield from self._links(ports)

    def _fabric(self, names: Sequence[str]) -> list[Check]:
        hosts = [self.site.hosts[n] for n in names]
        common = {"hosts": hosts, "interface": self.job.interface}
        asked = {n: common | {"rank": i} for i, n in enumerate(names)}
        chosen = self._ask("socket_interface", asked, _ANSWER_S, "fabric")
        self.report.measured["interfaces"] = chosen
        return rules.fabric({n: self.facts[n]["networks"] for n in chosen}, chosen)

    def _links(self, ports: Answers) -> list[Check]:
        """Measures between neighbours in a ring; no node is in two pairs at the same time.

        Measures again where one looks slow: something else may have used the link.
        """
        rates: dict[tuple[str, str], float] = {}
        for _ in range(_SEND_TRIES):
            for pairs in rules.rounds(self.report.measured["usable"]):
                for pair, rate in self._send(pairs, ports).items():
                    rates[pair] = max(rate, rates.get(pair, 0.0))
            found = list(rules.links(rates))
            if all(check.level == Level.OK for check in found):
                break
        measured = {f"{a} to {b}": rate for (a, b), rate in rates.items()}
        self.report.measured["links_bytes_s"] = measured
        return found

    def _send(
        self, pairs: Sequence[tuple[str, str]], ports: Answers
    ) -> dict[tuple[str, str], float]:
        """Bytes per second of these pairs, all of which send at the same time."""
        common = {"seconds": _SEND_S, "timeout_s": _REACH_S}
        asked = {
            start: common | {"host": self.site.hosts[goal], "port": ports[goal]["ephemeral"]}
            for start, goal in pairs
        }
        rates = self._ask("send", asked, _ANSWER_S, "links")
        return {pair: rates[pair[0]] for pair in pairs if pair[0] in rates}

    # --- folders and locks ---

    def _folders(self) -> Iterator[Check]:
        for what in ("runs", "cache", "tmp", "shm"):
            yield from rules.rooms(what, {n: f["rooms"][what] for n, f in self.facts.items()})
            if what in self.folders and what != "tmp" and len(self.facts) > 1:
                yield from self._sharing(what, self.folders[what])

    def _sharing(self, what: str, folder: Path) -> list[Check]:
        """Whether all nodes see what this host writes there; if so, which locks hold there."""
        names = list(self.facts)
        place = next(p for p in (folder, *folder.parents) if p.is_dir())
        mark = f"{secrets.token_hex(6)}-seen"
        operations = LockOperations()
        if operations.lock(str(place), "write", "-", mark) != "yes":
            return []  # the check of the folder says why
        try:
            question = {"folder": str(place), "operation": "see", "primitive": "-", "name": mark}
            seen = self._ask("lock", dict.fromkeys(names, question), _ANSWER_S, what)
        finally:
            operations.lock(str(place), "clear", "-", mark)
        blind = [n for n, answer in seen.items() if answer != "yes"]
        if blind and what == "runs":
            hint = "choose a --runs-dir on a file system that all nodes share"
            text = f"{some(blind)} do not see what this host writes in {place}"
            return [failure(what, text, hint)]
        if blind:
            return [ok(what, f"{some(blind)} have a {place} of their own: each node fills its own")]
        return self._locks(what, place)

    def _locks(self, what: str, place: Path) -> list[Check]:
        names = list(self.facts)
        fields = self.facts[names[0]]["rooms"][what].get("file_system")
        here = FileSystem(**fields) if fields else None
        if here is None or self.site.simulated or not here.is_shared:
            kind = "one machine" if self.site.simulated else f"{here}, not shared by its type"
            return [ok(f"{what} locks", f"not measured: {kind}")]
        ask = lock_probe.ask_agents(self.agents, names, place, self._left(_ANSWER_S))
        found = lock_probe.probe(ask, len(names), here, thorough=False)
        if found is None:
            return []
        choice = lock_probe.choose(found, here)
        with suppress(OSError, RuntimeError):
            lock_probe.record(here, found, len(names))
        others = ", ".join(f"{p} does not" for p, f in found.items() if p != choice and not f.good)
        text = f"{choice} holds between {some(names)} on {here}" + (f"; {others}" if others else "")
        return [ok(f"{what} locks", text, choice=choice)]

    # --- devices and collectives ---

    def _speeds(self) -> Iterator[Check]:
        usable = self.report.measured.get("usable", [])
        ports = self.report.measured.get("ports", {})
        if not usable:
            return
        left_s = self.deadline - time.monotonic() - 2
        if left_s < 5:
            text = "not measured: the time limit was reached"
            yield warning("speeds", text, "allow more time: --within 120")
            return
        common = {
            "hosts": [self.site.hosts[n] for n in usable],
            "port": ports[usable[0]]["torchrun"],
            "id": self.site.job_id,
            "job": dataclasses.asdict(self.job) | {"nodes": len(usable)},
            "timeout_s": left_s,
        }
        asked = {n: common | {"rank": i} for i, n in enumerate(usable)}
        answers = self._ask("speeds", asked, left_s + 2, "speeds")
        ranks = {n: a["ranks"] for n, a in answers.items()}
        self.report.measured["speeds"] = ranks
        missing = [n for n in self.facts if n not in usable]
        if missing:
            text = f"measured without {some(missing)}"
            yield warning("speeds", text, "the checks of names and ports say why")
        yield from rules.torchrun(answers)
        yield from rules.matmul(ranks)
        yield from rules.all_reduce(ranks.get(usable[0], []))
