"""`slurmft doctor`: what it finds on machines that are well, and on ones that are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.slurm import commands as slurm_commands
from slurmft.core import credentials
from slurmft.core.config import JobConfig
from slurmft.core.filesystem import Room
from slurmft.doctor import checks, login, rules
from slurmft.doctor import examination as doctor_examination
from slurmft.doctor.checks import Check, Level, failure, ok, warning
from slurmft.doctor.examination import Examination
from slurmft.doctor.nodes import Nodes, Site, agent_command
from slurmft.node.task import LOCAL_NODE
from tests.cli.test_commands import HEAVY
from tests.conftest import slurmft
from tests.support.cluster import Cluster

NO_SLURM = {"PATH": f"{Path(sys.executable).parent}:/usr/bin/nowhere", "HF_HUB_OFFLINE": "1"}


def wrong(found: list[Check]) -> list[str]:
    """What is not ok, in words."""
    return [f"{c.level}: {c.text}" for c in found if c.level != Level.OK]


# --- findings -------------------------------------------------------------------------------------


def test_only_failures_fail() -> None:
    good, doubtful, bad = ok("a", "x"), warning("b", "y", "do this"), failure("c", "z")
    assert checks.exit_code([good, doubtful]) == 0
    assert checks.exit_code([good, doubtful, bad]) == 1
    assert checks.lines([good, doubtful]) == ["ok       a  x", "WARNING  b  y",
                                              "            -> do this"]  # fmt: skip
    assert checks.summary([good, bad], 1.23) == "1 ok, 0 warning(s), 1 failure(s); took 1.2 s"


def test_slow_ones() -> None:
    assert checks.slow_ones({"n1": 10, "n2": 9.5, "n3": 4, "n4": 10.5}, 0.8) == {"n3": 0.4}
    assert checks.slow_ones({"n1": 10, "n2": 5}, 0.8) == {"n2": 0.5}
    assert checks.slow_ones({"n1": 10}, 0.8) == {}
    assert checks.slow_ones({"n1": 0, "n2": 0}, 0.8) == {}


def test_few_lines_name_all_broken_pairs() -> None:
    others = ["n1", "n2", "n4"]
    assert checks.blame((o, "n3") for o in others) == [("n3", "to", others)]
    assert checks.blame(("n3", o) for o in others) == [("n3", "from", others)]
    both = [("n1", "n3"), ("n2", "n3"), ("n4", "n1")]
    assert checks.blame(both) == [("n3", "to", ["n1", "n2"]), ("n1", "to", ["n4"])]
    three = {("n1", "n3"), ("n2", "n3"), ("n3", "n4")}
    assert rules.healthy(["n1", "n2", "n3", "n4"], three) == ["n1", "n2", "n4"]
    assert rules.healthy(["n1", "n2"], set()) == ["n1", "n2"]


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_rounds_have_every_link_of_the_ring_and_no_node_twice(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    found = rules.rounds(names)
    for pairs in found:
        ends = [name for pair in pairs for name in pair]
        assert len(ends) == len(set(ends))
    assert sorted(pair for pairs in found for pair in pairs) == sorted(
        (name, names[(i + 1) % count]) for i, name in enumerate(names)
    )


def test_what_hangs_is_left_behind() -> None:
    never = threading.Event()
    late, good, bad = checks.all_within(0.2, [never.wait, lambda: True, lambda: bool(1 // 0)])
    with pytest.raises(TimeoutError, match="no answer in"):
        late()
    assert good()
    with pytest.raises(ZeroDivisionError):
        bad()
    never.set()


def test_secrets_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'se"cret-99'
    environment = {
        "HF_TOKEN": secret,
        "SLURM_JWT": "abc.def",
        "AWS_SECRET_ACCESS_KEY": "else-where",
        "HF_ENDPOINT": "https://me:pass@mirror.example.com/hf",
        "OMP_NUM_THREADS": "4",
        "EDITOR": "vi",
    }
    told = checks.told_environment(environment)
    assert told["HF_TOKEN"] == told["SLURM_JWT"] == "[hidden]"
    assert told["OMP_NUM_THREADS"] == "4"
    assert not {"EDITOR", "AWS_SECRET_ACCESS_KEY"} & told.keys()
    text = json.dumps([told, secret, "hf_ABCDEFGHIJKLMNOP", "else-where"]) + secret
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    clean = credentials.redact(text)
    for part in ("cret-99", "pass", "me:", "ABCDEFG", "else-where"):
        assert part not in clean
    assert "https://[hidden]@mirror.example.com/hf" in clean
    json.loads(clean[: clean.rindex("]") + 1])


# --- Slurm's words (as 22.05.8 prints them) -------------------------------------------------------


def test_settings() -> None:
    text = (
        "Configuration data as of 2026-11-22T00:31:06\n"
        "AccountingStorageBackupHost = (null)\n"
        "AccountingStorageEnforce = none\n"
        "KillWait                = 10 sec\n"
        "SchedulerParameters     = batch_sched_delay=0,sched_interval=2\n"
        "\nSlurmctld(primary) at login is UP\n"
    )
    assert slurm_commands.parse_settings(text) == {
        "AccountingStorageEnforce": "none",
        "KillWait": "10 sec",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2",
    }


def test_nodes_that_take_no_jobs() -> None:
    text = (
        "n1|idle|none\nn1|idle|none\nn2|drained|bad | disk, see log\n"
        "n3|down*|Not responding\nn4|allocated|none\nn5|idle*|none\n"
    )
    found = slurm_commands.parse_unwell_hosts(text)
    assert found == {
        "n2": "drained: bad | disk, see log",
        "n3": "down*: Not responding",
        "n5": "idle*",
    }
    said = login.judge_down(found)
    assert said.level == Level.WARNING
    assert "n3 is down*: Not responding" in said.text
    assert login.judge_down({}).level == Level.OK


def test_partitions_and_accounts() -> None:
    here = slurm_commands.parse_partitions("batch|up|1:00:00|4|4\nold|down|1:00:00|64|4\n")
    judge = login.judge_partitions
    assert judge(here, None, 4).level == Level.OK
    assert judge(here, "gpu", 1).text.startswith("there is no 'gpu'; there are: batch (4 nodes")
    for wanted in (None, "batch", "old"):
        assert judge(here, wanted, 8).text.startswith("no 8 nodes in")
    assert judge([], None, 1).level == Level.FAILURE
    fields = "Account,Partition,QOS,MaxJobs,MaxSubmit,MaxTRES,MaxWall,GrpTRES"
    rows = slurm_commands.parse_associations("root||normal|||||\n", fields)
    assert rows == [{"Account": "root", "QOS": "normal"}]
    allowed = login.judge_accounting
    assert allowed("me", rows, {}).level == Level.OK
    assert allowed("me", [], {"AccountingStorageEnforce": "none"}).level == Level.OK
    assert allowed("me", [], {"AccountingStorageEnforce": "associations,limits"}).level == (
        Level.FAILURE
    )


def test_room() -> None:
    gib = 2**30
    full = Room(free_bytes=50 * gib, free_inodes=10**6, problem="Disk quota exceeded")
    said = login.judge_room("runs", "/x", full)
    assert (said.level, said.text) == (Level.FAILURE, "/x: cannot be written: Disk quota exceeded")
    assert "--runs-dir" in str(said.cure)
    for little in (Room(free_bytes=gib, free_inodes=None, problem=None),
                   Room(free_bytes=50 * gib, free_inodes=12, problem=None)):  # fmt: skip
        assert login.judge_room("runs", "/x", little).level == Level.WARNING
    shm = Room(free_bytes=gib, free_inodes=10**6, problem=None)
    assert login.judge_room("shm", "/dev/shm", shm).level == Level.OK


# --- what nodes said ------------------------------------------------------------------------------


def fact(**changes: Any) -> dict[str, Any]:
    """A node, as its agent tells it."""
    hardware = {"slurm_cpus": 8, "quota_cpus": None, "gpus": [], "model": "CPU", "flags": ["avx2"]}
    hardware |= {"memory_mib": 1000} | changes.pop("hardware", {})
    software = {"Python": "3.11.7 (/env/bin/python)", "torch": "2.13.0"}
    known = {"cores": 8, "mask_cpus": 8, "available_mib": 900, "kernel": "6.1", "hub": True}
    return known | {"hardware": hardware, "software": software} | changes


def test_cores_that_slurm_grants_but_does_not_give() -> None:
    assert not wrong(rules.cores({"n1": fact(), "n2": fact()}, 8))
    found = wrong(rules.cores({"n1": fact(), "n2": fact(mask_cpus=1, cores=1)}, None))
    assert found[0].startswith("warning: n2: 1 core(s) to compute on; Slurm counts 8 CPU(s)")
    assert found[1] == "warning: not the same on all nodes: n1: 8; n2: 1"
    assert wrong(rules.cores({"n1": fact()}, 16))
    assert wrong(rules.cores({"n1": fact(hardware={"quota_cpus": 2.0})}, None))


def test_nodes_that_are_not_alike() -> None:
    gpu = {"model": "H100"}
    two = {"n1": fact(hardware={"gpus": [gpu, gpu]}), "n2": fact(hardware={"gpus": [gpu]})}
    found = wrong(rules.devices(two, 2))
    assert found[0] == "failure: n2: fewer GPUs than the 2 asked for"
    assert "n1: 2 x H100; n2: 1 x H100" in found[1]
    small = {"n1": fact(), "n2": fact(hardware={"memory_mib": 500}), "n3": fact()}
    found = wrong(rules.memory(small))
    assert found == ["warning: n2 has 500 MiB, 50% of the median"]
    here = fact()["software"]
    assert not wrong(rules.versions({"n1": fact(), "n2": fact()}, here))
    other = fact(software=here | {"torch": "2.8.0"})
    found = wrong(rules.versions({"n1": fact(), "n2": other}, here))
    assert found == ["failure: not one torch: n1, this host: 2.13.0; n2: 2.8.0"]
    found = wrong(rules.hub({"n1": fact(), "n2": fact(hub=False)}))
    assert found == ["warning: n2 do not reach it, others do"]


def test_a_faster_fabric_that_would_not_be_taken() -> None:
    eth, ib = ["eth0", False, 1000, "eth0 (1 Gbit/s)"], ["ib0", True, 100000, "ib0 (InfiniBand)"]
    judge = rules.fabric
    said = judge({"n1": [ib, eth], "n2": [eth]}, {"n1": "eth0", "n2": "eth0"})[0]
    assert said.level == Level.WARNING
    assert "n1: ib0 (InfiniBand)" in said.text
    assert "--interface" in str(said.cure)
    assert not wrong(judge({"n1": [ib, eth]}, {"n1": "ib0"}))
    assert not wrong(judge({"n1": [eth]}, {"n1": "lo"}))


def test_one_slow_node_is_named() -> None:
    rates = {("n1", "n2"): 1e9, ("n2", "n3"): 1e8, ("n3", "n4"): 1.1e8, ("n4", "n1"): 1.2e9}
    found = wrong(rules.links(rates))
    assert found == ["warning: n3 is slow: 0.88 Gbit/s, 9% of the median"]

    def rank(fp32: float) -> dict[str, Any]:
        return {"tflop_s": {"fp32": fp32, "bf16": 9.0}}

    ranks = {"n1": [rank(5.0)], "n2": [rank(2.0)], "n3": [rank(4.9)]}
    found = wrong(rules.products(ranks))
    assert found == ["warning: n2 is slow in fp32: 2 TFLOP/s, 41% of the median"]
    both = {"n1": [rank(5.0), rank(5.0)], "n2": [rank(5.0), rank(1.0)]}
    assert "n2 process 1 is slow in fp32" in wrong(rules.products(both))[0]


def test_collectives_that_do_not_end() -> None:
    def answer(problem: str | None, late: bool, ranks: int) -> dict[str, Any]:
        return {"problem": problem, "late": late, "ranks": [{}] * ranks}

    judge = rules.torchrun
    assert judge({"n1": answer(None, False, 1)}) == []
    hung, dead = answer("torchrun did not end", True, 1), answer("Error: no ib0", False, 0)
    assert wrong(judge({"n1": hung, "n2": dead})) == ["failure: n2: Error: no ib0"]
    assert wrong(judge({"n1": hung, "n2": hung}))[0].startswith("failure: n1, n2: the processes")
    slow = answer("torchrun did not end", True, 0)
    assert wrong(judge({"n1": hung, "n2": slow}))[0].startswith("warning: n2: no process had")


def test_clocks() -> None:
    ways = {"n2": 0.002, "n3": 0.002}
    assert not wrong(rules.clocks({"n1": 0.0, "n2": 0.1, "n3": -0.1}, ways))
    found = wrong(rules.clocks({"n1": 0.0, "n2": 2.0, "n3": -40.0}, ways))
    assert found == [
        "warning: n2 is 2.0 s ahead of the others (give or take 0.001 s)",
        "failure: n3 is 40.0 s behind the others (give or take 0.001 s)",
    ]
    assert not wrong(rules.clocks({"n1": 0.0, "n2": 2.0}, {"n2": 5.0}))  # not known


# --- agents, real ones, on this machine -----------------------------------------------------------

SKEWED = """\
import time
now = time.time
time.time = lambda: now() + 90
from slurmft import nodeprobe
nodeprobe.main()
"""
CLOSED = """\
from slurmft import nodeprobe
real = nodeprobe.Agent.listen
nodeprobe.Agent.listen = lambda *a, **k: real(*a, **k) | {"rendezvous": 9}
nodeprobe.main()
"""
DEAF = "import sys; sys.stdin.read()"
DEAD = """\
import sys
print('slurmft-nodeprobe {"number": 1, "answ', end="")  # killed while it spoke
sys.exit("srun: error: Node failure on n7")
"""


def test_sick_nodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once: a skewed clock, a closed port, a name that does not resolve, one that does not
    answer, one that is dead."""
    monkeypatch.setattr(doctor_examination, "_START_S", 8.0)
    programs = {"n3": SKEWED, "n4": CLOSED, "n6": DEAF, "n7": DEAD}
    names = [f"n{i}" for i in range(1, 8)]
    commands = {
        name: ["env", f"{LOCAL_NODE}={i}"]
        + ([sys.executable, "-c", programs[name]] if name in programs else agent_command())
        for i, name in enumerate(names)
    }
    hosts = {name: f"127.0.0.{i + 1}" for i, name in enumerate(names)} | {"n5": "n5.invalid"}
    site = Site(hosts=hosts, commands=commands, env={}, job_id="7", simulated=True)
    folders = {"runs": tmp_path, "cache": tmp_path / "cache"}
    with Nodes(site.commands, {}) as nodes:
        examination = Examination(
            site=site,
            nodes=nodes,
            job=JobConfig(nodes=7),
            folders=folders,
            deadline=time.monotonic() + 60,
            quick=True,
        )
        examination.run()
    found = "\n".join(wrong(examination.checks))
    assert "failure: n6 cannot be used: no answer in 8 s" in found
    assert "failure: n7 cannot be used: its agent ended: Node failure on n7" in found
    assert "cannot resolve n5: " in found
    assert "cannot reach n4 on a rendezvous port: Connection refused" in found
    assert "failure: n3 is 90.0 s ahead of the others" in found
    assert examination.found["usable"] == ["n1", "n2", "n3"]
    assert not list(tmp_path.iterdir())  # nothing is left in the folders
    assert all(child.returncode is not None for child in nodes._processes.values())


def test_two_simulated_nodes(tmp_path: Path) -> None:
    """The whole of it, torchrun included, and the report for support."""
    report = tmp_path / "report.txt"
    flags = ("--nodes", "2", "--nproc-per-node", "1", "--within", "100", "--output", str(report))
    secrets = {"HF_TOKEN": "hf_QWERTYUIOPASDF", "UCX_URL": "http://me:hidden@proxy:80"}
    env = NO_SLURM | secrets | {"PATH": f"{NO_SLURM['PATH']}:/usr/bin:/bin"}
    done = slurmft("doctor", "--cluster", "local", *flags, "--json", env=env)
    assert done.code == 0, done.out + done.err
    said = json.loads(done.out)
    texts = {check["about"]: check["text"] for check in said["checks"]}
    assert texts["nodes"] == "127.0.0.1, 127.0.0.2 answer"
    assert texts["hub"].startswith("not asked: HF_HUB_OFFLINE is set")
    assert "by gloo" in texts["all-reduce"]
    assert "1 MiB" in texts["all-reduce"]
    products = [c for c in said["checks"] if c["about"] == "products" and c["level"] == "ok"]
    assert [c["figures"]["median_tflop_s"] > 0 for c in products] == [True, True]
    text = report.read_text()
    for secret in ("QWERTY", "hidden"):
        assert secret not in text + done.out
    facts = json.loads(text.partition("--- JSON ---\n")[2])
    assert facts["checks"] == said["checks"]
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


def test_the_login_part_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from slurmft.cli.doctor import main\n"
        "main(['--cluster', 'local', '--runs-dir', sys.argv[1]])\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.check_output(command, text=True, timeout=60, env=os.environ | NO_SLURM)
    assert said.splitlines()[-1] == "HEAVY []"


# --- on a real Slurm ------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.timeout(180)  # the cluster may have to start first
def test_four_nodes_that_are_well(
    idle_cluster: Cluster, shared_folder: Path, tmp_path: Path
) -> None:
    """With a runs directory whose file system keeps flock to each node."""
    env = idle_cluster.env | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    flags = ("--nodes", "4", "--within", "100", "--json", "--runs-dir", str(shared_folder))
    done = slurmft("doctor", *flags, env=env)
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out)["checks"]
    texts = {check["about"]: check["text"] for check in found}
    assert texts["nodes"] == "n1, n2, n3, n4 answer"
    assert texts["names"] == "all 4 nodes find each other's names"
    assert texts["ports"].startswith("all pairs reach each other")
    assert texts["fabric"].startswith("collectives take n1, n2, n3, n4: eth0")
    assert texts["runs locks"].startswith("lockf holds between n1, n2, n3, n4")
    assert "64 MiB" in texts["all-reduce"]
    assert "sacct answers" in texts["accounting"]
    idle_cluster.wait_idle()


@pytest.fixture
def sick_nodes(idle_cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """n2 knows no n3 and may not use the ports of a rendezvous; n4 has a bad cable."""
    known = Path("/etc/hosts").read_text()
    files = [tmp_path / "good", tmp_path / "bad"]
    files[0].write_text(known)
    files[1].write_text("".join(x for x in known.splitlines(True) if x.split()[1:2] != ["n3"]))
    idle_cluster.show([files[0], files[1], files[0], files[0]], Path("/etc/hosts"))
    idle_cluster.close_ports("n2", "10000-27000")
    idle_cluster.shape("20mbit", "n4")
    yield idle_cluster
    idle_cluster.shape(None, "n4")
    idle_cluster.close_ports("n2", None)
    idle_cluster.show([], Path("/etc/hosts"))


@pytest.mark.slurm
def test_four_nodes_of_which_two_are_sick(sick_nodes: Cluster, tmp_path: Path) -> None:
    env = sick_nodes.env | {"HF_HUB_OFFLINE": "1"}
    flags = ("--nodes", "4", "--quick", "--runs-dir", str(tmp_path))
    done = slurmft("doctor", *flags, env=env)
    assert done.code == 1, done.out + done.err
    lines = " ".join(done.out.split())
    assert "FAILURE names n2 cannot resolve n3: " in lines
    assert "FAILURE ports n2 cannot reach n1, n4 on a rendezvous port: " in lines
    assert "WARNING links n4 is slow: 0.0" in lines
    sick_nodes.wait_idle()
