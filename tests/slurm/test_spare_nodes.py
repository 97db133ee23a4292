"""Attempts that begin without a node that the one before had: --spare-nodes and --nodes MIN-MAX."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurmft.cluster.slurm import commands, first_node
from slurmft.cluster.slurm.batch_script import sbatch_text
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError
from slurmft.core.program import Program
from slurmft.core.run_files import Failure
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from tests.conftest import slurmft
from tests.slurm.commands import assert_nodes_are_clean, follow, run_script
from tests.slurm.commands import slurmft as on_slurm
from tests.support import faults, until
from tests.support.cluster import Cluster
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.suffering import undisturbed
from tests.train.test_resume import assert_same, pids
from tests.train.test_trainer import emotion

pytestmark = pytest.mark.processes


def make(folder: Path, **job: object) -> RunDir:
    program = Program(kind="script", name="plain", module="plain")
    config = JobConfig(runs_dir=str(folder), **job)  # type: ignore[arg-type]
    return RunDir.create(RunConfig(program=program, job=config))


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        ({"nodes": 4, "spare_nodes": 1}, ["--nodes=5", "--no-kill"]),
        ({"nodes": 4, "min_nodes": 2}, ["--nodes=2-4", "--no-kill"]),
        ({"nodes": 4, "min_nodes": 2, "spare_nodes": 1}, ["--nodes=2-5", "--no-kill"]),
        ({"nodes": 4, "min_nodes": 2, "requeue": False}, ["--nodes=2-4"]),
        ({"nodes": 4}, ["--nodes=4"]),
    ],
)
def test_request(tmp_path: Path, job: dict[str, object], asked: list[str]) -> None:
    run = make(tmp_path, **job)
    text = sbatch_text(run.load_config(), run)
    lines = [f"#SBATCH {option}" for option in asked]
    assert [line for line in lines if line not in text.splitlines()] == []
    survives = "--no-kill" in asked
    assert ("#SBATCH --no-kill" in text) == survives
    assert (' --nodelist="$SLURMFT_HOSTS"' in text) == survives


@pytest.mark.parametrize(
    ("job", "left", "unwell", "blamed", "hosts"),
    [
        ({"nodes": 3}, "n1 n2 n3", "n2", "", "n1 n2 n3"),
        ({"nodes": 3, "spare_nodes": 1}, "n1 n2 n3 n4", "", "", "n1 n2 n3"),
        # Slurm has taken a node out of the job, or will; or it was to blame.
        ({"nodes": 3, "spare_nodes": 1}, "n1 n3 n4", "", "", "n1 n3 n4"),
        ({"nodes": 3, "spare_nodes": 1}, "n1 n2 n3 n4", "n2", "", "n1 n3 n4"),
        ({"nodes": 3, "spare_nodes": 1}, "n1 n2 n3 n4", "", "n2", "n1 n3 n4"),
        # The rendezvous is on the first one.
        ({"nodes": 3, "spare_nodes": 1}, "n1 n2 n3 n4", "", "n1", "n1 n2 n3"),
        # One that failed once is better than one that is down.
        ({"nodes": 3, "spare_nodes": 1}, "n1 n2 n3 n4", "n2", "n3", "n1 n3 n4"),
        ({"nodes": 4, "min_nodes": 2}, "n1 n2 n3 n4", "n2", "n3", "n1 n4"),
        ({"nodes": 4, "min_nodes": 3}, "n1 n2 n3 n4", "n2", "n3", "n1 n3 n4"),
        ({"nodes": 4, "min_nodes": 2}, "n1 n2 n3 n4", "", "", "n1 n2 n3 n4"),
    ],
)
def test_hosts_of_the_next_attempt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, object],
    left: str,
    unwell: str,
    blamed: str,
    hosts: str,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    run = make(tmp_path, **job)
    attempts.begin(run, ["n1", "n2", "n3"], "7")
    for host in blamed.split():
        run.add(Failure.of("node", SlurmftError("x"), bad_host=host, attempt=1))
    answers = {"squeue": left.replace(" ", ","), "sinfo": f"{unwell}|down*|none"}

    def call(*command: str, timeout_s: float = 0) -> str:
        if command[:3] == ("scontrol", "show", "hostnames"):
            text = command[3].replace("n[1-4]", "n1,n2,n3,n4")
            return text.replace(",", "\n")
        return answers[command[0]]

    monkeypatch.setattr(commands, "call", call)
    if job == {"nodes": 3}:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3")
    assert first_node.hosts_to_use(run) == hosts.split()


def test_without_requeues_nothing_is_spare(tmp_path: Path) -> None:
    done = slurmft(
        "submit", "--dry-run", "--spare-nodes", "1", "--no-requeue", imported=True
    )
    assert done.code == 2
    assert "--spare-nodes" in done.err


def test_a_spare_node_takes_the_place_of_one_that_failed(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    program = 'touch "$0.began"; test "$SLURMFT_ATTEMPT" = 2 || exec sleep 600'
    flags = ("--nodes", "2", "--spare-nodes", "1", "--per", "process")
    done = run_script(fake_slurm, tmp_path, program, *flags)
    assert "to Slurm: 2 + 1 spare node(s)" in done.out
    run = done.run
    until(lambda: all(run.rank_log(rank).exists() for rank in (0, 1)), run.history)
    first = run.read_attempt()
    assert first is not None
    assert len(first.hosts) == 2
    os.kill(pids(run, "slurmft.node.processes")[-1], signal.SIGKILL)
    followed = on_slurm(fake_slurm, "follow", str(run.path))
    assert followed.code == 0, followed.err
    second = run.read_attempt()
    assert second is not None
    (blamed,) = run.blamed_hosts(1)
    assert len(second.hosts) == 2
    assert second.hosts[0] == first.hosts[0]
    assert blamed not in second.hosts
    again = f"it starts again on {', '.join(second.hosts)}"
    reasons = [each.reason for each in run.history()]
    assert any(reason.endswith(again) for reason in reasons), reasons
    fake_slurm.wait_idle()


@pytest.mark.slurm
@pytest.mark.extra("faults")
@pytest.mark.parametrize(
    ("flags", "left"),
    [(("--nodes", "3", "--spare-nodes", "1"), 3), (("--nodes", "2-4"), 3)],
)
def test_a_node_loses_its_power(
    idle_cluster: Cluster,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
    flags: tuple[str, ...],
    left: int,
) -> None:
    """The job keeps its allocation. Three nodes end as three that nothing has disturbed."""
    index = faults.BASE.index("--nodes")
    base = (
        *faults.BASE[:index],
        *faults.BASE[index + 2 :],
        *emotion(tiny_data, tiny_model),
    )
    base += ("--epochs", "30", *faults.CHECKPOINTS)
    job = follow(idle_cluster, tmp_path / "runs", *base, *flags)
    job.until("step 60/")
    host = faults.hosts_of(idle_cluster, job)[2]
    idle_cluster.kill_host(host)
    try:
        code, text = job.end()
    finally:
        idle_cluster.wait_state(host, "down*")
        idle_cluster.start_slurmd(host)
    assert code == 0, text
    attempt = job.run.read_attempt()
    assert attempt is not None
    assert (attempt.number, len(attempt.hosts)) == (2, left)
    assert host not in attempt.hosts
    reasons = [each.reason for each in job.run.history()]
    lost = f"it was lost: Slurm reports it as down (node {host}); it starts again on "
    assert any(reason.startswith(lost) for reason in reasons), reasons
    every_start = ["sacct", "-nPX", "--duplicates", f"--jobs={job.job_id}"]
    rows = idle_cluster.run([*every_start, "--format=State"]).stdout
    # Of the time with the node, and of that without it; no requeue.
    assert rows == "RESIZING\nCOMPLETED\n"
    if "--spare-nodes" in flags:
        whole = undisturbed(tmp_path / "whole", (*base, "--nodes", "3"))
        assert_same(job.run, whole)
    assert_nodes_are_clean(idle_cluster)


@pytest.mark.slurm
@pytest.mark.extra("faults")
def test_the_first_node_loses_its_power(idle_cluster: Cluster, tmp_path: Path) -> None:
    """Slurm keeps the job, and nothing runs in it any more: another node has it requeued."""
    program = 'touch "$0.began"; test "$SLURMFT_ATTEMPT" = 2 || exec sleep 600'
    flags = ("--nodes", "2", "--spare-nodes", "1", "--per", "process", "--time", "30")
    run = run_script(idle_cluster, tmp_path, program, *flags).run
    until(lambda: (tmp_path / "program.sh.began").exists(), run.history)
    attempt = run.read_attempt()
    assert attempt is not None
    head = attempt.hosts[0]

    def is_watched() -> bool:
        found = idle_cluster.processes(attempt.hosts[-1])
        return any("slurmft.cluster.slurm.head_watch" in line for _, line in found)

    until(is_watched, run.history)
    # Without its last word: else Slurm hears that the batch script was killed.
    idle_cluster.kill_slurmd(head)
    idle_cluster.kill_host(head)
    try:
        until(lambda: run.get_state().has_ended, run.history)
    finally:
        idle_cluster.wait_state(head, "down*")
        idle_cluster.start_slurmd(head)
    reasons = [each.reason for each in run.history() if each.state == "requeued"]
    assert reasons == [f"it was lost: Slurm reports it as down (node {head})"]
    assert run.get_state().state == "finished"
    assert_nodes_are_clean(idle_cluster)
