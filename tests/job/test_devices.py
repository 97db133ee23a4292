"""Which GPU a rank takes, and why torch cannot use those that are there."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from slurmft.job import devices
from slurmft.job.backend import offer
from slurmft.node.hardware import host_name
from slurmft.node.profiles import GPUS
from tests.conftest import slurmft
from tests.support.gpus import FakeGpus

OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "Please update your GPU driver by downloading and installing a new version from the URL"
)

ASKS = """
import os, sys
if "slurmft.node.torchrun" in sys.orig_argv:
    import torch

    def note(name, value):
        def answer(*args, **more):
            if "RANK" in os.environ:  # not torchrun, which asks too
                with open(os.environ["ASKED"], "a") as file:
                    print(name, file=file)
            return value
        return answer

    torch.cuda._lazy_init = torch.cuda.init = note("context", None)
    torch.cuda.is_available = note("is_available", True)
    torch.cuda.device_count = note("device_count", 2)
"""
"""A sitecustomize.py: what the ranks ask of CUDA goes into the file $ASKED."""


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which kinds of attention were switched, and how; torch's own stay as they are."""
    found: dict[str, bool] = {}
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        switch = partial(found.__setitem__, name)
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", switch)
    return found


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpus(4)
    fake.install(monkeypatch.setattr)
    assert devices.take(2) == torch.device("cuda", 2)
    assert fake.asked == ["set_device cuda:2"]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_only_gpu_that_a_rank_sees_is_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm's --gpus-per-task, mpirun's wrappers and --per gpu show each process one."""
    FakeGpus(1, kind=kind, uuid="GPU-b").install(monkeypatch.setattr)
    assert devices.take(3) == torch.device(kind, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv(GPUS, "4 NVIDIA")
    found = offer("auto")
    assert (found.gpus, found.processes, found.uuid, found.gpu_problem) == (
        1,
        4,
        "GPU-b",
        None,
    )
    assert found.gpu_backend == {"cuda": "nccl", "xpu": "xccl"}[kind]


def test_attention_of_cudnn_is_off(
    switches: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It builds a plan for every new shape; a run has tens of shapes."""
    FakeGpus(1).install(monkeypatch.setattr)
    devices.take(0)
    assert switches == {"cudnn": False}


@pytest.mark.parametrize(
    ("vendor", "name"), [("NVIDIA", "CUDA"), ("AMD", "ROCm"), ("Intel", "XPU support")]
)
def test_torch_of_another_build(
    vendor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, f"4 {vendor}")
    for build in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, build, None)
    count, problem = devices.usable()
    there = f"4 {vendor} GPU(s)"
    assert count == 0
    assert (
        problem == f"torch {torch.__version__} has no {name}, and the host has {there}"
    )


def test_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4 NVIDIA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    FakeGpus(0, says=OLD_DRIVER).install(monkeypatch.setattr)
    count, problem = devices.usable()
    assert count == 0
    assert problem is not None
    assert (
        "can use 0 of the host's 4 NVIDIA GPU(s): CUDA initialization: The NVIDIA"
        in problem
    )
    assert "driver on your system is too old" in problem


def test_fewer_gpus_than_the_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4 NVIDIA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    FakeGpus(3).install(monkeypatch.setattr)
    version = torch.__version__
    assert devices.usable() == (
        3,
        f"torch {version} can use 3 of the host's 4 NVIDIA GPU(s)",
    )
    FakeGpus(4).install(monkeypatch.setattr)
    assert devices.usable() == (4, None)


@pytest.mark.parametrize(
    ("asked", "gpus"), [("gloo", "4 NVIDIA"), ("ccl", ""), ("auto", "0")]
)
def test_ranks_on_cpus_ask_no_driver(
    asked: str, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question to CUDA's driver opens the GPUs; a context takes hundreds of MB of one."""
    monkeypatch.setenv(GPUS, gpus)
    fake = FakeGpus(4)
    fake.install(monkeypatch.setattr)
    found = offer(asked)
    assert (found.gpus, found.gpu_problem, fake.asked) == (0, None, [])


@pytest.mark.processes
def test_run_with_a_torch_for_cpus_on_a_node_with_gpus(tmp_path: Path) -> None:
    """It is refused at once, with host, cause and cure; it would train on CPUs."""
    version = torch.__version__
    if torch.version.cuda is not None:
        pytest.skip("this torch is for CUDA")
    flags = ("--cluster", "local", "--nodes", "2", "--runs-dir", str(tmp_path))
    done = slurmft("submit", "--follow", *flags, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert done.code == 2
    where = f"on {host_name()}: torch {version} has no CUDA, and the host has 1 NVIDIA GPU(s)"
    assert f"torch does not see a GPU for every process; {where}" in done.err
    assert "hint: install a torch for these GPUs and their driver" in done.err
    assert done.err.count("error: ") == 1
    for rank in range(2):
        assert where in done.run.rank_log(rank).read_text()


@pytest.mark.processes
@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch is for CUDA: its optimizers ask in each step whether a graph is captured",
)
def test_run_on_cpus_leaves_the_gpus_alone(tmp_path: Path) -> None:
    """A whole training, with a torch to which the node's GPUs are there."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ASKS)
    asked = tmp_path / "asked"
    asked.touch()
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    env |= {"ASKED": str(asked), "CUDA_VISIBLE_DEVICES": "0,1"}
    flags = ("--cluster", "local", "--max-steps", "2", "--runs-dir", str(tmp_path))
    done = slurmft(
        "submit",
        "--follow",
        "--nproc-per-node",
        "1",
        "--profile",
        "cpu",
        *flags,
        env=env,
    )
    assert done.code == 0, done.err
    assert done.result["backend"] == "gloo"
    assert asked.read_text() == ""
