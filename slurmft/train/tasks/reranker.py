"""Rerankers: pairs of texts, and how well they go together, from 0 to 1.

The model has one logit, whose sigmoid is the score of a pair; its loss is the binary cross entropy,
as sentence-transformers' BinaryCrossEntropyLoss. The saved model is a CrossEncoder of theirs.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from slurmft.train.data.tables import Batch
from slurmft.train.data.token_data import TokenData
from slurmft.train.login import sentence_modules
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks import sequence
from slurmft.train.tasks.hub import cached_file, from_hub
from slurmft.train.tasks.metrics import SCORES, check_numbers

_ACTIVATIONS = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Keys of config.json by which sentence-transformers makes scores of logits, from version 4 on and
before; without them it takes the sigmoid."""


class Task(sequence.Task):
    """A cross-encoder with one output."""

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForSequenceClassification

        # Where pairs only go together or do not, the model decides.
        if all(np.isin(table.labels, (0, 1)).all() for table in data.tables):
            self.metric_names = TASKS["reranker"].data_metrics
        name = str(self.config.model)
        file_of = functools.partial(cached_file, name)
        from_hub(
            "--model", name, lambda: sentence_modules.check_reranker(name, file_of)
        )
        model = self.pretrained(
            AutoModelForSequenceClassification,
            num_labels=1,
            # transformers' name for a sigmoid of each logit
            problem_type="multi_label_classification",
        )
        # The scores of the base may be its logits, as those of MS MARCO's cross-encoders.
        for key in _ACTIVATIONS:
            if hasattr(model.config, key):
                delattr(model.config, key)
        return model

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        logits = output.logits.squeeze(-1).float()
        labels = batch.targets["labels"]
        total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total, len(labels)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns the score of each pair."""
        return output.logits.squeeze(-1).double().sigmoid()

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        """Returns the metrics of scores; pairs go together from 0.5 on."""
        if "accuracy" not in self.metric_names:
            return super().compute(predictions, data)
        check_numbers(predictions)
        labels = data.validation.labels
        return {
            "average_precision": SCORES["average_precision"](predictions, labels),
            "accuracy": SCORES["accuracy"](predictions >= 0.5, labels == 1),
        }
