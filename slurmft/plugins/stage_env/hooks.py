"""Hooks of `--stage-env`: its check, lines of the batch script, a node's Python, a warning."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from slurmft.core import interpreter
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.decode import decode
from slurmft.core.errors import Exit
from slurmft.core.hooks import Hooks, NodePython, ScriptLines
from slurmft.plugins.stage_env.options import StageOptions
from slurmft.runs.rundir import RunDir

ARCHIVE = "SLURMFT_STAGE"
"""Variable for the tasks of the nodes: JSON, path there -> `unpack.Sent`; slurmft's environment is
the first. Unset: there is none."""

_BEFORE = """\
# the Python environment on the nodes' own disks; without it they use the shared one
if archive=$({send}); then
  export {variable}="$archive"
fi"""
# Tasks that end by themselves, or are stopped, have removed theirs.
_AFTER = """\
if [ -n "${{archive-}}" ] && [ $ended != 0 ] && [ $ended != {stopped} ]; then
  {clean} "$archive"  # what killed tasks left
fi"""


class StageEnv(Hooks):
    """Sends the Python environment to the nodes' own disks."""

    def check(self, job: JobConfig, cluster: str) -> None:
        if job.options_of(StageOptions).stage_env:
            # Not at the top: every command asks these hooks, and few jobs stage anything.
            from slurmft.plugins.stage_env import pack

            pack.check(job, cluster)

    def script_lines(self, config: RunConfig, run: RunDir) -> ScriptLines:
        if not config.job.options_of(StageOptions).stage_env:
            return ScriptLines()
        pack = "slurmft.plugins.stage_env.pack"
        send = shlex.join(interpreter.module(pack, "send", str(run.path)))
        clean = shlex.join(interpreter.module(pack, "clean"))
        return ScriptLines(
            before=_BEFORE.format(send=send, variable=ARCHIVE),
            after=_AFTER.format(clean=clean, stopped=int(Exit.STOPPED)),
        )

    def node_python(
        self, is_stopping: Callable[[], bool]
    ) -> AbstractContextManager[NodePython] | None:
        # Unset or empty: nothing was sent to this node, and the shared environment is used.
        text = os.environ.get(ARCHIVE) or "{}"
        archives = json.loads(text)
        if not archives:
            return None
        return _unpacked(archives, is_stopping)

    def recorder(self, run: RunDir) -> "SharedImports | None":
        if not run.load_config().job.options_of(StageOptions).stage_env:
            return None
        return SharedImports(run)


class SharedImports:
    """Warns of nodes whose ranks use the shared environment all the same.

    Such a run works in the same way: without a warning nobody would notice.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._messages: list[str] = []

    def take(self, record: dict[str, Any]) -> None:
        # What the ranks run on is written just before the first record.
        if record["event"] != "start":
            return
        ranks = self._run.read_environment().ranks
        # A set: all ranks of a node have one Python.
        hosts = {rank.host for rank in ranks if not rank.is_staged}
        if hosts:
            names = ", ".join(sorted(hosts))
            # The reason is in the logs of the batch script and the nodes' tasks.
            self._messages.append(
                f"--stage-env: {names} imported from the shared environment; "
                f"why: {self._run.submitit}"
            )

    def messages(self) -> Iterator[str]:
        while self._messages:
            yield self._messages.pop(0)

    def close(self) -> None:
        """Does nothing: every warning is given at once."""


@contextmanager
def _unpacked(
    archives: dict[str, Any], is_stopping: Callable[[], bool]
) -> Iterator[NodePython]:
    from slurmft.plugins.stage_env import unpack

    sent = decode(archives, dict[str, unpack.Sent])
    with unpack.environment(sent, os.environ, is_stopping) as (python, variables):
        yield NodePython(python, variables)
