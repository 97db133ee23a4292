"""What an agent on a node does for an examination: `python -m slurmft.plugins.examine.agent`."""

import contextlib
import dataclasses
import os
import platform
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from slurmft.core import filesystem, process
from slurmft.core import hub as core_hub
from slurmft.core.agents import serve
from slurmft.core.config import JobConfig, RunConfig, build
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.files import read_json, write_json
from slurmft.core.program import Program
from slurmft.node import hardware, rendezvous, task
from slurmft.node.rendezvous import Rendezvous
from slurmft.plugins.examine.host import call_all, software
from slurmft.plugins.examine.lock_probe import LockOperations

REQUEST = "request.json"
"""What the microbenchmarks are asked for: {"backend": of --backend, "seconds": for all of them}."""

_ROOM_S = 5.0
_CHUNK = bytes(2**20)
_TAIL = 1500


class Agent:
    """The operations; each answer is JSON."""

    def __init__(self) -> None:
        self.lock = LockOperations().lock

    def facts(self, folders: Mapping[str, str], job: Mapping[str, Any]) -> dict[str, Any]:
        """This node, what of it the job has, its versions, its free space.

        Args:
            folders: the folders in question, by what they are; "tmp" and "shm" are added.
            job: fields of JobConfig that say how a run would use the node.
        """
        here = hardware.detect(os.environ)
        places = {name: Path(path) for name, path in folders.items()}
        places |= {"tmp": Path(tempfile.gettempdir()), "shm": Path("/dev/shm")}
        looks: list[Callable[[], Any]] = [
            partial(_folder_facts, place) for place in places.values()
        ]
        looks.append(partial(core_hub.hub_in_reach, _ROOM_S - 1))
        *rooms, hub = call_all(_ROOM_S, looks)
        return {
            "hardware": here.facts(),
            "cores": len(here.cores),
            "mask_cpus": len(here.cpus),
            "available_mib": psutil.virtual_memory().available // 2**20,
            "software": software(),
            "networks": [
                [n.name, n.infiniband, n.speed_mbit_s, str(n)]
                for n in hardware.networks()
                if n.name in rendezvous.interfaces()
            ],
            "rooms": {n: _answer(room) for n, room in zip(places, rooms, strict=True)},
            "hub": hub is True,
            "profile": task.use_of_node(_config(job), os.environ).name,
        }

    def listen(self, token: str, job_id: str) -> dict[str, int]:
        """Listens on a port of the rendezvous' range and on an ephemeral one, from now on, and
        answers "who" with the token and its time. Returns both ports, and a free one for torchrun's
        store."""
        _Peer.token = token
        found = {"torchrun": rendezvous.free_ports(job_id, 1)[0]}
        ports = [p for p in rendezvous.candidate_ports(job_id) if p != found["torchrun"]]
        for name, tried in (("rendezvous", ports), ("ephemeral", [0])):
            server = _listener(tried)
            found[name] = server.server_address[1]
            threading.Thread(target=server.serve_forever, daemon=True).start()
        return found

    def reach(self, peers: Mapping[str, Mapping[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Resolves the peers' names and connects to their ports, all at the same time.

        Args:
            peers: host -> {"token": what it answers, "ports": {what for: port}}.

        Returns host -> {"problem": why its name has no address, "ports": {what it is for: why it
        cannot be reached, or None}, "ahead_s": its clock, "round_trip_s"}.
        """
        calls = [partial(_reach, host, **peer, timeout_s=timeout_s) for host, peer in peers.items()]
        answers = call_all(timeout_s + 1, calls)
        return {host: _answer(found) for host, found in zip(peers, answers, strict=True)}

    def send(self, host: str, port: int, seconds: float, timeout_s: float) -> float:
        """Sends to a host for so long; returns the bytes per second that arrived there."""
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(b"sink\n")
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            arrived = int(connection.makefile("rb").readline())
            return arrived / (time.perf_counter() - began)

    def place(self, folder: str) -> dict[str, Any]:
        """This host, and the file system of a folder."""
        here = filesystem.of(folder)
        return {"host": platform.node(), "file_system": dataclasses.asdict(here)}

    def socket_interface(
        self, hosts: Sequence[str], rank: int, interface: str | None
    ) -> str | None:
        """The interface that a run's collectives would use."""
        return _rendezvous(hosts, rank, interface).socket_interface()

    def speeds(
        self,
        hosts: Sequence[str],
        rank: int,
        port: int,
        id: str,
        job: Mapping[str, Any],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Measures devices and collectives under torchrun, as a run starts it: "ranks" (what those
        of this node measured), "problem" (why torchrun failed, or None), "late" (whether it reached
        the time limit)."""
        config = _config(job)
        profile = task.use_of_node(config, os.environ)
        rdzv = _rendezvous(hosts, rank, config.job.interface, port, id)
        environment = task.training_environment(profile, rdzv, os.environ)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "logs").mkdir()
            write_json(folder / REQUEST, {"backend": config.job.backend, "seconds": timeout_s / 3})
            command = task.node_command(config, folder, rdzv, str(profile.nproc))
            problem, late = _run(command, environment, folder / "log", timeout_s)
            ranks = [read_json(path) for path in sorted(folder.glob("rank-*.json"))]
        return {"problem": problem, "late": late, "ranks": [found for found in ranks if found]}


def _run(
    command: list[str], environment: dict[str, str], log: Path, limit_s: float
) -> tuple[str | None, bool]:
    """Runs a command; why it failed, or None, and whether it reached the time limit."""
    with open(log, "wb") as file:
        child = process.start(command, env=environment, stdout=file, stderr=file)
        try:
            code = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.end(child)
            return f"torchrun did not end within {limit_s:.0f} s", True
    if code == 0:
        return None, False
    said = [x.strip() for x in log.read_text(errors="replace")[-_TAIL:].splitlines() if x.strip()]
    errors = [line for line in said if "Error" in line]
    last = (errors or said or ["it printed nothing"])[-1]
    return f"torchrun ended with exit code {code}: {last}", False


_MICROBENCH = Program(kind="doctor", name="doctor", module="slurmft.plugins.examine.microbench")


def _config(job: Mapping[str, Any]) -> RunConfig:
    return RunConfig(program=_MICROBENCH, job=build(JobConfig, dict(job) | {"max_restarts": 0}))


def _rendezvous(
    hosts: Sequence[str], rank: int, interface: str | None, port: int = 0, id: str = ""
) -> Rendezvous:
    """This node's rendezvous; simulated nodes use the loopback interface."""
    interface = interface or ("lo" if rendezvous.LOCAL_NODE in os.environ else None)
    return Rendezvous(
        hosts=tuple(hosts), node_rank=rank, port=port, check_port=0, id=id, interface=interface
    )


def _folder_facts(folder: Path) -> dict[str, Any]:
    here, found = dataclasses.asdict(filesystem.of(folder)), filesystem.room(folder)
    return {"path": str(folder), "file_system": here} | dataclasses.asdict(found)


def _answer(result: Any) -> Any:
    return {"problem": one_line(result)} if isinstance(result, Exception) else result


def _reach(host: str, token: str, ports: Mapping[str, int], timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    resolve = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    resolved = call_all(timeout_s, [resolve])[0]  # name servers have time-outs of their own
    if isinstance(resolved, Exception):
        return {"problem": one_line(resolved)}
    found: dict[str, Any] = {"problem": None, "ports": {}}
    for name, port in ports.items():
        left_s = max(0.5, (deadline - time.monotonic()) / 2)
        try:
            found |= _greet(str(resolved[0][4][0]), port, token, left_s)
            found["ports"][name] = None
        except (OSError, ValueError) as error:
            found["ports"][name] = getattr(error, "strerror", None) or str(error) or "timed out"
    return found


def _greet(address: str, port: int, token: str, timeout_s: float) -> dict[str, float]:
    """How far the clock there is ahead of this one, and the round trip, in s. OSError where it
    cannot be reached, ValueError where it does not answer with the token."""
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        began, ticks = time.time(), time.perf_counter()
        connection.sendall(b"who\n")
        line = connection.makefile("rb").readline(200).decode(errors="replace").strip()
        trip_s = time.perf_counter() - ticks
    said, _, theirs = line.rpartition(" ")
    if said != token:
        raise ValueError(f"{line!r} answers there, at {address}: another host?")
    return {"ahead_s": float(theirs) - began - trip_s / 2, "round_trip_s": trip_s}


class _Peer(socketserver.StreamRequestHandler):
    """Answers other nodes. Their requests are lines: who, or sink, which counts what follows."""

    token, timeout = "", 10

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            for line in self.rfile:
                pieces = iter(partial(self.rfile.read1, 2**20), b"")
                who = line == b"who\n"
                said = f"{self.token} {time.time()}" if who else sum(map(len, pieces))
                self.wfile.write(f"{said}\n".encode())


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024


def _listener(ports: Sequence[int]) -> _Server:
    """A server on the first of the ports that is free."""
    for port in ports:
        with contextlib.suppress(OSError):
            return _Server(("", port), _Peer)
    raise SlurmftError(f"cannot listen on any of these ports: {ports}", "ss -tlnp shows who does")


if __name__ == "__main__":
    if sys.argv[1:]:  # the number of a simulated node
        os.environ[rendezvous.LOCAL_NODE] = sys.argv[1]
    serve(Agent())
