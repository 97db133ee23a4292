"""The validation split that --validation-fraction takes from the training data."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import GroupShuffleSplit, train_test_split

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.commands import data as data_command
from slurmft.train.config import TrainConfig
from slurmft.train.data.token_data import TokenData
from slurmft.train.login import inputs
from slurmft.train.login.sources import check_splits_in_cache, localize
from slurmft.train.login.validation_part import Part
from slurmft.train.tasks.pretrained import Pretrained
from tests.conftest import assert_two_lines, records, slurmft
from tests.support.models import (
    write_cached,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_trainer import EXACT, train


def tickets(counts: dict[str, int], seed: int = 0) -> list[dict[str, Any]]:
    """Rows of some classes, in any order."""
    labels = [label for label, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(labels)
    # Each text holds a number: they all differ.
    return [
        {"text": f"joy word{row % 50} {row}", "label": label}
        for row, label in enumerate(labels)
    ]


def prepare(data: Path, model: Path, **given: Any) -> TokenData:
    return task_of(data, model, **given).prepare()


def task_of(data: Path, model: Path, **given: Any) -> Pretrained:
    values = {"task": "text-classification", "validation_fraction": 0.2} | given
    config = TrainConfig.resolve(data=str(data), model=str(model), **values)
    task = tasks.get(localize(config))
    assert isinstance(task, Pretrained)
    return task


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 1 / 3, 0.5])
@pytest.mark.parametrize(
    "counts", [[50, 50], [128, 40, 13], [700, 203, 61, 31, 7], [5, 4, 9]]
)
def test_classes_are_stratified_as_by_scikit_learn(
    counts: list[int], fraction: float
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(1).shuffle(labels)
    try:
        _, theirs = train_test_split(
            labels, test_size=fraction, stratify=labels, random_state=0
        )
    except ValueError:  # fewer rows than classes in a part
        part = Part(fraction, 0, is_validation=True)
        with pytest.raises(UsageError, match="at least"):
            part.rows(len(labels), labels.tolist(), None, "data")
        return
    masks = []
    for is_validation in (True, False):
        part = Part(fraction, 0, is_validation)
        masks.append(part.rows(len(labels), labels.tolist(), None, "data"))
    assert masks[0] == [not each for each in masks[1]]
    ours = np.bincount(labels[masks[0]], minlength=len(counts))
    expected = np.bincount(theirs, minlength=len(counts))
    # Where remainders are equal, scikit-learn draws the class that gets the row.
    sizes = np.array(counts) * (len(labels) - len(theirs))
    remainders = sizes % len(labels)
    if len(set(remainders)) == len(counts):
        assert ours.tolist() == expected.tolist()
    assert ours.sum() == expected.sum()
    assert np.abs(ours - expected).max() <= 1


def test_parts_depend_on_data_fraction_and_seed_alone() -> None:
    classes = [row % 3 for row in range(90)]
    part = Part(0.1, 42, is_validation=True)
    rows = part.rows(90, classes, None, "data")
    assert rows == part.rows(90, classes, None, "data")
    assert rows != Part(0.1, 43, is_validation=True).rows(90, classes, None, "data")
    # These rows on every machine, and in every later release.
    plain = part.rows(20, None, None, "data")
    assert [row for row, is_chosen in enumerate(plain) if is_chosen] == [1, 19]


def test_questions_of_a_text_stay_together(tmp_path: Path) -> None:
    contexts = [f"text {row // 5}" for row in range(100)]
    rows = Part(0.2, 1, is_validation=True).rows(100, None, contexts, "data")
    validation = {contexts[row] for row in range(100) if rows[row]}
    training = {contexts[row] for row in range(100) if not rows[row]}
    assert not validation & training
    # As many of them as scikit-learn takes.
    splitter = GroupShuffleSplit(1, test_size=0.2, random_state=0)
    _, theirs = next(splitter.split(contexts, groups=contexts))
    assert len(theirs) == sum(rows)
    data = write_squad(tmp_path / "squad", train=20, validation=2)
    (data / "validation.jsonl").unlink()
    config = TrainConfig.resolve(task="squad", data=str(data), validation_fraction=0.3)
    splits, _ = inputs.look(localize(config))
    assert sum(split.rows for split in splits) == 20


def test_ranks_have_what_submission_showed(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tickets({"delivery": 60, "billing": 30, "other": 11})
    data = write_splits(tmp_path / "data", {"train": rows})
    found = prepare(data, tiny_model)
    assert (len(found.train), len(found.validation)) == (80, 21)
    # Each row is in one of them.
    counts = [np.bincount(table.labels) for table in (found.train, found.validation)]
    assert (counts[0] + counts[1]).tolist() == [30, 60, 11]
    note, *_ = found.notes
    assert "validation: 21 of the 101 rows of" in note
    assert "by --validation-fraction 0.2, stratified by label, seed 42" in note
    again = prepare(data, tiny_model, seed=7)
    assert (again.validation.tokens == found.validation.tokens).all()
    other = prepare(data, tiny_model, data_seed=7)
    assert other.validation.tokens.tolist() != found.validation.tokens.tolist()
    data_command.main([str(data), "--validation-fraction", "0.2", "--json"])
    shown = json.loads(capsys.readouterr().out)["splits"]
    names = found.labels
    for split, of_classes in zip(("train", "validation"), counts, strict=True):
        expected = dict(zip(names, of_classes.tolist(), strict=True))
        assert shown[split]["classes"] == expected
    assert shown["validation"]["also_in_train"] == 0
    sources = task_of(data, tiny_model).sources()
    assert sources != task_of(data, tiny_model, data_seed=7).sources()


def test_rows_that_are_wrong_have_their_numbers(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = tickets({"delivery": 30, "billing": 30})
    rows[40]["text"] = 7
    data = write_splits(tmp_path / "data", {"train": rows})
    config = TrainConfig.resolve(
        task="text-classification", data=str(data), validation_fraction=0.1
    )
    for read in (
        lambda: inputs.check(localize(config)),
        lambda: prepare(data, tiny_model),
    ):
        with pytest.raises(UsageError, match="row 41 has 7 in the column"):
            read()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "mnli"}, "its splits are train, validation_matched"),
        ({"task": "synthetic", "data": None}, "it generates its data"),
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0 must be above 0"),
        ({}, "classes of one row, which cannot be in both splits: 'rare' (row "),
        ({"validation_fraction": 0.01}, "each needs at least 3 rows"),
    ],
)
def test_requests_that_cannot_be_right(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    counts = {"a": 20, "b": 20, "rare": 1}
    if "at least" in message:
        counts["rare"] = 2
    data = write_splits(tmp_path / "data", {"train": tickets(counts)})
    values = {"task": "text-classification", "validation_fraction": 0.2} | given
    with pytest.raises(UsageError) as error:
        inputs.check(localize(TrainConfig.resolve(**({"data": str(data)} | values))))
    assert message in error.value.message
    assert error.value.hint or "must be" in message


def test_a_validation_split_that_is_there(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tickets({"a": 20, "b": 20})
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    message = "the data has a validation split already"
    with pytest.raises(UsageError, match=message):
        task_of(data, tiny_model)

    def load(*arguments: object, split: str) -> Any:
        import datasets

        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {splits}.')
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr("datasets.load_dataset", load)
    splits = ["train", "validation"]
    task = tasks.get(
        TrainConfig.resolve(
            task="text-classification", data="my/tickets", validation_fraction=0.2
        )
    )
    assert isinstance(task, Pretrained)
    with pytest.raises(UsageError, match=message):
        task.rows("train")
    splits = ["train"]
    assert len(task.rows("train")) + len(task.rows("validation")) == 40
    (data / "validation.jsonl").unlink()
    (data / "train.jsonl").rename(data / "train.txt")
    with pytest.raises(UsageError, match="takes rows"):
        task_of(data, tiny_model, task="causal-lm")


@pytest.mark.processes
def test_a_part_of_a_data_set_of_the_hub(tmp_path: Path, tiny_model: Path) -> None:
    """From the cache: what `data` shows, and what is refused at submission."""
    rows = tickets({"a": 40, "b": 20})
    home = tmp_path / "home"
    write_cached(home, "team/only", {"train": rows})
    write_cached(home, "team/both", {"train": rows, "validation": rows[:9]})
    wrong = [*rows[:41], rows[41] | {"text": None}, *rows[42:]]
    write_cached(home, "team/wrong", {"train": wrong})
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    flags = ("--task", "text-classification", "--validation-fraction", "0.2")
    done = slurmft("data", "team/only", *flags, "--json", env=env)
    assert done.code == 0, done.err
    splits = json.loads(done.out)["splits"]
    assert [split["classes"] for split in splits.values()] == [
        {"a": 32, "b": 16},
        {"a": 8, "b": 4},
    ]
    for split in splits.values():
        assert split["part"].startswith("by --validation-fraction 0.2, stratified by")
    done = slurmft("data", "team/wrong", *flags, env=env)
    assert_two_lines(done, "'team/wrong (train)': row 42 has no text")
    submit = ("submit", "--cluster", "local", "--dry-run", "--model", str(tiny_model))
    has_one = "the data has a validation split already: 'team/both'"
    assert_two_lines(slurmft(*submit, "--data", "team/both", *flags, env=env), has_one)
    done = slurmft(*submit, "--data", "team/only", *flags[:2], env=env)
    assert_two_lines(done, "--data 'team/only' has no validation split in the cache")
    assert "--validation-fraction 0.1 takes it" in done.err


def test_splits_of_one_of_several_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GLUE the cache may have other tasks than the one that is trained."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    train = TrainConfig.resolve(task="mnli")
    for subset, is_refused in (("mrpc", False), ("default", True)):
        folder = tmp_path / "nyu-mll___glue" / subset / "0.0.0" / "hash"
        folder.mkdir(parents=True)
        splits: dict[str, Any] = {"train": {}, "validation": {}}
        (folder / "dataset_info.json").write_text(json.dumps({"splits": splits}))
        if not is_refused:
            check_splits_in_cache(train)
            continue
        with pytest.raises(UsageError, match="no validation_matched split in the"):
            check_splits_in_cache(train)


def test_kept_tokens_of_other_data_with_the_same_rows(
    tmp_path: Path, tiny_model: Path
) -> None:
    """They are not taken where --validation-fraction is refused."""
    rows = tickets({"a": 20, "b": 20})
    data = write_splits(tmp_path / "data", {"train": rows})
    task = task_of(data, tiny_model)
    assert task.sources() is not None
    write_splits(tmp_path / "more", {"validation": rows})
    (tmp_path / "more/validation.jsonl").rename(data / "validation.jsonl")
    with pytest.raises(UsageError, match="has a validation split already"):
        task.sources()


def test_classes_of_words_are_drawn_at_random(tmp_path: Path, tiny_model: Path) -> None:
    data = write_words(tmp_path / "data", train=30, validation=1)
    (data / "validation.jsonl").unlink()
    found = prepare(data, tiny_model, task="token-classification")
    assert (len(found.train), len(found.validation)) == (24, 6)
    assert any("at random" in note for note in found.notes)


@pytest.mark.processes
def test_a_run_says_what_it_validates_on(tmp_path: Path, tiny_model: Path) -> None:
    rows = tickets({"delivery": 40, "billing": 40})
    data = write_splits(tmp_path / "data", {"train": rows})
    flags = ["--task", "text-classification", "--data", str(data)]
    flags += [
        "--model",
        str(tiny_model),
        "--validation-fraction",
        "0.2",
        "--nodes",
        "2",
    ]
    done = train(tmp_path, *EXACT, *flags, "--max-steps", "2", "--batch-size", "4")
    assert done.code == 0, done.err
    (start,) = records(done.run, "start")
    line, *notes = start["data"]
    assert line.startswith("train.jsonl: train, by --validation-fraction 0.2, strat")
    assert "validation, by --validation-fraction 0.2, stratified by label" in line
    assert any(note.startswith("validation: 16 of the 80 rows") for note in notes)
    assert len(notes) == len(set(notes))
    counts = Counter(row["label"] for row in rows)
    assert counts == {"delivery": 40, "billing": 40}
    assert done.result["classes"]["billing"]["support"] == 8


def test_classes_of_two_rows_in_two_halves(tmp_path: Path, tiny_model: Path) -> None:
    """The fraction leaves one row of each class: it is named, and not the column."""
    rows = tickets({f"class{number}": 2 for number in range(8)})
    data = write_splits(tmp_path / "data", {"train": rows})
    for read in (
        lambda: inputs.check(task_of(data, tiny_model, validation_fraction=0.5).config),
        lambda: prepare(data, tiny_model, validation_fraction=0.5),
    ):
        with pytest.raises(
            UsageError,
            match=r"the training split, by --validation-fr.* 0\.5.*another label in",
        ) as error:
            read()
        assert "give another fraction" in str(error.value.hint)


def test_a_seed_that_draws_nothing(tmp_path: Path, tiny_model: Path) -> None:
    rows = tickets({"a": 5, "b": 5})
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    with pytest.raises(UsageError, match="--data-seed 7 draws nothing without"):
        task_of(data, tiny_model, validation_fraction=None, data_seed=7)


@pytest.mark.parametrize(
    "given",
    [
        {"text_pair_column": "text"},
        {"label_column": "text"},
        {"task": "embeddings", "text_pair_column": "other, text"},
        {"task": "multi-label", "label_column": "joy,text"},
    ],
)
def test_one_column_for_two_things(
    given: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    rows = tickets({"a": 5, "b": 5})
    data = write_splits(tmp_path / "data", {"train": rows})
    with pytest.raises(UsageError, match="column text is the column of --text-column"):
        task_of(data, tiny_model, text_column="text", **given)
