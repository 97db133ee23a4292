"""The fault table, on a real Slurm: runs that suffer one fault after the other end as if nothing
had happened."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import Following
from tests.slurm.commands import assert_nodes_are_clean, run_script
from tests.support import CHECKOUT, faults, until
from tests.support.cluster import Cluster
from tests.support.faults import BASE, FAULTS
from tests.support.small_disk import SmallDisk
from tests.support.suffering import Sufferer, undisturbed
from tests.train.test_resume import held, rank_pids
from tests.train.test_trainer import emotion

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TORCHRUN = next(fault for fault in FAULTS if fault.harm is faults.kill_torchrun)
STOP = next(fault for fault in FAULTS if fault.harm is faults.scancel_signal)
FLAGS = (
    *(*BASE, "--epochs", "24", *faults.SHORT_STOP),
    *("--hang-timeout-s", "10", "--max-restarts", "20"),
)


def test_requeue_of_one_array_task(cluster: Cluster, tmp_path: Path) -> None:
    """The others are not touched, though the first one's job id is the array's."""
    runs = [tmp_path / "0", tmp_path / "1"]
    for folder in runs:
        job = JobConfig(nodes=1, runs_dir=str(folder))
        RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    python, done = shlex.quote(sys.executable), tmp_path / "done"
    script = f"""#!/bin/bash
run=$(echo {tmp_path}/$SLURM_ARRAY_TASK_ID/*)
found=$({python} -m slurmft.cluster.slurm.first_node begin "$run") || exit
export $found
echo "$SLURM_ARRAY_TASK_ID $SLURMFT_ATTEMPT" >> {done}
if [ "$SLURMFT_ATTEMPT$SLURM_ARRAY_TASK_ID" = 10 ]; then code=75; else code=0; fi
exec {python} -m slurmft.cluster.slurm.first_node end "$run" $code
"""
    (tmp_path / "job.sh").write_text(script)
    options = [
        "--array=0-1",
        "--nodes=1",
        "--time=2",
        "--requeue",
        "--wait",
        "--output=/dev/null",
    ]
    cluster.run(["sbatch", *options, str(tmp_path / "job.sh")], check=False)
    cluster.wait_idle()
    assert sorted(done.read_text().splitlines()) == ["0 1", "0 2", "1 1"]


@pytest.mark.extra("faults")
def test_ends_by_signals(idle_cluster: Cluster, tmp_path: Path) -> None:
    """Each is told by the signal that came first, and notifies once, though nobody follows."""
    notified = tmp_path / "notified"
    flags = (
        *("--notify-command", f'echo "$SLURMFT_RUN" >> {notified}', "--nodes", "2"),
        *("--max-restarts", "0", "--max-requeues", "0"),
    )

    def start() -> RunDir:
        script = "echo begun; exec sleep 600"
        run = run_script(idle_cluster, tmp_path, script, *flags).run
        logs = [run.rank_log(rank) for rank in (0, 1)]
        until(lambda: all(x.exists() and "begun" in x.read_text() for x in logs))
        return run

    def kill(run: RunDir, begin: str, number: signal.Signals) -> str:
        """Sends a signal to the processes of the job that begin so, on the last of its hosts that
        has any; returns the host. srun has two processes."""
        found = []
        for host in idle_cluster.hosts:
            for pid, line in idle_cluster.processes(host):
                if re.match(begin, line) and str(run.path) in line:
                    found.append((host, pid))
        last, _ = found[-1]
        for host, pid in found:
            if host == last:
                os.kill(pid, number)
        return last

    cancelled = start()
    idle_cluster.run(["scancel", cancelled.job_id()])
    killed = start()
    host = kill(killed, ".*-m slurmft.node.task /", signal.SIGKILL)
    ended = start()
    kill(ended, "(/usr/bin/)?srun ", signal.SIGTERM)
    reasons = {
        cancelled: f"the job {cancelled.job_id()} was cancelled by root",
        killed: f"the task of {host} was killed by SIGKILL;",
        ended: "srun was ended by a signal, and ended the tasks;",
    }
    for run, reason in reasons.items():
        until(lambda run=run: run.get_state().has_ended)  # type: ignore[misc]
        assert run.get_state().reason.startswith(reason), run.history()
    paths = sorted(str(run.path) for run in reasons)
    until(lambda: sorted(notified.read_text().split()) == paths, notified.read_text)


@pytest.fixture
def short_job(
    idle_cluster: Cluster, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> Iterator[Following]:
    """A job of two nodes whose slurmft is a copy of its own: `tmp_path / "lib"`."""
    shutil.copytree(CHECKOUT / "slurmft", tmp_path / "lib" / "slurmft")
    env = {"PYTHONPATH": str(tmp_path / "lib"), "PYTHONSAFEPATH": "1"}
    flags = (*BASE, *faults.SHORT_STOP, *emotion(tiny_data, tiny_model))
    flags += ("--epochs", "8")
    job = Following(
        "--runs-dir", str(tmp_path / "runs"), *flags, env=idle_cluster.env | env
    )
    yield job
    job.process.kill()
    idle_cluster.run(["scancel", "--user=root"])


@pytest.mark.extra("faults")
def test_upgrade_in_mid_run(
    cluster: Cluster, short_job: Following, tmp_path: Path
) -> None:
    """The job is to stop while its slurmft is being replaced: no step is lost."""
    package = tmp_path / "lib" / "slurmft" / "__init__.py"
    whole = package.read_text()
    short_job.at_step(60)
    with held(rank_pids(short_job.run)):
        package.write_text("raise ImportError('half an upgrade')")
        faults.scancel_signal(cluster, short_job)
    (log,) = short_job.run.submitit.glob("*_0_log.err")
    until(lambda: "half an upgrade" in log.read_text())
    package.write_text(whole)
    code, text = short_job.end()
    assert code == 0, text
    assert faults.steps_lost(short_job.run) == 0
    assert short_job.run.attempt_number() == 2


@pytest.mark.extra("faults")
def test_run_directory_that_vanishes(cluster: Cluster, short_job: Following) -> None:
    """The job ends as failed, and says why where that can still be read: in Slurm."""
    short_job.at_step(60)
    while short_job.run.path.exists():  # the job still writes
        shutil.rmtree(short_job.run.path, ignore_errors=True)
    command = ["scontrol", "show", "job", short_job.lines[0].split()[1]]
    until(lambda: "JobState=FAILED" in cluster.run(command).stdout, every_s=0.5)
    words = "Comment=slurmft: failed: the run cannot be read at its end: "
    assert words in cluster.run(command).stdout


@pytest.fixture
def sufferer(
    idle_cluster: Cluster, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> Iterator[Sufferer]:
    """Runs of four nodes, whose folders are on a small disk."""
    flags = (*FLAGS, *emotion(tiny_data, tiny_model))
    whole = undisturbed(tmp_path / "undisturbed", flags)
    with SmallDisk(tmp_path / "small disk", 24) as disk:

        def start() -> Following:
            idle_cluster.wait_idle()
            return Following("--runs-dir", str(disk), *flags, env=idle_cluster.env)

        yield Sufferer(idle_cluster, start, whole)
    assert_nodes_are_clean(idle_cluster)


@pytest.mark.extra("faults")
def test_faults(sufferer: Sufferer) -> None:
    """One run suffers them all, and ends as one that nothing has disturbed."""
    for fault in FAULTS:
        if fault.needs_slurm and not fault.slow and fault is not TORCHRUN:
            sufferer.suffer(fault)
    sufferer.end()


def test_node_that_fails_twice(idle_cluster: Cluster, sufferer: Sufferer) -> None:
    """A job that is stopped, and whose torchrun on one node is then killed twice, goes on without
    that node, and ends as one that nothing has disturbed."""
    sufferer.suffer(STOP)
    job = sufferer.living()
    bad = faults.hosts_of(idle_cluster, job)[-1]
    sufferer.suffer(TORCHRUN)
    assert faults.hosts_of(idle_cluster, job)[-1] == bad  # once may be chance
    sufferer.suffer(TORCHRUN)
    attempt = job.run.read_attempt()
    assert attempt is not None
    assert bad not in attempt.hosts
    assert any(f"without {bad}" in state.reason for state in job.run.history())
    sufferer.end()
