"""The commands of the documentation that want a Slurm, on the tests' own; see rules.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import rules
from tests.docs import world as worlds
from tests.docs.rules import CLUSTER, Command
from tests.docs.world import World
from tests.support.cluster import Cluster
from tests.support.cluster.system import wait_until

pytestmark = [pytest.mark.extra("docs"), pytest.mark.slurm, pytest.mark.timeout(600)]

COMMANDS = list(
    {rules.filled(c.text, {"RUN": "last"}): c for c in rules.tested(CLUSTER)}.values()
)
"""Those that come to the same once."""
FIRST = next(c for c in COMMANDS if c.as_run == c.text and c.text.endswith(" --follow"))
"""What starts the run that the others look at."""
SBATCH = next(c for c in COMMANDS if c.text.startswith("sbatch "))
WAITS = [c for c in COMMANDS if c.rule and c.rule.waits]


def run(cluster: Cluster, world: World, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a command on the login host, in the world's folder; it must succeed."""
    command = world.command(text)
    done = cluster.run(command, cwd=world.folder, env=world.env, check=False)
    assert done.returncode == 0, f"$ {text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> World:
    folder = tmp_path_factory.mktemp("docs") / "cluster"
    made = worlds.make(folder, tiny_model, tiny_data)
    made.env.update(HF_HUB_OFFLINE="1", TMPDIR=str(folder))
    return made


@pytest.fixture(scope="module")
def finished(cluster: Cluster, world: World) -> World:
    """The same folder, with the run of the README's first command on a cluster."""
    run(cluster, world, FIRST.as_run)
    return world


@pytest.fixture(scope="module")
def waiting(cluster: Cluster, world: World) -> Iterator[World]:
    """A folder of runs whose newest waits in the queue, or was cancelled there."""
    made = worlds.with_runs_dir(world, "waiting")
    run(cluster, made, "slurmft submit --sbatch begin=now+1hour")
    yield made
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in (FIRST, SBATCH, *WAITS)], ids=str
)
def test_command(command: Command, cluster: Cluster, finished: World) -> None:
    run(cluster, finished, command.as_run)


@pytest.mark.parametrize("command", WAITS, ids=str)
def test_command_on_a_job_that_waits(
    command: Command, cluster: Cluster, waiting: World
) -> None:
    """Each finds the run as it wants it: `resume` cancelled, others in the queue."""
    ended = '"cancelled"' in run(cluster, waiting, "slurmft list --json").stdout
    if "resume" in command.text and not ended:
        run(cluster, waiting, "slurmft cancel last")
    elif "cancel" in command.text and ended:
        run(cluster, waiting, "slurmft resume last")
    run(cluster, waiting, command.as_run)


def test_sbatch(cluster: Cluster, world: World) -> None:
    made = worlds.with_runs_dir(world, "sbatch")
    done = run(cluster, made, SBATCH.as_run)
    job = done.stdout.split()[-1]
    runs = made.folder / "sbatch-runs"

    def has_read_its_flags() -> bool:
        state = cluster.run(["squeue", "-h", "--states=all", "-j", job, "-o", "%T"])
        outputs = [path.read_text() for path in made.folder.glob(f"*{job}*.out")]
        assert "FAILED" not in state.stdout, outputs
        return bool([*runs.glob(f"*-{job}-*/job.json")])

    wait_until("the job reads its flags", has_read_its_flags)
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()
