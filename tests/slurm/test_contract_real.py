"""The real Slurm does what the fake one does: see contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.contract import SLEEPS, Contract, Site, jobs
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
__all__ = ["jobs"]  # a fixture


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(cluster, tmp_path_factory.mktemp("contract"))
    made.write("sleeps.sh", SLEEPS)
    yield made
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()


class TestRealSlurm(Contract):
    pass
