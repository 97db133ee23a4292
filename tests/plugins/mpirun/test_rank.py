"""Ranks that mpirun has started, and what they tell each other by files."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest

from slurmft.core.files import write_json
from slurmft.node.rendezvous import Rendezvous
from slurmft.plugins.mpirun import rank
from slurmft.runs.rundir import RunDir
from tests.support.nfs import remember_absent_names


def test_a_rendezvous_that_nfs_remembers_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    rendezvous = Rendezvous(
        hosts=("n1", "n2"), node_rank=0, port=1, check_port=2, id="r.1.7"
    )
    remember_absent_names(monkeypatch, tmp_path)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        write_json(run.rendezvous, asdict(rendezvous))

    monkeypatch.setattr(time, "sleep", sleep)
    assert rank.await_rendezvous(run, "r.1.7", "n2", timeout_s=2) == rendezvous
    assert len(pauses) == 1
