"""The predictions of `slurmft predict`, by the kind of the task: as numbers, and as columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from slurmft.train.data.tables import IGNORED, Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.task_facts import module_name
from slurmft.train.tasks.tags import are_entities, entities

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of predictions: as numbers, of a batch, and as columns of a file, of all rows."""

    shape: tuple[int, ...]
    """The shape of one prediction."""
    dtype: type
    predict: Callable[[Any, Batch, TokenData], Any]
    """Returns the predictions of a batch: (batch, *shape)."""
    columns: Callable[[Sequence[Any], np.ndarray], Columns]
    """Returns columns, from the texts of all rows and what is predicted of them."""


def kind_of(task: Any, data: TokenData) -> Kind:
    """Returns what a task's model predicts of the rows of `data`."""
    match module_name(task.config.task):
        case "multi_label":
            shape = (len(data.labels),)
            columns = partial(_several_labels, data.labels)
            return Kind(shape, np.float64, _probabilities, columns)
        case "tokens":
            places = data.validation.token_labels
            assert places is not None  # of rows of words
            most = max(0, int(places.max())) + 1
            predict = partial(_labels_of_words, most)
            columns = partial(_tags, data.labels)
            if are_entities(data.labels):
                columns = partial(_entities, data.labels)
            return Kind((most,), np.int64, predict, columns)
        case "seq2seq":
            # `generate` returns the token that starts the decoder, too.
            most = task.config.max_target_length + 1
            assert data.folder is not None  # ranks load it
            tokenizer = AutoTokenizer.from_pretrained(data.folder / "tokenizer")
            predict = partial(_generated, most, tokenizer.pad_token_id)
            columns = partial(_texts, tokenizer)
            return Kind((most,), np.int64, predict, columns)
        case _ if not data.labels:
            return Kind((), np.float64, _numbers, _columns_of_numbers)
        case _:
            columns = partial(_labels, data.labels)
            return Kind((2,), np.float64, _best_label, columns)


# --- classes --------------------------------------------------------------------------------------


def _best_label(model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
    """Returns the class and its probability: (batch, 2)."""
    output = model(**batch.inputs)
    # In double: probabilities near 1 stay apart.
    logits = output.logits.double()
    probabilities = logits.softmax(-1)
    best = probabilities.max(-1)
    # Both in one array: an evaluation gathers one from each rank.
    classes = best.indices.double()
    return torch.stack([classes, best.values], 1)


def _labels(names: list[str], texts: Sequence[Any], values: np.ndarray) -> Columns:
    classes = values[:, 0].astype(int)
    probabilities = values[:, 1].round(6)
    return {
        "prediction": [names[number] for number in classes],
        "probability": probabilities.tolist(),
    }


def _probabilities(model: Any, batch: Batch, data: TokenData) -> Any:
    output = model(**batch.inputs)
    # In double, as above.
    logits = output.logits.double()
    return logits.sigmoid()


def _several_labels(
    names: list[str],
    texts: Sequence[Any],
    values: np.ndarray,
) -> Columns:
    """Returns the labels that are as probable as not, or more."""
    predictions = []
    probabilities = []
    for row in values:
        # The evaluation chooses the same classes: a logit of 0 is a probability of 0.5.
        chosen = np.flatnonzero(row >= 0.5)
        predictions.append([names[i] for i in chosen])
        probabilities.append([round(value, 6) for value in row[chosen].tolist()])
    return {"prediction": predictions, "probability": probabilities}


# --- numbers --------------------------------------------------------------------------------------


def _numbers(model: Any, batch: Batch, data: TokenData) -> Any:
    output = model(**batch.inputs)
    # One number for each row: the last dimension has one place.
    numbers = output.logits.squeeze(-1)
    return numbers.double()


def _columns_of_numbers(texts: Sequence[Any], values: np.ndarray) -> Columns:
    return {"prediction": values.tolist()}


# --- words ----------------------------------------------------------------------------------------


def _labels_of_words(
    most: int,
    model: Any,
    batch: Batch,
    data: TokenData,
) -> torch.Tensor:
    """Returns the label of each word, and -1 where it has none: behind the last, and where a word
    has no tokens: (batch, most)."""
    output = model(**batch.inputs)
    logits = output.logits.flatten(0, -2)
    places_of_tokens = batch.targets["labels"].flatten()
    # The first token of a word stands for it: only that one has the word's place.
    is_first_token = places_of_tokens != IGNORED
    labels = logits[is_first_token].argmax(-1)
    places = places_of_tokens[is_first_token]
    # Labels of all texts lie one after the other.
    counts = data.validation.label_counts
    assert counts is not None  # of rows of words
    word_counts = counts[batch.indices].tolist()
    rows = torch.full((len(word_counts), most), -1)
    labels_of_texts = torch.split(labels.cpu(), word_counts)
    places_of_texts = torch.split(places.cpu(), word_counts)
    for row, words in enumerate(places_of_texts):
        rows[row, words] = labels_of_texts[row]
    return rows


def _entities(names: list[str], rows: Sequence[Any], values: np.ndarray) -> Columns:
    predictions = []
    for words, labels in zip(rows, values, strict=True):
        (places,) = np.nonzero(labels >= 0)  # the others have no label
        spans = entities([names[i] for i in labels[places]])
        spans_of_text = []
        for kind, first, last in spans:
            spans_of_text.append(_entity(words, kind, places[first], places[last]))
        predictions.append(spans_of_text)
    return {"prediction": predictions}


def _tags(names: list[str], rows: Sequence[Any], values: np.ndarray) -> Columns:
    """Returns the label of each word; None where it has none: it was cut off, or has no tokens."""
    predictions = []
    for words, labels in zip(rows, values, strict=True):
        tags: list[str | None] = [None] * len(words)
        for place in np.flatnonzero(labels >= 0):
            tags[place] = names[labels[place]]
        predictions.append(tags)
    return {"prediction": predictions}


def _entity(words: Sequence[str], kind: str, first: int, last: int) -> dict[str, Any]:
    text = " ".join(words[first : last + 1])
    return {"entity": kind, "first": int(first), "last": int(last), "text": text}


# --- texts ----------------------------------------------------------------------------------------


def _generated(
    most: int,
    padding: int,
    model: Any,
    batch: Batch,
    data: TokenData,
) -> torch.Tensor:
    """Returns the tokens of each text, with padding behind them: (batch, most)."""
    # Without the inputs of the decoder, which only a training has.
    tokens = model.generate(
        input_ids=batch.inputs["input_ids"],
        attention_mask=batch.inputs["attention_mask"],
    )
    # `generate` pads to the longest text of the batch; all batches are joined to one array.
    missing = most - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=padding)


def _texts(tokenizer: Any, texts: Sequence[Any], values: np.ndarray) -> Columns:
    return {"prediction": tokenizer.batch_decode(values, skip_special_tokens=True)}
