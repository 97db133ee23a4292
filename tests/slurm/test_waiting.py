"""What followers and lists ask of Slurm, and what they say when it does not answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slurmft.core.files import write_json
from tests.conftest import Following
from tests.slurm.commands import LONG, run_script, slurmft
from tests.support import until
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes

FORGOTTEN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


@pytest.fixture
def programs(fake_slurm: FakeSlurm) -> Path:
    """The folder of Slurm's commands, in which calls of squeue, sacct and scontrol leave their
    names before they run."""
    for name in ("squeue", "sacct", "scontrol"):
        (fake_slurm.bin / name).rename(fake_slurm.bin / f"real-{name}")
        stand_in(fake_slurm.bin, name, f"exec '{fake_slurm.bin}/real-{name}' \"$@\"")
    return fake_slurm.bin


def stand_in(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {name} >>'{folder}/calls'\n{line}\n")
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


def test_a_follower_leaves_slurm_alone_while_the_run_records(
    fake_slurm: FakeSlurm, programs: Path, tmp_path: Path
) -> None:
    following = Following(
        "--runs-dir", str(tmp_path / "runs"), *LONG, env=fake_slurm.env
    )
    following.until("step 20/")
    before = calls(programs)
    assert 0 < len(before) < 30
    time.sleep(5)
    assert calls(programs) == before
    # by hand: the ranks say that they stop
    fake_slurm.run(["scancel", following.job_id])
    code, text = following.end()
    assert "was cancelled" in text
    assert code != 0
    assert len(calls(programs)) - len(before) < 30


def listed(cluster: FakeSlurm, runs: Path) -> dict[str, tuple[str, str]]:
    done = slurmft(cluster, "list", "--json", "--runs-dir", str(runs))
    assert done.code == 0, done.err
    return {
        run["name"]: (run["state"], run["reason"])
        for run in json.loads(done.out)["runs"]
    }


def cancelled_array(cluster: FakeSlurm, runs: Path) -> str:
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
    fake_slurm: FakeSlurm, programs: Path, tmp_path: Path
) -> None:
    array = cancelled_array(fake_slurm, tmp_path / "runs")
    assert "CANCELLED" in fake_slurm.run(["sacct", "-nPX", f"--jobs={array}"]).stdout
    assert {state for state, _ in listed(fake_slurm, tmp_path / "runs").values()} == {
        "cancelled"
    }
    assert calls(programs).count("squeue") == 1
    for name in ("squeue", "scontrol"):  # minutes later the controller has forgotten it
        stand_in(programs, name, FORGOTTEN)
    found = listed(fake_slurm, tmp_path / "runs")
    for task in range(4):
        reason = f"the job {array}_{task} was cancelled by root"
        assert found[f"task-{task}"] == ("cancelled", reason)


def test_a_cancelled_run_notifies_once(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """By whomever and whenever it is cancelled: also in the queue, when no process of the job
    exists, and where nobody follows it."""
    told = tmp_path / "told"
    notify = ("--notify-command", f'echo "$SLURMFT_RUN" >> {told}')
    runs = []
    for nodes in ("1", "1", "4"):
        flags = ("--nodes", nodes, "--exclusive", *notify)
        runs.append(run_script(fake_slurm, tmp_path, "exec sleep 600", *flags).run)
    by_slurmft, by_hand, waiting = runs
    for run in (by_slurmft, by_hand):
        until(run.rank_log(0).exists)
    assert slurmft(fake_slurm, "cancel", str(by_slurmft.path)).code == 0
    for run in (waiting, by_hand):
        fake_slurm.run(["scancel", run.job_id()])
    until(lambda: by_hand.get_state().state == "cancelled")
    assert waiting.get_state().state == "submitted"
    for _ in range(2):
        states = listed(fake_slurm, tmp_path / "runs").values()
        assert {state for state, _ in states} == {"cancelled"}
    assert slurmft(fake_slurm, "follow", str(waiting.path)).code == 5
    paths = sorted(str(run.path) for run in runs)
    until(lambda: told.exists() and sorted(told.read_text().split()) == paths)
    assert "was cancelled by root" in by_hand.get_state().reason


def test_accounting_that_does_not_answer(
    fake_slurm: FakeSlurm, programs: Path, tmp_path: Path
) -> None:
    stand_in(
        programs,
        "sacct",
        "echo sacct: error: Sending PersistInit msg: refused >&2; exit 1",
    )
    cancelled_array(fake_slurm, tmp_path / "runs")
    for name in ("squeue", "scontrol"):
        stand_in(programs, name, FORGOTTEN)
    words = ("unknown", "it left the queue; accounting does not answer")
    assert set(listed(fake_slurm, tmp_path / "runs").values()) == {words}
