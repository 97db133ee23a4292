"""Gradients cross the network as --grad-comm says, and runs resume exactly with all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.communication import Measured
from slurmft.config import TrainConfig, local_steps
from slurmft.errors import UsageError
from tests.conftest import Following, records, slurmft
from tests.models import write_model
from tests.test_resume import EXACT, assert_same, rank_pids, steps_twice
from tests.test_train import emotion


def test_two_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.gradients"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} done" for rank in range(2)]


@pytest.mark.parametrize(
    ("seconds", "precision", "used", "advice"),
    [
        ((1.0, 0.4, 0.2), "bf16", "bf16", ""),
        ((1.0, 0.4, 0.2), "fp32", "fp32", ""),
        ((1.0, 0.4, 0.2), "fp16", "fp32", ""),
        ((1.0, 0.02, 0.01), "bf16", "fp32", ""),  # nothing to gain
        ((1.0, 0.4, 0.5), "bf16", "fp32", ""),  # rounding costs more than it saves
        ((9.0, 8.0, 4.0), "bf16", "bf16", "--grad-comm powersgd or local:64"),
        ((9.0, 8.0, 4.0), "fp32", "fp32", "--grad-comm bf16, powersgd or local:64"),
    ],
)
def test_auto_chooses(
    seconds: tuple[float, float, float], precision: str, used: str, advice: str
) -> None:
    measured = Measured(*seconds)
    assert measured.choice(precision) == used
    words = measured.words(precision, numbers=22_000_000)
    assert words.startswith(f"{used}: ")
    assert "\n" not in words
    assert (advice or "--grad-comm") in words or not advice
    assert advice or "--grad-comm" not in words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "unknown --grad-comm 'fp8'"),
        ("local", "unknown --grad-comm 'local'"),
        ("local:1", "give local:2 or more"),
    ],
)
def test_requests_that_cannot_be_right(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        TrainConfig(grad_comm=text)
    assert raised.value.hint


def test_local_steps() -> None:
    assert [local_steps(t) for t in ("auto", "powersgd", "local:2", "local:64")] == [
        None, None, 2, 64,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its table of words has 1.1 MiB."""
    return write_model(tmp_path_factory.mktemp("large") / "model", words=9000)


@pytest.mark.parametrize("mode", ["powersgd", "local:3"])
def test_resume_is_exact(mode: str, tmp_path: Path, tiny_data: Path, large_model: Path) -> None:
    """Stopped between two meetings of the ranks, too: they stop at the next one."""
    flags = (
        *EXACT, "--nodes", "2", "--batch-size", "4", "--epochs", "2", "--grad-comm", mode,
        *emotion(tiny_data, large_model), "--runs-dir", str(tmp_path),
    )  # fmt: skip
    whole = slurmft("submit", "--follow", *flags)
    assert whole.code == 0, whole.err
    used = whole.result["gradients"]
    assert used["used"] == mode
    assert bool(used["rows"]) == (mode == "powersgd")
    job = Following(*flags)
    job.until("step 20/")
    os.kill(rank_pids(job.run)[1], signal.SIGTERM)
    code, text = job.end(120)
    assert code == 0, text
    assert steps_twice(job.run) == 0
    (stop,) = records(job.run, "stopping")
    meetings = [*range(3, 53, 3), 26, 52]  # and the ends of the epochs
    assert mode == "powersgd" or stop["step"] in meetings
    assert_same(job.run, whole.run)
