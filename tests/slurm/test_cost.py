"""What a run cost, by Slurm's accounting; and who is told of its end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done, slurmft
from tests.support import until
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.own_programs import write

pytestmark = pytest.mark.processes

PROGRAM = """\
import time
taken = b"x" * 400 * 2**20
time.sleep(4)
"""


def test_all_attempts_are_counted(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """The job is requeued by an admin, in the middle of it."""
    program = write(tmp_path, "program.py", PROGRAM)
    told = tmp_path / "told"
    done = command(
        fake_slurm,
        *(
            "run",
            "--runs-dir",
            str(tmp_path / "runs"),
            "--nodes",
            "2",
            "--cpus-per-task",
            "1",
            "--per",
            "node",
        ),
        *("--time", "1:00:00", "--mem", "2G", "--notify-command", f"cat >> '{told}'"),
        *("--", str(program)),
    )
    run, job = done.run, json.loads((done.run.job).read_text())["id"]
    wait_for(run, "running", attempts=1)
    time.sleep(2)
    fake_slurm.run(["scontrol", "requeue", job])
    wait_for(run, "finished", attempts=2)
    fake_slurm.wait_idle()
    rows = fake_slurm.accounting(job, "ElapsedRaw,AllocCPUS", "-D", starts=2)

    facts = status(fake_slurm, run)
    cost = facts["cost"]
    starts = [[int(each) for each in row] for row in rows]
    assert cost["source"] == "Slurm's accounting"
    assert cost["node_hours"] == pytest.approx(sum(s for s, _ in starts) * 2 / 3600)
    assert cost["cpu_hours"] == pytest.approx(sum(s * n for s, n in starts) / 3600)
    assert cost["gpu_hours"] == 0
    assert 400 * 2**20 < cost["peak_memory_bytes"] < 2 * 2**30
    assert cost["asked_memory_bytes"] == 2 * 2**30
    assert cost["energy_j"] is None  # no plugin counts it here
    assert "asked for --time 1:00:00, ran " in cost["advice"]

    where = ("--runs-dir", str(tmp_path / "runs"))
    text = command(fake_slurm, "status", "last", *where).out
    assert "of 2.0 GiB a node" in text
    assert "energy unknown" in text
    assert "2.0 GiB" in command(fake_slurm, "list", "--cost", *where).out
    assert "node-hours" in command(fake_slurm, "report", str(tmp_path / "runs")).out
    (line,) = (x for x in told.read_text().splitlines() if x.startswith("slurmft: "))
    assert line == f"slurmft: {run.path.name}: finished"


def command(cluster: FakeSlurm, *arguments: str) -> Done:
    done = slurmft(*arguments, env=cluster.env)
    assert done.code == 0, done.err
    return done


def status(cluster: FakeSlurm, run: RunDir) -> dict[str, Any]:
    """When accounting has the job's end."""
    found: dict[str, Any] = {}

    def has_peak() -> bool:
        found.update(
            json.loads(command(cluster, "status", str(run.path), "--json").out)
        )
        return bool(found["cost"]["peak_memory_bytes"])

    until(has_peak, lambda: found, every_s=1)
    return found


def wait_for(run: RunDir, state: str, attempts: int) -> None:
    until(
        lambda: (run.get_state().state, run.attempt_number()) == (state, attempts),
        run.get_state,
    )
