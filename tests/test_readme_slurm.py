"""The README's commands that want a Slurm, on the tests' own; see tests/readme.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import readme, readme_world
from tests.readme import CLUSTER, Command
from tests.readme_world import World
from tests.support.cluster import Cluster
from tests.support.cluster.system import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

COMMANDS = readme.tested(CLUSTER)
FIRST = next(c for c in COMMANDS if c.as_run == c.text and c.text.endswith(" --follow"))
"""What starts the run that the others look at."""


def run(cluster: Cluster, world: World, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a command on the login host, in the world's folder."""
    command = world.command(text)
    return cluster.run(command, cwd=world.folder, env=world.env, timeout=110, check=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path) -> World:
    folder = tmp_path_factory.mktemp("readme") / "cluster"
    made = readme_world.make(folder, tiny_model, tiny_data)
    made.env.update(HF_HUB_OFFLINE="1", TMPDIR=str(folder))
    return made


@pytest.fixture(scope="module")
def finished(cluster: Cluster, world: World) -> World:
    """The same folder, with the run of the README's first command on a cluster."""
    done = run(cluster, world, FIRST.as_run)
    assert done.returncode == 0, done.stdout + done.stderr
    return world


@pytest.fixture
def waiting(
    cluster: Cluster, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A folder whose newest run waits in the queue."""
    site = tmp_path / "site.toml"
    site.write_text(f'{readme_world.SITE}runs_dir = "{tmp_path}/runs"\n')
    monkeypatch.setitem(world.env, "SLURMFT_SITE", str(site))
    done = run(cluster, world, "slurmft submit --sbatch begin=now+1hour")
    assert done.returncode == 0, done.stderr
    yield world
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle(60)


def only(waits: bool) -> list[Command]:
    return [c for c in COMMANDS if c.rule and c.rule.waits is waits]


@pytest.mark.parametrize("command", only(waits=False), ids=str)
def test_command(command: Command, cluster: Cluster, finished: World) -> None:
    if command is FIRST:
        return  # it made `finished`
    done = run(cluster, finished, command.as_run)
    assert done.returncode == 0, f"$ {command.as_run}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", only(waits=True), ids=str)
def test_command_on_a_job_that_waits(command: Command, cluster: Cluster, waiting: World) -> None:
    if "resume" in command.text:
        assert run(cluster, waiting, "slurmft cancel last").returncode == 0
    done = run(cluster, waiting, command.as_run)
    assert done.returncode == 0, f"$ {command.as_run}\n{done.stdout}\n{done.stderr}"
    if command.text.startswith("sbatch"):
        made = f"*-{done.stdout.split()[-1]}/job.json"
        runs = Path(waiting.env["SLURMFT_SITE"]).parent / "runs"
        wait_until("the job reads its flags", lambda: bool([*runs.glob(made)]), 60)
