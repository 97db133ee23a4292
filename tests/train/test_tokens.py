"""Token classification: labels of words, entities, and a loss of tokens on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from slurmft.train.predict.heads import kind_of
from slurmft.train.predict_config import PredictConfig
from slurmft.train.tasks.tags import are_entities, entities, scheme
from slurmft.train.tasks.tokens import Task, without_token
from tests.conftest import Done, records, slurmft
from tests.support.models import (
    LABELS,
    WORDS,
    write_model,
    write_splits,
    write_words,
)
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
        "loss",
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


SCHEMES = {
    # Two entities of type X, the second one right behind the first, and one of type Y.
    "IOB1": "I-X I-X B-X O I-Y",
    "IOB2": "B-X I-X B-X O B-Y",
    "IOE1": "I-X E-X I-X O I-Y",
    "IOE2": "I-X E-X E-X O E-Y",
    "IOBES": "B-X E-X S-X O S-Y",
    "BILOU": "B-X L-X U-X O U-Y",
}


@pytest.mark.parametrize("separator", ["-", "_"])
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_of_entities(name: str, separator: str) -> None:
    """seqeval's strict mode found the same in 2,000 random texts of each scheme."""
    labels = SCHEMES[name].replace("-", separator).split()
    assert are_entities(labels)
    assert scheme(labels, [labels]) == name
    assert list(entities(labels)) == [("X", 0, 1), ("X", 2, 2), ("Y", 4, 4)]


@pytest.mark.parametrize(
    "names", [["NOUN", "VERB", "O"], ["O"], ["B-X", "NOUN"], ["0", "1"], ["X", "I"]]
)
def test_plain_tags(names: list[str]) -> None:
    assert not are_entities(names)


def write_tags(folder: Path, tags: dict[str, str]) -> Path:
    """Words whose tag follows from the word."""
    draw = random.Random(0)

    def row() -> dict[str, Any]:
        chosen = draw.choices([*tags, *WORDS[len(LABELS) :]], k=draw.randint(2, 6))
        return {"tokens": chosen, "tags": [tags.get(word, "O") for word in chosen]}

    sizes = {"train": 200, "validation": 60}
    return write_splits(
        folder, {k: [row() for _ in range(n)] for k, n in sizes.items()}
    )


@pytest.mark.parametrize(
    ("tags", "noted"),
    [
        ({"joy": "NOUN", "love": "VERB", "fear": "VERB"}, "plain tags"),
        ({"joy": "U-X", "love": "U-Y", "fear": "U-Y"}, "scheme BILOU"),
        ({"joy": "B_X", "love": "B_Y", "fear": "B_Y"}, "scheme IOB2"),
    ],
)
@pytest.mark.processes
def test_tags_of_any_scheme_are_learnt_and_predicted(
    tags: dict[str, str], noted: str, tmp_path: Path, tiny_model: Path
) -> None:
    data = write_tags(tmp_path / "data", tags)
    flags = ("--epochs", "6", "--batch-size", "8", "--learning-rate", "0.01")
    done = run(tmp_path / "runs", data, tiny_model, *flags)
    metrics = done.result["metrics"]
    is_plain = noted == "plain tags"
    first = "accuracy" if is_plain else "entity_f1"
    assert done.result["primary_metric"] == first
    assert metrics[first] > 0.9
    assert noted in done.out
    output = tmp_path / "predictions.jsonl"
    file = data / "validation.jsonl"
    where = ("--cluster", "local", "--follow", "--runs-dir", str(tmp_path / "more"))
    predicted = slurmft(
        *("predict", str(done.run.path), str(file), "--output", str(output), *where),
        imported=True,
    )
    assert predicted.code == 0, predicted.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    if is_plain:  # the scores of what was predicted, by scikit-learn
        predictions = [tag for row in rows for tag in row["prediction"]]
        true = [tag for row in rows for tag in row["tags"]]
        assert metrics["accuracy"] == pytest.approx(accuracy_score(true, predictions))
        f1 = f1_score(true, predictions, average="macro")
        assert metrics["f1_macro"] == pytest.approx(f1)
        return
    right = 0
    predicted_count = 0
    true_count = 0
    for row in rows:
        found = {(e["entity"], e["first"], e["last"]) for e in row["prediction"]}
        true_entities = set(entities(row["tags"]))
        right += len(found & true_entities)
        predicted_count += len(found)
        true_count += len(true_entities)
    expected = 2 * right / (predicted_count + true_count)
    assert metrics["entity_f1"] == pytest.approx(expected)


def test_a_word_without_tokens_has_no_label(tmp_path: Path, tiny_model: Path) -> None:
    """The words behind it keep theirs."""
    rows = [{"tokens": ["joy", "word1"], "tags": ["NOUN", "O"]}] * 2
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    task = task_of(data, tiny_model)
    table = task.unlabelled(task.tokenizer(), [[["joy", "", "love"]]])
    prepared = dataclasses.replace(
        task.prepare(), validation=table, labels=["NOUN", "O", "VERB"]
    )
    kind = kind_of(task, prepared, PredictConfig())
    logits = torch.zeros(1, len(table.tokens), 3)
    logits[0, 1, 0] = logits[0, 2, 2] = 1.0
    output = SimpleNamespace(logits=logits)
    batch = table.batch(np.arange(1), prepared.pad_id)
    values = kind.predict(lambda **_: output, batch, prepared).numpy()
    columns = kind.columns([[["joy", "", "love"]]], values)
    assert columns["prediction"] == [["NOUN", None, "VERB"]]


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


def run_ner_labels(
    encoded: Any, labels: list[list[int]], names: list[str], label_all_tokens: bool
) -> list[list[int]]:
    """As tokenize_and_align_labels of transformers' run_ner.py, and its map of B- to I-."""
    b_to_i_label = []
    for idx, label in enumerate(names):
        if label.startswith("B-") and label.replace("B-", "I-") in names:
            b_to_i_label.append(names.index(label.replace("B-", "I-")))
        else:
            b_to_i_label.append(idx)
    aligned = []
    for i, of_words in enumerate(labels):
        previous_word_idx = None
        label_ids = []
        for word_idx in encoded.word_ids(batch_index=i):
            if word_idx is None:
                label_ids.append(-100)
            elif word_idx != previous_word_idx:
                label_ids.append(of_words[word_idx])
            elif label_all_tokens:
                label_ids.append(b_to_i_label[of_words[word_idx]])
            else:
                label_ids.append(-100)
            previous_word_idx = word_idx
        aligned.append(label_ids)
    return aligned


@pytest.mark.parametrize("all_tokens", [True, False])
@pytest.mark.parametrize("max_length", [128, 6])
def test_tokens_are_labelled_as_by_run_ner(
    all_tokens: bool, max_length: int, tmp_path: Path
) -> None:
    """All tokens of a word in the training data alone: metrics are those of words."""
    model = write_model(tmp_path / "model")
    # "joy,love" is three tokens.
    rows: list[dict[str, Any]] = [
        {
            "tokens": ["joy,love", "fear", "word1,word2"],
            "tags": ["B-PER", "O", "B-LOC"],
        },
        {"tokens": ["fear,joy", "love,fear", "x"], "tags": ["B-PER", "I-PER", "O"]},
        {"tokens": ["word1,x"], "tags": ["I-LOC"]},
        {"tokens": [], "tags": []},
    ]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    task = task_of(data, model, label_all_tokens=all_tokens, max_length=max_length)
    found = task.prepare()
    encoded = task.tokenizer()(
        [row["tokens"] for row in rows],
        is_split_into_words=True,
        truncation=True,
        max_length=max_length,
    )
    labels = [[found.labels.index(tag) for tag in row["tags"]] for row in rows]
    for table, of_all in ((found.train, all_tokens), (found.validation, False)):
        expected = run_ner_labels(encoded, labels, found.labels, of_all)
        assert table.token_labels is not None
        assert table.token_labels.tolist() == [x for row in expected for x in row]
    pieces = sum(len(encoding.ids) for encoding in encoded.encodings)
    assert pieces == len(found.train.tokens)
    assert found.train.label_counts is not None
    words_in_data = sum(len(set(row.word_ids) - {None}) for row in encoded.encodings)
    assert (found.train.label_counts.sum() > words_in_data) == all_tokens


def test_all_tokens_of_what_is_no_word(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no labels of words"):
        TrainConfig.resolve(task="emotion", label_all_tokens=True)


def test_labels_that_are_numbers_are_names(tmp_path: Path, tiny_model: Path) -> None:
    """Without names for its numbers, data with the classes 1 and 2 has these."""
    rows = [{"tokens": ["joy", "word1"], "tags": [1, 2]}] * 3
    splits = {"train": rows, "validation": rows}
    data = write_splits(tmp_path / "numbers", splits)
    config = TrainConfig.resolve(
        task="token-classification", data=str(data), model=str(tiny_model)
    )
    tokens = tasks.get(localize(config)).prepare()
    assert tokens.labels == ["1", "2"]
    assert tokens.train.token_labels is not None
    labels = tokens.train.token_labels[: len(tokens.train.token_labels) // 3]
    assert labels[labels != IGNORED].tolist() == [0, 1]


@pytest.mark.parametrize("word", ["", "\u200b"])
def test_labels_of_words_without_a_token_are_named(
    word: str, tmp_path: Path, tiny_model: Path
) -> None:
    """In each split; a word without a token that is of no entity loses nothing."""
    good = {"tokens": ["joy", word], "tags": ["B-joy", "O"]}
    bad = {"tokens": ["joy", word], "tags": ["B-joy", "I-joy"]}
    data = write_splits(
        tmp_path / "data", {"train": [good, good], "validation": [good, bad]}
    )
    (warning,) = task_of(data, tiny_model).prepare().warnings
    assert "validation.jsonl': words without a token" in warning
    assert warning.endswith("evaluated: row 2")


def test_words_that_are_cut_are_not_without_a_token() -> None:
    words = [None, 1, 1, 3, None]
    assert without_token(words, 6) == [0, 2, 4, 5]
    assert without_token(words, 6, "right") == [0, 2]
    assert without_token(words, 6, "left") == [2, 4, 5]


def test_texts_are_cut_on_the_side_that_the_tokenizer_names(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"truncation_side": "left"}))
    row = {"tokens": ["joy", "love", "fear"], "tags": ["B-joy", "B-love", "B-fear"]}
    splits = {"train": [row, row], "validation": [row]}
    data = write_splits(tmp_path / "data", splits)
    tokens = task_of(data, model, max_length=4).prepare()
    assert tokens.train.token_labels is not None
    names = [tokens.labels[i] for i in tokens.train.token_labels[1:3]]
    assert names == ["B-love", "B-fear"]
    # Of the words that were cut off none is said to have no token.
    for split, warning in zip(("train", "validation"), tokens.warnings, strict=True):
        assert f"{split}.jsonl' are cut to 4 tokens: their beginnings" in warning
