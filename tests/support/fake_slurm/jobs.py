"""The jobs of the fake Slurm: a file in its folder, which every command reads and writes under a
lock. There is no daemon: whatever changes a job calls `schedule.schedule`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.fake_slurm.settings import MIN_JOB_AGE_S

FOLDER = "FAKE_SLURM"
"""Environment variable with the folder of the fake Slurm."""


class RefusedError(Exception):
    """A refusal: the text for stderr, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


@dataclass
class Start:
    """One start of a job, as accounting has it."""

    state: str
    started: float
    ended: float
    hosts: list[str]
    exit_code: int = 0
    signal: int = 0
    peak_kib: int = 0


@dataclass
class Job:
    """A job, or a task of an array, which is a job of its own."""

    id: int
    name: str
    user: str
    partition: str
    command: str
    """The script's path and its arguments, as squeue shows them."""
    script: str
    """The copy of the script that runs."""
    arguments: list[str]
    environment: str
    """The file with the job's environment variables."""
    work_dir: str
    output: str
    error: str
    append: bool
    nodes: int
    """The fewest."""
    tasks_per_node: int
    cpus_per_task: int
    memory: str
    time_min: int
    submitted: float
    most_nodes: int = 0
    """The most of a range; 0: it takes `nodes`."""
    requeues: bool = True
    dependency: str = ""
    kill_on_invalid_dependency: bool = False
    array: int = 0
    """The id of the array, 0: this is no task of an array."""
    task: int = 0
    array_tasks: int = 0
    at_most: int = 0
    """How many tasks of the array may run at a time; 0: all."""
    comment: str = ""
    excluded: list[str] = field(default_factory=list)
    node_list: list[str] = field(default_factory=list)
    exclusive: bool = False
    held: bool = False
    begin: float = 0.0
    nice: int = 0
    warning: list[Any] = field(default_factory=list)
    """The option --signal: a number, seconds before the limit, "batch" or "steps"."""

    state: str = "PENDING"
    reason: str = "None"
    hosts: list[str] = field(default_factory=list)
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    started: float = 0.0
    ended: float = 0.0
    cancelled_by: int | None = None
    requests: list[list[Any]] = field(default_factory=list)
    """Orders to the job's runner: ["signal", number, scope], or ["end", why]."""
    is_requeued: bool = False
    """It runs, and will be pending once it has ended: Slurm counts it as pending from now on."""
    runner: int = 0
    """The process that runs the job; 0: none."""
    starts: list[Start] = field(default_factory=list)
    """The starts that have ended."""

    @property
    def shown_id(self) -> str:
        return f"{self.array}_{self.task}" if self.array else str(self.id)

    @property
    def allocated_nodes(self) -> int:
        """Those that it runs on, or asks for."""
        return len(self.hosts) or self.nodes

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def is_running(self) -> bool:
        return self.state in ("RUNNING", "COMPLETING")

    @property
    def has_ended(self) -> bool:
        return not self.is_pending and not self.is_running

    @property
    def is_known_to_controller(self) -> bool:
        return not self.has_ended or time.time() - self.ended < MIN_JOB_AGE_S

    def is_named(self, name: str) -> bool:
        """Returns whether `name` means this job: its id, its array's, or ARRAY_INDEX."""
        return name in (str(self.id), self.shown_id, str(self.array))


class Table:
    """The jobs of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "jobs.json"

    @classmethod
    def of_environment(cls) -> Table:
        return cls(Path(os.environ[FOLDER]))

    def read(self) -> list[Job]:
        """Returns all jobs, oldest first."""
        return self._read()[1]

    def get(self, job_id: int) -> Job:
        return next(job for job in self.read() if job.id == job_id)

    @contextlib.contextmanager
    def changing(self) -> Iterator[list[Job]]:
        """Gives the jobs to change, and writes them at the end, unless there was an error."""
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            next_id, jobs = self._read()
            self._next_id = next_id
            yield jobs
            self._write(self._next_id, jobs)

    def new_id(self) -> int:
        """Returns the id of a new job; while `changing`."""
        self._next_id += 1
        return self._next_id - 1

    def changed_at(self) -> int:
        """Returns a number that differs whenever the jobs have changed."""
        return os.stat(self._file).st_mtime_ns

    def _read(self) -> tuple[int, list[Job]]:
        if not self._file.exists():
            return 1, []
        content = json.loads(self._file.read_text())
        jobs = []
        for fields in content["jobs"]:
            fields["starts"] = [Start(**start) for start in fields["starts"]]
            jobs.append(Job(**fields))
        return content["next_id"], jobs

    def _write(self, next_id: int, jobs: list[Job]) -> None:
        rows = [
            vars(job) | {"starts": [vars(start) for start in job.starts]}
            for job in jobs
        ]
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"next_id": next_id, "jobs": rows}))
        new.rename(self._file)


def find(jobs: list[Job], name: str) -> list[Job]:
    """Returns the jobs that `name` means and that the controller still knows.

    Raises:
        RefusedError: there are none.
    """
    matching = [
        job for job in jobs if job.is_named(name) and job.is_known_to_controller
    ]
    if not matching:
        raise RefusedError(f"Invalid job id specified for job {name}")
    return matching
