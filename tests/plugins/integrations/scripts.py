"""Scripts of users, and how a node's task would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.node import heartbeat
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RUN_DIR, RunDir
from tests.support import CHECKOUT, PATIENCE_S


def make_run(folder: Path, **job: Any) -> RunDir:
    program = Program(kind="script", name="script", module="script")
    config = JobConfig(runs_dir=str(folder / "runs"), **job)
    return RunDir.create(RunConfig(program=program, job=config))


class Script:
    """A script of the user's, in the process of a job."""

    def __init__(
        self,
        run: RunDir,
        *command: str,
        ranks: int = 1,
        env: dict[str, str] | None = None,
    ) -> None:
        self.run = run
        self.node = run.path.parent / "node"
        self.node.mkdir(exist_ok=True)
        (self.node / "stopped").unlink(missing_ok=True)
        environment = os.environ | {
            RUN_DIR: str(run.path),
            heartbeat.FOLDER: str(self.node),
        }
        environment |= {
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
            ATTEMPT: "1",
        }
        torchrun = [
            "-m",
            "slurmft.node.torchrun",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if ranks > 1 else ()), *command],
            env=environment | (env or {}),
            stdin=subprocess.DEVNULL,
        )

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    @property
    def has_stopped(self) -> bool:
        """Whether it said so to its node's task."""
        return (self.node / "stopped").exists()


def events(run: RunDir, event: str) -> list[dict[str, Any]]:
    return list(RecordReader(run.records).read_values(event))
