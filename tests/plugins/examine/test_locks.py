"""`slurmft doctor locks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slurmft import locks
from slurmft.core import filesystem
from slurmft.core.filesystem import FileSystem
from slurmft.plugins.examine.lock_probe import Finding
from slurmft.plugins.examine.locks import Measurement, conclude, table
from tests.conftest import HOSTILE, slurmft
from tests.support.cluster import Cluster


def test_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    holds = Finding(
        on_node=True, between_nodes=True, on_unlock=True, on_exit=True, on_kill=False
    )
    findings = {"flock": Finding(error="No locks available"), "soft": holds}
    nfs = FileSystem(type="nfs4", source="server:/x", mount="/x")
    measurement = Measurement(hosts=["n1", "n2"], file_system=nfs, findings=findings)
    lines = table(measurement)
    assert lines[0] == "nfs4 at /x, seen from n1, n2"
    assert lines[3].split(maxsplit=1) == ["flock", "No locks available"]
    assert "STAYS LOCKED" in lines[4]
    lines_after = conclude(measurement)
    assert lines_after[0] == "choice: soft"
    assert str(tmp_path) in lines_after[1]
    assert "leaves its soft locks" in lines_after[2]
    assert measurement.as_dict()["choice"] == "soft"
    apart = Measurement(hosts=["n1", "n2"], file_system=nfs, findings=None)
    assert conclude(apart)[0].startswith("not one folder: n1, n2")
    assert table(apart) == []


@pytest.mark.processes
def test_doctor_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / HOSTILE).mkdir()
    alone = {
        "PATH": f"{Path(sys.executable).parent}:/nowhere",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = slurmft("doctor", "locks", str(tmp_path / HOSTILE), env=alone)
    assert done.code == 0, done.err
    assert "one node cannot know what holds between nodes" in done.out
    assert not (tmp_path / "slurmft").exists()  # nothing recorded
    answer = json.loads(
        slurmft("doctor", "locks", "--json", str(tmp_path), env=alone).out
    )
    assert answer["choice"] == locks.default(filesystem.of(tmp_path))
    assert set(answer["findings"]) == {"flock", "lockf", "ofd", "soft"}
    assert (
        slurmft("doctor", "locks", str(tmp_path), "--nodes", "2", env=alone).code == 2
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["locks", "/nowhere"], "no such folder: '/nowhere'"),
        (["lock"], "did you mean locks?"),
        (["locks"], "the following arguments are required: DIR"),
        (["locks", "/tmp", "--node", "2"], "did you mean --nodes?"),
        (["locks", "/tmp", "--nodes", "-1"], "argument --nodes: '-1'"),
    ],
)
def test_doctor_bad_input(arguments: list[str], words: str) -> None:
    done = slurmft("doctor", *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.slurm
def test_doctor_on_the_nodes_of_an_allocation(
    idle_cluster: Cluster, shared_folder: Path, tmp_path: Path
) -> None:
    env = idle_cluster.env | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurmft("doctor", "locks", str(shared_folder), "--nodes", "2", env=env)
    assert done.code == 0, done.err
    assert "seen from n1, n2" in done.out
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "DOES NOT EXCLUDE" in lines["flock"]
    assert "DOES NOT EXCLUDE" not in lines["lockf"]
    assert "choice: lockf" in done.out
    record = json.loads(next((tmp_path / "cache").rglob("*.json")).read_text())
    assert (record["primitive"], record["nodes"]) == ("lockf", 2)
    refused = slurmft(
        "doctor",
        "locks",
        str(shared_folder),
        "--nodes",
        "2",
        "--partition",
        "x",
        env=env,
    )
    assert refused.code != 0
    assert "invalid partition" in refused.err


@pytest.mark.slurm
def test_doctor_where_each_node_has_a_folder_of_its_own(
    idle_cluster: Cluster, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", HOSTILE, "common")]
    for folder in folders:
        folder.mkdir()
    arguments = ("doctor", "locks", str(folders[2]), "--nodes", "2", "--time", "2")
    with idle_cluster.showing(folders[:2], folders[2]):
        done = slurmft(
            *arguments, env=idle_cluster.env | {"XDG_CACHE_HOME": str(tmp_path)}
        )
    assert done.code == 0, done.err
    assert "not one folder: n1, n2 each have their own there" in done.out
    assert not (tmp_path / "slurmft").exists()
