"""Texts, or pairs of texts, put into classes or on a scale: emotion, GLUE, the user's own data."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.evaluate_metrics import MetricInputs
from slurmft.train.tasks.metrics import SCORES, check_numbers
from slurmft.train.tasks.pretrained import Pretrained

GLUE_IDS = ("glue", "nyu-mll/glue")


class Task(Pretrained):
    """Sequence classification, or regression; GLUE's tasks (nyu-mll/glue) with GLUE's metrics."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        # one data set on the hub, with a subset for each task
        if config.data in GLUE_IDS:
            self.hub_subset = config.task
        if not self.form.has_classes:
            self.prediction_dtype = np.dtype(np.float64)
            # rounded numbers would tie, which correlations see
            self.evaluates_in_fp32 = True
        self.metric_suffixes = self.facts.suffixes
        names = []
        for suffix in self.metric_suffixes:
            names += [metric + suffix for metric in self.facts.metrics]
        self.metric_names = tuple(names)

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForSequenceClassification

        settings: dict[str, Any]
        if data.labels:
            # A model that was fine-tuned before has another problem_type in its configuration.
            settings = label_maps(data) | {
                "problem_type": "single_label_classification"
            }
        else:  # one label, without a name: a number, learnt by its squared error
            settings = {"num_labels": 1, "problem_type": "regression"}
        return self.pretrained(AutoModelForSequenceClassification, **settings)

    def loss(self, output: Any, batch: Batch) -> tuple[Any, Any]:
        """Returns cross entropy of classes, or the squared error of numbers; summed over
        samples."""
        if self.form.has_classes:
            return super().loss(output, batch)
        numbers = output.logits.squeeze(-1)
        errors = numbers - batch.targets["labels"]
        return errors.square().sum(), len(errors)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns classes as int64, or numbers as float64: (batch,)."""
        if self.form.has_classes:
            return super().predict(output, batch, data)
        return output.logits.squeeze(-1).double()

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of every validation split."""
        check_numbers(predictions)
        values = {}
        for suffix, predicted, labels in self._splits(predictions, data):
            for metric in self.facts.metrics:
                values[metric + suffix] = SCORES[metric](predicted, labels)
        return values

    def metric_inputs(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, list[MetricInputs]]:
        inputs = {}
        for suffix, predicted, labels in self._splits(predictions, data):
            inputs[suffix] = [self.metric_form(predicted, labels, data)]
        return inputs

    def _splits(
        self, predictions: np.ndarray, data: TokenData
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yields suffix, predictions and labels of every validation split."""
        # The splits lie one after the other in one table.
        ends = np.cumsum(data.sizes)[:-1]
        predictions_of_splits = np.split(predictions, ends)
        labels_of_splits = np.split(data.validation.labels, ends)
        yield from zip(
            self.metric_suffixes,
            predictions_of_splits,
            labels_of_splits,
            strict=True,
        )
