"""`slurmft doctor` as a whole, on this machine and on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.plugins.examine.commands import doctor
from tests.cli.test_commands import HEAVY
from tests.conftest import slurmft
from tests.support.cluster import Cluster

pytestmark = pytest.mark.processes

NO_SLURM = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin/nowhere",
    "HF_HUB_OFFLINE": "1",
}


def test_two_simulated_nodes(tmp_path: Path) -> None:
    """The whole of it, torchrun included, and the report for support."""
    report = tmp_path / "report.txt"
    flags = (
        "--nodes",
        "2",
        "--nproc-per-node",
        "1",
        "--within",
        "180",
        "--output",
        str(report),
    )
    secrets = {
        "HF_TOKEN": "hf_QWERTYUIOPASDF",
        "UCX_URL": "http://me:swordfish@proxy:80",
    }
    env = NO_SLURM | secrets | {"PATH": f"{NO_SLURM['PATH']}:/usr/bin:/bin"}
    done = slurmft("doctor", "--cluster", "local", *flags, "--json", env=env)
    assert done.code == 0, done.out + done.err
    printed = json.loads(done.out)
    texts = {check["about"]: check["text"] for check in printed["checks"]}
    assert texts["nodes"] == "127.0.0.1, 127.0.0.2 answer"
    assert texts["hub"].startswith("not checked: HF_HUB_OFFLINE is set")
    assert "by gloo" in texts["all-reduce"]
    assert "1.0 MiB" in texts["all-reduce"]
    matmul = [
        c for c in printed["checks"] if c["about"] == "matmul" and c["level"] == "ok"
    ]
    assert [c["figures"]["median_tflop_s"] > 0 for c in matmul] == [True, True]
    text = report.read_text()
    for secret in ("QWERTY", "swordfish"):
        assert secret not in text + done.out
    facts = json.loads(text.partition("--- JSON ---\n")[2])
    assert facts["checks"] == printed["checks"]
    assert facts["environment"]["HF_TOKEN"] == "[hidden]"
    assert sorted(facts["measured"]["nodes"]) == ["127.0.0.1", "127.0.0.2"]


def test_without_slurm_it_says_so() -> None:
    done = slurmft("doctor", env=NO_SLURM)
    assert done.code == 0, done.out
    assert "WARNING  Slurm " in done.out
    assert "there is no Slurm here" in done.out
    assert "took " in done.out.splitlines()[-1]
    done = slurmft("doctor", "--cluster", "slurm", "--nodes", "2", env=NO_SLURM)
    assert done.code == 1
    assert "FAILURE  Slurm " in done.out
    assert slurmft("doctor", "--nods", "2").code == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--output", "{folder}/none/report.txt"], "no such folder"),
        (["--output", "{folder}"], "is a folder"),
        (["--wait", "inf"], "'inf' is not a number above 0"),
        (["--within", "-5"], "'-5' is not a number above 0"),
    ],
)
def test_mistakes_are_told_before_the_examination(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    flags = [word.format(folder=tmp_path) for word in words]
    with pytest.raises(UsageError, match=problem):
        doctor.main(flags)


def test_the_login_part_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from slurmft.plugins.examine.commands.doctor import main\n"
        "main(['--cluster', 'local', '--runs-dir', sys.argv[1]])\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.check_output(
        command, text=True, timeout=60, env=os.environ | NO_SLURM
    )
    assert printed.splitlines()[-1] == "HEAVY []"


# --- on a real Slurm ------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.timeout(600)  # the cluster may have to start first
def test_four_nodes_that_are_well(
    idle_cluster: Cluster, shared_folder: Path, tmp_path: Path
) -> None:
    """With a runs directory whose file system keeps flock to each node."""
    env = idle_cluster.env | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    flags = (
        "--nodes",
        "4",
        "--within",
        "180",
        "--json",
        "--runs-dir",
        str(shared_folder),
    )
    done = slurmft("doctor", *flags, env=env)
    checks = json.loads(done.out)["checks"]
    failures = [check["text"] for check in checks if check["level"] == "failure"]
    # On a machine with other work its "nodes" are not equally fast: this doctor must say so.
    assert all(" slow in " in text for text in failures), failures
    assert done.code == int(bool(failures)), done.err
    texts = {check["about"]: check["text"] for check in checks}
    assert texts["nodes"] == "n1, n2, n3, n4 answer"
    assert texts["names"] == "all 4 nodes resolve each other's names"
    assert texts["ports"].startswith("all pairs reach each other")
    assert texts["fabric"].startswith("collectives use n1, n2, n3, n4: eth0")
    assert texts["runs locks"].startswith("lockf holds between n1, n2, n3, n4")
    assert "64.0 MiB" in texts["all-reduce"]
    assert "sacct answers" in texts["accounting"]
    idle_cluster.wait_idle()


@pytest.fixture
def sick_nodes(idle_cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """n2 knows no n3 and may not use the ports of a rendezvous; n4 has a bad cable."""
    hosts_file = Path("/etc/hosts").read_text()
    files = [tmp_path / "good", tmp_path / "bad"]
    files[0].write_text(hosts_file)
    files[1].write_text(
        "".join(x for x in hosts_file.splitlines(True) if x.split()[1:2] != ["n3"])
    )
    seen_by_nodes = [files[0], files[1], files[0], files[0]]
    with (
        idle_cluster.showing(seen_by_nodes, Path("/etc/hosts")),
        idle_cluster.closed_ports("n2"),
        idle_cluster.slow("n4", "20mbit"),
    ):
        yield idle_cluster


@pytest.mark.slurm
def test_four_nodes_of_which_two_are_sick(sick_nodes: Cluster, tmp_path: Path) -> None:
    env = sick_nodes.env | {"HF_HUB_OFFLINE": "1"}
    flags = ("--nodes", "4", "--quick", "--runs-dir", str(tmp_path))
    done = slurmft("doctor", *flags, env=env)
    assert done.code == 1, done.out + done.err
    lines = " ".join(done.out.split())
    assert "FAILURE names n2: cannot resolve n3: " in lines
    assert "FAILURE ports n2: cannot reach n1, n4 on a rendezvous port: " in lines
    assert "WARNING links n4: all its links are slow: 0.0" in lines
    sick_nodes.wait_idle()
