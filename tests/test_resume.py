"""Runs that are interrupted end as if they had not been: on simulated nodes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slurmft.rundir import RunDir
from tests.conftest import Done, Following, records, slurmft
from tests.test_train import assert_gone, emotion, processes_of

# Dropout stays on: the random generators must come back, too.
EXACT = ("--cluster", "local", "--precision", "fp32", "--log-every", "1", "--learning-rate", "1e-3")
NODES, EPOCHS = 3, 12


def arguments(data: Path, model: Path, runs: Path) -> tuple[str, ...]:
    sizes = ("--nodes", str(NODES), "--batch-size", "2", "--epochs", str(EPOCHS))
    return (*EXACT, *sizes, "--runs-dir", str(runs), *emotion(data, model), "--eval-batch-size", "2")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    runs = tmp_path_factory.mktemp("undisturbed")
    done = slurmft("submit", "--follow", *arguments(tiny_data, tiny_model, runs))
    assert done.code == 0, done.err
    return done


def rank_pids(run: RunDir) -> list[int]:
    return pids(run, "slurmft.rank", without="slurmft.torchrun")


def pids(run: RunDir, words: str, without: str = "\n") -> list[int]:
    """Processes of a run with these words in their command lines, by their number."""
    found = processes_of(run)
    return sorted(pid for pid, line in found.items() if words in line and without not in line)


def losses(run: RunDir) -> list[float]:
    """The loss of every step; of a step that was done twice, the second."""
    return list({r["step"]: r["loss"] for r in records(run, "step")}.values())


def assert_same(run: RunDir, expected: RunDir) -> None:
    """Losses, metrics and weights are those of another run, to the last bit."""
    assert losses(run) == losses(expected)
    metrics = [
        {r["epoch"]: r["metrics"] for r in records(each, "epoch")} for each in (run, expected)
    ]
    assert metrics[0] == metrics[1]
    weights = [load_file(each.model / "model.safetensors") for each in (run, expected)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert np.array_equal(weights[0][name], weights[1][name]), name


def steps_twice(run: RunDir) -> int:
    """Steps that were lost, and done again."""
    steps = [r["step"] for r in records(run, "step")]
    return len(steps) - len(set(steps))


def states(run: RunDir) -> list[str]:
    return [state["state"] for state in run.history()]


def one_rank(run: RunDir) -> int:
    return rank_pids(run)[1]


def one_torchrun(run: RunDir) -> int:
    return pids(run, "slurmft.torchrun")[1]


def one_node(run: RunDir) -> int:
    return pids(run, "slurmft.node")[1]


def test_signals_to_any_process(
    undisturbed: Done, tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """Any stop signal, to any one process: all ranks stop at one step, and none is lost."""
    job = Following(*arguments(tiny_data, tiny_model, tmp_path))
    hits: list[tuple[Callable[[RunDir], int], signal.Signals, str]] = [
        (one_rank, signal.SIGUSR2, "step 20/"),
        (one_torchrun, signal.SIGTERM, "goes on after step"),
        (one_node, signal.SIGINT, "goes on after step"),
    ]
    for find, sent, after in hits:
        job.until(after)
        if after.startswith("goes"):
            job.until("step ")
        os.kill(find(job.run), sent)
    code, text = job.end(120)
    assert code == 0, text
    assert text.count("stopping after step") == 3
    assert "SIGUSR2 on rank" in text
    assert steps_twice(job.run) == 0
    assert_same(job.run, undisturbed.run)
    assert states(job.run)[-1] == "finished"
    assert states(job.run).count("requeued") == 3
    result = json.loads(job.run.result.read_text())
    expected = undisturbed.result
    for name in ("train_samples", "evaluate_samples", "steps", "metrics", "loss"):
        assert result[name] == expected[name]
    assert result["attempts"] == 4
    assert_gone(job.run)
