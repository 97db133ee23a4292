"""The hub's cache: filled once, wherever it lies, with locks that hold there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Following, slurmft
from tests.support import until
from tests.support.cluster import Cluster
from tests.support.faults import BASE
from tests.support.hub import NAME, Hub
from tests.train.test_resume import rank_pids

WEIGHTS = "model.safetensors"
FLAGS = (*BASE, "--epochs", "1", "--task", "emotion", "--model", NAME)


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    with Hub(tiny_model) as made:
        yield made


@pytest.mark.extra("caches")
def test_one_process_of_a_node_fetches(
    hub: Hub, tmp_path: Path, tiny_data: Path
) -> None:
    env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf home")}
    flags = (*FLAGS, "--data", str(tiny_data), "--runs-dir", str(tmp_path))
    done = slurmft("submit", "--follow", "--cluster", "local", *flags, env=env)
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1
    assert not list((tmp_path / "hf home").rglob(".slurmft-*"))


@pytest.mark.extra("caches")
def test_death_of_the_one_that_fetches(
    tiny_model: Path, tmp_path: Path, tiny_data: Path
) -> None:
    """Nothing half fetched is taken for whole, and no lock keeps the next one waiting."""
    with Hub(tiny_model, pause_s=8) as hub:  # less than its client waits
        env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf")}
        flags = (*FLAGS, "--data", str(tiny_data), "--runs-dir", str(tmp_path))
        job = Following("--cluster", "local", *flags, env=os.environ | env)
        until(
            lambda: (
                list((tmp_path / "hf").rglob("*.incomplete")) and hub.fetched[WEIGHTS]
            ),
            every_s=0.02,
        )
        for pid in rank_pids(job.run):
            os.kill(pid, signal.SIGKILL)
        hub.pause_s = 0
        code, text = job.end()
    assert code == 0, text
    assert hub.fetched[WEIGHTS] == 2


@pytest.mark.extra("caches")
@pytest.mark.slurm
def test_shared_and_node_local_caches_on_slurm(
    idle_cluster: Cluster,
    shared_folder: Path,
    hub: Hub,
    tmp_path: Path,
    tiny_data: Path,
) -> None:
    flags = (*FLAGS, "--data", str(tiny_data), "--runs-dir", str(tmp_path))
    env = idle_cluster.env | {"HF_ENDPOINT": hub.url("10.77.0.254")}
    env |= {
        "HF_HOME": str(shared_folder / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = slurmft("submit", "--follow", *flags, env=env)
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1
    folders = [tmp_path / "node a", tmp_path / "node b", tmp_path / "common"]
    for folder in folders:
        folder.mkdir()
    with idle_cluster.showing(folders[:2], folders[2]):
        done = slurmft(
            "submit", "--follow", *flags, env=env | {"HF_HOME": str(folders[2])}
        )
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1 + 2
