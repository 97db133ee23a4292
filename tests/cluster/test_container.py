"""`--container`: the command of the node's task, with a stand-in for Apptainer that checks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cluster import container
from slurmft.core.config import JobConfig, RunConfig, with_absolute_paths
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, assert_two_lines, slurmft
from tests.support.cluster import Cluster

APPTAINER = f"""\
#!/bin/sh
"exec" "{sys.executable}" "$0" "$@"  # a path with a space fits no first line
# apptainer exec [options] IMAGE PROGRAM...: checks what it can without being Apptainer.
import csv, json, os, sys
words = sys.argv[1:]
assert words.pop(0) == "exec", words
mounts, env, nv = [], {{}}, False
while words[0].startswith("--"):
    option = words.pop(0)
    if option == "--nv":
        nv = True
    elif option == "--env":
        env.update([words.pop(0).split("=", 1)])
    else:
        assert option == "--mount", option
        (fields,) = csv.reader([words.pop(0)])
        mount = dict(field.partition("=")[::2] for field in fields)
        assert mount["type"] == "bind" and os.path.exists(mount["source"]), mount
        mounts.append(mount)
image = words.pop(0)
assert os.path.exists(image), image
with open(os.environ["APPTAINER_LOG"], "a") as log:
    print(json.dumps([mounts, env, nv, image, words]), file=log)
code = next(m["source"] for m in mounts if m["destination"] == env["PYTHONPATH"] + "/slurmft")
path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.environ.update(PATH=path, PYTHONPATH=os.path.dirname(code))
os.execvp(words[0], words)
"""


@pytest.fixture
def apptainer(tmp_path: Path) -> dict[str, str]:
    """An environment with the stand-in, and where it writes what it was told."""
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(APPTAINER)
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    return {"PATH": path, "APPTAINER_LOG": str(tmp_path / "log")}


def test_command(
    tmp_path: Path, apptainer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths with everything that shells and CSV treat specially arrive whole."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "a,b cache"))
    (tmp_path / "a,b cache").mkdir()
    image = tmp_path / f"{HOSTILE}.sif"
    image.touch()
    job = JobConfig(runs_dir=str(tmp_path / "ru,ns"), container=str(image), gpus_per_node=1)
    config = RunConfig(program=TrainConfig.resolve().program(), job=job)
    run = RunDir.create(config)
    command = container.node_task(config, run)
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | apptainer
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "this is not a Slurm job" in done.stderr  # the node's task has run, and says so
    assert done.returncode == 4
    mounts, _, nv, told, words = json.loads((tmp_path / "log").read_text())
    assert nv
    assert told == str(image)
    assert words[:4] == ["python3", "-u", "-m", "slurmft.node.task"]
    assert [m["source"] for m in mounts] == [
        container.package(),
        str(run.path),
        str(tmp_path / "a,b cache"),
    ]
    assert "ro" in mounts[0]
    assert all(m["source"] == m["destination"] for m in mounts[1:])


def test_image_that_is_not_there(tmp_path: Path) -> None:
    where = ("--cluster", "slurm", "--runs-dir", str(tmp_path / "runs"))
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = slurmft("submit", "--container", str(tmp_path / "no.sif"), *where, env=env)
    assert_two_lines(done, "no such image")
    assert "apptainer pull" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "asks"),
    [("gpus-per-node=v100:4", True), ("gres=gpu:2", True), ("gres=lscratch:9", False)],
)
def test_gpus_by_any_option_of_sbatch(option: str, asks: bool, tmp_path: Path) -> None:
    job = JobConfig(runs_dir=str(tmp_path), container="image.sif", sbatch=(option,))
    config = RunConfig(program=TrainConfig.resolve().program(), job=job)
    assert ("--nv" in container.node_task(config, RunDir.create(config))) == asks


def test_resume_in_another_image(tmp_path: Path) -> None:
    """A path is one from where the command is given, as for submit."""
    assert with_absolute_paths(JobConfig(container="a.sif")).container == str(Path.cwd() / "a.sif")


def test_only_under_slurm(tmp_path: Path) -> None:
    (tmp_path / "image.sif").touch()
    done = slurmft("submit", "--container", str(tmp_path / "image.sif"), "--cluster", "local")
    assert done.code == 2
    assert "works under Slurm, not with --cluster local" in done.err


@pytest.mark.slurm
def test_run_in_a_container(
    idle_cluster: Cluster, tmp_path: Path, apptainer: dict[str, str]
) -> None:
    image = tmp_path / f"{HOSTILE}.sif"
    image.touch()
    cache = tmp_path / "cache"
    flags = ("--nodes", "2", "--time", "5", "--max-steps", "2", "--batch-size", "8", "--follow")
    done = slurmft(
        *("submit", *flags, "--container", str(image), "--runs-dir", str(tmp_path / HOSTILE)),
        env=idle_cluster.env | apptainer | {"HF_HOME": str(cache)},
    )
    assert done.code == 0, done.err
    assert done.result["nodes"] == 2
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(told) == 2  # one a node
    assert str(cache) in [m["source"] for m in told[0][0]]
