"""Jobs that Slurm, from 25.11 on, starts again before all others: --sbatch requeue=expedite."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.cluster.slurm import commands, launcher
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig

EXPEDITED = ("requeue=expedite",)


def script(tmp_path: Path) -> str:
    job = JobConfig(sbatch=EXPEDITED, runs_dir=str(tmp_path))
    launcher.check_expedited(job)
    config = RunConfig(program=TrainConfig.resolve().program(), job=job)
    return launcher.plan(config, RunDir(tmp_path / "run"))


@pytest.mark.parametrize("version", ["slurm 25.11.0", "slurm 26.05.1", "slurm-x"])
def test_slurm_that_has_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "version", lambda: version)
    monkeypatch.setattr(commands, "grant", lambda arguments: None)
    assert "#SBATCH --requeue=expedite\n" in script(tmp_path)


@pytest.mark.parametrize("version", ["slurm 22.05.8", "slurm 25.05.4"])
def test_older_slurm(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "version", lambda: version)
    with pytest.raises(UsageError, match=f"this is {version}, and .* since 25.11"):
        script(tmp_path)


def test_no_requeue_contradicts_it() -> None:
    with pytest.raises(UsageError, match="contradicts --no-requeue"):
        JobConfig(sbatch=EXPEDITED, requeue=False)


@pytest.mark.parametrize("pair", ["requeue", "requeue=soon", "no-requeue"])
def test_other_values_are_slurmfts_own(pair: str) -> None:
    with pytest.raises(UsageError, match=r"slurmft sets (no-)?requeue"):
        JobConfig(sbatch=(pair,))
