"""When the validation split is evaluated (--evaluate-every); nothing else depends on it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import configure
from slurmft.train.loop.step_plan import Plan
from tests.conftest import Following, records, slurmft
from tests.support import recorded_warnings
from tests.train.test_resume import (
    arguments,
    assert_same,
    await_resumes,
    losses,
    one_rank,
)
from tests.train.test_trainer import EXACT, emotion, train

SIZES = (
    *("--nodes", "2", "--batch-size", "32", "--lr-schedule", "constant"),
    *("--epochs", "2", "--learning-rate", "0.01", "--warmup-ratio", "0"),
)


@pytest.mark.parametrize(
    ("evaluate_every", "limit", "expected"),
    [
        ("epochs:1", None, [4, 8, 12]),
        ("epochs:2", None, [8, 12]),
        ("epochs:9", None, [12]),
        ("steps:5", None, [5, 10, 12]),
        ("steps:4", None, [4, 8, 12]),
        ("steps:1", 3, [1, 2, 3]),
        ("epochs:1", 6, [4, 6]),
        ("end", None, [12]),
        ("end", 7, [7]),
    ],
)
def test_steps_of_evaluations(
    evaluate_every: str, limit: int | None, expected: list[int]
) -> None:
    config = TrainConfig.resolve(
        evaluate_every=evaluate_every, max_steps=limit, batch_size=16, epochs=3
    )
    plan = Plan(
        config=config,
        world_size=1,
        precision="fp32",
        train_samples=64,
        validation_samples=8,
    )
    steps = [0]
    while steps[-1] < plan.total_steps:
        steps.append(plan.next_evaluation(steps[-1]))
    assert steps[1:] == expected
    assert plan.evaluations == len(expected)


@pytest.mark.parametrize(
    ("flags", "evaluations"),
    [
        ({"early_stopping": 2, "evaluate_every": "epochs:100"}, 1),
        ({"early_stopping": 2, "epochs": 3}, 3),
        ({"early_stopping": 2, "epochs": 4}, None),
        ({"early_stopping": 1, "evaluate_every": "steps:5", "max_steps": 7}, 2),
        ({"early_stopping": 1, "evaluate_every": "steps:3", "max_steps": 7}, None),
        ({"evaluate_every": "epochs:100"}, None),
    ],
)
def test_early_stopping_that_cannot_be(
    flags: dict[str, Any], evaluations: int | None
) -> None:
    """The last evaluation ends the run in any case, and the first one is the best so far."""
    with recorded_warnings() as caught:
        configure(flags)
    texts = [str(each.message) for each in caught]
    warned = [text for text in texts if "--early-stopping" in text]
    assert len(warned) == (evaluations is not None)
    if evaluations is not None:
        assert f"at most {evaluations} evaluation(s)" in warned[0]


@pytest.mark.parametrize(
    ("samples", "least", "steps", "left_out"),
    [(64, 1, 4, 0), (65, 1, 5, 0), (65, 2, 4, 1), (66, 2, 5, 0), (9, 2, 1, 0)],
)
def test_steps_of_an_epoch(samples: int, least: int, steps: int, left_out: int) -> None:
    config = TrainConfig.resolve(batch_size=16)
    plan = Plan(
        config=config,
        world_size=1,
        precision="fp32",
        train_samples=samples,
        validation_samples=8,
        least_rows=least,
    )
    assert (plan.steps_per_epoch, plan.left_out) == (steps, left_out)


@pytest.mark.parametrize(
    "text", ["", "epoch", "steps:0", "steps:-1", "epochs:0.5", "7"]
)
def test_periods_that_cannot_be_right(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        TrainConfig(evaluate_every=text)
    assert text in raised.value.message


def test_one_evaluation_ends_no_training_early() -> None:
    with pytest.raises(UsageError, match="one evaluation, after all training"):
        TrainConfig(evaluate_every="end", early_stopping=1)


@pytest.mark.extra("training")
@pytest.mark.processes
def test_training_does_not_depend_on_evaluations(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """Those within an epoch have the values of a run that ends there; 8 steps in all."""
    flags = (*emotion(tiny_data, tiny_model), *EXACT, *SIZES)
    runs = {}
    for name, options in {
        "steps": ("--evaluate-every", "steps:3"),
        "end": ("--evaluate-every", "end"),
        "ends there": ("--max-steps", "3"),
    }.items():
        done = train(tmp_path / name, *flags, *options)
        assert done.code == 0, done.err
        runs[name] = done.run
    evaluations = records(runs["steps"], "epoch")
    assert [each["step"] for each in evaluations] == [3, 6, 8]
    assert [each["step"] for each in records(runs["end"], "epoch")] == [8]
    assert losses(runs["steps"]) == losses(runs["end"])
    (only,) = records(runs["ends there"], "epoch")
    assert evaluations[0]["metrics"] == only["metrics"]
    assert evaluations[-1]["metrics"] == records(runs["end"], "epoch")[0]["metrics"]


@pytest.mark.extra("training")
@pytest.mark.processes
def test_resume_between_evaluations_is_exact(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    runs = tmp_path / "cut"
    every = ("--evaluate-every", "steps:7")
    job = Following(*arguments(tiny_data, tiny_model, runs), *every, imported=True)
    job.at_step(9)
    os.kill(one_rank(job.run), signal.SIGTERM)
    await_resumes(job.run, 1)
    code, text = job.end()
    assert code == 0, text
    whole = slurmft(
        *("submit", "--follow", *every),
        *arguments(tiny_data, tiny_model, tmp_path / "whole"),
        imported=True,
    )
    assert whole.code == 0, whole.err
    assert_same(job.run, whole.run)
    evaluated = {each["step"] for each in records(job.run, "epoch")}
    assert evaluated == {*range(7, 154, 7), 153}
