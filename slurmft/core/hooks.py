"""Hooks: what plug-ins do on the way of a job.

A plug-in subclasses `Hooks` and declares the class as an entry point of the group `slurmft.hooks`.
The kernel calls the functions below, and these call the methods of all plug-ins. The options of the
job decide whether a plug-in has anything to do: its modules are imported only then.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slurmft.core import interpreter, plugins
from slurmft.core.errors import SlurmftError, one_line

# For annotations alone: the core imports no package above it.
if TYPE_CHECKING:
    from slurmft.core.config import JobConfig, RunConfig
    from slurmft.node.peers import Peers
    from slurmft.node.rendezvous import Rendezvous
    from slurmft.runs.rundir import RunDir


@dataclass(frozen=True)
class ScriptLines:
    """Shell lines of the batch script around the tasks of the nodes. Those after the tasks find the
    tasks' exit code in `$ended`."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class NodePython:
    """The Python that a node's ranks run with, and the variables that belong to it."""

    python: str = interpreter.PYTHON
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedCache:
    """What the runs of a user keep for each other, outside of their directories."""

    folder: Path
    unused: Callable[[float], Iterable[tuple[Path, float]]]
    """Returns the entries that no run has used for so many seconds, with the seconds since then.
    A name that begins with a dot is one that a process was killed in writing or removing."""


class Recorder(Protocol):
    """Takes copies of a run's records, on its main rank."""

    def take(self, record: dict[str, Any]) -> None:
        """Takes a record, at once: the step waits for it."""

    def messages(self) -> Iterator[str]:
        """Yields the warnings since the last call."""

    def close(self) -> None:
        """Finishes: the rank ends after it."""


Examination = Callable[["Peers", float], bool]
"""Called when the nodes have met, with the others and how many seconds to wait for them: whether
the job may start."""


class Hooks:
    """The steps of a job at which plug-ins act. A plug-in overrides the methods that it needs; the
    others do nothing."""

    def check(self, job: "JobConfig", cluster: str) -> None:
        """Raises UsageError, before the submission, where the options cannot work on `cluster`."""

    def script_lines(self, config: "RunConfig", run: "RunDir") -> ScriptLines:
        """Returns the plug-in's lines of the batch script."""
        return ScriptLines()

    def examine_node(
        self, config: "RunConfig", run: "RunDir", rendezvous: "Rendezvous"
    ) -> Examination | None:
        """Begins to examine this node while the nodes meet; None: there is no examination."""

    def node_python(
        self, is_stopping: Callable[[], bool]
    ) -> AbstractContextManager[NodePython] | None:
        """Provides a Python on this node while its ranks run; None: they use the shared one."""

    def recorder(self, run: "RunDir") -> Recorder | None:
        """Returns what takes copies of the run's records; None: nothing does."""

    def state_changed(
        self, run: "RunDir", from_login: bool
    ) -> Callable[[], None] | None:
        """Hears that the state of a run has changed: on the job's first node, or where somebody
        follows the run (`from_login`). Returns what waits for the plug-in, if it works on."""

    def shared_cache(self) -> SharedCache | None:
        """Returns what the runs of this user keep for each other; None: nothing."""

    def next_commands(self, run: "RunDir") -> list[str]:
        """Returns commands that show more of a run that has finished."""
        return []


# --- what the kernel calls ------------------------------------------------------------------------


def check(job: "JobConfig", cluster: str) -> None:
    """Raises UsageError where an option of a plug-in cannot work for this job."""
    _answers(lambda member: member.check(job, cluster))


def script_lines(config: "RunConfig", run: "RunDir") -> ScriptLines:
    """Returns the lines of all plug-ins, those after the tasks in the opposite order."""
    lines = _answers(lambda member: member.script_lines(config, run))
    # As nested blocks: what was set up first is cleaned up last.
    before = [each.before for each in lines if each.before]
    after = [each.after for each in reversed(lines) if each.after]
    return ScriptLines("\n".join(before), "\n".join(after))


def examine_node(
    config: "RunConfig", run: "RunDir", rendezvous: "Rendezvous"
) -> list[Examination]:
    """Begins the examinations of this node."""
    return _answers(lambda member: member.examine_node(config, run, rendezvous))


def node_python(is_stopping: Callable[[], bool]) -> AbstractContextManager[NodePython]:
    """Provides the Python of this node's ranks: of the first plug-in that has one."""
    # One at most: ranks of a node have one Python.
    for provided in _answers(lambda member: member.node_python(is_stopping)):
        return provided
    return contextlib.nullcontext(NodePython())


def recorders(run: "RunDir") -> list[Recorder]:
    """Returns all that take copies of the run's records."""
    return _answers(lambda member: member.recorder(run))


def state_changed(run: "RunDir", from_login: bool = False) -> Callable[[], None]:
    """Tells all plug-ins; returns a function that waits for them. It need not be called where this
    process goes on living."""
    # All are called before any is waited for: their work goes on side by side.
    waits = _answers(lambda member: member.state_changed(run, from_login))

    def wait_for_all() -> None:
        for wait in waits:
            wait()

    return wait_for_all


def shared_caches() -> list[SharedCache]:
    """Returns all that the runs of this user keep for each other."""
    return _answers(lambda member: member.shared_cache())


def next_commands(run: "RunDir") -> list[str]:
    """Returns what plug-ins say about a run that has finished."""
    commands = _answers(lambda member: member.next_commands(run))
    return [command for of_member in commands for command in of_member]


Answer = TypeVar("Answer")


def _answers(ask: Callable[[Hooks], Answer | None]) -> list[Answer]:
    """Asks every plug-in; returns the answers that are not None.

    Raises:
        SlurmftError: a plug-in refuses.
    """
    answers = []
    for member in _members():
        try:
            answer = ask(member)
        # The plug-in refuses, as `check` does where an option cannot work.
        except SlurmftError:
            raise
        except Exception as error:
            # A fault of slurmft itself is to be seen with its traceback.
            if plugins.is_ours(type(member)):
                raise
            # A job does not fail for the fault of another package.
            _warn(type(member), error)
            continue
        if answer is not None:
            answers.append(answer)
    return answers


def _warn(plugin: Any, error: Exception) -> None:
    name = plugins.name_of(plugin)
    print(
        f"warning: {name}: {one_line(error)}; it is left out",
        file=sys.stderr,
        flush=True,
    )


@functools.cache
def _members() -> tuple[Hooks, ...]:
    """Makes one of each plug-in, which may keep something from one call to the next."""
    members = []
    for plugin in plugins.load_all(plugins.HOOKS):
        try:
            member = plugin()
            # It would lack methods, in the middle of a job.
            if not isinstance(member, Hooks):
                raise TypeError("it is no subclass of slurmft.core.hooks.Hooks")
        except Exception as error:
            _warn(plugin, error)
            continue
        members.append(member)
    return tuple(members)
