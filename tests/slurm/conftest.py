"""The fake Slurm, for tests whose subject is not Slurm itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_slurm.cluster import FakeSlurm

pytest.register_assert_rewrite("tests.slurm.contract")  # its asserts are tests' own


@pytest.fixture
def fake_slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    """A Slurm of four nodes with no job in it."""
    with FakeSlurm(tmp_path / "fake slurm") as slurm:
        yield slurm
