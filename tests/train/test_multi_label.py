"""Texts with any number of classes, and texts with a number of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmft.core.errors import SlurmftError, SlurmftWarning, UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from tests.conftest import Done, records
from tests.support.models import (
    LABELS,
    write_many_labels,
    write_model,
    write_pairs,
    write_splits,
)
from tests.train.test_trainer import EXACT, train

LEARN = (
    *EXACT,
    "--learning-rate",
    "0.01",
    "--lr-schedule",
    "constant",
    "--warmup-steps",
    "4",
)


def config_of(task: str, data: Path, model: Path, **given: Any) -> TrainConfig:
    return localize(
        TrainConfig.resolve(task=task, data=str(data), model=str(model), **given)
    )


def test_a_label_twice_in_a_row(tmp_path: Path, tiny_model: Path) -> None:
    """It counts once, and a warning names the row."""
    rows = [
        {"text": "a", "labels": ["joy"]},
        {"text": "b", "labels": ["joy", "fear", "joy"]},
    ]
    write_splits(tmp_path / "data", {"train": rows, "validation": rows[:1]})
    train = config_of("multi-label", tmp_path / "data", tiny_model, batch_size=1)
    with pytest.warns(SlurmftWarning) as caught:
        facts = inputs.check(train)
    what = next(iter(facts.values()))["what"]
    assert str(what).startswith("2 rows, 2 classes: 'joy' 2 (67 %), 'fear' 1 (33 %)")
    remarks = [str(warning.message) for warning in caught]
    assert (
        "nothing reads the second of two equal labels of a row: row 2 is the first that has it"
        in " ".join(remarks)
    )


@pytest.mark.parametrize("flags", [[0, 1, 0], [1.0, 0.0, 0.0], [False, True, True]])
def test_a_list_of_0_and_1_of_each_class(
    flags: list[Any], tmp_path: Path, tiny_model: Path
) -> None:
    """It holds no classes: 0 and 1 would be two, of which every text has one or both."""
    rows = [{"text": "a", "labels": [2]}, {"text": "b", "labels": flags}]
    write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    train = config_of("multi-label", tmp_path / "data", tiny_model)
    with pytest.raises(UsageError) as caught:
        inputs.check(train)
    assert f"row 2 has the labels {flags}, a 0 or 1 of each class" in str(caught.value)
    assert "--label-column joy,love,fear" in str(caught.value.hint)


def test_classes_called_0_and_1(tmp_path: Path, tiny_model: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "labels": [0, 1]},
        {"text": "b", "labels": [2, 1]},
    ]
    others = [row | {"text": "c"} for row in rows]
    write_splits(tmp_path / "data", {"train": rows, "validation": others})
    train = config_of("multi-label", tmp_path / "data", tiny_model, batch_size=1)
    what = next(iter(inputs.check(train).values()))["what"]
    assert str(what).startswith("2 rows, 3 classes: ")


def run(folder: Path, task: str, data: Path, model: Path, *flags: str) -> Done:
    done = train(
        folder,
        "--task",
        task,
        "--data",
        str(data),
        "--model",
        str(model),
        *LEARN,
        *flags,
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_labels(
        tmp_path_factory.mktemp("lists") / "data", train=600, validation=67
    )


@pytest.fixture(scope="module")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "quick", spread=0.3)


@pytest.fixture(scope="module")
def learnt(
    tmp_path_factory: pytest.TempPathFactory, lists: Path, quick_model: Path
) -> Done:
    folder = tmp_path_factory.mktemp("one")
    return run(
        folder, "multi-label", lists, quick_model, "--epochs", "4", "--batch-size", "16"
    )


def test_classes_are_learnt(learnt: Done) -> None:
    metrics = learnt.result["metrics"]
    assert list(metrics) == ["f1_micro", "f1_macro", "subset_accuracy", "loss"]
    assert metrics["f1_micro"] > 0.85
    assert metrics["f1_macro"] > 0.8
    assert metrics["subset_accuracy"] > 0.6
    from transformers import pipeline

    classify = pipeline(
        "text-classification", str(learnt.run.path / "model"), top_k=None
    )
    one, none = classify(["joy word1 word2", "word1 word2"])
    assert [each["label"] for each in one if each["score"] > 0.5] == ["joy"]
    assert len(none) == 6
    assert all(each["score"] < 0.5 for each in none)  # their sum is not 1
    card = (learnt.run.path / "model/README.md").read_text()
    assert "top_k=None" in card


@pytest.mark.extra("training")
def test_two_ranks_learn_the_same(
    learnt: Done, tmp_path: Path, lists: Path, quick_model: Path
) -> None:
    flags = ("--epochs", "1", "--batch-size", "8", "--nodes", "2")
    done = run(tmp_path, "multi-label", lists, quick_model, *flags)
    steps = zip(records(done.run, "step"), records(learnt.run, "step"), strict=False)
    for step, other in list(steps)[:4]:
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
    first = records(learnt.run, "epoch")[0]["metrics"]
    assert done.result["metrics"] == pytest.approx(first, rel=1e-4)


def test_columns_of_0_and_1(tmp_path: Path, tiny_model: Path) -> None:
    data = write_many_labels(tmp_path / "data", train=50, validation=9, columns=4)
    config = config_of(
        "multi-label", data, tiny_model, label_column=",".join(LABELS[:4])
    )
    found = inputs.check(config)
    assert "4 classes" in found[str(data / "train.csv")]["what"]
    tokens = tasks.get(config).prepare()
    assert tokens.labels == LABELS[:4]  # in the order of the columns
    first = (data / "train.csv").read_text().splitlines()[1].split(",")
    assert tokens.train.labels[0].tolist() == [int(cell) for cell in first[1:]]
    assert tokens.train.labels.shape == (50, 4)


def test_scores(lists: Path, tiny_model: Path) -> None:
    task = tasks.get(config_of("multi-label", lists, tiny_model))
    data = task.prepare()
    predictions = data.validation.labels.astype(np.int64)
    assert set(task.compute(predictions, data).values()) == {1.0}
    predictions[0] = 1 - predictions[0]
    found = task.compute(predictions, data)
    assert found["subset_accuracy"] == 66 / 67
    wanted = data.validation.labels.astype(bool)
    both = (predictions.astype(bool) & wanted).sum()
    assert found["f1_micro"] == pytest.approx(
        2 * both / (predictions.sum() + wanted.sum())
    )
    predictions[3] = -1
    with pytest.raises(SlurmftError, match="NaN for 1 of 67"):
        task.compute(predictions, data)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("joy", "row 3 has the labels 'joy', which are no list"),
        (["joy", None], "row 3 has the label None"),
        (["envy"], "row 3 has the label 'envy'"),
        ([["joy"]], r"row 3 has the label \['joy'\]"),
    ],
)
def test_labels_that_are_wrong(
    labels: Any, message: str, lists: Path, tmp_path: Path, tiny_model: Path
) -> None:
    rows = [
        json.loads(line) for line in (lists / "train.jsonl").read_text().splitlines()
    ]
    wrong = [*rows[:2], {"text": "a", "labels": labels}, *rows[3:5]]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": wrong})
    with pytest.raises(UsageError, match=message):
        inputs.check(config_of("multi-label", data, tiny_model))


def test_no_labels_and_cells_that_are_neither_0_nor_1(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "labels": []}] * 4
    data = write_splits(tmp_path / "none", {"train": rows, "validation": rows})
    with pytest.raises(UsageError, match="no row has a label"):
        inputs.check(config_of("multi-label", data, tiny_model))
    rows = [
        {"text": "a", "joy": 1, "love": "0"},
        {"text": "a", "joy": 1, "love": "yes"},
    ]
    data = write_splits(tmp_path / "cells", {"train": rows, "validation": rows})
    with pytest.raises(UsageError, match="row 2 has 'yes' in the column 'love'"):
        inputs.check(
            config_of("multi-label", data, tiny_model, label_column="joy, love")
        )


# --- numbers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"train": 400, "validation": 67}
    return write_pairs(
        tmp_path_factory.mktemp("numbers") / "data", ("text", None), 0, sizes
    )


@pytest.mark.extra("training")
@pytest.mark.processes
def test_numbers_are_learnt(tmp_path: Path, numbers: Path, tiny_model: Path) -> None:
    """Equally on two ranks."""
    same = ("text-regression", numbers, tiny_model, "--max-length", "10")
    one = run(tmp_path / "1", *same, "--batch-size", "16", "--epochs", "4")
    two = run(
        tmp_path / "2", *same, "--batch-size", "8", "--epochs", "1", "--nodes", "2"
    )
    metrics = one.result["metrics"]
    assert list(metrics) == ["pearson", "spearman", "rmse", "loss"]
    assert metrics["pearson"] > 0.98
    assert metrics["rmse"] < 0.4
    assert metrics["loss"] == pytest.approx(metrics["rmse"] ** 2)
    first = records(one.run, "epoch")[0]["metrics"]
    assert two.result["metrics"] == pytest.approx(first, abs=1e-4)
    assert "are cut to 10 tokens: their ends are not seen" in one.out + one.err


def test_a_label_that_is_no_number(
    numbers: Path, tmp_path: Path, tiny_model: Path
) -> None:
    rows = [{"text": "joy", "label": "3.5"}, {"text": "love", "label": "a lot"}]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    with pytest.raises(UsageError, match="row 2 has the label 'a lot'"):
        inputs.check(config_of("text-regression", data, tiny_model))
