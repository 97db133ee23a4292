"""The checkpoint from which all ranks of a program start, and how often memory ran out before:
rank 0 chooses and counts, and tells the others.

A shared file system may show each node another newest one. The ranks exchange it on a port that
torchrun's agent chooses; without torchrun, on that of their process group's store, which is free
until their programs start.
"""

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmft.core.decode import loads
from slurmft.node import sealed
from slurmft.node.peers import Peers, report_line
from slurmft.node.rendezvous import LISTEN, START_PORT, greet, listen
from slurmft.programs import checkpoints, memory_failures
from slurmft.programs.description import OwnProgram, in_words
from slurmft.runs.records import warn
from slurmft.runs.rundir import RunDir

_TIMEOUT_S = 60
"""How long ranks wait for each other: they start together."""
_POLL_S = 0.2
"""Pause between two questions, and between two looks at whether the job stops."""
_CONNECTION_S = 5
"""How long rank 0 may take to answer."""
_TOPIC = "start point"
"""Topic of a rank's report that it has the answer."""


class StartPoint:
    """One rank's view of the checkpoint from which its program starts."""

    def __init__(
        self,
        run: RunDir,
        program: OwnProgram,
        rank: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._run = run
        self._program = program
        self._rank = rank
        self._is_stopping = is_stopping
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._host = os.environ.get("MASTER_ADDR", "")
        port = os.environ.get(START_PORT) or os.environ.get("MASTER_PORT")
        self._port = int(port or 0)
        self.memory_failures = memory_failures.count(run)
        """How often memory ran out; after `choose` the same on every rank, where the command line
        depends on it."""

    def choose(self) -> Path | None:
        """Returns the checkpoint, the same on every rank; None: the program starts from its
        beginning. Ranks that cannot reach each other choose for themselves, with a warning.

        Raises:
            OSError: --checkpoint-dir cannot be read.
            TakenPortError: on rank 0; another process listens on the port.
        """
        # Its command line names no checkpoint: the program itself looks for one, if it does.
        if not self._program.chooses_start:
            return None
        # There is nobody to agree with, or no address at which ranks could meet.
        if self._world_size == 1 or not self._port:
            return self._newest()
        if self._rank == 0:
            checkpoint = self._newest()
            self._serve(checkpoint)
            return checkpoint
        return self._ask()

    def _newest(self) -> Path | None:
        """Returns the newest whole checkpoint, and warns where there are newer ones."""
        if self._program.resume_args is None:
            return None
        written = self._program.checkpoints()
        newest_ns = 0
        if written:
            newest_ns = checkpoints.written_ns(written[0])
        for path, refused in self._program.refused(newest_ns).items():
            self._warn(f"the checkpoint {path.name!r} is passed over: {refused}")
        if not written:
            return None
        # Before it is judged: a file that still grows looks cut off.
        checkpoints.settle(written[0])
        failed = {failure.checkpoint for failure in self._run.all_failures()}
        passed_over = {name for name in failed if name is not None}
        checkpoint = self._program.newest_checkpoint(passed_over)
        if checkpoint == written[0]:
            return checkpoint
        newest = in_words(written[0])
        reason = "is not whole"
        if newest in passed_over:
            reason = "could not be loaded"
        goal = "its beginning"
        if checkpoint is not None:
            goal = in_words(checkpoint)
        self._warn(f"the checkpoint {newest} {reason}: the program starts from {goal}")
        return checkpoint

    def _warn(self, text: str) -> None:
        print(f"slurmft: {text}", flush=True)
        warn(self._run.records, text)

    # --- rank 0 -----------------------------------------------------------------------------------

    def _serve(self, checkpoint: Path | None) -> None:
        """Answers every other rank.

        Raises:
            TakenPortError: another process listens on the port.
        """
        name = None
        if checkpoint is not None:
            # The name alone: each rank looks for it in --checkpoint-dir as its node has it.
            name = checkpoint.name
        answer = _Answer(self._run.path.name, name, self.memory_failures)
        # "n1=10.1.0.1": the address on which this node listens; empty for all.
        _, _, address = os.environ.get(LISTEN, "").partition("=")
        server = socket.socket(fileno=listen(address, self._port, is_held=True))
        peers = Peers([server], answer.line(), sealed.secret_of(os.environ))
        try:
            missing = self._await_ranks(peers)
        finally:
            # The port is free for the program.
            peers.close()
        if missing and not self._is_stopping():
            self._warn(
                f"{len(missing)} ranks have not asked which checkpoint they start from: each "
                "chooses the newest that its node sees"
            )

    def _await_ranks(self, peers: Peers) -> set[int]:
        """Waits until all other ranks have the answer; returns those that do not get it in time."""
        deadline = time.monotonic() + _TIMEOUT_S
        missing = set(range(1, self._world_size))
        reports: list[tuple[float, int]] = []
        while missing and time.monotonic() < deadline and not self._is_stopping():
            reports = peers.reports(_TOPIC, len(reports) + 1, _POLL_S)
            missing.difference_update(rank for _, rank in reports)
        return missing

    # --- other ranks ------------------------------------------------------------------------------

    def _ask(self) -> Path | None:
        """Asks rank 0 for its choice."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline and not self._is_stopping():
            # Rank 0 does not listen yet; or another process does.
            with contextlib.suppress(OSError, ValueError):
                answer = self._connect()
                self.memory_failures = answer.memory_failures
                if answer.checkpoint is None:
                    return None
                return self._seen(answer.checkpoint)
            time.sleep(_POLL_S)
        if not self._is_stopping():
            self._warn(
                f"rank {self._rank} cannot ask rank 0 which checkpoint it starts from: it chooses "
                "the newest that its node sees"
            )
        return self._newest()

    def _connect(self) -> "_Answer":
        """Returns the answer of rank 0.

        Raises:
            OSError, ValueError: nobody answers, or not as rank 0 of this run does.
        """
        address = (self._host, self._port)
        secret = sealed.secret_of(os.environ)
        with socket.create_connection(address, timeout=_CONNECTION_S) as server:
            channel, line = greet(server, secret, _CONNECTION_S)
            server.sendall(channel.seal(report_line(_TOPIC, self._rank)))
        return _Answer.parse(line, self._run.path.name)

    def _seen(self, name: str) -> Path:
        """Returns the path of a checkpoint, when this node sees it; with a warning, where it does
        not in time."""
        assert self._program.checkpoint_dir is not None
        path = self._program.path(self._program.checkpoint_dir) / name
        deadline = time.monotonic() + _TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                # The program gets it all the same: it may load it on rank 0 alone.
                self._warn(
                    f"rank {self._rank} does not see the checkpoint {name} that rank 0 starts from"
                )
                break
            # To list a folder makes NFS look for new entries.
            with contextlib.suppress(OSError):
                os.listdir(path.parent)
            time.sleep(_POLL_S)
        return path


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 tells the other ranks, as a line of JSON."""

    run: str
    """Name of the run's folder."""
    checkpoint: str | None
    """Name of an entry of --checkpoint-dir; None: the program starts from its beginning."""
    memory_failures: int = 0

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: str, run: str) -> "_Answer":
        """Reads an answer to a rank of a run.

        Raises:
            ValueError: it is no answer, or one of another run. No answer leads out of the folder.
        """
        try:
            answer = loads(line, cls)
        except RecursionError:
            raise ValueError("brackets within brackets") from None
        if answer.run != run:
            raise ValueError(f"an answer of the run {answer.run!r}")
        name = answer.checkpoint
        if name is not None and not _is_entry(name):
            raise ValueError(f"{name!r} is no name of a checkpoint")
        return answer


def _is_entry(name: str) -> bool:
    """Returns whether a text can be the name of a file or folder in a folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
