"""The fault table, on a real Slurm: every run ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import Done, Following, slurmft
from tests.slurm.test_jobs import assert_nodes_are_clean
from tests.support import faults
from tests.support.cluster import Cluster
from tests.support.faults import BASE, EVERY, FAULTS, Fault, SmallDisk
from tests.train.test_resume import assert_same
from tests.train.test_trainer import emotion

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

EPOCHS = ("--epochs", "12")


@pytest.fixture(scope="module")
def undisturbed(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    runs = tmp_path_factory.mktemp("undisturbed")
    flags = (*BASE, *EPOCHS, "--runs-dir", str(runs), *emotion(tiny_data, tiny_model))
    done = slurmft("submit", "--follow", *flags, env=cluster.env)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with SmallDisk(tmp_path / "small disk", 24) as folder:
        yield folder


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.slow], ids=lambda f: f.name)
def test_fault(
    fault: Fault,
    idle_cluster: Cluster,
    undisturbed: Done,
    small_disk: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    flags = (*BASE, *EPOCHS, *emotion(tiny_data, tiny_model), *fault.flags)
    job = Following("--runs-dir", str(small_disk), *flags, env=idle_cluster.env)
    with contextlib.ExitStack() as stack:
        stack.callback(job.process.kill)
        job.until(fault.after)
        began = time.time()
        fault.harm(idle_cluster, job)
        code, text = job.end(150)
    assert code == 0, text
    assert_nodes_are_clean(idle_cluster)
    assert_same(job.run, undisturbed.run)
    assert job.run.attempt_number() == fault.attempts
    lost = faults.steps_lost(job.run)
    print(f"{fault.name}: {lost} steps lost, {faults.recovery_s(job.run, began):.1f} s to recover")
    assert lost <= (0 if fault.signalled else 2 * EVERY)
    assert not list(job.run.checkpoints.glob(".*"))
    if fault.check:
        fault.check(job.run)


def test_host_that_fails_twice_is_left_out(
    idle_cluster: Cluster, undisturbed: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    flags = (*BASE, *EPOCHS, *emotion(tiny_data, tiny_model), *faults.CHECKPOINTS)
    job = Following("--runs-dir", str(tmp_path), *flags, env=idle_cluster.env)
    job.until("step 60/")
    bad = faults.hosts_of(idle_cluster, job)[-1]
    faults.kill_torchrun(idle_cluster, job)
    job.until("goes on after step")
    job.until("step 120/")
    assert faults.hosts_of(idle_cluster, job)[-1] == bad  # once may be chance
    faults.kill_torchrun(idle_cluster, job)
    code, text = job.end(150)
    assert code == 0, text
    assert bad not in json.loads(job.run.attempt.read_text())["hosts"]
    assert any(f"without {bad}" in state["reason"] for state in job.run.history())
    assert_same(job.run, undisturbed.run)


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
    cluster.run(["sbatch", *options, str(tmp_path / "job.sh")], timeout=90, check=False)
    cluster.wait_idle(60)
    assert sorted(done.read_text().splitlines()) == ["0 1", "0 2", "1 1"]
