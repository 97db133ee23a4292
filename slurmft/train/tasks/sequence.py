"""Texts, or pairs of texts, put into classes or on a scale: emotion, GLUE, the user's own data."""

import warnings
from typing import Any

import numpy as np

from slurmft.core.errors import SlurmftWarning
from slurmft.core.hub import is_local
from slurmft.train.config import TrainConfig
from slurmft.train.data import Batch, TokenData, TokenTable
from slurmft.train.metrics import SCORES, check_numbers
from slurmft.train.rows import Labels, label_ids, label_numbers
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.hub import Pretrained, Rows

GLUE_IDS = ("glue", "nyu-mll/glue")


class Task(Pretrained):
    """Sequence classification of texts from a hub data set or a local folder; GLUE's tasks
    (nyu-mll/glue) with GLUE's own metrics."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.hub_subset = config.task if config.data in GLUE_IDS else None
        self.has_classes = self.facts.labels != ()
        if not self.has_classes:
            self.prediction_dtype = np.dtype(np.float64)
            self.evaluates_in_fp32 = True
        # "", or of MNLI's two validations: "_matched", "_mismatched".
        self.suffixes = [split.removeprefix("validation") for split in self.facts.splits[1:]]
        self.metric_names = tuple(m + s for s in self.suffixes for m in self.facts.metrics)

    def label_names(self, train: Rows) -> list[str]:
        """Names of the classes, by class: those of the task, else those that the data set has for
        its classes, else the labels themselves."""
        own = self.known_labels or self.facts.labels
        if own is not None:
            return list(own)
        return train.names.get(self._label_column) or self.found_labels(train).names()

    def labels(self, rows: Rows, names: list[str]) -> list[Any]:
        """A split's labels: classes, or numbers.

        Raises:
            UsageError: rows without a label, a label of the wrong type, or that does not exist.
        """
        column, values = self._label_column, rows.column(self._label_column)
        labels = Labels(rows.where, values if names else ())
        labels.check_empty()
        for text in labels.oddities() if not is_local(str(self.config.data)) else ():
            warnings.warn(text, SlurmftWarning, stacklevel=2)  # of local data submit has told
        by_number = self.facts.labels is not None or column in rows.names
        if not names:
            return label_numbers(values, rows.where)
        return label_ids(values, names, rows.where, by_number)

    @property
    def _label_column(self) -> str:
        assert self.config.label_column is not None  # from the recipe
        return self.config.label_column

    def prepare(self) -> TokenData:
        """Reads and tokenizes all splits.

        Raises:
            UsageError: no such data or model, no such column, an empty split, a text or label of
                the wrong type, a label that does not exist.
        """
        tokenizer = self.tokenizer()
        train, *validation = (self.rows(split) for split in self.facts.splits)
        names = self.label_names(train)
        return TokenData(
            self._tokenize(tokenizer, [train], names),
            self._tokenize(tokenizer, validation, names),
            names,
            tokenizer.pad_token_id,
            sizes=tuple(map(len, validation)),
            warnings=tuple(self.warnings),
        )

    def _tokenize(self, tokenizer: Any, splits: list[Rows], names: list[str]) -> TokenTable:
        """One table of the splits, one after the other."""
        labels, encoded = list[Any](), list[tuple[Any, Any]]()
        for rows in splits:
            labels += self.labels(rows, names)
            texts = self.values(rows)[: 1 + bool(self.config.text_pair_column)]
            what = f"texts of {rows.where!r}"
            encoded += self.encode(tokenizer, texts, self.config.max_length, what)
        apart = len(texts) > 1 and self.tells_texts_apart(tokenizer)
        types = [types for _, types in encoded] if apart else None
        return TokenTable.build([ids for ids, _ in encoded], labels, types)

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForSequenceClassification

        # A model that was fine-tuned before says in its configuration for what: that goes, too.
        settings = label_maps(data.labels) | {"problem_type": "single_label_classification"}
        if not data.labels:  # one label, without a name: a number, learnt by its squared error
            settings = {"num_labels": 1, "problem_type": "regression"}
        return self.pretrained(AutoModelForSequenceClassification, **settings)

    def loss(self, output: Any, batch: Batch) -> tuple[Any, Any]:
        """Cross entropy of classes, or the squared error of numbers; summed over samples."""
        if self.has_classes:
            return super().loss(output, batch)
        errors = output.logits.squeeze(-1) - batch.targets["labels"]
        return errors.square().sum(), len(errors)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Classes as int64, or numbers as float64: (batch,)."""
        if self.has_classes:
            return super().predict(output, batch, data)
        return output.logits.squeeze(-1).double()

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """The metrics of every validation split."""
        check_numbers(predictions)
        ends = np.cumsum(data.sizes)[:-1]
        parts = (np.split(values, ends) for values in (predictions, data.validation.labels))
        return {
            metric + suffix: SCORES[metric](predicted, labels)
            for suffix, predicted, labels in zip(self.suffixes, *parts, strict=True)
            for metric in self.facts.metrics
        }
