"""One backend on all ranks, whatever their hosts have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.job.backend import Offer, choose
from slurmft.node import ccl
from slurmft.node.rendezvous import free_ports
from tests.support import prepared
from tests.support.ccl import stand_in, torch_version

NOT_HERE = "oneccl_bindings_for_pytorch is not installed"
BROKEN = "oneccl_bindings_for_pytorch cannot be imported: no libccl.so.1"


def test_gpus() -> None:
    some = [Offer("n1", 4), Offer("n2", 4), Offer("n2", 4), Offer("n3", 0, NOT_HERE)]
    assert choose("auto", some[:3]) == choose("nccl", some[:3]) == ("nccl", None)
    assert choose("gloo", some) == ("gloo", None)
    for asked in ("auto", "nccl"):
        with pytest.raises(UsageError, match="; on n1, n2: 4; on n3: 0\nhint") as error:
            choose(asked, some)
        assert "--backend gloo --profile cpu" in str(error.value.hint)
    with pytest.raises(UsageError, match="not every host has GPUs that torch sees; on n3: 0"):
        choose("nccl", some[3:])


def test_ccl() -> None:
    with_it, without, broken = Offer("n1", 0), Offer("n2", 0, NOT_HERE), Offer("n3", 0, BROKEN)
    assert choose("auto", [with_it, with_it]) == choose("ccl", [with_it]) == ("ccl", None)
    assert choose("auto", [without, without]) == ("gloo", None)  # nobody expects it
    assert choose("auto", [with_it, without]) == (
        "gloo",
        f"collectives use gloo; on n2: {NOT_HERE}",
    )
    words = f"on n2: {NOT_HERE}; on n3: {BROKEN}"
    offers = [with_it, without, broken, broken]
    assert choose("auto", offers) == ("gloo", f"collectives use gloo; {words}")
    with pytest.raises(UsageError, match=f"--backend ccl {words}\nhint") as error:
        choose("ccl", offers)
    assert error.value.hint == ccl.hint()


def join(asked: str, *variables: dict[str, str]) -> list[tuple[int, str]]:
    """Exit codes and output of ranks that join a process group, each on a host of its own."""
    ranks, port = [], str(free_ports(str(os.getpid()))[0])
    for number, more in enumerate(variables):
        env = {"RANK": str(number), "WORLD_SIZE": str(len(variables)), "LOCAL_RANK": "0"}
        env |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"SLURMD_NODENAME": f"n{number + 1}", "GPUS": "0", "FI_TCP_IFACE": "lo"} | more
        env["PYTHONPATH"] = os.pathsep.join([more.get("PYTHONPATH", ""), *sys.path])
        command = [*prepared.command("tests.support.join"), asked]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=os.environ | env, stdout=pipe, text=True))
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def test_host_without_the_binding(tmp_path: Path) -> None:
    binding = stand_in(tmp_path, torch_version()) | {"FROM_SETVARS": "yes"}
    found = join("auto", binding, {})
    assert found == [(0, f"gloo collectives use gloo; on n2: {NOT_HERE}\n")] * 2
    found = join("ccl", {}, binding)
    assert found == [(2, f"error: --backend ccl on n1: {NOT_HERE}\nhint: {ccl.hint()}\n")] * 2


def test_host_without_gpus() -> None:
    for code, text in join("auto", {"GPUS": "2"}, {}):
        assert code == 2
        assert "not every host has GPUs that torch sees; on n1: 2; on n2: 0\nhint: " in text
