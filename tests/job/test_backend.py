"""One backend on all ranks, whatever their hosts have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.job.backend import Offer, choose
from slurmft.node import ccl
from slurmft.node.profiles import GPUS
from slurmft.node.rendezvous import free_ports
from tests.support import PATIENCE_S, prepared
from tests.support.ccl import stand_in, torch_version

NOT_HERE = "oneccl_bindings_for_pytorch is not installed"
BROKEN = "oneccl_bindings_for_pytorch cannot be imported: no libccl.so.1"


def test_gpus() -> None:
    some = [Offer("n1", 4), Offer("n2", 4), Offer("n2", 4), Offer("n3", 0, NOT_HERE)]
    assert choose("auto", some[:3]) == choose("nccl", some[:3]) == "nccl"
    assert choose("gloo", some) == "gloo"
    for asked in ("auto", "nccl"):
        words = r"on n1, n2: 4 for 1 process\(es\); on n3: 0 for 1 process\(es\)\nhint"
        with pytest.raises(UsageError, match=words) as error:
            choose(asked, some)
        assert "--gpus-per-node), or compute on CPUs: --profile cpu" in str(
            error.value.hint
        )
    with pytest.raises(UsageError, match="a GPU for every process; on n3: 0 for 1"):
        choose("nccl", some[3:])
    assert choose("auto", [Offer("n1", 8, gpu_backend="xccl")]) == "xccl"


def test_torch_that_does_not_fit_the_gpus() -> None:
    """On all hosts: the environment is wrong, and none of them is to blame."""
    problem = "torch 2.13.0+cpu has no CUDA, and the host has 4 NVIDIA GPU(s)"
    offers = [Offer(host, 0, gpu_problem=problem, processes=4) for host in ("n1", "n2")]
    for asked in ("auto", "nccl"):
        with pytest.raises(
            UsageError, match=rf"--backend {asked}: .*; on n1, n2: torch 2.13"
        ) as e:
            choose(asked, offers)
        assert str(e.value.hint).startswith("install a torch for these GPUs")
    assert choose("gloo", offers) == "gloo"


def test_host_that_lost_a_gpu() -> None:
    lost = Offer(
        "n2", 3, gpu_problem="torch 2.13.0 can use 3 of 4 NVIDIA GPU(s)", processes=4
    )
    with pytest.raises(
        SlurmftError, match=r"on n1: 4 for 4 process.*; on n2: torch 2"
    ) as error:
        choose("auto", [Offer("n1", 4, processes=4), lost])
    assert error.value.bad_hosts == ["n2"]
    assert "--sbatch exclude=n2" in str(error.value.hint)
    assert (
        choose("auto", [Offer("n1", 4, processes=3), lost._replace(processes=3)])
        == "nccl"
    )
    without = Offer("n3", 0, processes=4)  # never had any: another mistake
    with pytest.raises(UsageError):
        choose("auto", [Offer("n1", 4, processes=4), lost, without])


def test_each_process_sees_one_gpu() -> None:
    own = [Offer("n1", 1, processes=2, uuid=uuid) for uuid in ("GPU-a", "GPU-b")]
    assert choose("auto", own) == "nccl"
    shared = [own[0], own[0]]
    with pytest.raises(UsageError, match="on n1: 1 for 2 process"):
        choose("auto", shared)
    with pytest.raises(UsageError, match="on n1, n2: 1 for 2 process"):
        choose("auto", [*own, Offer("n2", 1, processes=2, uuid="GPU-c")])


def test_ccl() -> None:
    """Of itself, auto does not take it: which one is faster is measured before."""
    with_it, without, broken = (
        Offer("n1", 0),
        Offer("n2", 0, NOT_HERE),
        Offer("n3", 0, BROKEN),
    )
    assert choose("ccl", [with_it, with_it]) == "ccl"
    assert choose("auto", [with_it, with_it]) == "gloo"
    words = f"on n2: {NOT_HERE}; on n3: {BROKEN}"
    offers = [with_it, without, broken, broken]
    with pytest.raises(UsageError, match=f"--backend ccl {words}\nhint") as error:
        choose("ccl", offers)
    assert error.value.hint == ccl.hint()


def join(asked: str, *variables: dict[str, str]) -> list[tuple[int, str]]:
    """Exit codes and output of ranks that join a process group, each on a host of its own."""
    ranks, port = [], str(free_ports()[0])
    for number, more in enumerate(variables):
        env = {
            "RANK": str(number),
            "WORLD_SIZE": str(len(variables)),
            "LOCAL_RANK": "0",
        }
        env |= {
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env |= {
            "SLURMD_NODENAME": f"n{number + 1}",
            "GPUS": "0",
            "FI_TCP_IFACE": "lo",
        } | more
        env["PYTHONPATH"] = os.pathsep.join([more.get("PYTHONPATH", ""), *sys.path])
        command = [*prepared.command("tests.support.join"), asked]
        pipe = subprocess.PIPE
        ranks.append(
            subprocess.Popen(command, env=os.environ | env, stdout=pipe, text=True)
        )
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.processes
def test_host_without_the_binding(tmp_path: Path) -> None:
    binding = stand_in(tmp_path, torch_version()) | {"FROM_SETVARS": "yes"}
    found = join("auto", binding, {})
    assert found == [(0, "gloo\n")] * 2
    found = join("ccl", {}, binding)
    assert (
        found
        == [(2, f"error: --backend ccl on n1: {NOT_HERE}\nhint: {ccl.hint()}\n")] * 2
    )


@pytest.mark.processes
def test_host_without_gpus() -> None:
    for code, text in join("auto", {"GPUS": "2"}, {}):
        assert code == 2
        assert (
            "; on n1: 2 for 1 process(es); on n2: 0 for 1 process(es)\nhint: " in text
        )


@pytest.mark.processes
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is for CUDA")
def test_torch_without_cuda_on_a_host_with_gpus() -> None:
    """It would train on CPUs without a word. One such host among others: all say so."""
    gpus = {GPUS: "4 NVIDIA"}
    problem = f"torch {torch.__version__} has no CUDA, and the host has 4 NVIDIA GPU(s)"
    for code, text in join("auto", gpus, gpus):
        assert code == 2
        assert f"; on n1, n2: {problem}\nhint: install a torch" in text
    for code, text in join("auto", gpus | {"GPUS": "4"}, gpus):
        assert code == 1
        assert f"; on n1: 4 for 1 process(es); on n2: {problem}\nhint: " in text
    assert join("auto", {GPUS: "0"}, {GPUS: "0"})[0][0] == 0  # --profile cpu
