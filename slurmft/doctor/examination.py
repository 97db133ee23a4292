"""What an allocation's nodes are like: asked of all of them at once, then judged side by side."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.filesystem import FileSystem
from slurmft.doctor import rules
from slurmft.doctor.agent import software
from slurmft.doctor.checks import Check, failure, in_words, ok, same_everywhere, slow_ones, warning
from slurmft.doctor.nodes import Nodes, Site, new_token
from slurmft.doctor.rules import Answers, some
from slurmft.locks import probe
from slurmft.locks.probe import ProbeError

_START_S, _ANSWER_S, _REACH_S = 20.0, 8.0, 4.0
_SEND_S, _SEND_TRIES = 0.3, 2


@dataclass
class Examination:
    """An examination of the nodes of one allocation; `run` does it."""

    site: Site
    nodes: Nodes
    job: JobConfig
    folders: dict[str, Path]
    deadline: float
    """By time.monotonic(): what is not measured by then is not measured."""
    quick: bool = False
    """Without devices and collectives."""
    checks: list[Check] = field(default_factory=list)
    facts: Answers = field(default_factory=dict)
    """What each node that answers is."""
    found: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, for programs."""

    def run(self) -> None:
        """One part after another; a part that fails leaves the others alone."""
        took = self.found["seconds"] = {}
        began = time.monotonic()
        self._meet()
        took["meet"] = time.monotonic() - began
        parts = [self._judge_nodes, self._network, self._folders]
        parts += [] if self.quick else [self._speeds]
        for part in parts if self.facts else ():
            try:
                part()
            except (SlurmftError, OSError) as error:
                self.checks.append(failure(part.__name__.strip("_"), in_words(error)))
            took[part.__name__.strip("_")] = time.monotonic() - began - sum(took.values())

    def _left(self, most_s: float) -> float:
        return max(0.5, min(most_s, self.deadline - time.monotonic()))

    def _ask(
        self,
        what: str,
        arguments: Mapping[str, Mapping[str, Any]],
        most_s: float,
        about: str | None = None,
    ) -> Answers:
        """The good answers; the others are failures under `about`."""
        answers = self.nodes.ask(what, arguments, self._left(most_s))
        wrong = {n: a.message for n, a in answers.items() if isinstance(a, ProbeError)}
        for text, names in same_everywhere(wrong).items():
            self.checks.append(failure(about or what, f"{some(names)}: {text}"))
        return {name: answers[name] for name in arguments if name not in wrong}

    # --- who is there ---

    def _meet(self) -> None:
        given = {k: str(v) for k, v in self.folders.items() if k != "tmp"}
        job = {name: getattr(self.job, name) for name in JobConfig.__dataclass_fields__}
        question = {"folders": given, "job": job}
        answers = self.nodes.ask(
            "facts", dict.fromkeys(self.site.hosts, question), self._left(_START_S)
        )
        dead = {n: a.message for n, a in answers.items() if isinstance(a, ProbeError)}
        for text, names in same_everywhere(dead).items():
            cure = "leave it out (--sbatch exclude=NODE for runs), and tell the site"
            self.checks.append(failure("nodes", f"{some(names)} cannot be used: {text}", cure))
        self.facts = {name: answers[name] for name in self.site.hosts if name not in dead}
        self.found["nodes"] = self.facts
        if not dead:
            self.checks.append(ok("nodes", f"{some(list(self.facts))} answer"))

    def _judge_nodes(self) -> None:
        self.checks += rules.cores(self.facts, self.job.cpus_per_task)
        self.checks += rules.devices(self.facts, self.job.gpus_per_node)
        self.checks += rules.memory(self.facts)
        self.checks += rules.versions(self.facts, software())
        self.checks += rules.hub(self.facts)

    # --- the network ---

    def _network(self) -> None:
        token = new_token()
        job = self.site.job_id
        asked = {n: {"token": f"{n} {token}", "job_id": job} for n in self.facts}
        ports = self._ask("listen", asked, _ANSWER_S, "ports")
        self.found["ports"] = ports
        self._fabric(list(ports))
        peers = {
            self.site.hosts[n]: {
                "token": f"{n} {token}",
                "ports": {kind: port for kind, port in found.items() if kind != "torchrun"},
            }
            for n, found in ports.items()
        }
        question = {"peers": peers, "timeout_s": _REACH_S}
        seen = self._ask("reach", dict.fromkeys(ports, question), _REACH_S + 4, "network")
        self.found["reach"] = seen
        names = {self.site.hosts[n]: n for n in ports}
        self.checks += rules.reach(seen, names)
        broken = rules.broken_pairs(seen, names)
        self.found["usable"] = rules.healthy(list(seen), broken)
        self._clocks(ports, broken)
        self._links(ports, broken)

    def _fabric(self, names: Sequence[str]) -> None:
        hosts = [self.site.hosts[n] for n in names]
        asked = {n: {"hosts": hosts, "rank": i, "asked": self.job.interface}
                 for i, n in enumerate(names)}  # fmt: skip
        chosen = self._ask("interface", asked, _ANSWER_S, "fabric")
        self.found["interfaces"] = chosen
        self.checks += rules.fabric({n: self.facts[n]["networks"] for n in chosen}, chosen)

    def _clocks(self, ports: Answers, broken: set[tuple[str, str]]) -> None:
        first = next(iter(self.found["usable"]), "")
        asked = {
            n: {"host": self.site.hosts[first], "port": ports[first]["ephemeral"],
                "timeout_s": _REACH_S}
            for n in ports if n != first and (n, first) not in broken
        }  # fmt: skip
        if not asked:
            return
        found = self._ask("clock", asked, _ANSWER_S, "clocks")
        # What the first one's clock is ahead of theirs; its own is 0 ahead of itself.
        self.found["clocks"] = found
        behind = {n: -a["ahead_s"] for n, a in found.items()} | {first: 0.0}
        ways = {n: a["round_trip_s"] for n, a in found.items()}
        self.checks += rules.clocks(behind, ways)

    def _links(self, ports: Answers, broken: set[tuple[str, str]]) -> None:
        """What passes between neighbours in a ring; no node is in two pairs at the same time.

        Once more where a node looks slow: something else may have been under way.
        """
        names = [n for n in ports if n in self.found["usable"]]
        rates: dict[tuple[str, str], float] = {}
        for _ in range(_SEND_TRIES):
            for pairs in rules.rounds(names):
                for pair, rate in self._send(pairs, ports, broken).items():
                    rates[pair] = max(rate, rates.get(pair, 0.0))
            if not slow_ones(rules.best_links(rates), rules.SLOW_LINK):
                break
        self.found["links_bytes_s"] = {f"{a} to {b}": rate for (a, b), rate in rates.items()}
        self.checks += rules.links(rates)

    def _send(
        self, pairs: Sequence[tuple[str, str]], ports: Answers, broken: set[tuple[str, str]]
    ) -> dict[tuple[str, str], float]:
        """Bytes a second, of all these pairs at the same time."""
        asked = {}
        for start, goal in pairs:
            if (start, goal) not in broken:
                where = {"host": self.site.hosts[goal], "port": ports[goal]["ephemeral"]}
                asked[start] = where | {"seconds": _SEND_S, "timeout_s": _REACH_S}
        answers = self._ask("send", asked, _ANSWER_S, "links")
        return {(start, dict(pairs)[start]): rate for start, rate in answers.items()}

    # --- folders and locks ---

    def _folders(self) -> None:
        for what in ("runs", "cache", "tmp", "shm"):
            self.checks += rules.rooms(what, {n: f["rooms"][what] for n, f in self.facts.items()})
            if what in self.folders and what != "tmp" and len(self.facts) > 1:
                self.checks += self._is_common(what, self.folders[what])

    def _is_common(self, what: str, folder: Path) -> list[Check]:
        """Whether all nodes see what this host writes there; then, how locks hold."""
        names = list(self.facts)
        place = next(p for p in (folder, *folder.parents) if p.is_dir())
        mark = f"{secrets.token_hex(6)}-seen"
        mine = probe.Agent(place)
        if mine.do("write", "-", mark) != "yes":
            return []  # said already: it cannot be written
        try:
            question = {"folder": str(place), "operation": "see", "primitive": "-", "name": mark}
            seen = self._ask("lock", dict.fromkeys(names, question), _ANSWER_S, what)
        finally:
            mine.do("clear", "-", mark)
        blind = [n for n, answer in seen.items() if answer != "yes"]
        if blind and what == "runs":
            cure = "give --runs-dir on a file system that all nodes share"
            return [failure(what, f"{some(blind)} see no files that are written in {place} here",
                            cure)]  # fmt: skip
        if blind:
            return [ok(what, f"{some(blind)} have {place} to themselves: each fills its own")]
        return self._locks(what, place)

    def _locks(self, what: str, place: Path) -> list[Check]:
        names = list(self.facts)
        fields = self.facts[names[0]]["rooms"][what].get("file_system")
        here = FileSystem.of_fields(fields) if fields else None
        if here is None or self.site.simulated or not here.is_shared:
            kind = "one machine" if self.site.simulated else f"{here}, not shared by its type"
            return [ok(f"{what} locks", f"not measured: {kind}")]
        ask = self.nodes.lock_ask(names, place, self._left(_ANSWER_S))
        found = probe.probe(ask, len(names), here, thorough=False)
        if found is None:
            return []
        choice = probe.choose(found, here)
        with suppress(OSError, RuntimeError):
            probe.record(here, found, len(names))
        tried = ", ".join(f"{p} does not" for p, f in found.items() if p != choice and not f.good)
        text = f"{choice} holds between {some(names)} on {here}" + (f"; {tried}" if tried else "")
        return [ok(f"{what} locks", text, choice=choice)]

    # --- devices and collectives ---

    def _speeds(self) -> None:
        usable = self.found.get("usable", [])
        ports = self.found.get("ports", {})
        if not usable:
            return
        left_s = self.deadline - time.monotonic() - 2
        if left_s < 5:
            self.checks.append(warning("speeds", "not measured: no time was left",
                                       "give it more: --within 120"))  # fmt: skip
            return
        asked = self._speed_questions(usable, ports[usable[0]]["torchrun"], left_s)
        answers = self._ask("speeds", asked, left_s + 2)
        ranks = {n: a["ranks"] for n, a in answers.items()}
        self.found["speeds"] = ranks
        missing = [n for n in self.facts if n not in usable]
        if missing:
            text = f"measured without {some(missing)}"
            self.checks.append(warning("speeds", text, "the lines on the network say why"))
        self.checks += rules.torchrun(answers)
        self.checks += rules.products(ranks)
        self.checks += rules.all_reduce(ranks.get(usable[0], []))

    def _speed_questions(
        self, usable: Sequence[str], port: int, left_s: float
    ) -> dict[str, dict[str, Any]]:
        job = {name: getattr(self.job, name) for name in JobConfig.__dataclass_fields__}
        hosts = [self.site.hosts[n] for n in usable]
        common = {"hosts": hosts, "port": port, "id": self.site.job_id}
        common |= {"job": job | {"nodes": len(usable)}, "timeout_s": left_s}
        return {n: common | {"rank": i} for i, n in enumerate(usable)}
