"""slurmft's commands on a login host of Slurm, real or fake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import Done, Following
from tests.support import until
from tests.support.cluster import Cluster
from tests.support.fake_slurm.cluster import FakeSlurm

AnySlurm = Cluster | FakeSlurm

QUICK = (
    "--cpus-per-task",
    "1",
    "--batch-size",
    "8",
    "--max-steps",
    "4",
    "--log-every",
    "1",
)
LONG = (
    "--cpus-per-task",
    "1",
    "--batch-size",
    "8",
    "--epochs",
    "500",
    "--log-every",
    "1",
)


def slurmft(slurm: AnySlurm, *arguments: str) -> Done:
    """Runs a slurmft command on the login host."""
    done = slurm.run([sys.executable, "-m", "slurmft", *arguments], check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def submit(slurm: AnySlurm, runs: Path, *arguments: str) -> Done:
    return slurmft(slurm, "submit", "--runs-dir", str(runs), "--time", "5", *arguments)


def run_script(slurm: AnySlurm, folder: Path, script: str, *arguments: str) -> Done:
    """Submits a program, lines of a shell script: what takes no training needs no torch."""
    program = folder / "program.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    place = ("--runs-dir", str(folder / "runs"), "--time", "5")
    return slurmft(slurm, "run", *place, *arguments, "--", str(program))


def follow(slurm: AnySlurm, runs: Path, *arguments: str) -> Following:
    return Following("--runs-dir", str(runs), "--time", "5", *arguments, env=slurm.env)


def job_fields(slurm: AnySlurm, done: Done) -> tuple[str, str]:
    """Returns the state and the exit code of a job, as accounting has them."""
    job = json.loads(done.run.job.read_text())["id"]
    ((state, code),) = slurm.accounting(job, "State,ExitCode")
    return state, code


def assert_nodes_are_clean(cluster: Cluster) -> None:
    """No process of a job is left on any node soon after its end."""

    def left() -> list[tuple[int, str]]:
        there = [found for host in cluster.hosts for found in cluster.processes(host)]
        return [(pid, line) for pid, line in there if "slurmft" in line]

    until(lambda: not left(), left)
