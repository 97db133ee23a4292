"""Token classification: a label for each word of a text, as of named entities.

A word's first token has its label, its other tokens have none, as in transformers' run_ner.py.
Entities are found in the labels as seqeval finds them (B-, I-, O; its default mode).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from slurmft.train.data.tables import IGNORED, Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import label_ids
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.hub import Pretrained, Rows, is_cut
from slurmft.train.tasks.metrics import NAN, check_numbers

FOUND, PREDICTED, TRUE, RIGHT, WORDS = range(5)
"""A prediction, of a whole text: entities that are found, predicted and true; words whose label is
right, and all words."""


class Task(Pretrained):
    """Words with labels, from a hub data set or a local folder."""

    metric_names = ("entity_f1", "entity_precision", "entity_recall", "accuracy")
    prediction_shape = (5,)
    needs_offsets = True

    def found_labels(self, train: Rows) -> list[str]:
        """The labels that occur, and of each entity's two the other one as well."""
        names = super().found_labels(train)
        return sorted({*names, *("I" + name[1:] for name in names if name.startswith("B-"))})

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """A word's first token has its label, its other tokens have none."""
        words, labels = self.values(rows)
        tokens, first = self._encoded(tokenizer, words, f"texts of {rows.where!r}")
        ids = [
            np.array([*label_ids(own, names, f"{rows.where}: row {row}"), IGNORED])
            for row, own in enumerate(labels, start=1)
        ]
        own_labels = [own[at] for own, at in zip(ids, first, strict=True)]
        return TokenTable.build(tokens, token_labels=own_labels)

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        tokens, first = self._encoded(tokenizer, texts[0], "texts")
        return TokenTable.build(tokens, token_labels=[np.where(at < 0, IGNORED, 0) for at in first])

    def _encoded(
        self, tokenizer: Any, words: list[list[str]], what: str
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Token ids of each text; and of each token the word that it begins, -1 for others."""
        assert self.config.max_length is not None  # from the recipe
        longest = min(self.config.max_length, tokenizer.model_max_length)
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=longest)
        self.warn_of_cuts(is_cut(encoded), what, longest)
        first = [np.array(first_of_word(each.word_ids)) for each in encoded.encodings]
        return encoded["input_ids"], first

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForTokenClassification

        return self.pretrained(AutoModelForTokenClassification, **label_maps(data.labels))

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """What the metrics need of each text: int64, (batch, 5); see `FOUND`."""
        counts = data.validation.label_counts
        assert counts is not None  # of a table whose tokens have labels
        has_label = batch.targets["labels"].flatten() != IGNORED
        logits = output.logits.flatten(0, -2)[has_label]
        chosen = logits.argmax(-1).masked_fill(logits.isnan().any(-1), NAN).cpu().numpy()
        wanted = batch.targets["labels"].flatten()[has_label].cpu().numpy()
        ends = np.cumsum(counts[batch.indices])[:-1]
        pairs = zip(np.split(wanted, ends), np.split(chosen, ends), strict=True)
        return torch.tensor([_counts(*pair, data.labels) for pair in pairs])

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Of entities, which are right where type and both ends are; and of words."""
        check_numbers(predictions)
        sums = predictions.sum(axis=0).tolist()
        precision, recall = (sums[FOUND] / max(sums[of], 1) for of in (PREDICTED, TRUE))
        f1 = 2 * precision * recall / (precision + recall) if sums[FOUND] else 0.0
        accuracy = sums[RIGHT] / max(sums[WORDS], 1)
        return dict(zip(self.metric_names, (f1, precision, recall, accuracy), strict=True))


def first_of_word(words: Sequence[int | None]) -> list[int]:
    """Of each token the word that it begins; -1 for others."""
    before = [None, *words[:-1]]
    return [-1 if w is None or w == b else w for w, b in zip(words, before, strict=True)]


def _counts(wanted: np.ndarray, chosen: np.ndarray, names: list[str]) -> list[int]:
    if (chosen == NAN).any():
        return [NAN] * 5
    true, predicted = (set(entities([names[i] for i in ids])) for ids in (wanted, chosen))
    right = int((wanted == chosen).sum())
    return [len(true & predicted), len(predicted), len(true), right, len(wanted)]


def entities(labels: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Type, first and last word of every entity.

    It begins with B- or S-, or with another prefix that nothing before it explains; I- and E- of
    its type continue it, and E- and S- end it.
    """
    begin, kind, ended = 0, None, True
    for i, label in enumerate([*labels, "O"]):
        prefix, _, own = label.partition("-")
        if kind is not None and (ended or own != kind or prefix not in ("I", "E")):
            yield kind, begin, i - 1
            kind = None
        if prefix in ("B", "I", "E", "S") and kind is None:
            begin, kind = i, own
        ended = prefix in ("E", "S")
