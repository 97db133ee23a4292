"""Hugging Face's caches on shared and on node-local file systems: who fills them, how they lock."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft import locks
from slurmft.core import filesystem
from slurmft.core.filesystem import FileSystem
from slurmft.job.process_group import World
from slurmft.locks import probe
from slurmft.locks.probe import Ask, ProbeError, Talk

_START_S, _ANSWER_S = 10.0, 1.0
"""How long an agent may take to start, and to answer: longer, and it hangs in a lock."""


def leads(world: World, folder: Path) -> bool:
    """Whether this rank is the one to fill a cache: one for each folder, be it shared by all nodes,
    by some, or by none. Found out with files that the ranks leave for each other there.

    Nobody does where it cannot be written: what is there must do.

    Args:
        folder: this rank's path of the cache; made if it is not there.
    """
    places = world.all_objects((platform.node(), str(folder)))
    first = places.index(places[world.rank]) == world.rank  # on this node, with this path
    name = world.share_object(f".slurmft-{secrets.token_hex(6)}")
    mine = folder / f"{name}-{world.rank}"
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
    except OSError:
        first = False
    world.all_objects(None)  # all files are there
    # By name, one by one: NFS may answer a listing from its memory.
    seen = (r for r in range(world.rank) if (folder / f"{name}-{r}").exists())
    leader = first and next(seen, None) is None
    world.all_objects(None)  # all have looked
    if first:
        mine.unlink()
    return leader


def settle_locks(world: World, folder: Path) -> str | None:
    """Measures which lock holds in a folder, where that matters and is not known.

    Two nodes are asked, in less than a second; the result is recorded for later runs. Returns a
    warning where it could not be found out.
    """
    hosts = world.all_objects(platform.node())
    here, known = world.share_object(_known(folder))
    if known is None and here.is_shared and len(set(hosts)) > 1:
        if not world.share_object(_made(folder)):
            return None
        second = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        with _agents(world, folder, [0, second]) as ask:
            found = _measure(ask, here) if ask else None
        found = world.share_object(found)
        if isinstance(found, ProbeError):
            return f"{found.message}; file locks: {locks.default(here)}"
        known = found and probe.choose(found, here)
        if known and world.is_main:
            with contextlib.suppress(OSError, RuntimeError):  # then the next run measures again
                probe.record(here, found, nodes=2)
    if known:  # whatever each of them has on record
        locks.settle(folder, known)
    return None


def _known(folder: Path) -> tuple[FileSystem, str | None]:
    """The file system of a folder, and the primitive on record for it."""
    here = filesystem.of(folder)
    record = locks.recorded(here)
    return here, str(record["primitive"]) if record else None


def _made(folder: Path) -> bool:
    """Whether a folder is there, or could be made, and can be written; else nobody locks in it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _measure(ask: Ask, here: FileSystem) -> Any:
    """The findings, on the main rank; None where the nodes see different folders."""
    try:
        found = probe.probe(ask, 2, here, thorough=False)
        if found:
            probe.choose(found, here)  # raises where none holds
        return found
    except ProbeError as error:
        return error


@contextlib.contextmanager
def _agents(world: World, folder: Path, ranks: list[int]) -> Iterator[Ask | None]:
    """Agents on two nodes; the main rank gets what asks them, the others serve meanwhile."""
    number = ranks.index(world.rank) if world.rank in ranks else None
    command = [*probe.agent_command(folder), str(number)]
    with contextlib.ExitStack() as stack:
        talk = None if number is None else stack.enter_context(Talk(command, _START_S))

        def ask(agent: int, *what: str) -> str:
            world.share_object((agent, what))
            return _relay(world, talk, ranks, agent, what)

        if world.is_main:
            yield ask
            world.share_object(None)
            return
        while (said := world.share_object(None)) is not None:
            with contextlib.suppress(ProbeError):  # the main rank knows
                _relay(world, talk, ranks, *said)
        yield None


def _relay(
    world: World, talk: Talk | None, ranks: list[int], agent: int, what: tuple[str, ...]
) -> str:
    """One agent's answer, on all ranks."""
    answer: str | ProbeError | None = None
    if world.rank == ranks[agent]:
        assert talk is not None
        try:
            answer = talk.ask(agent, *what)
            talk.timeout_s = _ANSWER_S
        except ProbeError as error:
            answer = error
    answer = world.share_object(answer, ranks[agent])
    if isinstance(answer, ProbeError):
        raise answer
    assert answer is not None
    return answer
