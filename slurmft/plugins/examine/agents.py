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
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from slurmft.core import process
from slurmft.core.decode import DecodeError, decode
from slurmft.core.errors import SlurmftError, one_line
from slurmft.core.files import to_json

MARK = "slurmft-agent "
"""Begins the lines of an agent: prologs and the like print, too."""

_EXIT_S = 2.0
# How many of the last lines on stderr say why an agent ended.
_STDERR_LINES = 3

Answer = dict[str, Any]
"""A line of an agent: {"number": of the request, "answer": ...} or {"number", "error": text}."""

_Line = tuple[str, Answer | None]


class AgentError(SlurmftError):
    """An agent's operation failed, or there was no answer in time."""


# --- the side that asks ---------------------------------------------------------------------------


class Agents:
    """Agents by name, each behind a process of its own; a context manager that ends them."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the agents.

        Args:
            commands: name -> the command that starts the agent.
            env: variables in addition to those of this process.
        """
        self._answers: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        """Agent -> its line, or None for the end of its output."""
        self._number = 0
        self._ended: set[str] = set()
        # Files, not pipes: nobody reads them before an agent ends, and a full pipe would stop it.
        self._stderr = {name: process.unnamed_file() for name in commands}
        self._processes = {
            name: process.start(
                command,
                # an srun that still waits for nodes cancels its step
                death=signal.SIGTERM,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr[name],
            )
            for name, command in commands.items()
        }
        for name, child in self._processes.items():
            assert child.stdout is not None
            threading.Thread(
                target=self._read,
                args=(name, child.stdout),
                daemon=True,
            ).start()

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the agents: by the end of their input, then by SIGTERM, then by SIGKILL."""
        for child in self._processes.values():
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        for ending in (subprocess.Popen.terminate, subprocess.Popen.kill):
            # All of them together have so long.
            deadline = time.monotonic() + _EXIT_S
            for child in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.0, deadline - time.monotonic()))
            # Popen sends nothing to those that have ended and were waited for.
            for child in self._processes.values():
                ending(child)
        for name, child in self._processes.items():
            child.wait()
            self._stderr[name].close()

    def ask(
        self,
        operation: str,
        arguments: Mapping[str, Mapping[str, Any]],
        timeout_s: float,
        kind: Any = Any,
    ) -> dict[str, Any]:
        """Asks some agents at the same time to do an operation, a method of what they serve.

        Args:
            arguments: agent -> the arguments of the method.
            kind: the type of the answers, which are decoded.

        Returns each agent's answer, or the AgentError that says why there is none.
        """
        self._number += 1
        answers: dict[str, Any] = {}
        for name, arguments_of_one in arguments.items():
            request = {
                "number": self._number,
                "operation": operation,
                "arguments": arguments_of_one,
            }
            line_of_request = to_json(request) + "\n"
            if name in self._ended or not self._send(name, line_of_request):
                answers[name] = self._why_ended(name)
        deadline = time.monotonic() + timeout_s
        while missing := arguments.keys() - answers.keys():
            try:
                left_s = max(0.0, deadline - time.monotonic())
                name, line = self._answers.get(timeout=left_s)
            except queue.Empty:
                late = AgentError(f"no answer in {timeout_s:.0f} s")
                return answers | dict.fromkeys(missing, late)
            if line is None:
                self._ended.add(name)
                if name in missing:
                    answers[name] = self._why_ended(name)
            # Another number: a late answer to an earlier request.
            elif line["number"] == self._number:
                answers[name] = _decode(line, kind)
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
                # half a line, of an agent that was killed
                with contextlib.suppress(ValueError):
                    answer = json.loads(text.removeprefix(MARK))
                    self._answers.put((name, answer))
        self._answers.put((name, None))

    def _why_ended(self, name: str) -> AgentError:
        """Reads the last lines on stderr, most often srun's."""
        self._stderr[name].seek(0)
        text = self._stderr[name].read().decode(errors="replace").strip()
        reasons = []
        for line in text.splitlines()[-_STDERR_LINES:]:
            line = line.removeprefix("srun: ")
            reasons.append(line.removeprefix("error: "))
        reason = " ".join(reasons) or "no error message"
        return AgentError(f"its agent ended: {reason}")


def _decode(line: Answer, kind: Any) -> Any:
    if line.get("error"):
        return AgentError(line["error"])
    try:
        return decode(line["answer"], kind)
    except DecodeError as error:
        problem = f"its answer is not understood ({error})"
        return AgentError(f"{problem}: another version of slurmft?")


# --- the agent ------------------------------------------------------------------------------------


def serve(agent: object) -> NoReturn:
    """Turns this process into an agent, whose operations are the methods of an object. They return
    JSON or dataclasses."""
    one_at_a_time = threading.Lock()

    def carry_out(request: dict[str, Any]) -> None:
        answer: Answer = {"number": request["number"]}
        try:
            operation = getattr(agent, request["operation"])
            answer["answer"] = operation(**request["arguments"])
        except Exception as error:
            answer["error"] = one_line(error)
        with one_at_a_time:
            print(MARK + to_json(answer), flush=True)

    for line in sys.stdin:
        threading.Thread(
            target=carry_out,
            args=(json.loads(line),),
            daemon=True,
        ).start()
    sys.stdout.flush()
    os._exit(0)  # operations that hang would keep the interpreter alive
