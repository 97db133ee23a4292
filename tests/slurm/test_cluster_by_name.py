"""A cluster that is named by SLURM_CLUSTERS, as where one login node serves several clusters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Following
from tests.slurm.commands import LONG, assert_nodes_are_clean
from tests.slurm.commands import slurmft as on_slurm
from tests.support import until
from tests.support.cluster import Cluster
from tests.train.test_resume import pids

pytestmark = pytest.mark.slurm


@pytest.mark.extra("faults")
def test_a_run_from_its_submission_to_its_cancellation(
    idle_cluster: Cluster,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's commands then ask accounting for the cluster, also those that the job calls."""
    monkeypatch.setenv("SLURM_CLUSTERS", "slurmft")
    place = ("--runs-dir", str(tmp_path / "runs"), "--nodes", "2", "--time", "5")
    source = ("--task", "emotion", "--data", str(tiny_data), "--model", str(tiny_model))
    job = Following(*place, *source, *LONG, env=idle_cluster.env)
    job.at_step(3)
    os.kill(pids(job.run, "slurmft.node.torchrun")[-1], signal.SIGKILL)
    until(lambda: job.run.attempt_number() == 2, job.run.history)
    status = on_slurm(idle_cluster, "status", str(job.run.path), "--json")
    assert json.loads(status.out)["state"] == "running", status.err
    listed = on_slurm(idle_cluster, "list", "--runs-dir", str(tmp_path / "runs"))
    assert "running" in listed.out
    cancelled = on_slurm(idle_cluster, "cancel", str(job.run.path))
    assert cancelled.code == 0, cancelled.err
    job.end()
    assert job.run.get_state().state == "cancelled"
    assert_nodes_are_clean(idle_cluster)
