"""Tests on a GPU: they run where torch sees one. With --gpu, they fail where it sees none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slurmft.core.config import JobConfig
from tests.support import CHECKOUT

# harness: steps that a test takes itself
sys.path.append(str(CHECKOUT / "results/benchmarks"))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    if not torch.cuda.is_available():
        if request.config.getoption("--gpu"):
            pytest.fail("torch sees no GPU here")
        pytest.skip("torch sees no GPU here")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu(device: torch.device) -> torch.device:
    """The device; random numbers begin anew."""
    torch.manual_seed(0)
    return device


@pytest.fixture(scope="session")
def local() -> tuple[str, ...]:
    """Flags of a run on this machine that trains on one GPU."""
    assert JobConfig().profile == "auto"  # which takes GPUs where there are any
    return ("--cluster", "local", "--nproc-per-node", "1", "--log-every", "1")
