"""Texts, or pairs of texts, put into classes or on a scale: emotion, GLUE, the user's own data."""

from typing import Any

import numpy as np

from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.tasks.base import label_maps
from slurmft.train.tasks.hub import Pretrained
from slurmft.train.tasks.metrics import SCORES, check_numbers

GLUE_IDS = ("glue", "nyu-mll/glue")


class Task(Pretrained):
    """Sequence classification of texts from a hub data set or a local folder; GLUE's tasks
    (nyu-mll/glue) with GLUE's own metrics."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.hub_subset = config.task if config.data in GLUE_IDS else None
        if not self.form.has_classes:
            self.prediction_dtype = np.dtype(np.float64)
            self.evaluates_in_fp32 = True
        # "", or of MNLI's two validations: "_matched", "_mismatched".
        self.suffixes = [split.removeprefix("validation") for split in self.facts.splits[1:]]
        self.metric_names = tuple(m + s for s in self.suffixes for m in self.facts.metrics)

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForSequenceClassification

        # A model that was fine-tuned before says in its configuration for what: that goes, too.
        settings = label_maps(data.labels) | {"problem_type": "single_label_classification"}
        if not data.labels:  # one label, without a name: a number, learnt by its squared error
            settings = {"num_labels": 1, "problem_type": "regression"}
        return self.pretrained(AutoModelForSequenceClassification, **settings)

    def loss(self, output: Any, batch: Batch) -> tuple[Any, Any]:
        """Cross entropy of classes, or the squared error of numbers; summed over samples."""
        if self.form.has_classes:
            return super().loss(output, batch)
        errors = output.logits.squeeze(-1) - batch.targets["labels"]
        return errors.square().sum(), len(errors)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Classes as int64, or numbers as float64: (batch,)."""
        if self.form.has_classes:
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
