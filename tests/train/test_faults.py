"""The fault table, as far as it needs no Slurm: a run that suffers one fault after the other ends
as one that nothing has disturbed. The rest is in tests/slurm/test_faults.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Following
from tests.support.faults import BASE, FAULTS, SHORT_STOP
from tests.support.small_disk import SmallDisk
from tests.support.suffering import Sufferer, undisturbed
from tests.train.test_trainer import assert_gone, emotion

pytestmark = pytest.mark.processes

FLAGS = (
    *(*BASE, "--epochs", "8", *SHORT_STOP),
    *("--hang-timeout-s", "4", "--max-restarts", "20"),
)


@pytest.mark.extra("faults")
@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to mount a small file system"
)
def test_faults(tmp_path: Path, tiny_data: Path, tiny_model: Path) -> None:
    flags = (*FLAGS, *emotion(tiny_data, tiny_model))
    whole = undisturbed(tmp_path / "undisturbed", flags)
    with SmallDisk(tmp_path / "small disk", 24) as disk:
        where = ("--cluster", "local", "--runs-dir", str(disk))
        env = {"OMP_NUM_THREADS": "1"}
        sufferer = Sufferer(
            None, lambda: Following(*flags, *where, env=env, imported=True), whole
        )
        for fault in FAULTS:
            if not fault.needs_slurm:
                sufferer.suffer(fault)
        last = sufferer.living().run
        sufferer.end()
        assert_gone(last)
