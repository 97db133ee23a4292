"""Studies on the real Slurm of tests/support/cluster: arrays that wait for each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done, records
from tests.slurm.test_jobs import LONG, QUICK, slurmft
from tests.support import until
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

FILE = """\
name = "two-shapes"
title = "Two shapes"
repeats = 2
[fixed]
time = 5
[grid]
nodes = [1, 2]
"""


def study(cluster: Cluster, folder: Path, command: str, *arguments: str) -> Done:
    if not (folder / "s.toml").exists():
        (folder / "s.toml").write_text(FILE)
    place = (str(folder / "s.toml"), "--studies-dir", str(folder / "it's studies"))
    return slurmft(cluster, "study", command, *place, *arguments)


def status(cluster: Cluster, folder: Path) -> dict[str, Any]:
    done = study(cluster, folder, "status", "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def await_totals(cluster: Cluster, folder: Path, good: Callable[[dict[str, int]], bool]) -> None:
    def totals() -> dict[str, int]:
        found: dict[str, int] = status(cluster, folder)["totals"]
        return found

    until(lambda: good(totals()), totals, every_s=1)


def runs_of(cluster: Cluster, folder: Path) -> list[RunDir]:
    """The runs that count, in the order of the rounds."""
    return [RunDir(Path(r["run"])) for r in status(cluster, folder)["repeats"]]


def test_study(idle_cluster: Cluster, tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    """Interleaved, one at a time; then again: nothing; a failed one: once more; cancelled."""
    source = ("--task", "emotion", "--data", str(tiny_data), "--model", str(tiny_model))
    done = study(idle_cluster, tmp_path, "run", *QUICK, *source)
    assert done.code == 0, done.err
    again = study(idle_cluster, tmp_path, "run", *QUICK, *source)
    assert "submitted" not in again.out
    await_totals(idle_cluster, tmp_path, lambda t: t["finished"] == 4)
    runs = runs_of(idle_cluster, tmp_path)
    assert [r.load_config().job.nodes for r in runs] == [1, 2, 1, 2]
    spans = [[h.time for h in r.history() if h.state != "submitted"] for r in runs]
    for one, following in itertools.pairwise(spans):
        assert one[-1] <= following[0]
    jobs = [json.loads(r.job.read_text())["id"] for r in runs]
    assert all("_" in job for job in jobs)
    assert slurmft(idle_cluster, "follow", str(runs[0].path)).code == 0
    runs[1].result.unlink()
    runs[1].state.unlink()
    runs[1].set_state("failed", "a made-up reason", 1)
    third = study(idle_cluster, tmp_path, "run", *QUICK, *source)
    assert third.code == 0, third.err
    assert third.out.count("1 submitted") == 1
    assert runs[1].path.exists()
    totals = status(idle_cluster, tmp_path)["totals"]
    assert (totals["finished"], totals["pending"] + totals["running"]) == (3, 1)
    assert study(idle_cluster, tmp_path, "cancel").code == 0


def test_array_task_is_a_job_like_others(idle_cluster: Cluster, tmp_path: Path) -> None:
    """One of two that run is stopped, requeues itself and goes on; it is cancelled and resumed."""
    one = FILE.replace("nodes = [1, 2]", "learning_rate = [1e-3, 1e-4]")
    (tmp_path / "s.toml").write_text(one.replace("[fixed]", "at_most = 2\n[fixed]"))
    assert study(idle_cluster, tmp_path, "run", *LONG, "--task", "synthetic").code == 0
    runs = runs_of(idle_cluster, tmp_path)
    jobs = [json.loads(r.job.read_text())["id"] for r in runs]
    array = jobs[0].partition("_")[0]
    assert jobs[:2] == [f"{array}_0", f"{array}_1"]
    await_steps(runs[0], 1)
    await_steps(runs[1], 1)
    stopped = runs[1]  # the last one to start has the job id of the whole array
    idle_cluster.run(["scancel", "--signal=USR2", jobs[1]])
    await_state(stopped, "requeued")
    await_state(stopped, "running")
    assert stopped.checkpoint_names()
    assert runs[0].get_state().state == "running"
    assert [r.attempt_number() for r in runs] == [1, 2, 0, 0]
    assert slurmft(idle_cluster, "cancel", str(stopped.path)).code == 0
    assert stopped.get_state().state == "cancelled"
    cancelled = study(idle_cluster, tmp_path, "cancel")
    assert "3 run(s) of two-shapes are being cancelled" in cancelled.out
    idle_cluster.wait_idle()
    assert status(idle_cluster, tmp_path)["totals"]["failed"] == 4
    resumed = slurmft(idle_cluster, "resume", str(stopped.path))
    assert resumed.code == 0, resumed.err
    assert status(idle_cluster, tmp_path)["totals"]["failed"] == 3
    assert study(idle_cluster, tmp_path, "cancel").code == 0


def test_refused(cluster: Cluster, tmp_path: Path) -> None:
    """What Slurm would never start leaves no run behind."""
    done = study(cluster, tmp_path, "run", "--task", "synthetic", "--time", "600")
    assert done.code == 3
    assert "never start the job" in done.err
    done = study(cluster, tmp_path, "run", "--task", "synthetic", "--partition", "gpu")
    assert done.code == 3
    assert "invalid partition" in done.err
    assert status(cluster, tmp_path)["totals"]["missing"] == 4
    assert "slurmft" not in cluster.run(["squeue", "-h", "--me"]).stdout


def await_steps(run: RunDir, count: int) -> None:
    until(lambda: run.records.exists() and len(records(run, "step")) >= count, run.get_state)


def await_state(run: RunDir, state: str) -> None:
    until(lambda: run.get_state().state == state, run.get_state)
