"""An agent on every node of an allocation, and how to talk to all of them at once.

The login node sends lines of JSON to each agent; the agent does what they say, each in a thread of
its own, and answers in lines of JSON. Whatever hangs on a node leaves its other answers alone, and
whatever does not come in time is an error with that node's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import slurmft
from slurmft import filesystem, hardware, node, process, rendezvous, slurm, sources
from slurmft.checks import all_within, in_words, installed, within
from slurmft.config import JobConfig, RunConfig, TrainConfig, build
from slurmft.errors import SlurmftError
from slurmft.lockprobe import Agent as LockAgent
from slurmft.lockprobe import ProbeError
from slurmft.rendezvous import Rendezvous
from slurmft.rundir import read_json, write_json

_MARK = "slurmft-nodeprobe "
"""Begins the lines of an agent: prologs and the like print, too."""
REQUEST = "request.json"
"""What `slurmft.speeds` is asked for: {"backend": of --backend, "seconds": for all collectives}."""
_ROOM_S = 5.0
_CHUNK = bytes(2**20)
_CLOCK_ROUNDS = 5
_TAIL = 1500


# --- on the login node ----------------------------------------------------------------------------


class Nodes:
    """The agents of all nodes, each behind a process of its own."""

    def __init__(self, commands: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> None:
        """Starts them.

        Args:
            commands: what starts the agent of each node.
            env: the processes' variables besides this process's own.
        """
        self._said: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = queue.SimpleQueue()
        self._number = 0
        self._ends = dict.fromkeys(commands, "")
        self._words = {name: tempfile.TemporaryFile() for name in commands}  # noqa: SIM115
        self._processes = {
            name: process.start(
                command,
                death=signal.SIGTERM,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words[name],
            )
            for name, command in commands.items()
        }
        for name, child in self._processes.items():
            assert child.stdout is not None
            threading.Thread(target=self._listen, args=(name, child.stdout), daemon=True).start()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the agents; one that does not end with its input is killed, by srun on its node."""
        for child in self._processes.values():
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        deadline = time.monotonic() + 2
        for ending in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for child in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.0, deadline - time.monotonic()))
            for child in self._processes.values():
                ending(child)
            deadline = time.monotonic() + 2
        for name, child in self._processes.items():
            child.wait()
            self._words[name].close()

    def _listen(self, name: str, lines: IO[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith(_MARK):
                with contextlib.suppress(ValueError):  # half a line, of an agent that was killed
                    self._said.put((name, json.loads(text.removeprefix(_MARK))))
        self._said.put((name, None))

    def ask(
        self, what: str, arguments: Mapping[str, Mapping[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
        """Asks some agents at the same time.

        Args:
            what: one of an agent's operations.
            arguments: the operation's arguments for each node that is asked.

        Returns the answer of each, a ProbeError where there is none.
        """
        self._number += 1
        number, found = self._number, dict[str, Any]()
        for name, given in arguments.items():
            line = json.dumps({"number": number, "do": what, "with": given}) + "\n"
            if self._ends[name] or not self._send(name, line):
                found[name] = self._ended(name)
        deadline = time.monotonic() + timeout_s
        while missing := arguments.keys() - found.keys():
            try:
                name, said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = ProbeError(f"no answer in {timeout_s:.0f} s ({what})")
                return found | dict.fromkeys(missing, late)
            if said is None:
                self._ends[name] = what
                if name in missing:
                    found[name] = self._ended(name)
            elif said["number"] == number:
                error = said.get("error")
                found[name] = ProbeError(error) if error else said["answer"]
        return found

    def _send(self, name: str, line: str) -> bool:
        stdin = self._processes[name].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode())
            stdin.flush()
        except OSError:
            return False
        return True

    def _ended(self, name: str) -> ProbeError:
        """The last words of a process that has ended, most often srun's."""
        self._words[name].seek(0)
        said = self._words[name].read().decode(errors="replace").strip().splitlines()
        last = " ".join(line.removeprefix("srun: ").removeprefix("error: ") for line in said[-3:])
        return ProbeError(f"its agent ended: {last or 'without a word'}")

    def lock_ask(self, names: Sequence[str], folder: Path, timeout_s: float) -> Callable[..., str]:
        """What `lockprobe.probe` asks these nodes with, one after another."""

        def ask(agent: int, operation: str, primitive: str = "-", name: str = "-") -> str:
            what = {"folder": str(folder), "operation": operation}
            what |= {"primitive": primitive, "name": name}
            answer = self.ask("lock", {names[agent]: what}, timeout_s)[names[agent]]
            if isinstance(answer, ProbeError):
                raise ProbeError(f"{names[agent]}: {operation} {primitive}: {answer.message}")
            return str(answer)

        return ask


def agent_command() -> list[str]:
    """What runs an agent."""
    return [sys.executable, "-m", "slurmft.nodeprobe"]


# --- on a node ------------------------------------------------------------------------------------


class Agent:
    """What a node does for an examination; every operation's answer is JSON."""

    def __init__(self) -> None:
        self._token = ""
        self._locks: dict[str, LockAgent] = {}

    def facts(self, folders: Mapping[str, str], job: Mapping[str, Any]) -> dict[str, Any]:
        """What this node is, what of it the job has, its versions, its room.

        Args:
            folders: the folders in question, by what they are; and "tmp" and "shm" are added.
            job: fields of JobConfig that say how a run would use the node.
        """
        here = hardware.detect(os.environ)
        places = {name: Path(path) for name, path in folders.items()}
        places |= {"tmp": Path(tempfile.gettempdir()), "shm": Path("/dev/shm")}
        looks: list[Callable[[], Any]] = [partial(_look, place) for place in places.values()]
        looks.append(partial(sources.hub_in_reach, _ROOM_S - 1))
        *rooms, hub = all_within(_ROOM_S, looks)
        return {
            "hardware": here.facts(),
            "cores": len(here.cores),
            "mask_cpus": len(here.cpus),
            "available_mib": _available_mib(),
            "software": software(),
            "kernel": platform.release(),
            "networks": [
                [n.name, n.infiniband, n.speed_mbit_s, str(n)]
                for n in hardware.networks()
                if n.name in rendezvous.interfaces()
            ],
            "rooms": {n: _answer(give) for n, give in zip(places, rooms, strict=True)},
            "hub": _answer(hub) is True,
            "profile": node.use_of_node(_config(job), os.environ)[0].name,
        }

    def listen(self, token: str, job_id: str) -> dict[str, int]:
        """Answers on a port of the rendezvous' range and on an ephemeral one, from now on.

        Args:
            token: what this node answers to those who ask who it is.

        Returns both ports, and a free one for torchrun's store.
        """
        self._token = token
        found = {"torchrun": rendezvous.free_ports(job_id, 1)[0]}
        ports = [p for p in rendezvous.candidate_ports(job_id) if p != found["torchrun"]]
        for name, tried in (("rendezvous", ports), ("ephemeral", [0])):
            server = _listener(tried)
            found[name] = server.getsockname()[1]
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        return found

    def _serve(self, server: socket.socket) -> None:
        while True:
            caller, _ = server.accept()
            threading.Thread(target=self._serve_one, args=(caller,), daemon=True).start()

    def _serve_one(self, caller: socket.socket) -> None:
        """One word of request: who, time, or sink and what to swallow."""
        with contextlib.suppress(OSError), caller:
            caller.settimeout(10)
            stream = caller.makefile("rwb")
            for line in stream:
                if line == b"who\n":
                    answer = self._token
                elif line == b"time\n":
                    answer = repr(time.time())
                else:
                    answer = str(_swallow(stream))
                stream.write(answer.encode() + b"\n")
                stream.flush()

    def reach(self, peers: Mapping[str, Mapping[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Resolves the peers' names and connects to their ports, all at the same time.

        Args:
            peers: host -> {"token": what it answers, "ports": {what for: port}}.

        Returns host -> {"address": of its name, "problem": why it has none, "ports": {what it is
        for: why it cannot be reached, or None}}.
        """
        calls = [partial(_reach, host, **peer, timeout_s=timeout_s) for host, peer in peers.items()]
        answers = all_within(timeout_s + 1, calls)
        return {host: _answer(give) for host, give in zip(peers, answers, strict=True)}

    def clock(self, host: str, port: int, timeout_s: float) -> dict[str, float]:
        """How far the clock of `host` is ahead of this one, and the way there and back, in s."""
        tries: list[tuple[float, float]] = []
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            stream = connection.makefile("rwb")
            for _ in range(_CLOCK_ROUNDS):
                began, ticks = time.time(), time.perf_counter()
                stream.write(b"time\n")
                stream.flush()
                theirs = float(stream.readline())
                way_s = time.perf_counter() - ticks
                tries.append((way_s, theirs - began - way_s / 2))
        way_s, ahead_s = min(tries)
        return {"ahead_s": ahead_s, "round_trip_s": way_s}

    def send(self, host: str, port: int, seconds: float, timeout_s: float) -> float:
        """Sends to a host for so long; bytes a second that have arrived there."""
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(b"sink\n")
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            arrived = int(connection.makefile("rb").readline())
            return arrived / (time.perf_counter() - began)

    def interface(self, hosts: Sequence[str], rank: int, asked: str | None) -> str | None:
        """The interface that a run's collectives would take."""
        return _meeting(hosts, rank, asked).socket_interface()

    def lock(self, folder: str, operation: str, primitive: str, name: str) -> str:
        """One operation of `lockprobe`."""
        agent = self._locks.setdefault(folder, LockAgent(Path(folder)))
        return agent.do(operation, primitive, name)

    def speeds(
        self,
        hosts: Sequence[str],
        rank: int,
        port: int,
        id: str,
        job: Mapping[str, Any],
        backend: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Measures devices and collectives by torchrun, as a run starts it.

        Returns "ranks" of this node as far as they came, "problem" (why torchrun failed, or None)
        and "late" (whether that is because it took too long).
        """
        config = _config(job, backend)
        profile, binding = node.use_of_node(config, os.environ)
        meeting = _meeting(hosts, rank, config.job.interface, port, id)
        environment = node.training_environment(profile, meeting, os.environ)
        if binding is not None:
            environment |= binding.environment()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "logs").mkdir()
            write_json(folder / REQUEST, {"backend": backend, "seconds": timeout_s / 3})
            command = node.torchrun_command(
                folder, meeting, str(profile.nproc), 0, module="slurmft.speeds"
            )
            problem, late = _run(command, environment, folder / "log", timeout_s)
            ranks = [read_json(path) for path in sorted(folder.glob("rank-*.json"))]
        return {"problem": problem, "late": late, "ranks": [found for found in ranks if found]}


def _run(
    command: list[str], environment: dict[str, str], log: Path, limit_s: float
) -> tuple[str | None, bool]:
    """Runs a command; why it failed, or None, and whether it had to be ended."""
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
    last = (errors or said or ["without a word"])[-1]
    return f"torchrun ended with exit code {code}: {last}", False


def _config(job: Mapping[str, Any], backend: str = "auto") -> RunConfig:
    return RunConfig(train=TrainConfig.resolve(backend=backend), job=build(JobConfig, dict(job)))


def _meeting(
    hosts: Sequence[str], rank: int, interface: str | None, port: int = 0, id: str = ""
) -> Rendezvous:
    """The rendezvous of this node; simulated nodes have the loopback interface."""
    local = node.LOCAL_NODE in os.environ
    return Rendezvous(
        hosts=tuple(hosts),
        node_rank=rank,
        port=port,
        roll_call_port=0,
        id=id,
        interface=interface or ("lo" if local else None),
    )


def _look(folder: Path) -> dict[str, Any]:
    here, found = filesystem.of(folder), filesystem.room(folder)
    return {
        "file_system": [here.type, here.source, here.mount],
        "free_bytes": found.free_bytes,
        "free_inodes": found.free_inodes,
        "problem": found.problem,
        "path": str(folder),
    }


def _answer(give: Callable[[], Any]) -> Any:
    try:
        return give()
    except Exception as error:
        return {"problem": in_words(error)}


def _reach(host: str, token: str, ports: Mapping[str, int], timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s

    def resolve() -> str:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])

    try:
        address = within(timeout_s, resolve)  # name servers have time-outs of their own
    except (OSError, TimeoutError) as error:
        return {"address": None, "problem": in_words(error), "ports": {}}
    found = {}
    for name, port in ports.items():
        left_s = max(0.5, (deadline - time.monotonic()) / 2)
        found[name] = _problem_with(address, port, token, left_s)
    return {"address": address, "problem": None, "ports": found}


def _problem_with(address: str, port: int, token: str, timeout_s: float) -> str | None:
    """Why a port cannot be reached, or does not answer with the token; None: it does."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.sendall(b"who\n")
            said = connection.makefile("rb").readline(200).decode(errors="replace").strip()
    except OSError as error:
        return error.strerror or str(error) or "timed out"
    return None if said == token else f"{said!r} answers there, at {address}: another host?"


def _listener(ports: Sequence[int]) -> socket.socket:
    """A server on the first of the ports that nobody has."""
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=1024)
    raise SlurmftError(f"cannot listen on any of these ports: {ports}", "ss -tlnp shows who does")


def _swallow(stream: Any) -> int:
    """Reads to the end; the number of bytes."""
    count = 0
    while data := stream.read1(2**20):
        count += len(data)
    return count


def _available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def software() -> dict[str, str | None]:
    """What must be the same on all nodes, and here."""
    packages = ("torch", "transformers", "accelerate", "datasets")
    return {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "slurmft": slurmft.__version__,
        **{name: installed(name) for name in packages},
    }


def serve(agent: Agent, lines: IO[str], out: IO[str]) -> None:
    """Does what lines of JSON tell, each in a thread of its own, until they end."""
    one_at_a_time = threading.Lock()

    def do(request: dict[str, Any]) -> None:
        said: dict[str, Any] = {"number": request["number"]}
        try:
            said["answer"] = getattr(agent, request["do"])(**request["with"])
        except Exception as error:
            said["error"] = in_words(error)
        with one_at_a_time:
            print(_MARK + json.dumps(said), file=out, flush=True)

    for line in lines:
        threading.Thread(target=do, args=(json.loads(line),), daemon=True).start()


def new_token() -> str:
    """What the agents of one examination know each other by."""
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The nodes that are examined, and how their agents are started."""

    hosts: dict[str, str]
    """Node -> the name by which the others reach it: the fabric's."""
    commands: dict[str, list[str]]
    env: dict[str, str]
    job_id: str

    simulated: bool
    """All of them are this machine."""


def allocated(environment: Mapping[str, str], host_suffix: str) -> Site:
    """The nodes of an allocation, by Slurm's variables."""
    meeting = rendezvous.from_slurm({**environment, rendezvous.PORT_VARIABLE: "0,0"})
    return Site(
        hosts={host: host + host_suffix for host in meeting.hosts},
        commands={host: slurm.on_host(host, agent_command()) for host in meeting.hosts},
        env=dict(environment),
        job_id=environment["SLURM_JOB_ID"],
        simulated=False,
    )


def simulated(nodes: int) -> Site:
    """Simulated nodes, as `--cluster local` has them."""
    hosts = [rendezvous.simulated_host(number) for number in range(nodes)]
    mine = {h: ["env", f"{node.LOCAL_NODE}={i}", *agent_command()] for i, h in enumerate(hosts)}
    return Site(
        hosts={host: host for host in hosts},
        commands=mine,
        env={},
        job_id=str(os.getpid()),
        simulated=True,
    )


def main() -> None:
    """`python -m slurmft.nodeprobe`: an agent. It ends with its input."""
    serve(Agent(), sys.stdin, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # whatever hangs


if __name__ == "__main__":
    main()
