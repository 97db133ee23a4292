"""Several jobs of one run, on the fake Slurm: only one of them has it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cluster import launcher
from slurmft.runs.rundir import RunDir
from tests.slurm.commands import run_script, slurmft, submit
from tests.support import PATIENCE_S, until
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.train.test_resume import pids

pytestmark = pytest.mark.processes


def end_of_second_job(cluster: FakeSlurm, run: RunDir) -> tuple[str, str]:
    """Submits the script of a run once more, behind the back of slurmft, as a second resume does
    where file locks do not work. Returns its id, and what it says, in one line, when it ends."""
    (script, *_) = sorted(run.submitit.glob("*.sh"))
    job = cluster.run(["sbatch", "--parsable", "--hold", str(script)]).stdout.strip()
    launcher.note_job(run, "slurm", job, "")
    cluster.run(["scontrol", "release", job])
    accounted = ["sacct", "-nPX", f"--jobs={job}", "--format=State,ExitCode"]
    until(lambda: cluster.run(accounted).stdout == "FAILED|2:0\n", run.history)
    log = (run.submitit / f"{job}_0_log.err").read_text().splitlines()
    (line,) = (line.partition("error: ")[2] for line in log if "error: " in line)
    return job, line


def test_a_run_has_one_job(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """Two resume it at the same moment; a second job starts while the first runs, and another one
    after it has finished."""
    go = tmp_path / "go"
    srun = f"srun() {{ until [ -e {shlex.quote(str(go))} ]; do sleep 0.1; done; }}"
    run = submit(fake_slurm, tmp_path / "runs", "--setup", srun).run
    until(lambda: run.attempt_number() == 1, run.history)
    assert slurmft(fake_slurm, "cancel", str(run.path)).code == 0
    fake_slurm.wait_idle()

    command = [sys.executable, "-m", "slurmft", "resume", str(run.path)]
    both = [
        subprocess.Popen(command, env=fake_slurm.env, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    words = [process.communicate(timeout=PATIENCE_S)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], words
    assert any(
        w in "".join(words) for w in ("is under way", "is pending", "is running")
    )
    until(lambda: run.attempt_number() == 2, run.history)
    assert len(fake_slurm.run(["squeue", "-h"]).stdout.splitlines()) == 1
    has_it = launcher.job_of(run).id

    second, line = end_of_second_job(fake_slurm, run)
    attempt = json.loads(run.attempt.read_text())
    has = f"has {run.path}, in attempt 2 on {attempt['hosts'][0]}"
    assert line == f"the job {second} ends at once: the job {has_it} {has}"
    assert (attempt["number"], attempt["job"]) == (2, has_it)
    assert launcher.job_of(run).id == has_it  # commands find the job that runs
    assert [s.state for s in run.history()] == [
        "submitted", "running", "cancelled", "submitted", "running",
    ]  # fmt: skip
    go.touch()
    until(lambda: run.get_state().state == "finished", run.history)
    third, line = end_of_second_job(fake_slurm, run)
    assert line == f"the job {third} ends at once: the run {run.path} is finished"
    assert run.attempt_number() == 2


def test_task_that_is_killed_is_the_reason(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """As by the kernel, for its memory. The other node's program is ended with it."""
    flags = ("--nodes", "2", "--max-restarts", "0", "--max-requeues", "0")
    run = run_script(fake_slurm, tmp_path, "exec sleep 600", *flags).run
    until(lambda: all(run.rank_log(rank).exists() for rank in (0, 1)), run.history)
    os.kill(pids(run, "slurmft.node.task")[-1], signal.SIGKILL)
    followed = slurmft(fake_slurm, "follow", str(run.path))
    reason = f"the task of {fake_slurm.hosts[1]} was killed by SIGKILL"
    assert followed.code == 1
    assert f"error: {reason}" in followed.err
    assert run.history()[-1].reason.startswith(f"{reason}; no new checkpoint")
    fake_slurm.wait_idle()


def test_task_that_is_killed_costs_no_place_in_the_queue(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """The next attempt begins in the allocation of this one."""
    program = 'test "$SLURMFT_ATTEMPT" = 2 || exec sleep 600'
    flags = ("--nodes", "2", "--max-restarts", "0")
    run = run_script(fake_slurm, tmp_path, program, *flags).run
    until(lambda: all(run.rank_log(rank).exists() for rank in (0, 1)), run.history)
    os.kill(pids(run, "slurmft.node.task")[-1], signal.SIGKILL)
    followed = slurmft(fake_slurm, "follow", str(run.path))
    assert followed.code == 0, followed.err
    # srun has ended the other task by SIGTERM.
    history = [each for each in run.history() if each.state != "stopping"]
    assert [each.state for each in history] == [
        "submitted", "running", "requeued", "running", "finished",
    ]  # fmt: skip
    killed = f"the task of {fake_slurm.hosts[1]} was killed by SIGKILL"
    again = "it starts again on the same nodes"
    assert history[2].reason == f"{killed}; {again}"
    # The job was started once, and accounting knows nothing of it.
    every_start = ["sacct", "-nPX", "--duplicates", f"--jobs={run.job_id()}"]
    rows = fake_slurm.run([*every_start, "--format=State"]).stdout
    assert rows == "COMPLETED\n"
    assert "requeued once" not in slurmft(fake_slurm, "status", str(run.path)).out
    fake_slurm.wait_idle()
