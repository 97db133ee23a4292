"""What users do with jobs on Slurm, and what goes wrong: on the fake one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.slurm.commands import QUICK, job_fields, run_script, slurmft, submit
from tests.support import PATIENCE_S, until
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes

SLEEPS = "exec sleep 600"


def test_submit_returns_at_once_with_the_next_commands(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    done = run_script(fake_slurm, tmp_path, SLEEPS, "--nodes", "2")
    assert done.code == 0
    for text in (
        "submitted to Slurm: 2 node(s)",
        "run directory: ",
        "follow",
        "cancel",
        "watch",
        "logs",
    ):
        assert text in done.out
    assert slurmft(fake_slurm, "cancel", str(done.run.path)).code == 0
    followed = slurmft(fake_slurm, "follow", str(done.run.path))
    assert followed.code == 5
    assert "was cancelled" in followed.err


def test_living_with_runs(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """One job runs and is requeued, one waits behind it, one is known to nobody, and one is another
    cluster's."""
    runs = run_script(fake_slurm, tmp_path, SLEEPS, "--nodes", "1").run
    waits = run_script(fake_slurm, tmp_path, SLEEPS, "--nodes", "4", "--exclusive").run
    gone = write_run(tmp_path / "gone", state="running")
    gone.job.write_text('{"cluster": "slurm", "id": "999999"}')
    # its ranks need not have started
    until(lambda: runs.get_state().state == "running")
    theirs = write_run(tmp_path / "theirs", state="requeued")
    theirs.job.write_text('{"cluster": "slurm", "id": "999998", "where": "b"}')
    now = list_runs(fake_slurm, tmp_path)
    assert [now[r.path.name]["state"] for r in (runs, waits, gone, theirs)] == [
        "running", "pending", "vanished", "requeued",
    ]  # fmt: skip
    assert [now[run.path.name]["where"] for run in (runs, waits)] == [
        "slurmft",
        "slurmft",
    ]
    refused = slurmft(fake_slurm, "cancel", "theirs", "--runs-dir", str(tmp_path))
    assert refused.code == 2
    assert "is on the cluster b; seen from slurmft" in refused.err
    # Slurm has many words for full nodes, but not at once.
    until(lambda: list_runs(fake_slurm, tmp_path)[waits.path.name]["reason"])
    job, waiting = now[runs.path.name]["job"], now[waits.path.name]["job"]
    cancelled = slurmft(fake_slurm, "cancel", waiting, "--runs-dir", str(tmp_path))
    assert f"the job {waiting} of {waits.path.name} is being cancelled" in cancelled.out
    fake_slurm.run(["scontrol", "requeue", job])
    until(
        lambda: list_runs(fake_slurm, tmp_path)[runs.path.name]["requeues"] == 1,
        lambda: fake_slurm.run(["scontrol", "show", "job", job]).stdout,
        every_s=1,
    )
    # its first start may still be stopping
    until(
        lambda: (
            list_runs(fake_slurm, tmp_path)[runs.path.name]["state"]
            in ("requeued", "running")
        )
    )
    assert list_runs(fake_slurm, tmp_path)[waits.path.name]["state"] == "cancelled"
    # Between the job's new start and the record of it, nothing shows the requeue.
    show_status = ("status", job, "--runs-dir", str(tmp_path))
    until(lambda: "requeued once" in slurmft(fake_slurm, *show_status).out)
    assert slurmft(fake_slurm, "cancel", job, "--runs-dir", str(tmp_path)).code == 0
    assert runs.get_state().state == "cancelled"


def list_runs(fake_slurm: FakeSlurm, runs: Path) -> dict[str, dict[str, Any]]:
    """The rows of `slurmft list`, by name."""
    done = slurmft(fake_slurm, "list", "--json", "--runs-dir", str(runs))
    assert done.code == 0, done.err
    return {row["name"]: row for row in json.loads(done.out)["runs"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--nodes", "5"],
            [
                "never start",
                "requests 5 nodes, but the partition batch has 4",
                "(4 nodes",
            ],
        ),
        (["--partition", "gpu"], ["invalid partition", "batch (4 nodes of 4 CPUs"]),
        (
            ["--time", "600"],
            ["never start", "requests a time of 10:00:00", "allows 1:00:00"],
        ),
        (["--mem", "99G"], ["sbatch refused the job (exit 1): Memory specification"]),
        (["--sbatch", "nosuchoption=1"], ["sbatch refused", "nosuchoption"]),
    ],
)
def test_refused(
    fake_slurm: FakeSlurm, arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    done = submit(fake_slurm, tmp_path / "runs", *arguments)
    assert done.code == 3, done.out
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    # no run directory for a job that never was
    assert not list(tmp_path.glob("runs/*"))


def test_cancelled_by_scancel_while_following(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    started = run_script(fake_slurm, tmp_path, SLEEPS, "--nodes", "2").run
    until(lambda: started.get_state().state == "running", started.history)
    follow = [sys.executable, "-m", "slurmft", "follow", str(started.path)]
    env = os.environ | fake_slurm.env
    following = subprocess.Popen(follow, env=env, stderr=subprocess.PIPE, text=True)
    job = json.loads(started.job.read_text())["id"]
    fake_slurm.run(["scancel", job])
    words = following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 5
    assert f"the job {job} was cancelled by root" in words
    fake_slurm.wait_idle()


def test_interface_that_is_not_there(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    done = submit(fake_slurm, tmp_path, "--follow", "--interface", "ib9", *QUICK)
    assert done.code == 4
    assert "has no network interface 'ib9'" in done.err
    assert "it has: lo" in done.err


def test_flags_win_over_sbatch_variables(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """sbatch prefers its environment to what its script says."""
    env = {
        "SBATCH_PARTITION": "urgent",
        "SBATCH_TIMELIMIT": "3",
        "SBATCH_NO_REQUEUE": "1",
    }
    arguments = ("--partition", "batch", "--time", "7", "--sbatch", "hold", *QUICK)
    done = conftest.slurmft(
        "submit", "--runs-dir", str(tmp_path), *arguments, env=fake_slurm.env | env
    )
    job = json.loads(done.run.job.read_text())["id"]
    shown = fake_slurm.run(["scontrol", "show", "job", job]).stdout
    for text in ("Partition=batch", "TimeLimit=00:07:00", "Requeue=1"):
        assert text in shown
    page = slurmft(fake_slurm, "status", str(done.run.path)).out
    for text in ("you hold it (JobHeldUser)", f"scontrol release {job}"):
        assert text in page
    assert slurmft(fake_slurm, "cancel", str(done.run.path)).code == 0


def test_environment_that_is_not_exported(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = '[ -z "${FROM_LOGIN-}" ]'
    monkeypatch.setenv("FROM_LOGIN", "yes")
    done = run_script(
        fake_slurm, tmp_path, program, "--follow", "--sbatch", "export=NONE"
    )
    assert done.code == 0, done.err


def test_setup_that_fails(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """The script's own words are shown: nothing else knows why."""
    setup = "echo no module named cuda/99 >&2; exit 7"
    done = submit(fake_slurm, tmp_path, "--follow", "--setup", setup, *QUICK)
    assert done.code == 7
    assert "no module named cuda/99" in done.err
    assert "ended as FAILED" in done.err
    assert job_fields(fake_slurm, done) == ("FAILED", "7:0")


def test_status_of_a_job_that_waits_for_nodes(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """More nodes than the partition has up are asked of the controller: it says which there are."""
    nodes = fake_slurm.run(["sinfo", "--noheader", "--partition=batch", "--format=%D"])
    count = nodes.stdout.split()[0]
    blocker = [
        "sbatch", "--parsable", f"--nodes={count}", "--exclusive", "--output=/dev/null",
        "--partition=batch", "--wrap=sleep 300",
    ]  # fmt: skip
    job = fake_slurm.run(blocker).stdout.strip()
    done = submit(fake_slurm, tmp_path, "--partition", "batch", *QUICK)

    def status() -> str:
        return slurmft(fake_slurm, "status", str(done.run.path)).out

    # The scheduler looks at the queue every few seconds: before that there is no reason.
    until(lambda: "  queue " in status(), status)
    page = status()
    fake_slurm.run(["scancel", job])
    assert slurmft(fake_slurm, "cancel", str(done.run.path)).code == 0
    assert "starts by itself" in page
    assert "nodes of the partition batch" in page or "before it" in page
