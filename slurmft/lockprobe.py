"""Which lock primitive holds between nodes: measured, with real processes on the real nodes.

Every node has an agent, which does one thing at a time as it is told; `measure` tells them what.
"""

from __future__ import annotations

import contextlib
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

from slurmft import filesystem, locks, process
from slurmft.errors import SlurmftError
from slurmft.filesystem import LOCK_PRIMITIVES, FileSystem
from slurmft.rundir import write_json

Ask = Callable[..., str]
"""ask(agent, operation, primitive, name) -> the agent's answer."""

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


def measure(ask: Ask, nodes: int, *, thorough: bool = True) -> dict[str, Finding]:
    """Tries the primitives one after another on the nodes of all agents.

    Args:
        ask: tells one of the agents 0 to nodes - 1 what to do.
        thorough: all primitives; else it ends at the first one that holds.
    """
    found: dict[str, Finding] = {}
    for primitive in LOCK_PRIMITIVES:
        found[primitive] = _measure_one(ask, nodes, primitive, thorough)
        if found[primitive].good and not thorough:
            break
    return found


def _measure_one(ask: Ask, nodes: int, primitive: str, thorough: bool) -> Finding:
    name, last = f"{primitive}-{secrets.token_hex(4)}", nodes - 1

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
        cost_us=float(ask(0, "cost", primitive, f"{name}-free")),
    )


def _in_time(is_free: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while not (free := is_free()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def choose(found: dict[str, Finding], here: FileSystem) -> str:
    """The primitive to use: the first one that holds; soft locks, which a killed process leaves
    behind, only where no other does.

    Raises:
        ProbeError: none holds.
    """
    usable = [finding for finding in found.values() if not finding.error]
    if usable and all(finding.between_nodes is None for finding in usable):
        return locks.default(here)  # one node cannot know
    for primitive, finding in found.items():
        if finding.good:
            return primitive
    if "soft" in found and found["soft"].excludes:
        return "soft"
    errors = {finding.error for finding in found.values()}
    why = f": {errors.pop()}" if len(errors) == 1 and None not in errors else ""
    raise ProbeError(
        f"no kind of file lock holds on {here}{why}",
        "put the caches (HF_HOME) on another file system, or on node-local disks",
    )


def record(here: FileSystem, found: dict[str, Finding], nodes: int) -> Path:
    """Writes what was measured to where `locks.recorded` finds it."""
    path = locks.record_path(here)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "primitive": choose(found, here),
            "file_system": {"type": here.type, "source": here.source, "mount": here.mount},
            "nodes": nodes,
            "time": time.time(),
            "findings": {name: as_dict(finding) for name, finding in found.items()},
        },
    )
    return path


def as_dict(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in Finding.__slots__}


def same_folder(ask: Ask, nodes: int) -> bool:
    """Whether all agents see one folder under their paths."""
    name = f"seen-{secrets.token_hex(4)}"
    ask(0, "write", "", name)
    seen = [ask(agent, "see", "", name) for agent in range(nodes)]
    ask(0, "remove", "", name)
    return all(answer == "yes" for answer in seen)


# --- an agent -------------------------------------------------------------------------------------


class Agent:
    """What one node does for the probe, in a folder of its file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, tuple[int, Any]] = {}

    def do(self, operation: str, primitive: str, name: str) -> str:
        """Does what it is told; the answer is one word, or an error's text."""
        path = self.folder / f".slurmft-lock-{name}"
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
        answer, child = self._child(path, primitive)
        _end(child)
        return answer

    def _leave(self, path: Path, primitive: str) -> str:
        """A process takes the lock, and ends without giving it up."""
        answer, child = self._child(path, primitive)
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
        return answer

    def _die(self, path: Path, primitive: str) -> str:
        answer, child = self._child(path, primitive)
        _end(child)
        return answer

    def _child(self, path: Path, primitive: str) -> tuple[str, subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "slurmft.lockprobe", "hold", str(path), primitive]
        child = process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        return child.stdout.readline().decode().strip(), child

    def _write(self, path: Path, primitive: str) -> str:
        path.touch()
        return "yes"

    def _see(self, path: Path, primitive: str) -> str:
        return "yes" if path.exists() else "no"

    def _remove(self, path: Path, primitive: str) -> str:
        path.unlink(missing_ok=True)
        return "yes"

    def _clear(self, path: Path, primitive: str) -> str:
        """Removes what the probe has left here."""
        for left in self.folder.glob(".slurmft-lock-*"):
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


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


def serve(folder: Path, number: int, lines: IO[str], out: IO[str]) -> None:
    """Does what lines "NUMBER OPERATION PRIMITIVE NAME" tell this agent; answers in JSON lines.

    srun hands all lines to all agents.
    """
    agent = Agent(folder)
    for line in lines:
        to, operation, primitive, name = line.split(" ")
        if int(to) == number:
            answer = agent.do(operation, primitive, name.strip())
            print(json.dumps([number, answer]), file=out, flush=True)


class Talk:
    """Agents behind one pipe: a local process, or all tasks of an srun."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process = process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the agents end with their input
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.end(self.process)

    def ask(self, agent: int, operation: str, primitive: str = "-", name: str = "-") -> str:
        """One agent's answer.

        Raises:
            ProbeError: there is none in time, or the agents have ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        what = f"node {agent}: {operation} {primitive}"
        try:
            self.process.stdin.write(f"{agent} {operation} {primitive or '-'} {name}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise ProbeError(f"the probe ended before its time ({what})") from None
        if not select.select([self.process.stdout], [], [], self.timeout_s)[0]:
            raise ProbeError(
                f"no answer within {self.timeout_s:.0f} s ({what})",
                "a lock that hangs: is the file system's lock service up?",
            )
        line = self.process.stdout.readline()
        if not line:
            raise ProbeError(f"the probe ended before its time ({what})")
        number, answer = json.loads(line)
        assert number == agent
        return str(answer)


def agent_command(folder: Path) -> list[str]:
    """What runs an agent; its number is Slurm's of the task, else the one given."""
    return [sys.executable, "-m", "slurmft.lockprobe", "agent", str(folder)]


def main(argv: list[str]) -> None:
    """`python -m slurmft.lockprobe agent FOLDER [NUMBER]`, or `hold PATH PRIMITIVE`."""
    if argv[0] == "hold":
        try:
            _held = acquire(Path(argv[1]), argv[2])  # a soft lock goes with its object
            print("got", flush=True)
        except BlockingIOError:
            print("busy", flush=True)
        except OSError as error:
            print(error.strerror, flush=True)
        sys.stdin.read()
        os._exit(0)  # with no unlock, and no library's care at exit
    number = argv[2] if len(argv) > 2 else os.environ.get("SLURM_PROCID", "0")
    serve(Path(argv[1]), int(number), sys.stdin, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
