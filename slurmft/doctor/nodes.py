"""The agents of all nodes, as the login node talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slurmft.cluster.slurm import allocation
from slurmft.core import process
from slurmft.locks.probe import ProbeError
from slurmft.node import rendezvous, task

REQUEST = "request.json"
"""What the microbenchmarks are asked for: {"backend": of --backend, "seconds": for all of them}."""


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
            if text.startswith(MARK):
                with contextlib.suppress(ValueError):  # half a line, of an agent that was killed
                    self._said.put((name, json.loads(text.removeprefix(MARK))))
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
    return [sys.executable, "-m", "slurmft.doctor.agent"]


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
        commands={host: allocation.on_host(host, agent_command()) for host in meeting.hosts},
        env=dict(environment),
        job_id=environment["SLURM_JOB_ID"],
        simulated=False,
    )


def simulated(nodes: int) -> Site:
    """Simulated nodes, as `--cluster local` has them."""
    hosts = [rendezvous.simulated_host(number) for number in range(nodes)]
    mine = {h: ["env", f"{task.LOCAL_NODE}={i}", *agent_command()] for i, h in enumerate(hosts)}
    return Site(
        hosts={host: host for host in hosts},
        commands=mine,
        env={},
        job_id=str(os.getpid()),
        simulated=True,
    )


MARK = "slurmft-nodeprobe "
"""Begins the lines of an agent: prologs and the like print, too."""
