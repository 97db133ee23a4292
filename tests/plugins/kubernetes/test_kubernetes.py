"""Kubernetes manifests, held against the operators' published models; and their pods, run here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.run_files import Failure
from slurmft.node import sealed
from slurmft.node.rendezvous import RendezvousError, free_ports
from slurmft.plugins.kubernetes import manifests
from slurmft.plugins.kubernetes.pod import make_run, pod_index, rendezvous_of
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import records, slurmft
from tests.support import PATIENCE_S, prepared, until
from tests.support.ccl import stand_in, torch_version
from tests.support.own_programs import PLACES

pytestmark = pytest.mark.processes

FLAGS = (
    "--image",
    "registry.example.com:5000/team/slurmft:1",
    "--claim",
    "runs",
    "--nodes",
    "3",
)
MORE = (
    *(
        "--name",
        "mrpc-3",
        "--namespace",
        "team",
        "--cpu",
        "16",
        "--memory",
        "64Gi",
        "--shm",
        "8Gi",
    ),
    *("--gpus", "2", "--min-nodes", "2", "--nproc-per-node", "2", "--secret", "hub"),
    *(
        "--node-selector",
        "node.kubernetes.io/instance-type=r7iz.metal-16xl",
        "--stop-lead-s",
        "60",
    ),
)


def render(kind: str, *more: str) -> dict[str, dict[str, Any]]:
    """The objects that are printed, by their kind."""
    env = {"HF_TOKEN": "hf_secret"}
    done = slurmft("render", "kubernetes", "--kind", kind, *FLAGS, *more, env=env)
    assert done.code == 0, done.err
    assert "hf_secret" not in done.out
    return {found["kind"]: found for found in yaml.safe_load_all(done.out)}


def pod_of(kind: str, objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if kind == "pytorchjob":
        worker = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]
        found: dict[str, Any] = worker["template"]["spec"]
        return found
    (job,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    spec: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.extra("kubernetes")
@pytest.mark.parametrize("more", [(), MORE], ids=["least", "all"])
def test_pytorchjob_fits_the_published_model(more: tuple[str, ...]) -> None:
    """Read and written by its client, nothing is lost: no field is unknown."""
    training = pytest.importorskip("kubeflow.training")
    found = render("pytorchjob", *more)["PyTorchJob"]
    client = training.ApiClient()

    class Answer:
        data = json.dumps(found)

    model = client.deserialize(Answer, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(model) == found


@pytest.mark.extra("kubernetes")
@pytest.mark.parametrize("more", [(), MORE], ids=["least", "all"])
@pytest.mark.parametrize("kind", ["TrainJob", "TrainingRuntime"])
def test_trainjob_fits_the_published_model(kind: str, more: tuple[str, ...]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = render("trainjob", *more)[kind]
    model = getattr(models, f"TrainerV1alpha1{kind}").from_dict(found)
    assert model.to_dict() == found


@pytest.mark.parametrize("kind", manifests.KINDS)
def test_every_manifest_has_a_secret_of_its_own(kind: str) -> None:
    secrets = set()
    for _ in range(2):
        objects = render(kind)
        secret = objects["Secret"]
        (container,) = pod_of(kind, objects)["containers"]
        variables = {each["name"]: each for each in container["env"]}
        assert variables[sealed.SECRET]["valueFrom"]["secretKeyRef"] == {
            "name": secret["metadata"]["name"],
            "key": "secret",
        }
        assert len(bytes.fromhex(secret["stringData"]["secret"])) == 32
        secrets.add(secret["stringData"]["secret"])
    assert len(secrets) == 2


@pytest.mark.parametrize("kind", manifests.KINDS)
def test_pod(kind: str) -> None:
    objects = render(kind, *MORE)
    pod = pod_of(kind, objects)
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]  # guaranteed
    assert resources["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "2"}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert pod["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "r7iz.metal-16xl"
    }
    assert pod["terminationGracePeriodSeconds"] == 60
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    config = RunConfig.from_json(objects["ConfigMap"]["data"]["config.json"])
    assert config.job.nodes == 3
    assert all(found["metadata"]["namespace"] == "team" for found in objects.values())


def test_elastic_policy() -> None:
    spec = render("pytorchjob", *MORE)["PyTorchJob"]["spec"]
    policy = spec["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["rdzvBackend"]) == (
        2,
        3,
        "c10d",
    )
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"
    assert spec["nprocPerNode"] == "2"


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    done = slurmft("render", "kubernetes", *FLAGS, *MORE, "--output", str(folder))
    assert done.code == 0, done.err
    assert sorted(p.name for p in folder.iterdir()) == ["Dockerfile", "mrpc-3.yaml"]
    # With its Secret, others would execute code in the pods.
    assert stat.S_IMODE((folder / "mrpc-3.yaml").stat().st_mode) == 0o600
    for words in (
        "docker build",
        "kubectl --namespace team apply",
        "get pytorchjob/mrpc-3 --watch",
    ):
        assert words in done.out
    assert f"delete --filename '{folder}".split("'")[0] in done.out
    lines = [
        line for line in done.out.splitlines() if not line.startswith("written to")
    ]
    subprocess.run(["bash", "-n", "-c", "\n".join(lines)], check=True, timeout=10)


@pytest.mark.parametrize(("mode", "warns"), [(0o640, True), (0o600, False)])
def test_a_file_that_takes_the_manifest(tmp_path: Path, mode: int, warns: bool) -> None:
    file = tmp_path / "job.yaml"
    file.touch()
    file.chmod(mode)
    command = [sys.executable, "-P", "-m", "slurmft", "render", "kubernetes"]
    with open(file, "wb") as output:
        done = subprocess.run(
            [*command, *FLAGS, *MORE],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
    assert ("warning: others can read the file" in done.stderr) == warns


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "My_Run"], "'My_Run' is not a valid name in Kubernetes"),
        (["--name", "My_Run"], ": my-run"),
        (["--name", "x" * 41], "at most 40"),
        (["--claim", "a/b"], "--claim 'a/b'"),
        (["--claim", "a..b"], "--claim 'a..b'"),
        (["--image", "a b"], "--image 'a b' is not an image name"),
        (["--image", "-a"], "'-a'"),
        (["--task", "text-classification"], "needs data of your own"),
        (["--node-selector", "zone"], "is not KEY=VALUE"),
        (["--min-nodes", "4"], "--min-nodes 4 of --nodes 3"),
        (
            ["--min-nodes", "0"],
            "argument --min-nodes: '0' is not a whole number of 1 or more",
        ),
        (["--cpu", "0"], "argument --cpu: '0' is not a whole number of 1 or more"),
        (["--gpus", "-1"], "argument --gpus: '-1' is not a whole number of 0 or more"),
        (["--memory", "-5"], "--memory '-5' is not a size in Kubernetes"),
        (["--memory", "1Gi\n"], "--memory '1Gi\\n' is not a size in Kubernetes"),
        (["--shm", "0"], "--shm '0' is not a size in Kubernetes"),
        (["--kind", "pod"], "invalid choice: 'pod'"),
        (["--partition", "gpu"], "unknown flag '--partition'"),
    ],
)
def test_mistakes(arguments: list[str], words: str) -> None:
    done = slurmft("render", "kubernetes", *FLAGS, *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "text",
    [
        "emotion",
        "GLUE/mrpc",
        "7b",
        "",
        "ä",
        "-x-",
        "a" * 60,
        "9" * 60,
        "9" * 35 + "-" + "9" * 4,
    ],
)
def test_names_are_safe(text: str) -> None:
    found = manifests.dns_name(text)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", found)


def test_words_that_other_readers_take_for_numbers() -> None:
    """Kubernetes' reader of YAML is not PyYAML: 08, 1e3 and y stand in quotes."""
    more = (
        "--node-selector",
        "y=08",
        "--node-selector",
        "zone=1e3",
        "--memory",
        "1000",
    )
    done = slurmft("render", "kubernetes", *FLAGS, *more)
    assert done.code == 0, done.err
    for line in ('"y": "08"', '"zone": "1e3"', 'memory: "1000"', 'cpu: "8"'):
        assert line in done.out


def test_a_configuration_that_is_no_ascii(tmp_path: Path) -> None:
    """YAML ends lines at characters at which JSON does not."""
    folder = tmp_path / "ä\u2028b"
    config = render("trainjob", "--model", str(folder))["ConfigMap"]["data"][
        "config.json"
    ]
    assert RunConfig.from_json(config).program.settings["model"] == str(folder)


def test_names_that_kubernetes_has(tmp_path: Path) -> None:
    """Claims and secrets may begin with a digit and hold dots."""
    names = ("--claim", "1e3", "--secret", "hub.v2", "--namespace", "7b")
    done = slurmft("render", "kubernetes", *FLAGS, *names)
    assert done.code == 0, done.err
    assert 'claimName: "1e3"' in done.out


def test_image_and_pod_have_one_user() -> None:
    """Else a new volume, which is root's, cannot be written."""
    pod = pod_of("pytorchjob", render("pytorchjob"))
    group = pod["securityContext"]["fsGroup"]
    assert f"USER {group}:{group}\n" in dockerfile_of()


def dockerfile_of(*more: str) -> str:
    """The Dockerfile that is printed, as comments before the manifest."""
    done = slurmft("render", "kubernetes", *FLAGS, *more)
    assert done.code == 0, done.err
    _, _, text = done.out.partition("its Dockerfile, which is:\n")
    lines = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return "\n".join(lines) + "\n"


def test_image_fits_what_the_pods_compute_on() -> None:
    """CUDA for GPUs alone; oneCCL's binding with a torch that it fits; Intel's OpenMP."""
    cpus = dockerfile_of()
    assert "download.pytorch.org/whl/cpu" in cpus
    assert "intel-openmp" in cpus
    assert "-c constraints.txt" in cpus
    assert "oneccl" not in cpus
    ccl = dockerfile_of("--backend", "ccl")
    assert "-c constraints-xeon.txt" in ccl
    assert "torch==2.8" in ccl
    assert "oneccl_bind_pt==2.8" in ccl
    assert "pytorch-extension.intel.com" in ccl
    for on_gpus in (
        dockerfile_of("--gpus", "2"),
        dockerfile_of("--gpus", "2", "--backend", "nccl"),
    ):
        assert "-c constraints.txt ." in " ".join(on_gpus.split()).replace("\\ ", "")
        assert "whl/cpu" not in on_gpus


@pytest.mark.parametrize("kind", manifests.KINDS)
def test_pods_as_a_published_manifest_has_them(kind: str, tmp_path: Path) -> None:
    """oneCCL, its variables, lines before the program, and when to pull the image."""
    setup = f'echo "it\'s $((1 + 1))" >{tmp_path}/ready'
    objects = render(
        kind,
        *("--backend", "ccl", "--setup", setup, "--image-pull-policy", "Always"),
        *("--env", "CCL_WORKER_COUNT=4", "--env", "NO=yes: '\"&", "--env", "EMPTY="),
    )
    (container,) = pod_of(kind, objects)["containers"]
    assert container["imagePullPolicy"] == "Always"
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["CCL_WORKER_COUNT"] == "4"
    assert (variables["NO"], variables["EMPTY"]) == ("yes: '\"&", "")
    config = RunConfig.from_json(objects["ConfigMap"]["data"]["config.json"])
    assert config.job.backend == "ccl"
    *shell, python = container["command"][:5]
    assert python == "python3"
    subprocess.run([*shell, "true"], check=True, timeout=10)
    assert (tmp_path / "ready").read_text() == "it's 2\n"
    (plain,) = pod_of(kind, render(kind))["containers"]
    assert "imagePullPolicy" not in plain
    assert plain["command"][0] == "python3"


def test_run_of_the_same_name(tmp_path: Path) -> None:
    """Its configuration is not taken for that of another; other nodes are no other run."""
    job, run = JobConfig(), RunDir(tmp_path / "run")
    config = RunConfig(program=TrainConfig.resolve().program(), job=job)
    make_run(run, config, first=True)
    other = dataclasses.replace(config, job=JobConfig(nodes=2))
    make_run(run, other, first=True)
    assert run.load_config().job.nodes == 2
    changed = dataclasses.replace(
        config, program=TrainConfig.resolve(learning_rate=0.5).program()
    )
    with pytest.raises(
        UsageError, match="of the same name with another program"
    ) as error:
        make_run(run, changed, first=True)
    assert "--name" in str(error.value.hint)


def test_where_pods_meet(tmp_path: Path) -> None:
    config = RunConfig.from_json(render("trainjob")["ConfigMap"]["data"]["config.json"])
    elastic = {"PET_RDZV_ENDPOINT": "localhost:23456", "HOSTNAME": "mrpc-worker-2"}
    found = rendezvous_of(config, elastic)
    assert (found.head, found.port, found.node_rank, found.is_head) == (
        "localhost",
        23456,
        2,
        False,
    )
    assert found.host == "127.0.0.1"
    fixed = {
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29500",
        "PET_NODE_RANK": "0",
    }
    first = rendezvous_of(config, fixed)
    assert first.is_head
    assert first.socket_interface() == found.socket_interface() == "lo"
    assert pod_index({"HOSTNAME": "single"}) == 0
    with pytest.raises(RendezvousError, match="no operator started this pod"):
        rendezvous_of(config, {})


@contextlib.contextmanager
def pods(
    kind: str, config: Path, run: RunDir
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with the variables that the operators set, as two pods."""
    port, started = str(free_ports()[0]), []
    for index in range(2):
        env = {
            sealed.SECRET: "s",
            "PET_NNODES": "2",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        env |= {"PET_NODE_RANK": str(index)}
        if kind == "pytorchjob":
            env = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_NNODES": "1:2"}
            env[sealed.SECRET] = "s"
            env |= {"HOSTNAME": f"mrpc-worker-{index}", "PET_RDZV_ID": "mrpc"}
        command = [
            *prepared.command("slurmft.plugins.kubernetes.pod"),
            str(config),
            str(run.path),
        ]
        started.append(
            subprocess.Popen(command, env=os.environ | env | {"OMP_NUM_THREADS": "1"})
        )
    try:
        yield started
    finally:
        for pod in started:
            pod.kill()
            pod.wait()


def configured(
    folder: Path, kind: str, *more: str, program: tuple[str, ...] = ()
) -> Path:
    """The configuration as the manifest has it."""
    train = () if program else ("--batch-size", "8", "--precision", "fp32")
    flags = ("--nproc-per-node", "1", *train, *more, *program)
    path = folder / "config.json"
    path.write_text(render(kind, *flags)["ConfigMap"]["data"]["config.json"])
    return path


@pytest.mark.extra("kubernetes")
def test_pods_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On oneCCL, which needs the name of the interface in every pod."""
    binding = stand_in(tmp_path / "lib", torch_version())["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([binding, *sys.path]))
    run = RunDir(tmp_path / "runs" / "mrpc")
    config = configured(tmp_path, "trainjob", "--max-steps", "2", "--backend", "ccl")
    with pods("trainjob", config, run) as started:
        assert [pod.wait(PATIENCE_S) for pod in started] == [0, 0]
    result = json.loads(run.result.read_text())
    assert (result["world_size"], result["backend"]) == (2, "ccl")
    assert run.get_state().state == "finished"


@pytest.mark.extra("kubernetes")
def test_pods_run_a_program_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACES)
    run = RunDir(tmp_path / "runs" / "place")
    config = configured(
        tmp_path, "trainjob", program=("--", str(tmp_path / "place.py"))
    )
    with pods("trainjob", config, run) as started:
        assert [pod.wait(PATIENCE_S) for pod in started] == [0, 0]
    assert [run.rank_log(n).read_text().split()[-6] for n in range(2)] == ["0", "1"]
    assert run.get_state().state == "finished"


@pytest.mark.extra("kubernetes")
@pytest.mark.timeout(600)
def test_evicted_pod_and_those_that_start_again(tmp_path: Path) -> None:
    """The first life stops and saves; the second is another attempt, and goes on from there."""
    run = RunDir(tmp_path / "runs" / "mrpc")
    config = configured(
        tmp_path, "pytorchjob", "--max-steps", "300", "--log-every", "1"
    )
    with pods("pytorchjob", config, run) as started:
        until(lambda: run.records.exists() and records(run, "step"))
        started[1].terminate()
        assert [pod.wait(PATIENCE_S) for pod in started] == [75, 75]
    (saved,) = run.checkpoint_names()
    assert run.get_state().state == "requeued"
    run.add(Failure.of("node mrpc-worker-1", SlurmftError("it was killed"), attempt=1))
    with pods("pytorchjob", config, run) as started:
        assert [pod.wait(PATIENCE_S) for pod in started] == [0, 0]
    assert [s.state for s in run.history()] == [
        *("submitted", "running", "requeued", "running", "finished"),
    ]
    assert records(run, "resume")[0]["checkpoint"] == saved
    assert run.attempt_number() == 2
    assert json.loads(run.started.read_text())["attempt"] == 2  # the ranks know it, too
    assert run.root_failure() is None  # that of the first life is none of the second's
