"""The process in which the scripts of metrics run, as the one sees it that has started it.

A script may change the directory, close files, install handlers of signals, leave threads, take all
memory, or end its process: whatever it does, it does there, and what started it goes on.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from slurmft.core import interpreter, process
from slurmft.core.decode import NullIsNaN, decode
from slurmft.core.errors import UsageError, one_line
from slurmft.core.files import MOST_BYTES, parse_json
from slurmft.core.text import duration, in_bytes

_POLL_S = 0.5
"""How often is looked whether the process has ended: a child of it may keep its socket open."""
_END_S = 5.0
"""How long it has to end: a thread of a script may never do."""
_READ_BYTES = 2**16
_LONGEST_LINE = 300
_CURE = "correct its script, or leave it out"
_CURE_OF_SLOW = "try again when this machine has less to do, or choose another metric"

T = TypeVar("T")


class MetricError(UsageError):
    """A metric that cannot be used, or has no value."""


class _EndedError(Exception):
    """The process has ended, or has closed its socket."""


class _NoAnswerError(Exception):
    """What came is no answer: a script has written into the socket."""


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to `Worker.fetch`."""

    takes: str


@dataclass(frozen=True, slots=True)
class Trial:
    """The answer to `Worker.examine`."""

    form: Annotated[int, range(100)]
    numbers: list[str]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The answer to `Worker.compute`."""

    numbers: dict[str, NullIsNaN]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that fails."""

    message: str
    hint: str | None


class MetricProcess:
    """A process that loads and computes metrics. It starts with the first request, and again with
    the next one where a metric has ended it."""

    def __init__(self, environment: dict[str, str], keeps_output: bool = False) -> None:
        """
        Args:
            environment: its variables.
            keeps_output: what it prints goes where this process prints; else it is left out, and
                messages have the last line of its errors.
        """
        self._environment = environment
        self._keeps_output = keeps_output
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._errors: process.StderrEnd | None = None

    def __enter__(self) -> "MetricProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any], kind: type[T], timeout_s: float | None) -> T:
        """Sends a request, and returns its answer.

        Args:
            request: see `slurmft.train.metric_worker.Worker`.
            kind: the type of the answer.
            timeout_s: how long it may take; None: any time.

        Raises:
            MetricError: the metric cannot be used or has no value, takes longer, has ended the
                process, or has sent what is no answer.
        """
        what = f"--metric {request['metric']!r}"
        # Before the process is asked: a value that JSON cannot hold is no error of the metric.
        text = json.dumps(request, default=_plain).encode() + b"\n"
        deadline = None
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
        try:
            answer = _decoded(self._exchange(text, deadline), kind)
        except TimeoutError:
            self.end(at_once=True)
            problem = f"{what} took more than {duration(timeout_s or 0)}"
            raise MetricError(problem, _CURE_OF_SLOW) from None
        except _EndedError:
            problem = f"{what} has ended its process{self._last_words()}"
            self.end(at_once=True)
            raise MetricError(problem, _CURE) from None
        except _NoAnswerError as error:
            # Nor is what it would send next.
            self.end(at_once=True)
            problem = f"{what} has sent what is no answer of a metric: {error}"
            raise MetricError(problem, _CURE) from None
        except BaseException:  # Ctrl-C, too
            self.end(at_once=True)
            raise
        if isinstance(answer, Refusal):
            raise MetricError(answer.message, answer.hint)
        return answer

    def end(self, at_once: bool = False) -> None:
        """Ends the process, and what its scripts have left running."""
        if self._child is None:
            return
        assert self._channel is not None
        # It ends when nothing can come any more.
        self._channel.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child = None
        self._errors = None

    def _start(self) -> None:
        self._channel, of_child = socket.socketpair()
        self._channel.settimeout(_POLL_S)
        output: int | None = None
        errors: int | None = None
        if not self._keeps_output:
            output = subprocess.DEVNULL
            errors = subprocess.PIPE
        command = interpreter.module(
            "slurmft.train.metric_worker", str(of_child.fileno()), unbuffered=True
        )
        with of_child:
            self._child = process.start(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[of_child.fileno()],
                # A group of its own, with all that scripts start: `end` reaches them.
                start_new_session=True,
            )
        if errors is not None:
            self._errors = process.StderrEnd(self._child)

    def _exchange(self, text: bytes, deadline: float | None) -> bytes:
        """Sends a line, and returns the one that comes back. Raises as `_wait`, and _NoAnswerError
        where it has no end."""
        if self._child is None:
            self._start()
        channel = self._channel
        assert channel is not None
        left = memoryview(text)
        while left:
            left = left[self._wait(partial(channel.send, left), deadline) :]
        line = bytearray()
        while not line.endswith(b"\n"):
            part = self._wait(partial(channel.recv, _READ_BYTES), deadline)
            if not part:
                raise _EndedError
            line += part
            if len(line) > MOST_BYTES:
                raise _NoAnswerError(f"more than {in_bytes(MOST_BYTES)}")
        return bytes(line)

    def _wait(self, transfer: Callable[[], T], deadline: float | None) -> T:
        """Returns what a call of the socket returns, as soon as it can.

        Raises:
            _EndedError: the process has ended.
            TimeoutError: the deadline has passed.
        """
        assert self._child is not None
        while True:
            try:
                return transfer()
            except TimeoutError:
                if self._child.poll() is not None:
                    raise _EndedError from None
                if deadline is not None and time.monotonic() > deadline:
                    raise
            except ConnectionError:
                raise _EndedError from None

    def _last_words(self) -> str:
        """Returns how the process has ended, as the end of a sentence."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_POLL_S)
        code = self._child.returncode
        words = ""
        if code is not None and code < 0:
            words = f" ({process.signal_name(-code)})"
        elif code:
            words = f" (exit code {code})"
        if self._errors is None:
            return words
        # What a script has left running may still have it open.
        printed = os.fsdecode(self._errors.read(_POLL_S))
        last_line = printed.strip().rpartition("\n")[2]
        if last_line:
            words += f": {last_line[-_LONGEST_LINE:]}"
        return words


def _decoded(line: bytes, kind: type[T]) -> T | Refusal:
    """Decodes an answer; raises _NoAnswerError where it is none."""
    try:
        value = parse_json(line)
        if isinstance(value, dict) and "message" in value:
            return decode(value, Refusal)
        return decode(value, kind)
    except ValueError as error:
        raise _NoAnswerError(one_line(error)) from None


def _plain(value: Any) -> Any:
    """Returns arrays and numbers of numpy and torch as Python's."""
    as_list = getattr(value, "tolist", None)
    if as_list is None:
        raise TypeError(f"metrics get no {type(value).__name__}")
    return as_list()
