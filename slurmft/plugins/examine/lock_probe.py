"""Which lock primitive holds between nodes: measured, with real processes on the real nodes.

`probe` decides what is tried and where; `LockOperations` does it on a node, as part of an agent.
`python -m slurmft.plugins.examine.lock_probe` is an agent with nothing else.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft import locks
from slurmft.core.agents import AgentError, Agents, serve
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.filesystem import LOCK_PRIMITIVES, FileSystem

Ask = Callable[..., str]
"""ask(node, operation, primitive, name) -> the answer of `LockOperations.lock` on that node."""

_PREFIX = ".slurmft-lock-"
_RELEASE_TRIES, _RELEASE_PAUSE_S = 40, 0.05
"""How long a lock may stay that was given up: clients tell the server about a dead process, and
remember a second long that a file was there."""


class ProbeError(SlurmftError):
    """No kind of lock holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was measured of one primitive; None: not known."""

    error: str | None = None
    """Why it cannot be used here."""
    on_node: bool | None = None
    """It excludes other processes of the same node."""
    between_nodes: bool | None = None
    """It excludes processes of other nodes."""
    on_unlock: bool | None = None
    """It is released by an unlock."""
    on_exit: bool | None = None
    """It is released by the end of its process."""
    on_kill: bool | None = None
    """It is released by a SIGKILL of its process."""

    @property
    def excludes(self) -> bool:
        return self.error is None and bool(self.between_nodes and self.on_node and self.on_unlock)

    @property
    def good(self) -> bool:
        return self.excludes and bool(self.on_exit and self.on_kill)


Findings = dict[str, Finding]
"""By primitive."""


def probe(ask: Ask, nodes: int, here: FileSystem, *, thorough: bool = True) -> Findings | None:
    """Tries the primitives one after another between nodes, the default first: all of them if
    `thorough`, else up to the first one that holds. None where the nodes see different folders
    under their paths.

    `ask` has an operation done on one of the nodes from 0 on. What is asked depends on the answers
    alone, so that ranks that share the answers may all run it.
    """
    token = ask(0, "token")  # others may measure in the same folder
    try:
        ask(0, "write", "-", token)
        if any(ask(node, "see", "-", token) != "yes" for node in range(nodes)):
            return None
        found: Findings = {}
        for primitive in preference(here):
            found[primitive] = _measure(ask, nodes, primitive, f"{token}-{primitive}", thorough)
            if found[primitive].good and not thorough:
                break
        return found
    finally:
        with contextlib.suppress(AgentError):
            ask(0, "clear", "-", token)


def preference(here: FileSystem) -> list[str]:
    """In this order they are tried: first the default, which processes without a record use."""
    first = locks.default(here)
    return [first, *(primitive for primitive in LOCK_PRIMITIVES if primitive != first)]


def _measure(ask: Ask, nodes: int, primitive: str, name: str, thorough: bool) -> Finding:
    last = nodes - 1

    def becomes_free(name: str) -> bool:
        """Whether the last node can have it soon."""
        for _ in range(_RELEASE_TRIES):
            if ask(last, "try", primitive, name) == "got":
                return True
            time.sleep(_RELEASE_PAUSE_S)
        return False

    def released_by(end: str) -> bool | None:
        """Whether that end of a process of the first node releases its lock."""
        own = f"{name}-{end}"  # an earlier lock may have stayed
        if ask(0, end, primitive, own) != "got":
            return None
        return becomes_free(own)

    held = ask(0, "hold", primitive, name)
    if held != "got":
        return Finding(error=held)
    on_node = ask(0, "die", primitive, name) == "busy"  # to another process
    others = [ask(node, "try", primitive, name) for node in range(1, nodes)]
    between_nodes = all(answer == "busy" for answer in others) if others else None
    ask(0, "free", primitive, name)
    if between_nodes is False and not thorough:
        return Finding(on_node=on_node, between_nodes=False)
    return Finding(
        on_node=on_node,
        between_nodes=between_nodes,
        on_unlock=becomes_free(name),
        on_exit=released_by("leave"),
        on_kill=released_by("die"),
    )


def choose(found: Findings, here: FileSystem) -> str:
    """The primitive to use: the default if it holds, else the first one that does; soft locks,
    which a killed process leaves behind, only where no other does. ProbeError where none holds."""
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


def ask_agents(agents: Agents, names: Sequence[str], folder: Path, timeout_s: float) -> Ask:
    """What `probe` asks with, where agents with the operation `lock` run on the nodes."""

    def ask(node: int, operation: str, primitive: str = "-", name: str = "-") -> str:
        asked = {"folder": str(folder), "operation": operation}
        asked |= {"primitive": primitive, "name": name}
        agent = names[node]
        answer = agents.ask("lock", {agent: asked}, timeout_s)[agent]
        if isinstance(answer, AgentError):
            raise AgentError(
                f"cannot measure file locks: {agent}: {answer.message} ({operation} {primitive})",
                "if a lock hangs: is the lock service of the file system up?",
            )
        return str(answer)

    return ask


# --- on a node ------------------------------------------------------------------------------------


class LockOperations:
    """What one node does for the probe."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, Any]] = {}

    def lock(self, folder: str, operation: str, primitive: str, name: str) -> str:
        """Does one operation; the answer is one word, or an error's text."""
        path = Path(folder) / f"{_PREFIX}{name}"
        try:
            return str(getattr(self, f"_{operation}")(path, primitive))
        except BlockingIOError:
            return "busy"
        except OSError as error:
            return error.strerror or str(error)

    def _token(self, path: Path, primitive: str) -> str:
        """A name that nobody else uses."""
        return secrets.token_hex(6)

    def _hold(self, path: Path, primitive: str) -> str:
        self._held[path] = acquire(path, primitive)
        return "got"

    def _free(self, path: Path, primitive: str) -> str:
        release(self._held.pop(path), primitive)
        return "got"

    def _try(self, path: Path, primitive: str) -> str:
        release(acquire(path, primitive), primitive)
        return "got"

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
            name = path.name.removeprefix(_PREFIX)
            os.write(answer, self.lock(str(path.parent), "hold", primitive, name).encode())
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
        for left in path.parent.glob(f"{path.name}*"):
            left.unlink(missing_ok=True)
        return "yes"


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


if __name__ == "__main__":
    serve(LockOperations())
