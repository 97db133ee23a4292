"""Hugging Face's caches on file systems that several nodes share: which file locks hold there."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmft import locks
from slurmft.core import filesystem, permissions
from slurmft.core.agents import AgentError, Agents
from slurmft.core.errors import SlurmftError
from slurmft.core.filesystem import FileSystem
from slurmft.job.process_group import World
from slurmft.locks import probe
from slurmft.locks.probe import Findings

_AGENT = [sys.executable, "-m", "slurmft.locks.probe"]
_START_S, _ANSWER_S = 10.0, 1.0
"""How long an agent may take to start, and to answer: after that it counts as hanging in a lock."""


def settle_locks(world: World, folder: Path) -> str | None:
    """Measures which lock holds in a folder, where that matters and is not known.

    Two nodes take less than a second for it; the result is recorded for later runs. Returns a
    warning if it could not be measured.
    """
    hosts = world.all_objects(platform.node())
    here, known = world.share_object(_known(folder))
    if known is None and here.is_shared and len(set(hosts)) > 1:
        if not world.share_object(_is_writable(folder)):
            return None
        second = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        try:
            findings = _probe(world, folder, [0, second], here)
            known = findings and probe.choose(findings, here)
        except SlurmftError as error:
            return f"{error.message}; file locks: {locks.default(here)}"
        if findings and world.is_main:
            with contextlib.suppress(OSError, RuntimeError):  # then the next run measures again
                probe.record(here, findings, nodes=2)
    if known:  # whatever each of them has on record
        locks.settle(folder, known)
    return None


def _known(folder: Path) -> tuple[FileSystem, str | None]:
    """The file system of a folder, and the primitive on record for it."""
    here = filesystem.of(folder)
    record = locks.recorded(here)
    return here, str(record["primitive"]) if record else None


def _is_writable(folder: Path) -> bool:
    """Whether a folder is there, or could be made, and can be written; else nobody locks in it."""
    with contextlib.suppress(OSError), permissions.as_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _probe(world: World, folder: Path, ranks: Sequence[int], here: FileSystem) -> Findings | None:
    """Measures between two ranks. A lock call may hang, so each of the two has an agent, a child
    that can be killed. All ranks run the probe with the same answers, and so stay in step."""
    name = f"rank {world.rank}"
    with Agents({name: _AGENT} if world.rank in ranks else {}) as agents:

        def ask(node: int, *what: str, timeout_s: float = _ANSWER_S) -> str:
            answer: str | AgentError | None = None
            if world.rank == ranks[node]:
                try:
                    answer = probe.ask_agents(agents, [name] * 2, folder, timeout_s)(node, *what)
                except AgentError as error:
                    answer = error
            answer = world.share_object(answer, ranks[node])
            if isinstance(answer, AgentError):
                raise answer
            return str(answer)

        for node in range(2):
            ask(node, "token", timeout_s=_START_S)
        return probe.probe(ask, 2, here, thorough=False)
