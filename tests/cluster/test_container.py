"""`--container`: what each runtime is told. Charliecloud and Podman are the real ones; stand-ins
for Apptainer and for Pyxis check the command, refuse what is not documented, and run the task."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import slurmft as package
from slurmft.cluster import container
from slurmft.core import config as core_config
from slurmft.core.config import JobConfig, RunConfig, image_kind, with_absolute_paths
from slurmft.core.errors import UsageError, run_main
from slurmft.node import container as node_container
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, Following, assert_two_lines, slurmft
from tests.slurm.commands import assert_nodes_are_clean
from tests.support import images
from tests.support.cluster import Cluster
from tests.support.faults import steps_lost

PACKAGE = str(Path(package.__file__).parent)

APPTAINER = f"""\
#!/bin/sh
"exec" "{sys.executable}" "$0" "$@"  # a path with a space fits no first line
# apptainer exec [options] IMAGE PROGRAM...: checks what it can without being Apptainer.
import csv, json, os, sys
words = sys.argv[1:]
assert words.pop(0) == "exec", words
mounts, nv = [], False
while words[0].startswith("--"):
    option = words.pop(0)
    if option == "--nv":
        nv = True
    else:
        assert option == "--mount", option
        (fields,) = csv.reader([words.pop(0)])
        mount = dict(field.partition("=")[::2] for field in fields)
        assert mount["type"] == "bind" and os.path.exists(mount["source"]), mount
        mounts.append(mount)
image = words.pop(0)
assert os.path.exists(image), image
with open(os.environ["APPTAINER_LOG"], "a") as log:
    print(json.dumps([mounts, nv, image, words]), file=log)
code = next(m["source"] for m in mounts if m["destination"] == "/opt/slurmft/slurmft")
assert words[:2] == ["env", "PYTHONPATH=/opt/slurmft"], words
words[1] = "PYTHONPATH=" + os.path.dirname(code)
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.execvp(words[0], words)
"""


SRUN = f"""\
#!/bin/sh
"exec" "{sys.executable}" "$0" "$@"
# srun with Pyxis: takes its options off, as documented, and checks them; the task then runs by the
# real srun, outside of any container.
import json, os, sys
REAL = {shutil.which("srun")!r}
words, told, rest = sys.argv[1:], {{}}, []
if words == ["--help"]:
    print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    sys.exit()
while words and words[0] != "env" and not words[0].startswith(os.sep):
    word = words.pop(0)
    name, _, value = word.partition("=")
    if not name.lstrip("-").removeprefix("no-").startswith("container-"):
        rest.append(word)
        if word in ("--output", "--error"):
            rest.append(words.pop(0))
        continue
    takes = ("--container-image", "--container-mounts", "--container-workdir")
    known = value if name in takes else word == "--no-container-remap-root"
    if not known:
        sys.exit(f"srun: unrecognized option '{{word}}'")
    if name in told:
        sys.exit(f"srun: error: pyxis: {{name}} specified multiple times")
    told[name] = value
if told:
    image = told["--container-image"]
    if image[0] == "/" and not os.path.isfile(image):
        sys.exit(f"slurmstepd: error: pyxis: No such file: {{image}}")
    for entry in told["--container-mounts"].split(","):
        source, *target = entry.split(":")
        if len(target) not in (1, 2) or source[0] not in "./" or target[0][0] not in "./":
            sys.exit(f"srun: error: pyxis: --container-mounts: invalid format: {{entry}}")
        if not os.path.exists(source) or target[1:] not in ([], ["ro"]):
            sys.exit(f"slurmstepd: error: pyxis: mount source path does not exist: {{source}}")
        if target[0] == "/opt/slurmft/slurmft":
            words[1] = "PYTHONPATH=" + os.path.dirname(source)
    with open(os.environ["PYXIS_LOG"], "a") as log:
        print(json.dumps([told, rest, words]), file=log)
    os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
os.execv(REAL, [REAL, *rest, *words])
"""


@pytest.fixture
def pyxis(tmp_path: Path) -> dict[str, str]:
    """An environment whose srun has Pyxis, and where it writes what it was told."""
    tool = tmp_path / "pyxis" / "srun"
    tool.parent.mkdir()
    tool.write_text(SRUN)
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYXIS_LOG": str(tmp_path / "pyxis log")}


@pytest.fixture
def apptainer(tmp_path: Path) -> dict[str, str]:
    """An environment with the stand-in, and where it writes what it was told."""
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir()
    tool.write_text(APPTAINER)
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    return {"PATH": path, "APPTAINER_LOG": str(tmp_path / "log")}


@pytest.mark.processes
def test_command(
    tmp_path: Path, apptainer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths with everything that shells and CSV treat specially arrive whole."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "a,b cache"))
    (tmp_path / "a,b cache").mkdir()
    image = tmp_path / f"{HOSTILE}.sif"
    image.touch()
    job = JobConfig(
        runs_dir=str(tmp_path / "ru,ns"), container=str(image), gpus_per_node=1
    )
    config = RunConfig(program=TrainConfig.resolve().program(), job=job)
    run = RunDir.create(config)
    monkeypatch.setenv("PATH", apptainer["PATH"])
    command = container.node_task(config, run)
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | apptainer
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    # the node's task has run, and says so
    assert "no batch script of slurmft" in done.stderr
    assert done.returncode == 4
    mounts, nv, told, words = json.loads((tmp_path / "log").read_text())
    assert nv
    assert told == str(image)
    assert words[0] == "env"
    assert words[3:8] == ["python3", "-P", "-u", "-m", "slurmft.node.task"]
    assert [m["source"] for m in mounts] == [
        PACKAGE,
        str(tmp_path / "a,b cache"),
        str(tmp_path / "ru,ns"),
    ]
    assert "ro" in mounts[0]
    assert all(m["source"] == m["destination"] for m in mounts[1:])


@pytest.mark.processes
def test_image_that_is_not_there(tmp_path: Path) -> None:
    where = ("--cluster", "slurm", "--runs-dir", str(tmp_path / "runs"))
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flags = (
        "--container-runtime",
        "apptainer",
        "--container",
        str(tmp_path / "no.sif"),
    )
    done = slurmft("submit", *flags, *where, env=env)
    assert_two_lines(done, "no such image")
    assert "apptainer pull" in done.err
    assert not (tmp_path / "runs").exists()


def config_of(tmp_path: Path, runtime: str, image: str, **job: Any) -> RunConfig:
    made = JobConfig(
        runs_dir=str(tmp_path / "runs"),
        container=image,
        container_runtime=runtime,
        **job,
    )
    return RunConfig(program=TrainConfig.resolve().program(), job=made)


def told(config: RunConfig) -> list[str]:
    """What the runtime of a job is told, before the task."""
    run = RunDir.create(config)
    return [*container.srun_options(config, run), *container.node_task(config, run)]


GPUS = {
    "apptainer": "--nv",
    "pyxis": "--export=ALL,NVIDIA_VISIBLE_DEVICES=all,NVIDIA_DRIVER_CAPABILITIES=all",
    "podman": "--device=nvidia.com/gpu=all",
}


@pytest.mark.parametrize("runtime", GPUS)
@pytest.mark.parametrize(
    ("option", "asks"),
    [("gpus-per-node=v100:4", True), ("gres=gpu:2", True), ("gres=lscratch:9", False)],
)
def test_gpus_by_any_option_of_sbatch(
    runtime: str, option: str, asks: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, runtime, "docker://torch", sbatch=(option,))
    assert (GPUS[runtime] in told(config)) == asks


@pytest.mark.processes
def test_the_runtime_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the documentation; Singularity where Apptainer is not."""
    assert ("auto", *container.runtimes()) == core_config.RUNTIMES
    monkeypatch.setenv("PATH", str(tmp_path))
    job = JobConfig(container="docker://torch")
    with pytest.raises(
        UsageError, match="no apptainer, singularity, ch-run or podman"
    ) as none:
        container.check(job, "slurm")
    assert "--container-runtime" in str(none.value.hint)
    srun = "#!/bin/sh\n[ $* = --help ] && echo '  --container-image=[USER@]...'\n"
    for program, text, runtime in (
        ("podman", "", "podman"),
        ("srun", "#!/bin/sh\necho --container\n", "podman"),
        ("ch-run", "", "charliecloud"),
        ("srun", srun, "pyxis"),
        ("singularity", "", "apptainer"),
        ("apptainer", "", "apptainer"),
    ):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
        assert container.runtime_of(job) == runtime
        if runtime == "apptainer":
            assert program in told(config_of(tmp_path, "auto", "docker://torch"))


@pytest.mark.parametrize(
    ("runtime", "image", "words"),
    [
        ("pyxis", "folder", "pyxis cannot run an image of the kind 'folder'"),
        ("podman", "file.sif", "podman cannot run an image of the kind 'file'"),
        ("charliecloud", "nvcr.io#nvidia/torch:1", "an image of the kind 'registry'"),
        ("apptainer", "no.sif", "no such image"),
        ("podman", "images/torch", "no such image"),
    ],
)
def test_image_that_cannot_be_run(
    runtime: str, image: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.sif").touch()
    path = image if "#" in image else str(tmp_path / image)
    with pytest.raises(UsageError) as refused:
        container.check(config_of(tmp_path, runtime, path).job, "slurm")
    assert words in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("runtime", "character"), [("pyxis", ":"), ("pyxis", ","), ("charliecloud", ":")]
)
def test_path_that_cannot_be_mounted(
    runtime: str, character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", f"/gpfs/a{character}b")
    with pytest.raises(UsageError) as refused:
        told(config_of(tmp_path, runtime, "/gpfs/torch.sqsh"))
    assert f"{runtime} takes no path with {character!r}: '/gpfs/a{character}b'" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("docker://ubuntu", "registry"),
        ("nvcr.io#nvidia/pytorch:24.01-py3", "registry"),
        ("me@nvcr.io#nvidia/pytorch", "registry"),
        ("nvcr.io/nvidia/pytorch:24.01-py3", "registry"),
        ("localhost:5000/torch", "registry"),
        ("oci-archive:/gpfs/torch.tar", "registry"),
        ("images/torch.sif", "file"),
        ("../torch.sif", "file"),
        ("/gpfs/a.b/torch:1.sqsh", "file"),
    ],
)
def test_kind_of_an_image(image: str, kind: str) -> None:
    """What is a path is one from where the command is given."""
    assert image_kind(image) == kind
    whole = with_absolute_paths(JobConfig(container=image)).container
    assert (whole == image) == (kind == "registry" or image[0] == "/")


def test_node_without_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task says so, and the run has it as the reason of its end."""
    config = config_of(tmp_path, "podman", "docker://torch")
    run = RunDir.create(config)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert run_main(lambda: node_container.main([str(run.path), "podman", "run"])) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: --container: there is no podman on this node"
    assert hint.startswith("hint: ")
    failure = run.root_failure(0)
    assert failure
    assert failure.where == "node n7"


def test_resume_in_another_image(tmp_path: Path) -> None:
    """A path is one from where the command is given, as for submit."""
    assert with_absolute_paths(JobConfig(container="a.sif")).container == str(
        Path.cwd() / "a.sif"
    )


@pytest.mark.processes
def test_only_under_slurm(tmp_path: Path) -> None:
    (tmp_path / "image.sif").touch()
    done = slurmft(
        "submit", "--container", str(tmp_path / "image.sif"), "--cluster", "local"
    )
    assert done.code == 2
    assert "works under Slurm, not with --cluster local" in done.err


@pytest.mark.extra("containers")
@pytest.mark.slurm
def test_run_in_a_container(
    idle_cluster: Cluster, tmp_path: Path, apptainer: dict[str, str]
) -> None:
    image = tmp_path / f"{HOSTILE}.sif"
    image.touch()
    cache = tmp_path / "cache"
    flags = (
        "--nodes",
        "2",
        "--time",
        "5",
        "--max-steps",
        "2",
        "--batch-size",
        "8",
        "--follow",
    )
    done = slurmft(
        *(
            "submit",
            *flags,
            "--container",
            str(image),
            "--runs-dir",
            str(tmp_path / HOSTILE),
        ),
        env=idle_cluster.env | apptainer | {"HF_HOME": str(cache)},
    )
    assert done.code == 0, done.err
    assert done.result["nodes"] == 2
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(told) == 2  # one a node
    assert str(cache) in [m["source"] for m in told[0][0]]


@pytest.mark.extra("containers")
@pytest.mark.slurm
def test_run_by_pyxis(
    idle_cluster: Cluster, tmp_path: Path, pyxis: dict[str, str]
) -> None:
    image = tmp_path / f"{HOSTILE}.sqsh"
    image.touch()
    flags = (
        "--nodes",
        "2",
        "--time",
        "5",
        "--max-steps",
        "2",
        "--batch-size",
        "8",
        "--follow",
    )
    done = slurmft(
        *(
            "submit",
            *flags,
            "--container",
            str(image),
            "--runs-dir",
            str(tmp_path / HOSTILE),
        ),
        env=idle_cluster.env | pyxis | {"HF_HOME": str(tmp_path / "cache")},
    )
    assert done.code == 0, done.err
    assert done.result["nodes"] == 2
    (line,) = (tmp_path / "pyxis log").read_text().splitlines()
    options, others, words = json.loads(line)
    assert options["--container-image"] == str(image)
    assert options["--container-workdir"] == os.getcwd()
    assert f"{PACKAGE}:/opt/slurmft/slurmft:ro" in options["--container-mounts"].split(
        ","
    )
    assert "--export=ALL" in others
    assert words[3:8] == ["python3", "-P", "-u", "-m", "slurmft.node.task"]


@pytest.mark.extra("containers")
@pytest.mark.slurm
def test_srun_without_pyxis(idle_cluster: Cluster, tmp_path: Path) -> None:
    """The node says so, and the job is not requeued."""
    flags = (
        "--container",
        "nvcr.io#torch",
        "--container-runtime",
        "pyxis",
        "--time",
        "5",
    )
    done = slurmft(
        *("submit", "--follow", *flags, "--runs-dir", str(tmp_path)),
        env=idle_cluster.env,
    )
    assert done.code == 1
    assert "error: --container: there is no Pyxis on this node (node n1)" in done.err
    assert [s.state for s in done.run.history()] == ["submitted", "running", "failed"]


@pytest.mark.extra("containers")
@pytest.mark.slurm
@pytest.mark.parametrize(
    ("runtime", "stop"), [("charliecloud", "USR2"), ("podman", "TERM")]
)
def test_run_and_stop_in_a_container(
    runtime: str, stop: str, idle_cluster: Cluster, tmp_path: Path
) -> None:
    """The real Charliecloud and Podman, on two nodes. The run stops, is requeued, and loses no
    step."""
    if reason := images.missing(runtime, tmp_path / "probe"):
        pytest.skip(reason)
    image = images.make(tmp_path / f"{HOSTILE} image")
    env = images.podman_environment(tmp_path / "bin") if runtime == "podman" else {}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env |= {
        "USER": "root",
        "PATH": path,
        "HF_HOME": str(tmp_path / "cache"),
    } | idle_cluster.env
    flags = [
        *("--nodes", "2", "--cpus-per-task", "1", "--time", "5", "--max-steps", "300")
    ]
    flags += [
        "--batch-size",
        "8",
        "--log-every",
        "10",
        "--runs-dir",
        str(tmp_path / HOSTILE),
    ]
    shown = images.mounted(image) if runtime == "charliecloud" else nullcontext(image)
    with shown:
        job = Following(
            *flags, "--container", str(image), "--container-runtime", runtime, env=env
        )
        job.at_step(10)
        idle_cluster.run(["scancel", f"--signal={stop}", job.job_id])
        code, text = job.end()
        assert code == 0, text
        idle_cluster.wait_idle()
    assert job.run.attempt_number() == 2
    assert "requeued" in [state.state for state in job.run.history()]
    assert steps_lost(job.run) == 0
    assert_nodes_are_clean(idle_cluster)
