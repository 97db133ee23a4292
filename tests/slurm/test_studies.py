"""Studies on the fake Slurm: arrays that wait for each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done, records
from tests.job.test_job import SCRIPT
from tests.slurm.commands import slurmft
from tests.support import until
from tests.support.fake_slurm.cluster import FakeSlurm

pytestmark = pytest.mark.processes

FILE = """\
name = "two-shapes"
title = "Two shapes"
repeats = 2
[fixed]
time = 5
[grid]
nodes = [1, 2]
"""


ATTACHED = """\
name = "two-shapes"
repeats = 2
at_most = 2
[fixed]
time = 5
[program]
command = "{program} 100000 {{lr}}"
per = "node"
[grid]
lr = [1, 2]
"""
"""Programs that attach, one process each: they need no torch."""


def study(cluster: FakeSlurm, folder: Path, command: str, *arguments: str) -> Done:
    if not (folder / "s.toml").exists():
        (folder / "s.toml").write_text(FILE)
    place = (str(folder / "s.toml"), "--studies-dir", str(folder / "it's studies"))
    return slurmft(cluster, "study", command, *place, *arguments)


def status(cluster: FakeSlurm, folder: Path) -> dict[str, Any]:
    done = study(cluster, folder, "status", "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def await_totals(
    cluster: FakeSlurm, folder: Path, good: Callable[[dict[str, int]], bool]
) -> None:
    def totals() -> dict[str, int]:
        found: dict[str, int] = status(cluster, folder)["totals"]
        return found

    def reasons() -> list[str]:
        return [shown_end(run) for run in runs_of(cluster, folder)]

    until(lambda: good(totals()), reasons, every_s=1)


def shown_end(run: RunDir) -> str:
    """How a run is, and the last lines of its logs."""
    state = run.get_state()
    logs = [*run.path.glob("logs/*"), *run.path.glob("submitit/*.err")]
    ends = [f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(logs)]
    return "\n".join([f"{run.path.name}: {state}", *ends])


def runs_of(cluster: FakeSlurm, folder: Path) -> list[RunDir]:
    """The runs that count, in the order of the rounds."""
    return [RunDir(Path(r["run"])) for r in status(cluster, folder)["repeats"]]


def test_study(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """Interleaved, one at a time; then again: nothing; a failed one: once more; cancelled."""
    program = tmp_path / "ends.sh"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    (tmp_path / "s.toml").write_text(
        FILE + f'[program]\ncommand = "{program} {{seed}}"\n'
    )
    done = study(fake_slurm, tmp_path, "run")
    assert done.code == 0, done.err
    again = study(fake_slurm, tmp_path, "run")
    assert "submitted" not in again.out
    await_totals(fake_slurm, tmp_path, lambda t: t["finished"] == 4)
    runs = runs_of(fake_slurm, tmp_path)
    assert [r.load_config().job.nodes for r in runs] == [1, 2, 1, 2]
    spans = [[h.time for h in r.history() if h.state != "submitted"] for r in runs]
    for one, following in itertools.pairwise(spans):
        assert one[-1] <= following[0]
    jobs = [json.loads(r.job.read_text())["id"] for r in runs]
    assert all("_" in job for job in jobs)
    assert slurmft(fake_slurm, "follow", str(runs[0].path)).code == 0
    runs[1].result.unlink()
    runs[1].state.unlink()
    runs[1].set_state("failed", "a made-up reason", 1)
    third = study(fake_slurm, tmp_path, "run")
    assert third.code == 0, third.err
    assert third.out.count("1 submitted") == 1
    assert runs[1].path.exists()
    totals = status(fake_slurm, tmp_path)["totals"]
    assert (totals["finished"], totals["pending"] + totals["running"]) == (3, 1)
    assert study(fake_slurm, tmp_path, "cancel").code == 0


def test_array_task_is_a_job_like_others(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """One of two that run is stopped, requeues itself and goes on; it is cancelled and resumed."""
    (tmp_path / "counts.py").write_text(SCRIPT)
    (tmp_path / "s.toml").write_text(ATTACHED.format(program=tmp_path / "counts.py"))
    done = study(fake_slurm, tmp_path, "run")
    assert done.code == 0, done.err
    runs = runs_of(fake_slurm, tmp_path)
    jobs = [json.loads(r.job.read_text())["id"] for r in runs]
    array = jobs[0].partition("_")[0]
    assert jobs[:2] == [f"{array}_0", f"{array}_1"]
    await_steps(runs[0], 1)
    await_steps(runs[1], 1)
    stopped = runs[1]  # the last one to start has the job id of the whole array
    fake_slurm.run(["scancel", "--signal=USR2", jobs[1]])
    await_state(stopped, "requeued")
    await_state(stopped, "running")
    assert stopped.checkpoint_names()
    assert runs[0].get_state().state == "running"
    assert [r.attempt_number() for r in runs] == [1, 2, 0, 0]
    assert slurmft(fake_slurm, "cancel", str(stopped.path)).code == 0
    assert stopped.get_state().state == "cancelled"
    cancelled = study(fake_slurm, tmp_path, "cancel")
    assert "3 run(s) of two-shapes are being cancelled" in cancelled.out
    fake_slurm.wait_idle()
    assert status(fake_slurm, tmp_path)["totals"]["failed"] == 4
    resumed = slurmft(fake_slurm, "resume", str(stopped.path))
    assert resumed.code == 0, resumed.err
    assert status(fake_slurm, tmp_path)["totals"]["failed"] == 3
    assert study(fake_slurm, tmp_path, "cancel").code == 0


def test_refused(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """What Slurm would never start leaves no run behind."""
    done = study(fake_slurm, tmp_path, "run", "--task", "synthetic", "--time", "600")
    assert done.code == 3
    assert "never start the job" in done.err
    done = study(
        fake_slurm, tmp_path, "run", "--task", "synthetic", "--partition", "gpu"
    )
    assert done.code == 3
    assert "invalid partition" in done.err
    assert status(fake_slurm, tmp_path)["totals"]["missing"] == 4
    assert "slurmft" not in fake_slurm.run(["squeue", "-h", "--me"]).stdout


def await_steps(run: RunDir, count: int) -> None:
    until(
        lambda: run.records.exists() and len(records(run, "step")) >= count,
        run.get_state,
    )


def await_state(run: RunDir, state: str) -> None:
    until(lambda: run.get_state().state == state, run.get_state)
