"""The preflight: every node examines itself and its way to the next one, before programs start.

Each task of a job reports to the head, by the connection of the reachability check. The head judges
the reports by the rules of doctor, for all: a node with a failure is named, and the job is requeued
without it.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from slurmft.core import interpreter, process
from slurmft.core.decode import decode_or_none, loads
from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import Failure
from slurmft.core.text import some
from slurmft.node import sealed
from slurmft.node.hardware import host_name, visible_gpus
from slurmft.node.peers import FAILED, PASSED, Peers
from slurmft.node.rendezvous import (
    HOSTS,
    Rendezvous,
    RendezvousError,
    TakenPortError,
    answer_checks,
    check_reachable,
    secret_ports,
)
from slurmft.plugins.examine import inspection
from slurmft.plugins.examine.report import LinkReport, NodeReport, Products
from slurmft.runs.rundir import RunDir

_TOPIC = "preflight"
_PRODUCTS_S = 60.0
# How much longer than the others the head may take.
_VERDICT_S = 30.0


class Preflight:
    """The part of one node. Its measurements start at once, beside the reachability check."""

    def __init__(self, run: RunDir, rendezvous: Rendezvous) -> None:
        self._run = run
        self._rendezvous = rendezvous
        self._began = time.monotonic()
        self._names = os.environ.get(HOSTS, host_name()).split(",")
        """Slurm's names for the nodes of the job, by rank."""
        # By its path, not by -m: no package is imported.
        command = interpreter.script(str(Path(__file__).with_name("matmul.py")))
        if visible_gpus(os.environ):
            command.append("gpu")
        self._products = process.start(
            command,
            env=interpreter.library_environment(dict(os.environ)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # Beside the process: nvidia-smi may take seconds.
        self._thread = ThreadPoolExecutor(max_workers=1)
        # Without folders of its own choice: it looks at /tmp and /dev/shm by itself.
        self._inspection = self._thread.submit(inspection.inspect, {})

    def passes(self, peers: Peers, wait_s: float) -> bool:
        """Returns True if all nodes may go on. Every task calls it.

        The head waits `wait_s` for the others, and records the bad nodes.
        """
        # Half of the time is for this node's way to the next one, so that its report is not late.
        report = self._report(wait_s / 2)
        if not self._rendezvous.is_head:
            peers.report(_TOPIC, asdict(report))
            decision = peers.heard_any((PASSED, FAILED), wait_s + _VERDICT_S)
            if decision is None:
                head = self._rendezvous.head
                raise RendezvousError(f"{head} has not judged the preflight")
            return decision == PASSED
        reports = [(time.time(), report)]
        for arrived_s, facts in peers.reports(_TOPIC, len(self._names) - 1, wait_s):
            other = decode_or_none(facts, NodeReport)
            if other is not None:  # whoever connects to the port may send anything
                reports.append((arrived_s, other))
        # 40 ms: only the head needs the rules
        from slurmft.plugins.examine import verdict

        checks = verdict.judge(reports, self._names)
        failures = verdict.failures_by_host(checks)
        self._record(verdict.speeds(checks), failures)
        peers.tell(FAILED if failures else PASSED)
        return not failures

    def _report(self, wait_s: float) -> NodeReport:
        links = self._links(wait_s)
        products = self._await_products()
        report = self._inspection.result()
        self._thread.shutdown()
        return replace(
            report,
            host=self._names[self._rendezvous.node_rank],
            time_s=time.time(),
            gpu_errors=report.gpu_errors + products.problems,
            # Of several GPUs the slowest: in a run, the others wait for it.
            tflop_s=min(products.tflop_s, default=None),
            links=links,
        )

    def _links(self, wait_s: float) -> dict[str, LinkReport]:
        """Tries to reach the next node of the ring, which may still be starting. All have reached
        the head."""
        rendezvous = self._rendezvous
        links = {}
        if not rendezvous.is_head:
            links[self._names[0]] = LinkReport(ports={"rendezvous": None})
        next_rank = rendezvous.node_rank + 1
        secret = sealed.secret_of(os.environ)
        is_last = next_rank == len(rendezvous.hosts)
        reason = None
        try:
            if not rendezvous.is_head:  # the head answers anyway
                answer_on_ring(rendezvous, secret)
            if not is_last:
                port, *other_ports = ring_ports(secret, next_rank)
                check_reachable(
                    rendezvous.host,
                    rendezvous.hosts[next_rank],
                    port,
                    rendezvous.id,
                    secret,
                    wait_s,
                    other_ports=other_ports,
                )
        except RendezvousError as error:
            reason = error.reason
        if not is_last:  # the last one is followed by the head
            links[self._names[next_rank]] = LinkReport(ports={"rendezvous": reason})
        return links

    def _await_products(self) -> Products:
        """Reads what `matmul` prints. Nothing where numpy or torch are not imported in time: what
        they are read from may be slow."""
        try:
            printed, _ = self._products.communicate(timeout=_PRODUCTS_S)
            return loads(printed, Products)
        except (subprocess.TimeoutExpired, ValueError):
            process.end(self._products)
            return Products()

    def _record(self, speeds: str, failures: Mapping[str, str]) -> None:
        for host, problem in failures.items():
            hint = "tell the site; `--preflight off` starts without this check"
            error = SlurmftError(f"preflight: {problem}", hint)
            where = f"node {host}"
            self._run.add(Failure.of(where, error, bad_host=host, exclude=True))
        seconds = time.monotonic() - self._began
        text = f"{len(self._names)} node(s) in {seconds:.1f} s, {speeds}"
        if failures:
            text += f"; bad: {some(list(failures))}"
        # 40 ms, with the types of all records
        from slurmft.runs.records import RecordWriter

        event = {"event": "preflight", "text": text, "seconds": seconds}
        with contextlib.suppress(OSError):  # a full disk ends no run
            RecordWriter(self._run.records).write(event)


def ring_ports(secret: str, rank: int) -> list[int]:
    """Returns the ports on one of which a node answers the one before it.

    A port that others knew before, as that of the head, could be taken first: a good node would be
    excluded.
    """
    return secret_ports(secret, f"preflight {rank}")


def answer_on_ring(rendezvous: Rendezvous, secret: str) -> None:
    """Answers the node before this one, in the background.

    Raises:
        TakenPortError: other processes listen on all ports of this node.
    """
    *ports, last = ring_ports(secret, rendezvous.node_rank)
    place = (rendezvous.id, secret, rendezvous.addresses())
    for port in ports:
        with contextlib.suppress(TakenPortError):
            answer_checks(port, *place)
            return
    answer_checks(last, *place)
