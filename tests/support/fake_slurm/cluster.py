"""The fake Slurm as tests use it: its commands in a folder, and what they need of a cluster.

Jobs run as processes of this machine; its nodes are addresses of it.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support import until
from tests.support.cluster import system
from tests.support.fake_slurm import processes, schedule
from tests.support.fake_slurm.jobs import FOLDER, Table
from tests.support.fake_slurm.program import COMMANDS
from tests.support.fake_slurm.settings import HOSTS

BACKGROUND = ("runner", "timer")


class FakeSlurm(system.LoginHost):
    """The commands in a folder, and what tests need of a cluster (see tests/support/cluster)."""

    def __init__(self, folder: Path) -> None:
        self.table = Table(folder / "slurm")
        self.bin = folder / "bin"
        for folder_to_make in (self.table.folder / "spool", self.bin):
            folder_to_make.mkdir(parents=True)
        for name in COMMANDS.keys() - set(BACKGROUND):
            (self.bin / name).write_text(
                f'#!/bin/sh\nexec {shlex.join(schedule.command(name))} "$@"\n'
            )
            (self.bin / name).chmod(0o755)

    def __enter__(self) -> FakeSlurm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all jobs, whatever they do."""
        for job in self.table.read():
            if job.runner:
                alive = processes.descendants(job.runner)
                processes.send(signal.SIGKILL, [job.runner, *alive])

    @property
    def hosts(self) -> list[str]:
        return list(HOSTS)

    @property
    def env(self) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return {FOLDER: str(self.table.folder), "PATH": path}

    def _command(self, argv: Sequence[str], on: str | None) -> Sequence[str]:
        assert on is None, "the fake's nodes are this machine"
        return argv

    def wait_idle(self) -> None:
        """Waits until no job is queued."""
        until(lambda: all(job.has_ended for job in self.table.read()), self.table.read)

    def accounting(
        self, job: str, fields: str, *options: str, starts: int = 1
    ) -> list[list[str]]:
        """Returns the rows of sacct for a job that has ended."""
        rows: list[list[str]] = []

        def has_ended() -> bool:
            command = [
                "sacct",
                "-nPX",
                *options,
                f"--jobs={job}",
                f"--format=End,{fields}",
            ]
            lines = self.run(command).stdout.splitlines()
            rows[:] = [line.split("|") for line in lines]
            return len(rows) == starts and all(row[0] != "Unknown" for row in rows)

        until(has_ended, lambda: rows)
        return [row[1:] for row in rows]
