"""The hub's cache: filled once, wherever it lies, with locks that hold there."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from slurmft.job.process_group import World
from slurmft.train import hub_cache
from tests.conftest import Following, slurmft
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


def test_one_process_of_a_node_fetches(hub: Hub, tmp_path: Path, tiny_data: Path) -> None:
    env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf home")}
    flags = (*FLAGS, "--data", str(tiny_data), "--runs-dir", str(tmp_path))
    done = slurmft("submit", "--follow", "--cluster", "local", *flags, env=env)
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1
    assert not list((tmp_path / "hf home").rglob(".slurmft-*"))


def test_death_of_the_one_that_fetches(tiny_model: Path, tmp_path: Path, tiny_data: Path) -> None:
    """Nothing half fetched is taken for whole, and no lock keeps the next one waiting."""
    with Hub(tiny_model, pause_s=3) as hub:
        env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf")}
        flags = (*FLAGS, "--data", str(tiny_data), "--runs-dir", str(tmp_path))
        job = Following("--cluster", "local", *flags, env=os.environ | env)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "hf").rglob("*.incomplete")) or not hub.fetched[WEIGHTS]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for pid in rank_pids(job.run):
            os.kill(pid, signal.SIGKILL)
        hub.pause_s = 0
        code, text = job.end(90)
    assert code == 0, text
    assert hub.fetched[WEIGHTS] == 2


class ThreadWorld:
    """Ranks that are threads, each on a host of its own choice."""

    def __init__(self, rank: int, host: str, common: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.host, self.is_main = rank, host, rank == 0
        self._common, self._barrier = common, barrier

    def all_objects(self, value: Any) -> list[Any]:
        self._common[self.rank] = pickle.dumps(value)
        self._barrier.wait()
        found = [pickle.loads(text) for text in self._common]
        self._barrier.wait()
        return found

    def share_object(self, value: Any, source: int = 0) -> Any:
        return self.all_objects(value)[source]


def settled(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What `settle_locks` returns on two ranks of each host, by rank."""
    hosts = [host for host in folders for _ in range(2)]
    common, barrier, ranks = [b""] * len(hosts), threading.Barrier(len(hosts)), threading.local()
    monkeypatch.setattr("platform.node", lambda: ranks.world.host)

    def settle(rank: int) -> str | None:
        ranks.world = ThreadWorld(rank, hosts[rank], common, barrier)
        return hub_cache.settle_locks(cast(World, ranks.world), folders[hosts[rank]])

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(settle, range(len(hosts)), timeout=60))


def test_locks_are_measured_between_two_nodes(
    two_nodes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = dict(zip(("n1", "n2"), two_nodes, strict=True))
    assert settled(folders, monkeypatch) == [None] * 4
    record = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert record["primitive"] == "lockf"
    assert record["findings"]["lockf"]["between_nodes"]
    assert not list(two_nodes[0].glob(".slurmft-*"))


def test_a_lock_that_hangs_is_a_warning_on_all_ranks(
    two_nodes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub_cache, "_AGENT", ["sleep", "60"])
    monkeypatch.setattr(hub_cache, "_START_S", 0.3)
    found = settled(dict(zip(("n1", "n2"), two_nodes, strict=True)), monkeypatch)
    assert (
        found
        == ["cannot measure file locks: rank 0: no answer in 0 s (token -); file locks: lockf"] * 4
    )
    assert not list(tmp_path.iterdir())


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
    env |= {"HF_HOME": str(shared_folder / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurmft("submit", "--follow", *flags, env=env)
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1
    # What was measured at the start is there for the next run.
    record = json.loads(next((tmp_path / "cache").rglob("*.json")).read_text())
    assert record["primitive"] == "lockf"
    assert record["findings"]["lockf"]["between_nodes"]

    folders = [tmp_path / "node a", tmp_path / "node b", tmp_path / "common"]
    for folder in folders:
        folder.mkdir()
    idle_cluster.show(folders[:2], folders[2])
    done = slurmft("submit", "--follow", *flags, env=env | {"HF_HOME": str(folders[2])})
    assert done.code == 0, done.err + done.out
    assert hub.fetched[WEIGHTS] == 1 + 2
