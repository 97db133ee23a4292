"""Token classification: labels of words, entities, and a loss of tokens on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from slurmft.train.tasks.tokens import Task, entities
from tests.conftest import Done, records
from tests.support.models import write_splits, write_words
from tests.train.test_trainer import EXACT, train

TASK = ("--task", "token-classification")


def task_of(data: Path, model: Path, **given: object) -> Task:
    config = TrainConfig.resolve(
        task="token-classification", data=str(data), model=str(model), **given
    )
    found = tasks.get(localize(config))
    assert isinstance(found, Task)
    return found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(
        tmp_path_factory.mktemp("words") / "data", train=408, validation=51
    )


def run(folder: Path, words: Path, model: Path, *flags: str) -> Done:
    done = train(
        folder, *TASK, "--data", str(words), "--model", str(model), *EXACT, *flags
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def one_rank(
    tmp_path_factory: pytest.TempPathFactory, words: Path, tiny_model: Path
) -> Done:
    """Steps of 16 texts; 8 are left for the last of each epoch."""
    folder = tmp_path_factory.mktemp("one")
    flags = (
        "--lr-schedule",
        "constant",
        "--warmup-steps",
        "4",
        "--batch-size",
        "16",
        "--epochs",
        "4",
        "--learning-rate",
        "0.01",
        "--log-every",
        "1",
    )
    return run(folder, words, tiny_model, *flags)


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        ("--nodes", "4", "--batch-size", "4"),
        ("--nodes", "2", "--batch-size", "4", "--gradient-accumulation-steps", "2"),
        ("--nodes", "2", "--batch-size", "8", "--batching", "dynamic"),
    ],
    ids=["4x4", "2x2x4", "padded"],
)
def test_loss_of_tokens_does_not_depend_on_ranks_and_micro_steps(
    layout: tuple[str, ...],
    one_rank: Done,
    tmp_path: Path,
    words: Path,
    tiny_model: Path,
) -> None:
    """Texts have 1 to 20 labels each: weighted by texts, the first loss would differ by percents.
    The last step of the epoch has fewer texts than others."""
    done = run(
        tmp_path, words, tiny_model, *layout,
        *("--epochs", "1", "--learning-rate", "0.01", "--log-every", "1"),
        *("--lr-schedule", "constant", "--warmup-steps", "4"),
    )  # fmt: skip
    found = [r["loss"] for r in records(done.run, "step")]
    expected = [r["loss"] for r in records(one_rank.run, "step")][:26]
    assert found[:10] == pytest.approx(expected[:10], abs=1e-6)
    # what is learnt differs by rounding, too
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.processes
def test_weights_of_classes_are_those_of_the_loss_alone(
    tmp_path: Path, words: Path, tiny_model: Path
) -> None:
    """The evaluation counts words, not their weights."""
    flags = ("--class-weights", "balanced", "--max-steps", "1", "--batch-size", "16")
    assert (
        0 <= run(tmp_path, words, tiny_model, *flags).result["metrics"]["accuracy"] <= 1
    )


def test_entities_are_learnt(one_rank: Done) -> None:
    metrics = one_rank.result["metrics"]
    assert set(metrics) == {
        "entity_f1",
        "entity_precision",
        "entity_recall",
        "accuracy",
    }
    assert metrics["entity_f1"] > 0.95
    model = one_rank.run.path / "model"
    from transformers import AutoModelForTokenClassification, pipeline

    tagger = pipeline("token-classification", str(model), aggregation_strategy="simple")
    assert [e["entity_group"] for e in tagger("joy fear word4 word5")] == ["joy"]
    config = AutoModelForTokenClassification.from_pretrained(model).config
    assert config.id2label[0] == "B-joy"


def test_only_the_first_token_of_a_word_has_a_label(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = [
        {"tokens": ["joy", "word1-word2", "love"], "tags": ["B-joy", "O", "B-love"]}
    ] * 2
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    found = task_of(data, tiny_model).prepare()
    names = found.labels
    # I- of each type as well
    assert names == ["B-joy", "B-love", "I-joy", "I-love", "O"]
    assert found.train.token_labels is not None
    assert found.train.token_labels[: found.train.offsets[1]].tolist() == [
        IGNORED, 0, 4, IGNORED, IGNORED, 1, IGNORED,
    ]  # fmt: skip


def test_entities() -> None:
    """As seqeval's get_entities has them, which found the same in 40,000 random texts."""
    for labels, expected in (
        ("O B-X I-X O", [("X", 1, 2)]),
        ("I-X I-X I-Y", [("X", 0, 1), ("Y", 2, 2)]),
        ("B-X B-X I-Y I-X", [("X", 0, 0), ("X", 1, 1), ("Y", 2, 2), ("X", 3, 3)]),
        ("S-X E-X B-Y E-Y I-Y", [("X", 0, 0), ("X", 1, 1), ("Y", 2, 3), ("Y", 4, 4)]),
        ("O O", []),
    ):
        assert list(entities(labels.split())) == expected, labels


def test_scores(words: Path, tiny_model: Path) -> None:
    task = task_of(words, tiny_model)
    found = task.compute(np.array([[1, 2, 1, 5, 6], [1, 2, 3, 1, 2]]), task.prepare())
    assert found["entity_precision"] == 0.5
    assert found["entity_recall"] == 0.5
    assert found["entity_f1"] == 0.5
    assert found["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 3 has 2 words and 1 labels"),
        (
            {"tokens": "a b", "tags": ["O", "O"]},
            "row 3 has the words 'a b', which are no list",
        ),
        ({"tokens": ["a", 5], "tags": ["O", "O"]}, "row 3 has the word 5"),
        ({"tokens": ["a"], "tags": [None]}, "row 3 has the label None"),
        ({"tokens": ["a"], "tags": ["B-new"]}, "row 3 has the label 'B-new'"),
    ],
)
def test_rows_that_are_wrong(
    row: dict[str, object], message: str, words: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """Told at submission, with the row."""
    rows = [
        json.loads(line) for line in (words / "train.jsonl").read_text().splitlines()
    ]
    data = write_splits(
        tmp_path / "data", {"train": rows, "validation": [*rows[:2], row, *rows[3:5]]}
    )
    config = TrainConfig.resolve(task=TASK[1], data=str(data), model=str(tiny_model))
    with pytest.raises(UsageError, match=message):
        inputs.check(localize(config))
