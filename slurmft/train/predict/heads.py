"""The predictions of `slurmft predict`, by the kind of the task: as numbers, and as columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from slurmft.core.errors import UsageError
from slurmft.train.config import required
from slurmft.train.data.tables import IGNORED, Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.predict_config import NEW_TOKENS, PredictConfig
from slurmft.train.tasks import (
    Task,
    causal_lm,
    embeddings,
    multi_label,
    reranker,
    seq2seq,
    squad,
    tokens,
)
from slurmft.train.tasks.metrics import check_numbers
from slurmft.train.tasks.tags import are_entities, entities

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of predictions: as numbers, of a batch, and as columns of a file, of all rows."""

    shape: tuple[int, ...]
    """The shape of one prediction."""
    dtype: Any
    predict: Callable[[Any, Batch, TokenData], Any]
    """Returns the predictions of a batch: (batch, *shape)."""
    columns: Callable[[Sequence[list[Any]], np.ndarray], Columns]
    """Returns columns, from the columns that the model reads and what is predicted of them."""
    generates: bool = False
    """Predictions are texts that the model writes."""
    pads_left: bool | None = None
    """Padding stands before texts, as what is generated follows them; None: where the model reads
    it so."""


def kind_of(task: Any, data: TokenData, predict: PredictConfig) -> Kind:
    """Returns what a task's model predicts of the rows of `data`. A task of the user's own predicts
    as the one that it derives from, unless it says which columns it has."""
    match task:
        case _ if hasattr(task, "prediction_columns"):
            columns = partial(_columns_of_task, task, data)
            return _kind_of_task(task, columns)
        case multi_label.Task():
            shape = (len(data.labels),)
            columns = partial(_several_labels, data.label_values)
            return Kind(shape, np.float64, _probabilities, columns)
        case tokens.Task():
            places = data.validation.token_labels
            assert places is not None  # of rows of words
            most = max(0, int(places.max())) + 1
            columns = partial(_tags, data.label_values)
            if are_entities(data.labels):
                columns = partial(_entities, data.labels)
            return Kind((most,), np.int64, partial(_labels_of_words, most), columns)
        case squad.Task():
            return _kind_of_task(task, partial(_answers, task, data))
        case seq2seq.Task():
            # `generate` returns the token that starts the decoder, too.
            most = int(required(task.config, "max_target_length")) + 1
            # Behind them: a decoder of its own writes.
            return _kind_of_texts(data, most, _generated, pads_left=False)
        case causal_lm.Task():
            most = predict.max_new_tokens or NEW_TOKENS
            settings = _generation(task, predict)
            generate = partial(_continued, settings, task.config.seed)
            return _kind_of_texts(data, most, generate, pads_left=True)
        case embeddings.Task():
            vectors = partial(_kept_vectors, task)
            kept = len(range(task.vector_size)[: task.head.modules.truncate_dim])
            return Kind((kept,), task.prediction_dtype, vectors, _columns_of_vectors)
        case reranker.Task():
            return Kind((), np.float64, _scores, _columns_of_numbers)
        case _ if not data.labels:
            return Kind((), np.float64, _numbers, _columns_of_numbers)
        case _:
            columns = partial(_labels, data.label_values)
            return Kind((2,), np.float64, _best_label, columns)


def _kind_of_task(task: Any, columns: Callable[..., Columns]) -> Kind:
    """Returns predictions that are those of the task's evaluation."""
    predict = partial(_predictions_of_task, task)
    return Kind(task.prediction_shape, task.prediction_dtype, predict, columns)


def _predictions_of_task(task: Task, model: Any, batch: Batch, data: TokenData) -> Any:
    # An evaluation computes a loss, too, for which the rows have no labels.
    if type(task).evaluate is Task.evaluate:
        return task.predict(model(**batch.inputs), batch, data)
    return task.evaluate(model, batch, data).predictions


def _kind_of_texts(
    data: TokenData,
    most: int,
    generate: Callable[[Any, Batch, int], torch.Tensor],
    pads_left: bool,
) -> Kind:
    """Returns predictions that are texts of up to so many tokens.

    Args:
        generate: returns the tokens of a batch, from model, batch and the token of padding.
    """
    assert data.folder is not None  # ranks load it
    tokenizer = AutoTokenizer.from_pretrained(data.folder / "tokenizer")
    padding = data.pad_id

    def predict(model: Any, batch: Batch, data: TokenData) -> torch.Tensor:
        generated = generate(model, batch, padding)
        # `generate` pads to the longest text of the batch; all batches are joined to one array.
        missing = most - generated.shape[1]
        return torch.nn.functional.pad(generated, (0, missing), value=padding)

    columns = partial(_texts, tokenizer)
    return Kind((most,), np.int64, predict, columns, True, pads_left)


def _columns_of_task(
    task: Any,
    data: TokenData,
    inputs: Sequence[list[Any]],
    values: np.ndarray,
) -> Columns:
    columns: Columns = task.prediction_columns(values, data)
    for name, cells in columns.items():
        if len(cells) != len(inputs[0]):
            raise UsageError(
                f"prediction_columns() of --task {task.config.task} has {len(cells):,} values of "
                f"{name!r} for {len(inputs[0]):,} rows",
                "return a value for each row",
            )
    return columns


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


def _labels(
    names: list[Any], inputs: Sequence[list[Any]], values: np.ndarray
) -> Columns:
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
    names: list[Any],
    inputs: Sequence[list[Any]],
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


def _scores(model: Any, batch: Batch, data: TokenData) -> Any:
    return _numbers(model, batch, data).sigmoid()


def _columns_of_numbers(inputs: Sequence[list[Any]], values: np.ndarray) -> Columns:
    return {"prediction": values.tolist()}


def _kept_vectors(
    task: embeddings.Task, model: Any, batch: Batch, data: TokenData
) -> Any:
    return task.head.kept(_predictions_of_task(task, model, batch, data))


def _columns_of_vectors(inputs: Sequence[list[Any]], values: np.ndarray) -> Columns:
    # Rows of the array: lists of Python's numbers would take several times their room.
    return {"prediction": list(values)}


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


def _entities(
    names: list[str], inputs: Sequence[list[Any]], values: np.ndarray
) -> Columns:
    predictions = []
    for words, labels in zip(inputs[0], values, strict=True):
        (places,) = np.nonzero(labels >= 0)  # the others have no label
        spans = entities([names[i] for i in labels[places]])
        spans_of_text = []
        for kind, first, last in spans:
            spans_of_text.append(_entity(words, kind, places[first], places[last]))
        predictions.append(spans_of_text)
    return {"prediction": predictions}


def _tags(names: list[Any], inputs: Sequence[list[Any]], values: np.ndarray) -> Columns:
    """Returns the label of each word; None where it has none: it was cut off, or has no tokens."""
    predictions = []
    for words, labels in zip(inputs[0], values, strict=True):
        tags: list[Any] = [None] * len(words)
        for place in np.flatnonzero(labels >= 0):
            tags[place] = names[labels[place]]
        predictions.append(tags)
    return {"prediction": predictions}


def _entity(words: Sequence[str], kind: str, first: int, last: int) -> dict[str, Any]:
    text = " ".join(words[first : last + 1])
    return {"entity": kind, "first": int(first), "last": int(last), "text": text}


# --- answers --------------------------------------------------------------------------------------


def _answers(
    task: squad.Task,
    data: TokenData,
    inputs: Sequence[list[Any]],
    values: np.ndarray,
) -> Columns:
    check_numbers(values)
    _, contexts = inputs
    texts = {"contexts": contexts, "context": range(len(contexts))}
    answers = squad.answers(values, data.validation, texts, task.may_have_none)
    return {"prediction": answers}


# --- texts ----------------------------------------------------------------------------------------


def _generated(model: Any, batch: Batch, padding: int) -> torch.Tensor:
    """Returns the tokens of each text, with padding behind them: (batch, longest)."""
    # Without the inputs of the decoder, which only a training has.
    return _generate(model, batch)


def _generate(model: Any, batch: Batch, **settings: Any) -> torch.Tensor:
    """Returns what `generate` of transformers makes of a batch."""
    # Of experts: nobody needs the loss of their router here, and it fails where texts are padded.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    tokens: torch.Tensor = model.generate(
        input_ids=batch.inputs["input_ids"],
        attention_mask=batch.inputs["attention_mask"],
        **settings,
    )
    return tokens


def _generation(task: Any, predict: PredictConfig) -> dict[str, Any]:
    """Returns the arguments of `generate` that continues prompts."""
    settings: dict[str, Any] = {"max_new_tokens": predict.max_new_tokens or NEW_TOKENS}
    if predict.generation == "greedy":
        settings |= {"do_sample": False, "num_beams": 1}
    if task.config.num_beams is not None:
        settings["num_beams"] = task.config.num_beams
    return settings


def _continued(
    settings: dict[str, Any],
    seed: int,
    model: Any,
    batch: Batch,
    padding: int,
) -> torch.Tensor:
    """Returns the tokens that follow each prompt, with padding behind them: (batch, longest)."""
    # Tokens may be drawn: a batch draws the same ones whichever rank has it.
    torch.manual_seed(seed + int(batch.indices[0]))
    generated = _generate(model, batch, pad_token_id=padding, **settings)
    return generated[:, batch.inputs["input_ids"].shape[1] :]


def _texts(tokenizer: Any, inputs: Sequence[list[Any]], values: np.ndarray) -> Columns:
    return {"prediction": tokenizer.batch_decode(values, skip_special_tokens=True)}
