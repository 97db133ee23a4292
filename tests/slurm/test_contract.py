"""The fake Slurm does what tests rely on: see contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.contract import SLEEPS, Contract, Site, jobs
from tests.support.fake_slurm.cluster import FakeSlurm

pytestmark = pytest.mark.processes

__all__ = ["jobs"]  # a fixture


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("contract")
    with FakeSlurm(folder / "fake") as slurm:
        made = Site(slurm, folder)
        made.write("sleeps.sh", SLEEPS)
        yield made


class TestFakeSlurm(Contract):
    pass
