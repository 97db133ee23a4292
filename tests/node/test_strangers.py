"""A job on this machine, into whose stores another account writes while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.runs.rundir import RunDir
from tests.conftest import Done, slurmft
from tests.support import PATIENCE_S

FLAGS = (
    *("--cluster", "local", "--nodes", "2", "--nproc-per-node", "1"),
    *("--batch-size", "8", "--max-steps", "150", "--max-requeues", "0"),
)
CAUSES = (
    "somebody else has written into this job's store",
    "somebody else has written into the store of torchrun",
)


def train(folder: Path) -> Done:
    return slurmft(
        *("submit", "--follow", "--runs-dir", str(folder), *FLAGS),
        timeout_s=3 * PATIENCE_S,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of the undisturbed run."""
    done = train(tmp_path_factory.mktemp("undisturbed"))
    assert done.code == 0, done.err
    return metrics_of(done.run)


def metrics_of(run: RunDir) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(run.result.read_text())["metrics"]
    return metrics


@pytest.mark.extra("faults")
@pytest.mark.processes
@pytest.mark.parametrize("phase", ["rendezvous", "ranks", "training"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_strangers_write_is_never_used(
    phase: str, seed: int, expected: dict[str, float], tmp_path: Path
) -> None:
    """1,000 random writes: the run has the metrics of the undisturbed one, or names the cause."""
    bomb = tmp_path / "bomb"
    stranger = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.stranger"),
            *(str(tmp_path), phase, str(bomb), str(seed)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    done = train(tmp_path)
    written, _ = stranger.communicate(timeout=PATIENCE_S)
    assert int(written) > 0
    assert not bomb.exists()
    if done.code == 0:
        assert metrics_of(done.run) == expected
        return
    failure = done.run.root_failure()
    assert failure is not None
    assert any(cause in failure.message for cause in CAUSES), (failure, done.err)
