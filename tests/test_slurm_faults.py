"""The fault table, on a real Slurm: every run ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import faults
from tests.cluster import Cluster
from tests.conftest import Done, Following, slurmft
from tests.faults import BASE, EVERY, FAULTS, Fault, SmallDisk
from tests.test_resume import assert_same
from tests.test_slurm_jobs import assert_nodes_are_clean
from tests.test_train import emotion

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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
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
