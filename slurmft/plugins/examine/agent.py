"""The agent on a node: `python -m slurmft.plugins.examine.agent [SIMULATED NODE]`.

Its operations are all that an examination does on a node; `agents` carries requests and answers.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.core import decode, process
from slurmft.core.config import JobConfig
from slurmft.core.files import write_json
from slurmft.core.options import build
from slurmft.core.trusted import temporary_place
from slurmft.node import preparation, rendezvous, sealed, start
from slurmft.node.rendezvous import Rendezvous
from slurmft.plugins.examine import connections, inspection, node_use
from slurmft.plugins.examine.agents import serve
from slurmft.plugins.examine.lock_operations import LockOperations
from slurmft.plugins.examine.measurements import RankReport, SpeedReport
from slurmft.plugins.examine.report import NodeReport

REQUEST = "request.json"
"""File with the request to the microbenchmarks: {"backend": of --backend, "seconds": for all}."""

# Characters of torchrun's log in which its error is looked for.
_TAIL = 1500


class Agent:
    """The operations, by name. `job` has fields of JobConfig: how a run would use the node."""

    # `serve` looks an operation up here, by the name that the request has.
    listen = staticmethod(connections.listen)
    reach = staticmethod(connections.reach_all)
    send = staticmethod(connections.send)

    def __init__(self) -> None:
        self.lock = LockOperations().lock

    def inspect(
        self,
        folders: dict[str, str],
        job: dict[str, Any] | None = None,
    ) -> NodeReport:
        """Reports on the node; see `inspection.inspect`."""
        paths = {purpose: Path(path) for purpose, path in folders.items()}
        if job is None:
            return inspection.inspect(paths)
        return inspection.inspect(paths, build(JobConfig, job))

    def describe(self, job: dict[str, Any]) -> list[str]:
        """Returns lines that say what the node is, and how a run would use it."""
        return node_use.describe(build(JobConfig, job))

    def socket_interface(
        self,
        hosts: Sequence[str],
        rank: int,
        interface: str | None,
    ) -> str | None:
        """Returns the interface that a run's collectives would use."""
        return _rendezvous(hosts, rank, interface).socket_interface()

    def speeds(
        self,
        hosts: Sequence[str],
        rank: int,
        port: int,
        id: str,
        secret: str,
        job: dict[str, Any],
        timeout_s: float,
    ) -> SpeedReport:
        """Measures devices and collectives under torchrun, as a run starts it."""
        config = inspection.config(build(JobConfig, job))
        profile = preparation.use_of_node(config, os.environ)
        rdzv = _rendezvous(hosts, rank, config.job.interface, port, id)
        environment = preparation.training_environment(profile, rdzv, os.environ)
        environment[sealed.SECRET] = secret
        # A rank that is about to end may still write there: that is no fault of the node.
        with tempfile.TemporaryDirectory(
            dir=temporary_place(), ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            (folder / "logs").mkdir()
            # Collectives have a third of the time: before them torch is imported.
            request = {"backend": config.job.backend, "seconds": timeout_s / 3}
            write_json(folder / REQUEST, request)
            command = start.node_command(config, folder, rdzv, str(profile.nproc))
            problem, is_late = _run(command, environment, folder / "log", timeout_s)
            ranks = []
            for path in sorted(folder.glob("rank-*.json")):
                report = decode.read(path, RankReport)
                if report is not None:  # else it was killed while it wrote
                    ranks.append(report)
        return SpeedReport(problem=problem, is_late=is_late, ranks=tuple(ranks))


def _run(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    limit_s: float,
) -> tuple[str | None, bool]:
    """Runs torchrun; returns why it failed, or None, and if it reached the time limit."""
    with open(log, "wb") as file:
        child = process.start(command, env=environment, stdout=file, stderr=file)
        try:
            code = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.end(child)
            return f"torchrun did not end within {limit_s:.0f} s", True
    if code == 0:
        return None, False
    end_of_log = log.read_text(errors="replace")[-_TAIL:]
    last = _last_error(end_of_log)
    return f"torchrun ended with exit code {code}: {last}", False


def _last_error(text: str) -> str:
    """Returns the last line with an error; without one, the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it printed nothing"
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1]


def _rendezvous(
    hosts: Sequence[str],
    rank: int,
    interface: str | None,
    port: int = 0,
    id: str = "",
) -> Rendezvous:
    if interface is None and rendezvous.LOCAL_NODE in os.environ:
        interface = "lo"  # a simulated node
    return Rendezvous(
        hosts=tuple(hosts),
        node_rank=rank,
        port=port,
        # Nobody listens there: `connections` tries whether nodes reach each other.
        check_port=0,
        id=id,
        interface=interface,
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        os.environ[rendezvous.LOCAL_NODE] = sys.argv[1]
    serve(Agent())
