"""The files of sbatch/: submitted by plain sbatch, they do what `slurmft submit` does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cluster import launcher
from slurmft.cluster.slurm import commands
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.files import write_json
from slurmft.core.options import build
from slurmft.runs.rundir import RunDir
from slurmft.train.commands.prepare import find_run, job_values
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, Done, records, slurmft
from tests.slurm.commands import AnySlurm, assert_nodes_are_clean
from tests.slurm.conftest import fake_slurm
from tests.support import CHECKOUT, until
from tests.support.cluster import Cluster
from tests.support.fake_slurm.cluster import FakeSlurm
from tests.support.models import write_emotion, write_model, write_pairs, write_squad

__all__ = ["fake_slurm"]  # a fixture

FOLDER = CHECKOUT / "sbatch"
FILES = sorted(FOLDER.glob("*.sbatch"))
SMALL = (
    "--max-steps",
    "2",
    "--batch-size",
    "8",
    "--eval-batch-size",
    "64",
    "--precision",
    "fp32",
)

SCONTROL = """\
JobId=7 JobName=a Partition=b
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901757 Nice=0 Account=proj QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-00:05:00 TimeMin=N/A
   Partition=gpu AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=n3
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=1 MinMemoryNode=4G MinTmpDiskNode=0
   Features=fast&new DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=/tmp/TimeLimit=3 Account=x
   Comment=Partition=z QOS=z
   TresPerNode=gres:gpu:v100:4
"""


def test_what_a_job_asked_for() -> None:
    """For `slurmft resume`, which asks Slurm for the same again."""
    environment = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_NAME": "it's",
    }
    job = build(JobConfig, job_values(environment, commands.parse_job_facts(SCONTROL)))
    assert (job.nodes, job.cpus_per_task, job.job_name) == (2, 8, "it's")
    assert (job.partition, job.account, job.qos) == ("gpu", "proj", "normal")
    assert (job.time, job.mem, job.constraint) == ("1-00:05:00", "4G", "fast&new")
    assert job.exclusive
    assert job.requeue
    assert job.sbatch == ("exclude=n3", "gpus-per-node=v100:4")


def test_gpus_without_a_type() -> None:
    found = job_values({"SLURM_JOB_NUM_NODES": "1"}, {"TresPerNode": "gres/gpu:2"})
    assert found["gpus_per_node"] == 2
    assert found["sbatch"] == ()


def test_requeued_job_finds_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its id, and not one with the same letters in its name, or of another cluster."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "a")
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(runs_dir=str(tmp_path))
    )
    flags = {"runs_dir": str(tmp_path)}
    ours = RunDir.create(config, mark="4711")
    launcher.note_job(ours, "slurm", "4711", "a")
    namesake = RunDir.create(config, mark="x-4711")
    write_json(namesake.job, {"cluster": "slurm", "id": "12"})
    RunDir.create(config, mark="y-4711")  # never submitted
    theirs = RunDir.create(config, mark="z-4711")
    launcher.note_job(theirs, "slurm", "4711", "b")
    assert find_run(flags) is None  # its first start
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found = find_run(flags)
    assert found is not None
    assert found.path == ours.path
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert find_run(flags) is None


@pytest.mark.processes
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_file_passes_shellcheck(file: Path) -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run(
        [tool, file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes=4"], "--nodes=4 is an option of the job"),
        (["--time", "5"], "sbatch --nodes=4 --time=30 sbatch/multi_node.sbatch"),
        (["--no-requeue"], "--no-requeue is an option of the job"),
        ([], "this is not a Slurm job"),
    ],
)
def test_mistakes(arguments: list[str], words: str) -> None:
    done = slurmft("prepare", *arguments)
    assert done.code == 2
    assert words in done.err
    assert done.out == ""


# --- on Slurm -----------------------------------------------------------------------------------


def sbatch(
    cluster: AnySlurm, folder: Path, file: Path, *options: str, flags: tuple[str, ...]
) -> str:
    """Submits a file from a folder; returns the job's id."""
    python = {"SLURMFT_PYTHON": sys.executable}
    command = ["sbatch", "--parsable", *options, str(file), *flags]
    return cluster.run(command, cwd=folder, env=python).stdout.strip()


def run_of(folder: Path, job: str) -> RunDir:
    """The one run directory of a job."""
    until(
        lambda: list((folder / "runs").glob(f"*-{job}-*/job.json")),
        (folder / f"slurm-{job}.out").read_text,
    )
    (path,) = (folder / "runs").iterdir()
    return RunDir.open(path)


def follow(cluster: AnySlurm, run: RunDir) -> Done:
    command = [sys.executable, "-m", "slurmft", "follow", str(run.path)]
    done = cluster.run(command, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.slurm
def test_hostile_folders(idle_cluster: Cluster, tmp_path: Path) -> None:
    """On two nodes, from a folder, a file and data with everything that shells treat specially."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    file = Path(shutil.copy(FOLDER / "multi_node.sbatch", folder / f"{HOSTILE}.sbatch"))
    model, data = write_model(folder / "model"), write_emotion(folder / "data", 96, 30)
    setup = 'export SAID="it\'s $((1 + 1))"; echo "$SAID" >said'
    task = ("--task", "emotion", "--data", str(data), "--model", "model")
    flags = (*task, *SMALL, "--setup", setup)
    job = sbatch(
        idle_cluster,
        folder,
        file,
        "--nodes=2",
        "--time=5",
        "--comment=$HOME",
        flags=flags,
    )
    run = run_of(folder, job)
    done = follow(idle_cluster, run)
    assert done.code == 0, done.err
    result = json.loads(run.result.read_text())
    assert result["nodes"] == result["world_size"] == 2
    assert (folder / "said").read_text() == "it's 2\n"
    assert json.loads(run.job.read_text())["where"] == "slurmft"
    config = run.load_config()
    assert TrainConfig.of(config.program).model == str(model)
    assert (config.job.nodes, config.job.partition, config.job.time) == (
        2,
        "batch",
        "00:05:00",
    )
    assert (
        f"slurmft follow '{run.path}'".split("'")[0]
        in (folder / f"slurm-{job}.out").read_text()
    )


@pytest.mark.extra("sbatch")
@pytest.mark.slurm
def test_requeue_keeps_the_run_directory(idle_cluster: Cluster, tmp_path: Path) -> None:
    flags = ("--max-steps", "200", "--batch-size", "8", "--log-every", "1")
    job = sbatch(
        idle_cluster, tmp_path, FOLDER / "multi_node.sbatch", "--time=5", flags=flags
    )
    run = run_of(tmp_path, job)
    until(lambda: run.records.exists() and records(run, "step"))
    idle_cluster.run(["scancel", "--signal=USR2", job])
    done = follow(idle_cluster, run)
    assert done.code == 0, done.err
    assert [r["step"] for r in records(run, "step")] == list(range(1, 201))
    states = [state.state for state in run.history()]
    assert states == [
        "submitted",
        "running",
        "stopping",
        "requeued",
        "running",
        "finished",
    ]
    assert run_of(tmp_path, job).path == run.path
    assert_nodes_are_clean(idle_cluster)


STUDIES = {
    "mn4_emotion": "mn4-emotion",
    "icelake_glue": "icelake-mrpc",
    "spr_squad": "spr-squad",
}


@pytest.mark.extra("sbatch")
@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "options", "flags"),
    [
        ("single_node", (), ()),
        ("xeon_multi_node", ("--nodes=2",), ("--nproc-per-node", "2")),
        ("mn4_emotion", ("--nodes=1", "--gpus-per-node=0"), ()),
        ("icelake_glue", ("--nodes=1",), ()),
        ("spr_squad", ("--nodes=1",), ()),
    ],
)
def test_file(
    name: str,
    options: tuple[str, ...],
    flags: tuple[str, ...],
    idle_cluster: Cluster,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    if name == "mn4_emotion":
        flags = ("--data", str(tiny_data), "--model", str(tiny_model))
    if name == "icelake_glue":
        sizes = {"train": 40, "validation": 20}
        data = write_pairs(tmp_path / "mrpc", ("sentence1", "sentence2"), 2, sizes)
        flags = ("--data", str(data), "--model", str(tiny_model))
    if name == "spr_squad":
        data = write_squad(tmp_path / "squad", train=24, validation=8)
        flags = ("--data", str(data), "--model", str(tiny_model))
        flags = (*flags, "--max-length", "24", "--doc-stride", "8")
    file = FOLDER / f"{name}.sbatch"
    job = sbatch(
        idle_cluster, tmp_path, file, "--time=5", *options, flags=(*flags, *SMALL)
    )
    run = run_of(tmp_path, job)
    done = follow(idle_cluster, run)
    assert done.code == 0, done.err
    assert json.loads(run.result.read_text())["nodes"] == (
        2 if name == "xeon_multi_node" else 1
    )
    assert TrainConfig.of(run.load_config().program).recipe == STUDIES.get(
        name, "synthetic"
    )


@pytest.mark.processes
def test_study_on_nodes_that_cannot_do_it(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    """The benchmark's fp16 needs GPUs."""
    file = FOLDER / "mn4_benchmark.sbatch"
    job = sbatch(fake_slurm, tmp_path, file, "--nodes=1", "--gpus-per-node=0", flags=())
    run = run_of(tmp_path, job)
    done = follow(fake_slurm, run)
    assert done.code == 2
    assert "--precision fp16 needs GPUs" in done.err
    assert TrainConfig.of(run.load_config().program).recipe == "mn4-benchmark"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "flags", "words"),
    [
        ((), ("--task", "emotions"), "did you mean emotion?"),
        ((), ("--nodes", "4"), "--nodes is an option of the job"),
        (("--ntasks-per-node=2",), (), "needs one a node"),
        (("--time=2",), (), "leaves little before the stop signal"),
    ],
)
def test_job_that_cannot_be_right(
    options: tuple[str, ...],
    flags: tuple[str, ...],
    words: str,
    fake_slurm: FakeSlurm,
    tmp_path: Path,
) -> None:
    file = FOLDER / "multi_node.sbatch"
    command = [
        "sbatch",
        "--wait",
        "--parsable",
        "--time=5",
        *options,
        str(file),
        *flags,
    ]
    env = {"SLURMFT_PYTHON": sys.executable}
    done = fake_slurm.run(command, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 2
    assert words in (tmp_path / f"slurm-{done.stdout.strip()}.out").read_text()
    assert not (tmp_path / "runs").exists()
