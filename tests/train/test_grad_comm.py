"""Gradients cross the network as --grad-comm says, and runs resume exactly with all of it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig, local_steps
from tests.conftest import Following, records, slurmft
from tests.support import PATIENCE_S, prepared
from tests.support.models import write_emotion, write_model
from tests.train.test_resume import EXACT, assert_same, rank_pids, steps_twice
from tests.train.test_trainer import emotion


@pytest.mark.processes
def test_two_ranks(tmp_path: Path) -> None:
    torchrun = prepared.command("torch.distributed.run")
    done = subprocess.run(
        [
            *torchrun,
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "tests.support.gradients",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} done" for rank in range(2)
    ]


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
    assert [local_steps(t) for t in ("auto", "bf16", "local:2", "local:64")] == [
        None, None, 2, 64,
    ]  # fmt: skip


UNUSED = 9000


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its table has 1.1 MiB of words that the data has, and as many that it has not."""
    words = 9000 + UNUSED
    return write_model(
        tmp_path_factory.mktemp("large") / "model", words=words, max_positions=128
    )


@pytest.fixture(scope="module")
def large_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "large"
    return write_emotion(folder, train=203, validation=67, more=9000)


def check_unused_rows(before: Path, after: Path) -> None:
    """They are as they were, but for their decay, which is the same for all numbers."""
    was = load_file(before / "model.safetensors")["embeddings.word_embeddings.weight"]
    now = load_file(after / "model.safetensors")[
        "bert.embeddings.word_embeddings.weight"
    ]
    assert was.shape == now.shape
    ratios = now[-UNUSED:] / was[-UNUSED:]
    assert 0.9 < ratios.min() < 1
    assert ratios.max() - ratios.min() < 1e-5
    assert not np.allclose(now[:-UNUSED], was[:-UNUSED], rtol=0.01)


@pytest.mark.extra("training")
def test_resume_is_exact(tmp_path: Path, large_data: Path, large_model: Path) -> None:
    """Stopped between two meetings of the ranks, too: they stop at the next one. And rows of words
    that the data has not are in the model that is saved."""
    mode, micro_steps = "local:3", 2
    flags = (
        *EXACT, "--nodes", "2", "--batch-size", str(4 // micro_steps), "--epochs", "2",
        "--gradient-accumulation-steps", str(micro_steps), "--grad-comm", mode,
        *emotion(large_data, large_model), "--runs-dir", str(tmp_path), "--weight-decay", "0.1",
    )  # fmt: skip
    whole = slurmft("submit", "--follow", *flags, imported=True)
    assert whole.code == 0, whole.err
    assert whole.result["gradients"]["used"] == mode
    rows = whole.result["vocabulary"]
    assert rows["all"] - rows["used"] >= UNUSED
    assert f"{rows['used']:,} of {rows['all']:,} tokens in use" in whole.out
    check_unused_rows(large_model, whole.run.model)
    job = Following(*flags, imported=True)
    job.at_step(10)
    os.kill(rank_pids(job.run)[1], signal.SIGTERM)
    code, text = job.end()
    assert code == 0, text
    assert steps_twice(job.run) == 0
    (stop,) = records(job.run, "stopping")
    meetings = [*range(3, 53, 3), 26, 52]  # and the ends of the epochs
    assert stop["step"] in meetings
    assert_same(job.run, whole.run)
