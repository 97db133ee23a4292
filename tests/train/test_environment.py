"""What ranks say of themselves, where there are many of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmft.core.files import to_json
from slurmft.node import hardware, profiles
from slurmft.train.loop import environment


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
    monkeypatch.setenv(
        profiles.CORES, ";".join(",".join(map(str, range(256))) for _ in range(8))
    )
    monkeypatch.setenv("LOCAL_RANK", "7")
    world: Any = SimpleNamespace(rank=1023, device=torch.device("cpu"), local_rank=0)
    second: Any = SimpleNamespace(rank=1023, device=world.device, local_rank=1)
    first = environment.describe_rank(world, 2.5)
    other = environment.describe_rank(second, None)
    assert (
        first["cores"] == first["cores_asked"] == first["hardware"]["cpus"] == "0-255"
    )
    assert len(to_json({"ranks": [first] * 1024}, indent=2)) < 2**20
    assert len(to_json({"ranks": [other] * 1024}, indent=2)) < 2**20
