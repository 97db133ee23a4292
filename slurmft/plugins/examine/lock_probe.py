"""The lock primitive that holds between nodes: measured, with real processes on the real nodes.

`probe` decides what is tried and where; the agents do it (`LockOperations`).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurmft import locks
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.filesystem import LOCK_PRIMITIVES, FileSystem
from slurmft.plugins.examine.agents import AgentError, Agents

Ask = Callable[..., str]
"""ask(node, operation, primitive, name) -> the answer of `LockOperations.lock` on that node."""

# A lock that was given up may stay for a while: clients tell the server about a dead process, and
# remember a second long that a file was there.
_RELEASE_TRIES = 40
_RELEASE_PAUSE_S = 0.05


class ProbeError(SlurmftError):
    """No kind of lock holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The measurements of one primitive. None: not known."""

    error: str | None = None
    """The reason why it cannot be used here."""
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
        holds = self.between_nodes and self.on_node and self.on_unlock
        return self.error is None and bool(holds)

    @property
    def good(self) -> bool:
        return self.excludes and bool(self.on_exit and self.on_kill)


Findings = dict[str, Finding]
"""By primitive."""


def probe(
    ask: Ask,
    nodes: int,
    file_system: FileSystem,
    *,
    thorough: bool = True,
) -> Findings | None:
    """Tries the primitives one after another between nodes, the default first.

    Each question depends on the answers so far alone: ranks that share the answers may all run it.

    Args:
        ask: has an operation done on one of the nodes, which count from 0.
        thorough: tries all primitives; else stops at the first one that holds.

    Returns None where the nodes see different folders under their paths.
    """
    token = ask(0, "token")  # others may measure in the same folder
    try:
        ask(0, "write", "-", token)
        # A node that does not see the file has a folder of its own there, as /tmp is: no lock needs
        # to hold between them.
        if any(ask(node, "see", "-", token) != "yes" for node in range(nodes)):
            return None
        findings: Findings = {}
        for primitive in preference(file_system):
            name = f"{token}-{primitive}"
            findings[primitive] = _measure(ask, nodes, primitive, name, thorough)
            if findings[primitive].good and not thorough:
                break
        return findings
    finally:
        # The folder is somebody's cache: nothing of the measurement stays there.
        with contextlib.suppress(AgentError):
            ask(0, "clear", "-", token)


def preference(file_system: FileSystem) -> list[str]:
    """Returns the primitives in the order in which they are tried: first the default, which
    processes without a record use."""
    first = locks.default(file_system)
    others = [primitive for primitive in LOCK_PRIMITIVES if primitive != first]
    return [first, *others]


def _measure(
    ask: Ask,
    nodes: int,
    primitive: str,
    name: str,
    thorough: bool,
) -> Finding:
    # Another node than the first, which holds the locks, if there is another.
    last = nodes - 1

    def becomes_free(name: str) -> bool:
        """Tells if the last node can have the lock soon."""
        for _ in range(_RELEASE_TRIES):
            if ask(last, "try", primitive, name) == "got":
                return True
            time.sleep(_RELEASE_PAUSE_S)
        return False

    def is_released_by(end: str) -> bool | None:
        """Tells if that end of a process of the first node releases its lock."""
        separate_name = f"{name}-{end}"  # an earlier lock may have stayed
        if ask(0, end, primitive, separate_name) != "got":
            return None
        return becomes_free(separate_name)

    answer = ask(0, "hold", primitive, name)
    # Any other word is the text of an error: this primitive cannot be used here.
    if answer != "got":
        return Finding(error=answer)
    on_node = ask(0, "die", primitive, name) == "busy"  # another process tries
    # Node 0 holds the lock meanwhile.
    others = [ask(node, "try", primitive, name) for node in range(1, nodes)]
    between_nodes = None
    if others:
        between_nodes = all(answer == "busy" for answer in others)
    ask(0, "free", primitive, name)
    # It cannot be chosen. How it is released need not be known then, and takes the longest to find
    # out.
    if between_nodes is False and not thorough:
        return Finding(on_node=on_node, between_nodes=False)
    return Finding(
        on_node=on_node,
        between_nodes=between_nodes,
        on_unlock=becomes_free(name),
        on_exit=is_released_by("leave"),
        on_kill=is_released_by("die"),
    )


def choose(findings: Findings, file_system: FileSystem) -> str:
    """Returns the primitive to use: the default if it holds, else the first one that does.

    Soft locks, which a killed process leaves behind, are chosen only where no other one holds.

    Raises:
        ProbeError: none holds.
    """
    usable = [finding for finding in findings.values() if not finding.error]
    # Of all primitives or of none is known what holds between nodes.
    if usable and all(finding.between_nodes is None for finding in usable):
        return locks.default(file_system)  # one node cannot know
    for primitive in preference(file_system):
        if primitive in findings and findings[primitive].good:
            return primitive
    if "soft" in findings and findings["soft"].excludes:
        return "soft"
    errors = {finding.error for finding in findings.values()}
    reason = ""
    if len(errors) == 1 and None not in errors:
        reason = f": {errors.pop()}"
    raise ProbeError(
        f"no kind of file lock holds on {file_system}{reason}",
        "put the caches (HF_HOME) on another file system, or on node-local disks",
    )


def record(file_system: FileSystem, findings: Findings, nodes: int) -> Path:
    """Writes the measurements to where `locks.recorded` finds them; returns the file."""
    path = locks.record_path(file_system)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "primitive": choose(findings, file_system),
        "file_system": asdict(file_system),
        "nodes": nodes,
        "time": time.time(),
        "findings": {name: asdict(finding) for name, finding in findings.items()},
    }
    write_json(path, content)
    return path


def ask_agents(
    agents: Agents,
    names: Sequence[str],
    folder: Path,
    timeout_s: float,
) -> Ask:
    """Returns the function by which `probe` asks the agents on the nodes."""

    def ask(node: int, operation: str, primitive: str = "-", name: str = "-") -> str:
        question = {
            "folder": str(folder),
            "operation": operation,
            "primitive": primitive,
            "name": name,
        }
        agent = names[node]
        answer = agents.ask("lock", {agent: question}, timeout_s)[agent]
        if isinstance(answer, AgentError):
            raise AgentError(
                f"cannot measure file locks: {agent}: {answer.message} ({operation} {primitive})",
                "if a lock hangs: is the lock service of the file system up?",
            )
        return str(answer)

    return ask
