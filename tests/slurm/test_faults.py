"""The fault table, on a real Slurm: runs that suffer one fault after the other end as if nothing
had happened."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import Following, records, slurmft
from tests.slurm.test_jobs import assert_nodes_are_clean
from tests.support import CHECKOUT, faults, until
from tests.support.cluster import Cluster
from tests.support.faults import BASE, FAULTS, Fault
from tests.support.small_disk import SmallDisk
from tests.train.test_resume import assert_same, held, rank_pids
from tests.train.test_trainer import emotion

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

EPOCHS = 24
TORCHRUN = next(fault for fault in FAULTS if fault.harm is faults.kill_torchrun)
FLAGS = (
    *(*BASE, "--epochs", str(EPOCHS), *faults.SHORT_STOP),
    *("--hang-timeout-s", "10", "--max-restarts", "20"),
)


class Runs:
    """The run that suffers now, and those that came to their end before it had suffered all."""

    def __init__(self, cluster: Cluster, disk: Path, flags: tuple[str, ...], whole: RunDir) -> None:
        self.cluster, self.disk, self.flags, self.whole = cluster, disk, flags, whole
        self.steps = max(step_numbers(whole))
        self.job: Following | None = None
        self.suffered: list[str] = []
        """Of this run."""
        self.fine = True
        """Whether the test before has passed."""

    def living(self) -> Following:
        """A run that has steps enough before it to recover from another fault."""
        if self.job is not None and max(step_numbers(self.job.run)) > 0.6 * self.steps:
            self.end()
        if self.job is None:
            self.cluster.wait_idle()
            self.job = Following("--runs-dir", str(self.disk), *self.flags, env=self.cluster.env)
            self.suffered.clear()
            self.await_steps(35)
        return self.job

    def suffer(self, fault: Fault) -> None:
        """Does the harm, and waits until training is well behind the place where it was."""
        job = self.living()
        self.suffered.append(fault.name)
        attempt, lost = job.run.attempt_number(), faults.steps_lost(job.run)
        saved = saved_step(job.run)
        began = time.time()
        fault.harm(self.cluster, job)
        self.await_attempt(attempt + fault.attempts - 1)
        self.await_steps(20)
        assert job.run.attempt_number() == attempt + fault.attempts - 1
        lost = faults.steps_lost(job.run) - lost
        recovery_s = faults.recovery_s(job.run, began)
        print(f"{fault.name}: {lost} steps lost, {recovery_s:.1f} s to recover")
        # Only what was not saved is done again, however fast the machine is beside its disk.
        again = max(0, faults.furthest_again(job.run) - saved)
        assert lost <= (0 if fault.signalled else again)
        if fault.check:
            fault.check(job.run)

    def await_attempt(self, number: int) -> None:
        until(lambda: self.run.attempt_number() >= number, self.run.history)

    def await_steps(self, more: int) -> None:
        """Waits for so many steps that were never done before."""
        goal = max(step_numbers(self.run), default=0) + more

        def done() -> bool:
            assert self.job is not None
            assert self.job.process.poll() is None, self.text()
            return max(step_numbers(self.run), default=0) >= goal

        until(done, self.run.history, every_s=0.3)

    @property
    def run(self) -> RunDir:
        assert self.job
        return self.job.run

    def text(self) -> str:
        return self.job.end(10)[1] if self.job else ""

    def end(self) -> None:
        """Its end is that of the run which nothing has disturbed."""
        assert self.job
        job, self.job = self.job, None
        code, text = job.end()
        assert code == 0, text
        assert_same(job.run, self.whole)
        assert not list(job.run.checkpoints.glob(".*")), self.suffered
        assert_nodes_are_clean(self.cluster)

    def forget(self) -> None:
        """After a test that failed."""
        if self.job is not None:
            self.job.process.kill()
            self.cluster.run(["scancel", "--user=root"])
            self.job = None


def saved_step(run: RunDir) -> int:
    """That of the last checkpoint but one: the newest may be what is damaged."""
    names = run.checkpoint_names()[-2:]
    return int(names[0].split("-")[1]) if names else 0


def step_numbers(run: RunDir) -> list[int]:
    return [r["step"] for r in records(run, "step")] if run.records.exists() else []


@pytest.fixture(scope="module")
def all_runs(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Iterator[Runs]:
    flags = (*FLAGS, *emotion(tiny_data, tiny_model))
    folder = tmp_path_factory.mktemp("faults")
    # On two simulated nodes, and to the last bit the same.
    where = ("--cluster", "local", "--runs-dir", str(folder / "undisturbed"))
    whole = slurmft(
        "submit", "--follow", *flags, *where, env={"OMP_NUM_THREADS": "1"}, imported=True
    )
    assert whole.code == 0, whole.err
    with SmallDisk(folder / "small disk", 24) as disk:
        made = Runs(cluster, disk, flags, whole.run)
        yield made
        made.forget()


@pytest.fixture
def runs(all_runs: Runs) -> Iterator[Runs]:
    all_runs.fine = False
    yield all_runs
    if not all_runs.fine:
        all_runs.forget()


def test_requeue_of_one_array_task(cluster: Cluster, tmp_path: Path) -> None:
    """The others are not touched, though the first one's job id is the array's."""
    runs = [tmp_path / "0", tmp_path / "1"]
    for folder in runs:
        job = JobConfig(nodes=1, runs_dir=str(folder))
        RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    python, done = shlex.quote(sys.executable), tmp_path / "done"
    script = f"""#!/bin/bash
run=$(echo {tmp_path}/$SLURM_ARRAY_TASK_ID/*)
found=$({python} -m slurmft.cluster.slurm.batch_script begin "$run") || exit
export $found
echo "$SLURM_ARRAY_TASK_ID $SLURMFT_ATTEMPT" >> {done}
if [ "$SLURMFT_ATTEMPT$SLURM_ARRAY_TASK_ID" = 10 ]; then code=75; else code=0; fi
exec {python} -m slurmft.cluster.slurm.batch_script end "$run" $code
"""
    (tmp_path / "job.sh").write_text(script)
    options = ["--array=0-1", "--nodes=1", "--time=2", "--requeue", "--wait", "--output=/dev/null"]
    cluster.run(["sbatch", *options, str(tmp_path / "job.sh")], check=False)
    cluster.wait_idle()
    assert sorted(done.read_text().splitlines()) == ["0 1", "0 2", "1 1"]


@pytest.fixture
def short_job(
    idle_cluster: Cluster, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> Iterator[Following]:
    """A job of two nodes whose slurmft is a copy of its own: `tmp_path / "lib"`."""
    shutil.copytree(CHECKOUT / "slurmft", tmp_path / "lib" / "slurmft")
    env = {"PYTHONPATH": str(tmp_path / "lib"), "PYTHONSAFEPATH": "1"}
    flags = (*BASE, *faults.SHORT_STOP, *emotion(tiny_data, tiny_model))
    flags += ("--epochs", "8")
    job = Following("--runs-dir", str(tmp_path / "runs"), *flags, env=idle_cluster.env | env)
    yield job
    job.process.kill()
    idle_cluster.run(["scancel", "--user=root"])


def test_upgrade_in_mid_run(cluster: Cluster, short_job: Following, tmp_path: Path) -> None:
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


def test_run_directory_that_vanishes(cluster: Cluster, short_job: Following) -> None:
    """The job ends as failed, and says why where that can still be read: in Slurm."""
    short_job.at_step(60)
    while short_job.run.path.exists():  # the job still writes
        shutil.rmtree(short_job.run.path, ignore_errors=True)
    command = ["scontrol", "show", "job", short_job.lines[0].split()[1]]
    until(lambda: "JobState=FAILED" in cluster.run(command).stdout, every_s=0.5)
    words = "Comment=slurmft: failed: the run cannot be read at its end: "
    assert words in cluster.run(command).stdout


def test_host_that_fails_twice_is_left_out(runs: Runs) -> None:
    """The torchrun of a node is killed, and that of the same node again."""
    if runs.job is not None:
        runs.end()  # in which others may have failed
    job = runs.living()
    bad = faults.hosts_of(runs.cluster, job)[-1]
    runs.suffer(TORCHRUN)
    assert faults.hosts_of(runs.cluster, job)[-1] == bad  # once may be chance
    runs.suffer(TORCHRUN)
    assert bad not in json.loads(job.run.attempt.read_text())["hosts"]
    assert any(f"without {bad}" in state.reason for state in job.run.history())
    runs.fine = True


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if not f.slow and f is not TORCHRUN], ids=lambda f: f.name
)
def test_fault(fault: Fault, runs: Runs) -> None:
    runs.suffer(fault)
    runs.fine = True


def test_end_of_the_last_run(runs: Runs) -> None:
    runs.living()
    runs.end()
    runs.fine = True
