"""Token classification: a label for each word of a text, as of named entities.

A word's first token has its label, its other tokens have none, as in transformers' run_ner.py.
Entities are read from the labels as seqeval reads them (B-, I-, O; its default mode).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import label_ids
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.metrics import NAN, check_numbers
from slurmft.train.tasks.pretrained import Pretrained, are_cut, filled

# Places in a prediction, which counts for a whole text: entities that are predicted rightly, that
# are predicted, that are true; words whose label is right, and all words.
RIGHT_ENTITIES, PREDICTED, TRUE, RIGHT_WORDS, WORDS = range(5)


class Task(Pretrained):
    """Words with labels, from a hub data set or a local folder."""

    metric_names = ("entity_f1", "entity_precision", "entity_recall", "accuracy")
    prediction_shape = (5,)
    needs_offsets = True

    def found_labels(self, train: Rows) -> list[str]:
        """Returns the labels that occur, and for each entity that begins (B-) the one that goes on
        (I-)."""
        names = set(super().found_labels(train))
        for name in list(names):
            # In a small file every entity may have one word; others may be longer.
            if name.startswith("B-"):
                names.add("I" + name[1:])
        return sorted(names)

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        words, labels = self.values(rows)
        what = f"texts of {rows.where!r}"
        tokens, words_of_tokens = self._encoded(tokenizer, words, what)
        token_labels = []
        pairs = zip(labels, words_of_tokens, strict=True)
        for row, (labels_of_row, places) in enumerate(pairs, start=1):
            ids = label_ids(labels_of_row, names, f"{rows.where}: row {row}")
            # The place -1, of tokens that begin no word, is that of IGNORED.
            token_labels.append(np.array([*ids, IGNORED])[places])
        return TokenTable.build(tokens, token_labels=token_labels)

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        tokens, words_of_tokens = self._encoded(tokenizer, texts[0], "texts")
        # Any label will do: that a token has one says that a word begins with it.
        token_labels = [np.where(places < 0, IGNORED, 0) for places in words_of_tokens]
        return TokenTable.build(tokens, token_labels=token_labels)

    def _encoded(
        self,
        tokenizer: Any,
        words: list[list[str]],
        what: str,
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Returns the token ids of each text; and for each token the word that it begins, or -1."""
        longest = self.longest(tokenizer)
        encoded = tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=longest,
        )
        self.warn_of_cuts(are_cut(encoded), what, longest)
        ids = list(filled(encoded["input_ids"], tokenizer.pad_token_id))
        words_of_tokens = []
        for encoding in encoded.encodings:
            places = first_of_word(encoding.word_ids)
            words_of_tokens.append(places)
        # No word begins with a token that stands for a text without any.
        return ids, [np.array(row) for row in filled(words_of_tokens, -1)]

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForTokenClassification

        maps = label_maps(data.labels)
        return self.pretrained(AutoModelForTokenClassification, **maps)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns what the metrics need of each text: int64, (batch, 5); see `RIGHT_ENTITIES`."""
        counts = data.validation.label_counts
        assert counts is not None  # of a table whose tokens have labels
        labels = batch.targets["labels"].flatten()
        has_label = labels != IGNORED
        logits = output.logits.flatten(0, -2)[has_label]
        has_nan = logits.isnan().any(-1)
        # argmax takes NaN for the largest number.
        best = logits.argmax(-1).masked_fill(has_nan, NAN)
        predicted = best.cpu().numpy()
        true = labels[has_label].cpu().numpy()
        # Words of all texts lie one after the other.
        ends = np.cumsum(counts[batch.indices])[:-1]
        texts = zip(np.split(true, ends), np.split(predicted, ends), strict=True)
        return torch.tensor([_counts(*text, data.labels) for text in texts])

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of entities, which are right where type and both ends are; and of
        words."""
        check_numbers(predictions)
        sums = predictions.sum(axis=0).tolist()
        right = sums[RIGHT_ENTITIES]
        # Where no entity is predicted, or none is true, `right` is 0 and so is the share.
        precision = right / max(sums[PREDICTED], 1)
        recall = right / max(sums[TRUE], 1)
        f1 = 0.0
        if right:
            f1 = 2 * precision * recall / (precision + recall)
        return {
            "entity_f1": f1,
            "entity_precision": precision,
            "entity_recall": recall,
            "accuracy": sums[RIGHT_WORDS] / max(sums[WORDS], 1),
        }


def first_of_word(words: Sequence[int | None]) -> list[int]:
    """Returns for each token the word that it begins; -1 for others.

    Args:
        words: the word that each token is of; None for special tokens.
    """
    first_tokens = []
    previous = None
    for word in words:
        if word is None or word == previous:
            first_tokens.append(-1)
        else:
            first_tokens.append(word)
        previous = word
    return first_tokens


def _counts(true: np.ndarray, predicted: np.ndarray, names: list[str]) -> list[int]:
    """Returns the prediction of one text, see `RIGHT_ENTITIES`."""
    if (predicted == NAN).any():
        return [NAN] * 5
    true_names = [names[i] for i in true]
    predicted_names = [names[i] for i in predicted]
    # An entity is right where its type, its first and its last word are.
    true_entities = set(entities(true_names))
    predicted_entities = set(entities(predicted_names))
    return [
        len(true_entities & predicted_entities),
        len(predicted_entities),
        len(true_entities),
        int((true == predicted).sum()),
        len(true),
    ]


def entities(labels: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yields type, first and last word of every entity.

    It begins with B- or S-, or with another prefix that nothing before it explains; I- and E- of
    its type continue it, and E- and S- end it.
    """
    begin = 0
    kind = None  # of the entity under way
    has_ended = True
    # an O behind the last word ends what is under way
    for i, label in enumerate([*labels, "O"]):
        prefix, _, label_kind = label.partition("-")
        continues = not has_ended and label_kind == kind and prefix in ("I", "E")
        if kind is not None and not continues:
            yield kind, begin, i - 1
            kind = None
        if prefix in ("B", "I", "E", "S") and kind is None:
            begin = i
            kind = label_kind
        has_ended = prefix in ("E", "S")
