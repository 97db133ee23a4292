"""Runs that take as many nodes as Slurm has free at each start: --nodes MIN-MAX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmft.cli.commands import command_parser
from slurmft.cli.parser import typed_options
from slurmft.cluster.slurm import commands
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import build, options
from slurmft.core.site import OPTIONS_OF_ON, merge, site_defaults
from slurmft.train.commands import prepare
from tests.conftest import slurmft
from tests.slurm.commands import follow, run_script
from tests.slurm.commands import slurmft as on_slurm
from tests.support import faults, until
from tests.support.cluster import Cluster
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.train.test_resume import losses

pytestmark = pytest.mark.processes

SETTINGS = (
    "--cpus-per-task", "1", "--batch-size", "8", "--dropout", "0", "--optimizer", "adamw",
    "--max-steps", "24", "--precision", "fp32", "--log-every", "1", "--preflight", "off",
)  # fmt: skip


def take_a_node(slurm: FakeSlurm) -> str:
    """Returns the id of another job, which has one of the four nodes."""
    words = ["sbatch", "--parsable", "--exclusive", f"--nodelist={slurm.hosts[0]}"]
    words += ["--output=/dev/null", "--wrap", "sleep 600"]
    job = slurm.run(words).stdout.strip()
    state = ["squeue", "-h", f"--jobs={job}", "--format=%T"]
    until(lambda: slurm.run(state).stdout == "RUNNING\n")
    return job


@pytest.mark.extra("faults")
def test_training_takes_what_is_free(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """Three nodes, then four: batch, order, schedule and losses are those of four."""
    fixed = slurmft(
        "submit", "--cluster", "local", "--follow", "--nodes", "4", *SETTINGS,
        "--runs-dir", str(tmp_path / "fixed"), imported=True,
    )  # fmt: skip
    assert fixed.code == 0, fixed.err
    other = take_a_node(fake_slurm)
    job = follow(fake_slurm, tmp_path / "runs", "--nodes", "2-4", *SETTINGS)
    job.at_step(6)
    fake_slurm.run(["scancel", other])
    id = json.loads(job.run.job.read_text())["id"]
    fake_slurm.run(["scancel", "--signal=USR2", id])
    code, text = job.end()
    assert code == 0, text
    assert "world_size 3 -> 4" in text
    assert "global batch stays 32" in text
    assert losses(job.run) == pytest.approx(losses(fixed.run), abs=1e-5)
    result = job.run.read_result()
    assert result is not None
    assert result["nodes"] == 4
    assert result["global_batch_size"] == fixed.result["global_batch_size"] == 32


def test_a_program_has_the_nodes_that_are_free(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """What lists and results say is what the run had."""
    other = take_a_node(fake_slurm)
    script = 'echo "one of $(echo "$SLURMFT_HOSTS" | tr , "\\n" | wc -l)"'
    flags = ("--nodes", "2-4", "--per", "node", "--exclusive")
    done = run_script(fake_slurm, tmp_path, script, *flags)
    assert done.code == 0, done.err
    assert "to Slurm: 2-4 node(s)" in done.out
    until(lambda: done.run.get_state().state == "finished", done.run.history)
    fake_slurm.run(["scancel", other])
    logs = [path.read_text() for path in done.run.logs.glob("rank-*.log")]
    assert len(logs) == 3
    assert all("one of 3" in log for log in logs)
    result = done.run.read_result()
    assert result is not None
    assert result["nodes"] == 3
    listed = on_slurm(fake_slurm, "list", "--json", "--runs-dir", f"{tmp_path}/runs")
    (listed_run,) = json.loads(listed.out)["runs"]
    assert listed_run["nodes"] == 3


def test_what_is_no_range(tmp_path: Path) -> None:
    for nodes, message in (
        ("8-2", "--nodes 8-2 is no range from fewer to more\nhint: did you mean --nodes 2-8?"),
        ("4-4", "--nodes 4-4 is no range from fewer to more\nhint: did you mean --nodes 4?"),
        ("2-", "argument --nodes: '2-' is neither a whole number nor a range such as 2-8"),
        ("2-4-6", "argument --nodes: '2-4-6' is neither a whole number nor a range"),
        ("0-2", "--nodes 0-2: a range begins with 1 or more\nhint: did you mean --nodes 1-2?"),
        ("1-0", "--nodes 1-0 is no range from fewer to more\nhint: did you mean --nodes 1?"),
        ("2-70000", "--nodes 70000 must be between 1 and 65,536"),
    ):  # fmt: skip
        done = slurmft("submit", "--dry-run", "--nodes", nodes, imported=True)
        assert done.code == 2
        assert message in done.err


def test_a_number_ends_a_range() -> None:
    """A run that had a range is resumed on the nodes that are typed."""
    job = JobConfig(nodes=8, min_nodes=2)
    parser = command_parser(["submit"])
    assert parser is not None
    arguments = parser.parse(["--nodes", "4"])
    values = typed_options(arguments, options(JobConfig))
    assert job.replaced(values).node_range == "4"
    assert job.replaced({"nodes": 1}).node_range == "1"
    assert job.node_range == "2-8"
    site = {"nodes": 8, "min_nodes": 2}
    assert merge(site, {"nodes": 4}) == {"nodes": 4}
    assert merge(site, {"partition": "p"}) == site | {"partition": "p"}


@pytest.mark.parametrize(
    ("flags", "node_range"),
    [
        (["--nodes", "8", "--min-nodes", "2"], "2-8"),
        (["--min-nodes", "2", "--nodes", "8"], "2-8"),
        (["--nodes", "2-8", "--nodes", "4"], "4"),
    ],
)
def test_both_ends_by_flags(flags: list[str], node_range: str) -> None:
    parser = command_parser(["submit"])
    assert parser is not None
    values = typed_options(parser.parse(flags), options(JobConfig))
    assert JobConfig(**values).node_range == node_range


def test_a_number_ends_a_range_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives it: another site file, --on, Python, a study, or the job that runs already."""
    site = tmp_path / "site.toml"
    site.write_text("nodes = 4\nmin_nodes = 2\n")
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    known = options(JobConfig)
    of_site = site_defaults(known)
    assert build(JobConfig, of_site).node_range == "2-4"
    for nodes in (1, 3):
        job = build(JobConfig, merge(of_site, {"nodes": nodes}))
        assert job.node_range == str(nodes)
    monkeypatch.setenv(OPTIONS_OF_ON, '{"nodes": 1}')
    assert build(JobConfig, site_defaults(known)).node_range == "1"
    monkeypatch.delenv(OPTIONS_OF_ON)
    monkeypatch.setattr(commands, "job_facts", lambda _: {})
    for allocated in ("1", "4"):
        environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": allocated}
        config = prepare.configure_inside({"task": "synthetic"}, environment)
        assert config.job.node_range == allocated
    site.write_text('nodes = "2-4"\n')
    with pytest.raises(UsageError, match="nodes must be a whole number") as error:
        site_defaults(known)
    assert error.value.hint == "a range has two options: min_nodes = 2 and nodes = 8"


def test_who_needs_one_number(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn2\nn3\n")
    place = ("--cluster", "mpirun", "--hostfile", str(hosts))
    done = slurmft("submit", "--dry-run", *place, "--nodes", "2-3", imported=True)
    assert done.code == 2
    assert "--nodes 2-3: mpirun starts on a fixed number of hosts" in done.err
    study = tmp_path / "s.toml"
    study.write_text(
        'name = "s"\n[fixed]\nnodes = 4\nmin_nodes = 2\n[grid]\nbatch_size = [8]\n'
    )
    done = slurmft("study", "run", str(study), "--dry-run", imported=True)
    assert done.code == 2
    assert "--nodes 2-4: a study measures fixed numbers of nodes" in done.err


@pytest.mark.extra("faults")
@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_dead_node_is_done_without(idle_cluster: Cluster, tmp_path: Path) -> None:
    """Four nodes, of which one loses its power: the job is requeued, and goes on with three."""
    fixed = follow(idle_cluster, tmp_path / "fixed", "--nodes", "4", *SETTINGS)
    code, text = fixed.end()
    assert code == 0, text
    checkpoints = ("--checkpoint-every-steps", "4")
    flags = ("--nodes", "2-4", *SETTINGS, *checkpoints)
    job = follow(idle_cluster, tmp_path / "runs", *flags)
    job.at_step(10)
    host = faults.hosts_of(idle_cluster, job)[-1]
    idle_cluster.kill_host(host)
    try:
        idle_cluster.wait_state(host, "down*")
        code, text = job.end()
    finally:
        idle_cluster.start_slurmd(host)
    assert code == 0, text
    assert "world_size 4 -> 3" in text
    assert losses(job.run) == pytest.approx(losses(fixed.run), abs=1e-5)
    attempt = job.run.read_attempt()
    assert attempt is not None
    assert len(attempt.hosts) == 3
    assert host not in attempt.hosts
