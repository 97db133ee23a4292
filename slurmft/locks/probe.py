"""Which lock primitive holds between nodes: measured, with real processes on the real nodes.

Every node has an agent, which does one thing at a time as it is told; `probe` tells them what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slurmft import locks
from slurmft.core import filesystem, process
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.filesystem import LOCK_PRIMITIVES, FileSystem

Ask = Callable[..., str]
"""ask(agent, operation, primitive, name) -> the agent's answer."""

_PREFIX = ".slurmft-lock-"
_MARK = "slurmft-lockprobe "
"""Begins the lines of an agent: prologs and the like print, too."""

_COST_ROUNDS = 50
_GONE_WITHIN_S = 2.0
"""How long a dead process's lock may live on: clients tell the server about it."""


class ProbeError(SlurmftError):
    """The probe itself could not be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was seen of one primitive; None: could not be known."""

    error: str | None = None
    """Why it cannot be used here at all."""
    on_node: bool | None = None
    """Excludes other processes of the same node."""
    between_nodes: bool | None = None
    """Excludes processes of other nodes."""
    on_unlock: bool | None = None
    """Is released by an unlock..."""
    on_exit: bool | None = None
    """... by the end of its process..."""
    on_kill: bool | None = None
    """... by its SIGKILL."""
    cost_us: float | None = None
    """Lock and unlock of a file that nobody else wants, median."""

    @property
    def excludes(self) -> bool:
        return self.error is None and bool(self.between_nodes and self.on_node and self.on_unlock)

    @property
    def good(self) -> bool:
        return self.excludes and bool(self.on_exit and self.on_kill)


Findings = dict[str, Finding]
"""By primitive."""


def probe(ask: Ask, nodes: int, here: FileSystem, *, thorough: bool = True) -> Findings | None:
    """Tries the primitives one after another on the nodes of all agents, the default first.

    Args:
        ask: tells one of the agents 0 to nodes - 1 what to do.
        here: the file system in question.
        thorough: all primitives; else it ends at the first one that holds.

    Returns what was found; None where the nodes see different folders under their paths.
    """
    token = secrets.token_hex(6)  # others may measure in the same folder
    try:
        if not _is_one_folder(ask, nodes, token):
            return None
        found: Findings = {}
        for primitive in preference(here):
            found[primitive] = _measure(ask, nodes, primitive, f"{token}-{primitive}", thorough)
            if found[primitive].good and not thorough:
                break
        return found
    finally:
        with contextlib.suppress(ProbeError):
            ask(0, "clear", "-", token)


def preference(here: FileSystem) -> list[str]:
    """The default first: processes that know of no measurement use that, and must not be alone."""
    first = locks.default(here)
    return [first, *(primitive for primitive in LOCK_PRIMITIVES if primitive != first)]


def _is_one_folder(ask: Ask, nodes: int, name: str) -> bool:
    ask(0, "write", "-", name)
    return all(ask(agent, "see", "-", name) == "yes" for agent in range(nodes))


def _measure(ask: Ask, nodes: int, primitive: str, name: str, thorough: bool) -> Finding:
    last = nodes - 1

    def is_free(name: str) -> bool:
        """Whether the last node can have it."""
        return ask(last, "try", primitive, name) == "got"

    def comes_free(end: str) -> bool | None:
        """Whether the lock of a process of the first node ends with that."""
        own = f"{name}-{end}"  # an earlier lock may have stayed
        return _in_time(lambda: is_free(own)) if ask(0, end, primitive, own) == "got" else None

    held = ask(0, "hold", primitive, name)
    if held != "got":
        return Finding(error=held)
    on_node = ask(0, "beside", primitive, name) == "busy"
    others = [ask(agent, "try", primitive, name) for agent in range(1, nodes)]
    between_nodes = all(answer == "busy" for answer in others) if others else None
    ask(0, "free", primitive, name)
    if between_nodes is False and not thorough:
        return Finding(on_node=on_node, between_nodes=False)
    return Finding(
        on_node=on_node,
        between_nodes=between_nodes,
        on_unlock=is_free(name),
        on_exit=comes_free("leave"),
        on_kill=comes_free("die"),
        cost_us=_number(ask(0, "cost", primitive, f"{name}-free")),
    )


def _number(answer: str) -> float | None:
    try:
        return float(answer)
    except ValueError:  # an error's text
        return None


def _in_time(is_free: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while not (free := is_free()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def choose(found: Findings, here: FileSystem) -> str:
    """The primitive to use: the default if it holds, else the first one that does; soft locks,
    which a killed process leaves behind, only where no other does.

    Raises:
        ProbeError: none holds.
    """
    usable = [finding for finding in found.values() if not finding.error]
    if usable and all(finding.between_nodes is None for finding in usable):
        return locks.default(here)  # one node cannot know
    for primitive in preference(here):
        if primitive in found and found[primitive].good:
            return primitive
    if "soft" in found and found["soft"].excludes:
        return "soft"
    errors = {finding.error for finding in found.values()}
    why = f": {errors.pop()}" if len(errors) == 1 and None not in errors else ""
    raise ProbeError(
        f"no kind of file lock holds on {here}{why}",
        "put the caches (HF_HOME) on another file system, or on node-local disks",
    )


def record(here: FileSystem, found: Findings, nodes: int) -> Path:
    """Writes what was measured to where `locks.recorded` finds it."""
    path = locks.record_path(here)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "primitive": choose(found, here),
            "file_system": dataclasses.asdict(here),
            "nodes": nodes,
            "time": time.time(),
            "findings": {name: dataclasses.asdict(finding) for name, finding in found.items()},
        },
    )
    return path


# --- an agent -------------------------------------------------------------------------------------


class Agent:
    """What one node does for the probe, in a folder of its file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, tuple[int, Any]] = {}

    def do(self, operation: str, primitive: str, name: str) -> str:
        """Does what it is told; the answer is one word, or an error's text."""
        path = self.folder / f"{_PREFIX}{name}"
        try:
            return str(getattr(self, f"_{operation}")(path, primitive))
        except BlockingIOError:
            return "busy"
        except OSError as error:
            return error.strerror or str(error)

    def _hold(self, path: Path, primitive: str) -> str:
        self._held[primitive] = acquire(path, primitive)
        return "got"

    def _free(self, path: Path, primitive: str) -> str:
        release(self._held.pop(primitive), primitive)
        return "got"

    def _try(self, path: Path, primitive: str) -> str:
        release(acquire(path, primitive), primitive)
        return "got"

    def _cost(self, path: Path, primitive: str) -> float:
        times = []
        for _ in range(_COST_ROUNDS):
            began = time.perf_counter()
            release(acquire(path, primitive), primitive)
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)

    def _beside(self, path: Path, primitive: str) -> str:
        """As another process of this node."""
        return self._child(path, primitive, signal.SIGKILL)

    def _leave(self, path: Path, primitive: str) -> str:
        """A process takes the lock, and ends without giving it up."""
        return self._child(path, primitive, None)

    def _die(self, path: Path, primitive: str) -> str:
        """A process takes the lock, and is killed."""
        return self._child(path, primitive, signal.SIGKILL)

    def _child(self, path: Path, primitive: str, sig: int | None) -> str:
        """What a child process gets, before a signal or its own exit ends it."""
        answers, answer = os.pipe()
        orders, order = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(order)
            os.write(answer, self.do("hold", primitive, path.name.removeprefix(_PREFIX)).encode())
            os.read(orders, 1)  # until the parent closes its end
            os._exit(0)  # with no unlock, and no library's care at exit
        for end in (answer, orders):
            os.close(end)
        said = os.read(answers, 4096).decode()
        if sig is not None:
            os.kill(pid, sig)
        for end in (order, answers):
            os.close(end)
        os.waitpid(pid, 0)
        return said

    def _write(self, path: Path, primitive: str) -> str:
        path.touch()
        return "yes"

    def _see(self, path: Path, primitive: str) -> str:
        return "yes" if path.exists() else "no"

    def _clear(self, path: Path, primitive: str) -> str:
        """Removes what a probe has left here."""
        for left in self.folder.glob(f"{path.name}*"):
            left.unlink(missing_ok=True)
        return "yes"

    def _place(self, path: Path, primitive: str) -> str:
        """The host, and its file system, as JSON."""
        here = filesystem.of(self.folder)
        return json.dumps([os.uname().nodename, here.type, here.source, here.mount])


def acquire(path: Path, primitive: str) -> tuple[int, Any]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return fd, locks.lock(fd, primitive)
    except OSError:
        os.close(fd)
        raise


def release(held: tuple[int, Any], primitive: str) -> None:
    fd, what = held
    locks.unlock(fd, primitive, what)
    os.close(fd)


def serve(folder: Path, number: int, lines: IO[str], out: IO[str]) -> None:
    """Does what lines "NUMBER OPERATION PRIMITIVE NAME" tell this agent; answers in JSON lines.

    srun hands all lines to all agents.
    """
    agent = Agent(folder)
    for line in lines:
        to, operation, primitive, name = line.split(" ")
        if int(to) == number:
            answer = agent.do(operation, primitive, name.strip())
            print(_MARK + json.dumps([number, answer]), file=out, flush=True)


class Talk:
    """Agents behind one pipe: a local process, or all tasks of an srun."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.late = "a lock that hangs: is the file system's lock service up?"
        """The hint for an answer that does not come in time."""
        self.process = process.start(
            command, death=signal.SIGTERM, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._heard = b""

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the agents end with their input
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        self.process.terminate()  # an srun that still waits for nodes gives its job up
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        process.end(self.process)
        self.process.stdout.close()

    def ask(self, agent: int, operation: str, primitive: str = "-", name: str = "-") -> str:
        """One agent's answer.

        Raises:
            ProbeError: there is none in time, or the agents have ended.
        """
        assert self.process.stdin is not None
        what = f"node {agent}: {operation} {primitive}"
        try:
            self.process.stdin.write(f"{agent} {operation} {primitive} {name}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise ProbeError(f"the probe ended before its time ({what})") from None
        deadline = time.monotonic() + self.timeout_s
        while True:
            line = self._line(deadline, what)
            if line.startswith(_MARK):
                number, answer = json.loads(line.removeprefix(_MARK))
                assert number == agent
                return str(answer)

    def _line(self, deadline: float, what: str) -> str:
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([out], [], [], left)[0]:
                raise ProbeError(f"no answer within {self.timeout_s:.0f} s ({what})", self.late)
            data = os.read(out, 65536)
            if not data:
                raise ProbeError(f"the probe ended before its time ({what})")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace")


def agent_command(folder: Path) -> list[str]:
    """What runs an agent; its number is Slurm's of the task, else the one given."""
    return [sys.executable, "-m", "slurmft.locks.probe", str(folder)]


def main(argv: list[str]) -> None:
    """`python -m slurmft.locks.probe FOLDER [NUMBER]`: an agent."""
    number = argv[1] if len(argv) > 1 else os.environ.get("SLURM_PROCID", "0")
    serve(Path(argv[0]), int(number), sys.stdin, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
