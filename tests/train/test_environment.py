"""What ranks say of themselves, where there are many of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmft.core.files import to_json
from slurmft.node import hardware, profiles
from slurmft.train.loop import environment
from tests.conftest import slurmft


def test_a_thousand_ranks_take_less_than_a_megabyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On nodes of 256 CPUs, with one rank or with eight, bound to cores or to none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(256)))
    monkeypatch.setattr(
        hardware,
        "_cpu",
        lambda root, n: hardware.Cpu(number=n, socket=0, numa=0, core=(0, n)),
    )
    fabrics = tuple(
        hardware.Network(name=f"hsn{n}", infiniband=False, speed_mbit_s=200_000)
        for n in range(4)
    )
    monkeypatch.setattr(hardware, "networks", lambda root: fabrics)
    monkeypatch.setenv(
        profiles.CORES, ";".join(",".join(map(str, range(256))) for _ in range(8))
    )
    monkeypatch.setenv("LOCAL_RANK", "7")
    # Libraries that other tests have imported set some.
    for name in list(os.environ):
        if name.startswith("KMP_"):
            monkeypatch.delenv(name)
    world: Any = SimpleNamespace(rank=1023, device=torch.device("cpu"), local_rank=0)
    second: Any = SimpleNamespace(rank=1023, device=world.device, local_rank=1)
    first = environment.describe_rank(world, 2.5)
    other = environment.describe_rank(second, None)
    assert (
        first["cores"]
        == first["allotted_cores"]
        == first["hardware"]["cpus"]
        == "0-255"
    )
    assert len(to_json({"ranks": [first] * 1024}, indent=2)) < 2**20
    assert len(to_json({"ranks": [other] * 1024}, indent=2)) < 2**20


@pytest.mark.processes
def test_variables_as_ranks_had_them(tmp_path: Path) -> None:
    """The user's and the profile's; no others, which may be secret."""
    done = slurmft(
        *("submit", "--cluster", "local", "--follow", "--runs-dir", str(tmp_path)),
        *("--nodes", "2", "--max-steps", "1", "--batch-size", "8"),
        env={"KMP_SETTINGS": "0", "FI_PROVIDER": "tcp", "MY_TOKEN": "secret"},
    )
    assert done.code == 0, done.err
    text = done.run.environment.read_text()
    found = done.run.read_environment().variables
    assert (found["KMP_SETTINGS"], found["FI_PROVIDER"]) == ("0", "tcp")
    assert int(found["OMP_NUM_THREADS"] or 0) >= 1
    assert "MY_TOKEN" not in text


def test_variables_that_differ_between_ranks() -> None:
    ranks: list[dict[str, Any]] = [
        {"variables": {"OMP_NUM_THREADS": "4", "CCL_WORKER_COUNT": "1"}},
        {"variables": {"OMP_NUM_THREADS": "8", "CCL_WORKER_COUNT": "1"}},
        {"variables": {"CCL_WORKER_COUNT": "1", "LD_PRELOAD": "a.so"}},
    ]
    common = environment.take_common_variables(ranks)
    assert common == {"CCL_WORKER_COUNT": "1"}
    assert [rank["variables"] for rank in ranks] == [
        {"OMP_NUM_THREADS": "4"},
        {"OMP_NUM_THREADS": "8"},
        {"LD_PRELOAD": "a.so"},
    ]
