"""Jobs on the real Slurm of tests/support/cluster: what users do, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmft.cluster.slurm.batch_script import sbatch_text
from slurmft.runs import log_times
from tests.conftest import HOSTILE, Done, Following, modes
from tests.slurm.commands import LONG, QUICK, assert_nodes_are_clean, follow, submit
from tests.support import faults
from tests.support.cluster import Cluster, network
from tests.support.models import write_emotion, write_model
from tests.train.test_resume import rank_pids

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@dataclass
class Jobs:
    """Jobs that share the nodes, each followed by a command of its own."""

    limited: Following
    """Reaches its time limit, and is not requeued."""
    killed: Following
    """Is to lose a rank, with neither a restart nor a requeue left."""
    four_nodes: Following
    """From and in hostile folders, with hostile texts."""


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("slurm")
    # Only the run directory's name is Slurm's to read: others may have line breaks, too.
    model = write_model(folder / f"{HOSTILE}\n" / "model")
    data = write_emotion(folder / f"{HOSTILE}\n" / "data", train=96, validation=30)
    setup = f"export SETUP_RAN=yes; touch {json.dumps(str(folder / 'setup ran'))}"
    last_try = ("--max-restarts", "0", "--max-requeues", "0")
    limit = ("--time", "1", "--no-requeue", "--sbatch", "nodelist=n1")
    made = Jobs(
        limited=Following("--runs-dir", str(folder), *LONG, *limit, env=cluster.env),
        killed=follow(cluster, folder, "--nodes", "2", *LONG, *last_try),
        four_nodes=follow(
            cluster,
            folder / HOSTILE / "runs",
            *(
                "--nodes",
                "4",
                "--task",
                "emotion",
                "--data",
                str(data),
                "--model",
                str(model),
            ),
            *(
                "--job-name",
                'it\'s "é"',
                "--comment",
                "$HOME; `x`",
                "--sbatch",
                "nice=10",
            ),
            *("--setup", setup, *QUICK),
        ),
    )
    yield made
    for job in (made.limited, made.killed, made.four_nodes):
        job.process.kill()
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()


@pytest.fixture(scope="module")
def four_nodes(jobs: Jobs) -> Done:
    """The finished run on four nodes, where the other jobs run, too."""
    code, text = jobs.four_nodes.end()
    assert code == 0, text
    (ran,) = jobs.four_nodes.run.path.parents[2].glob("setup ran")
    assert ran.exists()
    return Done(code, text, text)


def test_run_on_four_nodes(cluster: Cluster, four_nodes: Done) -> None:
    assert four_nodes.result["world_size"] == four_nodes.result["nodes"] == 4
    ranks = json.loads(four_nodes.run.environment.read_text())["ranks"]
    assert sorted(rank["host"] for rank in ranks) == cluster.hosts
    assert "accuracy" in four_nodes.out
    assert "to Slurm: 4 node(s)" in four_nodes.out


def test_run_is_its_users_alone(four_nodes: Done) -> None:
    """What sbatch, srun, tasks and ranks wrote, on all nodes."""
    assert modes(four_nodes.run.path) == {"folders": {0o700}, "files": {0o600}}


def test_slurm_got_what_was_asked_for(cluster: Cluster, four_nodes: Done) -> None:
    job = json.loads(four_nodes.run.job.read_text())["id"]
    shown = cluster.run(["scontrol", "show", "job", job]).stdout
    for text in (
        "NumNodes=4",
        'JobName=it\'s "é"',
        "Comment=$HOME; `x`",
        "Nice=10",
        "00:05:00",
    ):
        assert text in shown
    text = (four_nodes.run.submitit / f"{job}_submission.sh").read_text()
    config = four_nodes.run.load_config()

    # what --dry-run shows is what ran
    assert text == sbatch_text(config, four_nodes.run)


def test_metric_is_the_same_on_every_rank(four_nodes: Done) -> None:
    told = set()
    for rank in range(4):
        lines = four_nodes.run.rank_log(rank).read_text().splitlines()
        told.add(tuple(log_times.split(line)[1] for line in lines if " done:" in line))
    assert len(told) == 1
    assert len(told.pop()) >= 1


def test_killed_rank(cluster: Cluster, jobs: Jobs) -> None:
    """Where neither a restart nor a requeue is left."""
    job = jobs.killed
    job.until("step 1/")
    host = faults.hosts_of(cluster, job)[0]
    on_host = {pid for pid, _ in cluster.processes(host)}
    (pid,) = on_host.intersection(rank_pids(job.run))
    assert_bound_to_their_node(cluster, job)
    os.kill(pid, signal.SIGKILL)
    code, text = job.end()
    assert code == 1
    assert "error: a rank was killed by SIGKILL" in text
    reason = job.run.history()[-1].reason
    assert reason.startswith("a rank was killed by SIGKILL"), reason
    assert f"(node {host})" in reason


def assert_bound_to_their_node(cluster: Cluster, job: Following) -> None:
    """The processes of a job of several nodes listen on their node's address, never on all."""
    for host in faults.hosts_of(cluster, job):
        sockets = cluster.run(["ss", "-Hltnp"], on=host).stdout.splitlines()
        sockets_of_job = [line for line in sockets if is_of_job(line, job.job_id)]
        addresses = {line.split()[3].rpartition(":")[0] for line in sockets_of_job}
        (own,) = cluster.run(["getent", "ahostsv4", host]).stdout.split()[:1]
        assert addresses, sockets
        assert addresses <= {own, f"[::ffff:{own}]"}, sockets_of_job


def is_of_job(socket: str, job_id: str) -> bool:
    """True if a socket, a line of `ss -p`, belongs to the job: others share the nodes.

    Slurm's own srun, which listens on all addresses, does not count.
    """
    if '"srun"' in socket:
        return False
    variable = f"SLURM_JOB_ID={job_id}".encode()
    for pid in re.findall(r"pid=(\d+)", socket):
        with contextlib.suppress(OSError):
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
    return False


def test_time_limit(cluster: Cluster, jobs: Jobs) -> None:
    """The run stops in time, saves, and says how to go on."""
    job = jobs.limited
    code, text = job.end()
    assert code == 75
    assert "stopping after step" in text
    assert "not requeued (--no-requeue)" in text
    assert f"slurmft resume {job.run.path}" in text
    assert job.run.checkpoint_names()
    assert_nodes_are_clean(cluster)


def test_preflight_leaves_a_bad_node_out(idle_cluster: Cluster, tmp_path: Path) -> None:
    """n2 has no route to n3, which all others reach; the job is requeued without the latter."""
    inside = ["nsenter", f"--net={network.namespace('n2')}", "ip", "rule"]
    rule = ["to", network.address("n3"), "unreachable"]
    subprocess.run([*inside, "add", *rule], check=True)
    try:
        done = submit(
            idle_cluster,
            tmp_path,
            *(
                "--nodes",
                "3",
                "--follow",
                "--preflight",
                "on",
                "--rdzv-timeout-s",
                "20",
            ),
            *QUICK,
        )
    finally:
        subprocess.run([*inside, "del", *rule], check=True)
    assert done.code == 0, done.err
    assert "bad: n3" in done.out
    assert any(state.reason.endswith("(without n3)") for state in done.run.history())
    assert getattr(done.run.read_attempt(), "hosts", None) == ["n1", "n2", "n4"]


def test_head_that_cannot_be_reached(idle_cluster: Cluster, tmp_path: Path) -> None:
    """A suffix that resolves nowhere: every node but the head says so, with both names."""
    done = submit(
        idle_cluster,
        tmp_path,
        *(
            "--follow",
            "--nodes",
            "2",
            "--host-suffix",
            "-ib0",
            "--rdzv-timeout-s",
            "5",
            *QUICK,
        ),
    )
    assert done.code == 4
    assert "-ib0" in done.err
    assert "does not resolve" in done.err
    assert_nodes_are_clean(idle_cluster)


def test_head_without_a_route(cluster: Cluster) -> None:
    """An address on the nodes' network that nobody has."""
    code = (
        "from slurmft.node.rendezvous import check_reachable\n"
        "check_reachable('n2', '10.77.0.99', 12345, '1.0', 's', timeout_s=4)"
    )
    done = cluster.run([sys.executable, "-c", code], on="n2", check=False, timeout=60)
    assert "node n2 cannot reach the head node 10.77.0.99, port 12345" in done.stderr
