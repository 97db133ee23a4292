"""What followers and lists ask of a real Slurm, and what they say when it does not answer."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.files import write_json
from tests.conftest import Following
from tests.slurm.test_jobs import LONG, slurmft
from tests.support.cluster import Cluster, config, system
from tests.support.made_runs import write_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on the PATH, in which calls of squeue, sacct and scontrol leave
    their names before the real programs run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scontrol"):
        stand_in(folder, name, f'exec {shutil.which(name)} "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def stand_in(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {name} >>{folder}/calls\n{line}\n")
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


def test_a_follower_leaves_slurm_alone_while_the_run_records(
    idle_cluster: Cluster, programs: Path, tmp_path: Path
) -> None:
    following = Following("--runs-dir", str(tmp_path / "runs"), *LONG, env=idle_cluster.env)
    following.until("step 20/")
    before = calls(programs)
    assert 0 < len(before) < 30
    time.sleep(15)
    assert calls(programs) == before
    idle_cluster.run(["scancel", following.job_id])  # by hand: the ranks say that they stop
    code, text = following.end()
    assert "was cancelled" in text
    assert code != 0
    assert len(calls(programs)) - len(before) < 30


@pytest.fixture
def without_accounting(cluster: Cluster) -> Iterator[None]:
    system.kill_until_gone(lambda: system.marked("slurmdbd"))
    yield
    cluster._start_slurm("slurmdbd", config.SLURMDBD_PORT)
    system.wait_until("accounting answers", cluster._accounted)


def listed(cluster: Cluster, runs: Path) -> dict[str, tuple[str, str]]:
    done = slurmft(cluster, "list", "--json", "--runs-dir", str(runs))
    assert done.code == 0, done.err
    return {run["name"]: (run["state"], run["reason"]) for run in json.loads(done.out)["runs"]}


def cancelled_array(cluster: Cluster, runs: Path) -> str:
    """Runs whose jobs are tasks of an array that was cancelled while it waited; its id."""
    (runs.parent / "job.sh").write_text("#!/bin/sh\nsleep 60\n")
    submit = ["sbatch", "--parsable", "--hold", "--array=0-3%2", "--output=/dev/null"]
    array = cluster.run([*submit, str(runs.parent / "job.sh")]).stdout.strip()
    for task in range(4):
        run = write_run(runs / f"task-{task}", state="running")
        write_json(run.job, {"cluster": "slurm", "id": f"{array}_{task}"})
    cluster.run(["scancel", array])
    return array


def test_an_array_that_was_cancelled_by_hand(
    idle_cluster: Cluster, programs: Path, tmp_path: Path
) -> None:
    array = cancelled_array(idle_cluster, tmp_path / "runs")
    system.wait_until(
        "accounting knows of it",
        lambda: "CANCELLED" in idle_cluster.run(["sacct", "-nPX", f"--jobs={array}"]).stdout,
    )
    assert {state for state, _ in listed(idle_cluster, tmp_path / "runs").values()} == {"cancelled"}
    assert calls(programs).count("squeue") == 1
    for name in ("squeue", "scontrol"):  # minutes later the controller has forgotten it
        stand_in(programs, name, FORGOTTEN)
    found = listed(idle_cluster, tmp_path / "runs")
    assert set(found.values()) == {("cancelled", "cancelled by 0")}


def test_accounting_that_does_not_answer(
    idle_cluster: Cluster, programs: Path, tmp_path: Path, without_accounting: None
) -> None:
    cancelled_array(idle_cluster, tmp_path / "runs")
    for name in ("squeue", "scontrol"):
        stand_in(programs, name, FORGOTTEN)
    words = ("unknown", "it left the queue; accounting does not answer")
    assert set(listed(idle_cluster, tmp_path / "runs").values()) == {words}
