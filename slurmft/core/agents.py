"""Agents: child processes that carry out operations, on this machine or, behind srun, on others.

Requests and answers are lines of JSON on a child's stdin and stdout. Every operation runs in a
thread of its own, and answers are awaited with a timeout: one that hangs, in a lock or in a dead
file system, blocks nothing else. An agent ends when its stdin is closed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from slurmft.core import process
from slurmft.core.errors import SlurmftError, one_line

MARK = "slurmft-agent "
"""Begins the lines of an agent: prologs and the like print, too."""

_EXIT_S = 2.0


class AgentError(SlurmftError):
    """An agent's operation failed, or there was no answer in time."""


# --- the side that asks ---------------------------------------------------------------------------


class Agents:
    """Agents by name, each behind a process of its own; a context manager that ends them."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], env: Mapping[str, str] | None = None
    ) -> None:
        """Starts them by their commands, with `env` in addition to the variables of this
        process."""
        self._answers: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = queue.SimpleQueue()
        self._number = 0
        self._ended: set[str] = set()
        self._stderr = {name: tempfile.TemporaryFile() for name in commands}  # noqa: SIM115
        self._processes = {
            name: process.start(
                command,
                death=signal.SIGTERM,  # an srun that still waits for nodes cancels its step
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr[name],
            )
            for name, command in commands.items()
        }
        for name, child in self._processes.items():
            assert child.stdout is not None
            threading.Thread(target=self._read, args=(name, child.stdout), daemon=True).start()

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the agents: by the end of their input, then by SIGTERM, then by SIGKILL."""
        for child in self._processes.values():
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        for ending in (subprocess.Popen.terminate, subprocess.Popen.kill):
            deadline = time.monotonic() + _EXIT_S
            for child in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.0, deadline - time.monotonic()))
            for child in self._processes.values():
                ending(child)
        for name, child in self._processes.items():
            child.wait()
            self._stderr[name].close()

    def ask(
        self, operation: str, arguments: Mapping[str, Mapping[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
        """Asks some agents at the same time to do an operation, a method of what they serve, each
        with arguments of its own. Returns each agent's answer, or the AgentError that says why
        there is none."""
        self._number += 1
        answers: dict[str, Any] = {}
        for name, given in arguments.items():
            request = {"number": self._number, "operation": operation, "arguments": given}
            if name in self._ended or not self._send(name, json.dumps(request) + "\n"):
                answers[name] = self._why_ended(name)
        deadline = time.monotonic() + timeout_s
        while missing := arguments.keys() - answers.keys():
            try:
                name, said = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = AgentError(f"no answer in {timeout_s:.0f} s")
                return answers | dict.fromkeys(missing, late)
            if said is None:
                self._ended.add(name)
                if name in missing:
                    answers[name] = self._why_ended(name)
            elif said["number"] == self._number:  # else a late answer to an earlier request
                error = said.get("error")
                answers[name] = AgentError(error) if error else said["answer"]
        return answers

    def _send(self, name: str, line: str) -> bool:
        stdin = self._processes[name].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode())
            stdin.flush()
        except OSError:
            return False
        return True

    def _read(self, name: str, lines: IO[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                with contextlib.suppress(ValueError):  # half a line, of an agent that was killed
                    self._answers.put((name, json.loads(text.removeprefix(MARK))))
        self._answers.put((name, None))

    def _why_ended(self, name: str) -> AgentError:
        """The last lines on stderr, most often srun's."""
        self._stderr[name].seek(0)
        lines = self._stderr[name].read().decode(errors="replace").strip().splitlines()[-3:]
        text = " ".join(line.removeprefix("srun: ").removeprefix("error: ") for line in lines)
        return AgentError(f"its agent ended: {text or 'no error message'}")


# --- the agent ------------------------------------------------------------------------------------


def serve(agent: object) -> NoReturn:
    """Turns this process into an agent, whose operations are the methods of an object."""
    one_at_a_time = threading.Lock()

    def carry_out(request: dict[str, Any]) -> None:
        said: dict[str, Any] = {"number": request["number"]}
        try:
            said["answer"] = getattr(agent, request["operation"])(**request["arguments"])
        except Exception as error:
            said["error"] = one_line(error)
        with one_at_a_time:
            print(MARK + json.dumps(said), flush=True)

    for line in sys.stdin:
        threading.Thread(target=carry_out, args=(json.loads(line),), daemon=True).start()
    sys.stdout.flush()
    os._exit(0)  # operations that hang would keep the interpreter alive
