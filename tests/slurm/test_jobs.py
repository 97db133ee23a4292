"""Jobs on the real Slurm of tests/support/cluster: what users do, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster.slurm.batch_script import sbatch_text
from slurmft.runs import log_times
from tests import conftest
from tests.conftest import HOSTILE, Done, Following, modes, records
from tests.support import until
from tests.support.cluster import Cluster, network
from tests.support.made_runs import write_run
from tests.support.models import write_emotion, write_model

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

QUICK = ("--cpus-per-task", "1", "--batch-size", "8", "--max-steps", "4", "--log-every", "1")
LONG = ("--cpus-per-task", "1", "--batch-size", "8", "--epochs", "500", "--log-every", "1")


def slurmft(cluster: Cluster, *arguments: str) -> Done:
    """Runs a slurmft command on the login host."""
    command = [sys.executable, "-m", "slurmft", *arguments]
    done = cluster.run(command, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def submit(cluster: Cluster, runs: Path, *arguments: str) -> Done:
    return slurmft(cluster, "submit", "--runs-dir", str(runs), "--time", "5", *arguments)


def follow(cluster: Cluster, runs: Path, *arguments: str) -> Following:
    return Following("--runs-dir", str(runs), "--time", "5", *arguments, env=cluster.env)


@pytest.fixture(scope="module")
def four_nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished run on four nodes, from and in hostile folders, with hostile texts."""
    folder = tmp_path_factory.mktemp("slurm")
    # Only the run directory's name is Slurm's to read: others may have line breaks, too.
    model = write_model(folder / f"{HOSTILE}\n" / "model")
    data = write_emotion(folder / f"{HOSTILE}\n" / "data", train=96, validation=30)
    done = submit(
        cluster,
        folder / HOSTILE / "runs",
        *("--follow", "--nodes", "4", "--task", "emotion"),
        *("--data", str(data), "--model", str(model), *QUICK),
        *("--job-name", 'it\'s "é"', "--comment", "$HOME; `x`", "--sbatch", "nice=10"),
        *("--setup", f"export SETUP_RAN=yes; touch {json.dumps(str(folder / 'setup ran'))}"),
    )
    assert done.code == 0, done.err
    assert (folder / "setup ran").exists()
    return done


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
    for text in ("NumNodes=4", 'JobName=it\'s "é"', "Comment=$HOME; `x`", "Nice=10", "00:05:00"):
        assert text in shown
    text = (four_nodes.run.submitit / f"{job}_submission.sh").read_text()
    config = four_nodes.run.load_config()

    assert text == sbatch_text(config, four_nodes.run)  # what --dry-run shows is what ran


def test_metric_is_the_same_on_every_rank(four_nodes: Done) -> None:
    told = set()
    for rank in range(4):
        lines = four_nodes.run.rank_log(rank).read_text().splitlines()
        told.add(tuple(log_times.split(line)[1] for line in lines if " done:" in line))
    assert len(told) == 1
    assert len(told.pop()) >= 1


def test_submit_returns_at_once_with_the_next_commands(
    idle_cluster: Cluster, tmp_path: Path
) -> None:
    done = submit(idle_cluster, tmp_path, "--nodes", "2", *LONG)
    assert done.code == 0
    for text in (
        "submitted to Slurm: 2 node(s)",
        "run directory: ",
        "follow",
        "cancel",
        "watch",
        "logs",
    ):
        assert text in done.out
    assert slurmft(idle_cluster, "cancel", str(done.run.path)).code == 0
    followed = slurmft(idle_cluster, "follow", str(done.run.path))
    assert followed.code == 5
    assert "was cancelled" in followed.err


def test_preflight_leaves_a_bad_node_out(idle_cluster: Cluster, tmp_path: Path) -> None:
    """n2 has no route to n3, which all others reach; the job is requeued without the latter."""
    inside = ["nsenter", f"--net={network.namespace('n2')}", "ip", "rule"]
    rule = ["to", network.address("n3"), "unreachable"]
    subprocess.run([*inside, "add", *rule], check=True)
    try:
        done = submit(
            idle_cluster,
            tmp_path,
            *("--nodes", "3", "--follow", "--preflight", "on", "--rdzv-timeout-s", "20"),
            *QUICK,
        )
    finally:
        subprocess.run([*inside, "del", *rule], check=True)
    assert done.code == 0, done.err
    assert "bad: n3" in done.out
    assert any(state.reason.endswith("(without n3)") for state in done.run.history())
    assert getattr(done.run.read_attempt(), "hosts", None) == ["n1", "n2", "n4"]


def test_living_with_runs(idle_cluster: Cluster, tmp_path: Path) -> None:
    """One job runs and is requeued, one waits behind it, one is known to nobody, and one is another
    cluster's."""
    runs = submit(idle_cluster, tmp_path, "--nodes", "1", *LONG).run
    waits = submit(idle_cluster, tmp_path, "--nodes", "4", "--exclusive", *LONG).run
    gone = write_run(tmp_path / "gone", state="running")
    gone.job.write_text('{"cluster": "slurm", "id": "999999"}')
    until(lambda: runs.get_state().state == "running")  # its ranks need not have started
    theirs = write_run(tmp_path / "theirs", state="requeued")
    theirs.job.write_text('{"cluster": "slurm", "id": "999998", "where": "b"}')
    now = list_runs(idle_cluster, tmp_path)
    assert [now[r.path.name]["state"] for r in (runs, waits, gone, theirs)] == [
        "running", "pending", "vanished", "requeued",
    ]  # fmt: skip
    assert [now[run.path.name]["where"] for run in (runs, waits)] == ["slurmft", "slurmft"]
    refused = slurmft(idle_cluster, "cancel", "theirs", "--runs-dir", str(tmp_path))
    assert refused.code == 2
    assert "is on the cluster b; seen from slurmft" in refused.err
    # Slurm has many words for full nodes, but not at once.
    until(lambda: list_runs(idle_cluster, tmp_path)[waits.path.name]["reason"])
    job, waiting = now[runs.path.name]["job"], now[waits.path.name]["job"]
    cancelled = slurmft(idle_cluster, "cancel", waiting, "--runs-dir", str(tmp_path))
    assert f"the job {waiting} of {waits.path.name} is being cancelled" in cancelled.out
    idle_cluster.run(["scontrol", "requeue", job])
    until(lambda: list_runs(idle_cluster, tmp_path)[runs.path.name]["requeues"] == 1, every_s=1)
    now = list_runs(idle_cluster, tmp_path)
    assert now[runs.path.name]["state"] in ("requeued", "running")
    assert now[waits.path.name]["state"] == "cancelled"
    told = slurmft(idle_cluster, "status", job, "--runs-dir", str(tmp_path))
    assert "requeued once" in told.out
    assert slurmft(idle_cluster, "cancel", job, "--runs-dir", str(tmp_path)).code == 0
    assert runs.get_state().state == "cancelled"


def list_runs(cluster: Cluster, runs: Path) -> dict[str, dict[str, Any]]:
    """The rows of `slurmft list`, by name."""
    done = slurmft(cluster, "list", "--json", "--runs-dir", str(runs))
    assert done.code == 0, done.err
    return {row["name"]: row for row in json.loads(done.out)["runs"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--nodes", "5"],
            ["never start", "requests 5 nodes, but the partition batch has 4", "(4 nodes"],
        ),
        (["--partition", "gpu"], ["invalid partition", "batch (4 nodes of 4 CPUs"]),
        (["--time", "600"], ["never start", "requests a time of 10:00:00", "allows 1:00:00"]),
        (["--mem", "99G"], ["sbatch refused the job (exit 1): Memory specification"]),
        (["--sbatch", "nosuchoption=1"], ["sbatch refused", "nosuchoption"]),
    ],
)
def test_refused(cluster: Cluster, arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = submit(cluster, tmp_path, *arguments)
    assert done.code == 3, done.out
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []  # no run directory for a job that never was


def test_cancelled_by_scancel_while_following(idle_cluster: Cluster, tmp_path: Path) -> None:
    job = follow(idle_cluster, tmp_path, "--nodes", "2", *LONG)
    job.until("step 1/")
    idle_cluster.run(["scancel", job.job_id])
    code, text = job.end()
    assert code == 5
    assert f"the job {job.job_id} was cancelled by root" in text
    assert_nodes_are_clean(idle_cluster)


def test_rank_that_raises(idle_cluster: Cluster, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_positions=24)
    data = write_emotion(tmp_path / "data", train=60, validation=8)
    with open(data / "train.jsonl", "a") as file:
        file.write(json.dumps({"text": "word1 " * 40, "label": 0}) + "\n")
    done = submit(
        idle_cluster,
        tmp_path / "runs",
        *("--follow", "--nodes", "2", "--cpus-per-task", "1", "--task", "emotion"),
        *("--data", str(data), "--model", str(model), "--batch-size", "4", "--epochs", "50"),
    )
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    assert done.err.splitlines()[-2].startswith("error: ValueError: a text of ")
    assert " on n" in done.err.splitlines()[-2]
    assert_nodes_are_clean(idle_cluster)
    failed = job_fields(idle_cluster, done)
    assert failed == ("FAILED", "1:0")


def test_killed_rank(idle_cluster: Cluster, tmp_path: Path) -> None:
    """Where neither a restart nor a requeue is left."""
    flags = ("--max-restarts", "0", "--max-requeues", "0")
    job = follow(idle_cluster, tmp_path, "--nodes", "2", *LONG, *flags)
    job.until("step 1/")
    nodes = idle_cluster.run(["squeue", "-hj", job.job_id, "-o", "%N"]).stdout.strip()
    host = nodes.replace("n[", "n").split(",")[0].split("-")[0].rstrip("]")
    pid = next(
        p
        for p, line in idle_cluster.processes(host)
        if "-m slurmft.train.rank" in line and "slurmft.node.torchrun" not in line
    )
    assert_bound_to_their_node(idle_cluster)
    os.kill(pid, 9)
    code, text = job.end()
    assert code == 1
    assert "error: a rank was killed by SIGKILL" in text
    reason = job.run.history()[-1].reason
    assert reason.startswith("a rank was killed by SIGKILL"), reason
    assert f"(node {host})" in reason
    assert_nodes_are_clean(idle_cluster)


def assert_bound_to_their_node(cluster: Cluster) -> None:
    """What a running job's processes listen on: addresses of the node, never all of them."""
    seen: dict[str, set[str]] = {}
    for host in cluster.hosts:
        shown = cluster.run(["ss", "-Hltnp"], on=host).stdout.splitlines()
        ours = [line.split()[3] for line in shown if "python" in line or "pt_" in line]
        if ours:
            seen[host] = {address.rpartition(":")[0] for address in ours}
    assert len(seen) == 2  # nodes of the job
    for host, addresses in seen.items():
        (own,) = cluster.run(["getent", "ahostsv4", host]).stdout.split()[:1]
        assert addresses <= {own, f"[::ffff:{own}]"}, (host, addresses)


def test_head_that_cannot_be_reached(idle_cluster: Cluster, tmp_path: Path) -> None:
    """A suffix that resolves nowhere: every node but the head says so, with both names."""
    done = submit(
        idle_cluster,
        tmp_path,
        *("--follow", "--nodes", "2", "--host-suffix", "-ib0", "--rdzv-timeout-s", "5", *QUICK),
    )
    assert done.code == 4
    assert "-ib0" in done.err
    assert "does not resolve" in done.err
    assert_nodes_are_clean(idle_cluster)


def test_head_without_a_route(cluster: Cluster) -> None:
    """An address on the nodes' network that nobody has."""
    code = (
        "from slurmft.node.rendezvous import check_reachable\n"
        "check_reachable('n2', '10.77.0.99', 12345, '1.0', timeout_s=4)"
    )
    done = cluster.run([sys.executable, "-c", code], on="n2", check=False, timeout=60)
    assert "node n2 cannot reach the head node 10.77.0.99, port 12345" in done.stderr


def test_interface_that_is_not_there(idle_cluster: Cluster, tmp_path: Path) -> None:
    done = submit(idle_cluster, tmp_path, "--follow", "--nodes", "2", "--interface", "ib9", *QUICK)
    assert done.code == 4
    assert "has no network interface 'ib9'" in done.err
    assert "eth0" in done.err


def test_flags_win_over_sbatch_variables(idle_cluster: Cluster, tmp_path: Path) -> None:
    """sbatch prefers its environment to what its script says."""
    env = {"SBATCH_PARTITION": "urgent", "SBATCH_TIMELIMIT": "3", "SBATCH_NO_REQUEUE": "1"}
    arguments = ("--partition", "batch", "--time", "7", "--sbatch", "hold", *QUICK)
    done = conftest.slurmft(
        "submit", "--runs-dir", str(tmp_path), *arguments, env=idle_cluster.env | env
    )
    job = json.loads(done.run.job.read_text())["id"]
    shown = idle_cluster.run(["scontrol", "show", "job", job]).stdout
    for text in ("Partition=batch", "TimeLimit=00:07:00", "Requeue=1"):
        assert text in shown
    assert slurmft(idle_cluster, "cancel", str(done.run.path)).code == 0


def test_time_limit(idle_cluster: Cluster, tmp_path: Path) -> None:
    """The run stops in time, saves, and says how to go on."""
    flags = ("--time", "1", "--no-requeue")
    job = Following("--runs-dir", str(tmp_path), *LONG, *flags, env=idle_cluster.env)
    job.until("step 1/")
    code, text = job.end()
    assert code == 75
    assert "stopping after step" in text
    assert "not requeued (--no-requeue)" in text
    assert f"slurmft resume {job.run.path}" in text
    assert job.run.checkpoint_names()
    assert_nodes_are_clean(idle_cluster)


def test_environment_that_is_not_exported(idle_cluster: Cluster, tmp_path: Path) -> None:
    done = submit(idle_cluster, tmp_path, "--follow", "--sbatch", "export=NONE", *QUICK)
    assert done.code == 0, done.err


def test_setup_that_fails(idle_cluster: Cluster, tmp_path: Path) -> None:
    """The script's own words are shown: nothing else knows why."""
    setup = "echo no module named cuda/99 >&2; exit 7"
    done = submit(idle_cluster, tmp_path, "--follow", "--setup", setup, *QUICK)
    assert done.code == 7
    assert "no module named cuda/99" in done.err
    assert "ended as FAILED" in done.err
    assert job_fields(idle_cluster, done) == ("FAILED", "7:0")


def test_two_jobs_on_the_same_nodes(idle_cluster: Cluster, tmp_path: Path) -> None:
    flags = ("--nodes", "2", "--sbatch", "nodelist=n1,n2", *QUICK)
    jobs = [follow(idle_cluster, tmp_path, *flags) for _ in range(2)]
    for job in jobs:
        code, text = job.end()
        assert code == 0, text
        assert len(records(job.run, "step")) == 4


def job_fields(cluster: Cluster, done: Done) -> tuple[str, str]:
    """State and exit code of a job, as accounting has them."""
    job = json.loads(done.run.job.read_text())["id"]
    ((state, code),) = cluster.accounting(job, "State,ExitCode")
    return state, code


def assert_nodes_are_clean(cluster: Cluster) -> None:
    """No process of a job is left on any node soon after its end."""

    def left() -> list[tuple[int, str]]:
        there = [found for host in cluster.hosts for found in cluster.processes(host)]
        return [(pid, line) for pid, line in there if "slurmft" in line]

    until(lambda: not left(), left)
